"""Combine tables and job orders: two independent builders agree, and both meet every invariant over all ranks."""

from __future__ import annotations

import dataclasses
import functools

import numpy as np
import pytest
import table_problems
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from table_problems import problems

from tktune.core import combine_tables, combine_tables_check, combine_tables_torch, tables, tables_torch
from tktune.core.combine_tables import JOB_ORDERS, WALKS
from tktune.core.errors import WordsError
from tktune.core.routing import parse_routing

problem_of = functools.partial(table_problems.problem_of, family="gemm_combine")


def built(ids, problem):
    """Golden tables of all ranks, compared with the vectorised ones."""
    combines, schedules = [], []
    for rank in range(problem.world):
        golden = combine_tables.build(ids, problem, rank)
        fast = combine_tables_torch.build(torch.as_tensor(np.asarray(ids)), problem, rank).numpy()
        for name, array in golden.arrays().items():
            assert fast.arrays()[name].dtype == np.int32, name
            np.testing.assert_array_equal(array, fast.arrays()[name], err_msg=name)
        combines.append(golden)
        schedules.append(tables.build(ids, problem, rank))
    combine_tables_check.check(combines, schedules, ids, problem)
    return combines, schedules


@settings(max_examples=80, deadline=None)
@given(problems(family="gemm_combine"), st.integers(0, 1000))
def test_both_builders_agree_and_all_ranks_meet_every_invariant(problem, seed):
    built(parse_routing(problem.routing).draw(problem, seed), problem)


@settings(max_examples=60, deadline=None)
@given(
    problems(family="gemm_combine"),
    st.integers(0, 1000),
    st.sampled_from(JOB_ORDERS),
    st.integers(1, 4),
    st.sampled_from(WALKS),
)
def test_both_builders_give_the_same_jobs_in_an_allowed_order(problem, seed, order, groups, walk):
    ids = parse_routing(problem.routing).draw(problem, seed)
    rank = seed % problem.world
    golden, combine = tables.build(ids, problem, rank), combine_tables.build(ids, problem, rank)
    fast = tables_torch.build(torch.as_tensor(ids), problem, rank)
    fast_combine = combine_tables_torch.build(torch.as_tensor(ids), problem, rank)

    words = (order, groups, walk)
    jobs = combine_tables.push_jobs(golden, problem, *words)
    np.testing.assert_array_equal(jobs, combine_tables_torch.push_jobs(fast, problem, *words).numpy())
    own = golden.pull_tokens[:, 0] == rank
    combine_tables_check.check_jobs(jobs, golden.pull_slots.max(1), own, groups, problem.pad, order, walk)

    jobs = combine_tables.pull_jobs(combine, problem, *words)
    np.testing.assert_array_equal(jobs, combine_tables_torch.pull_jobs(fast_combine, problem, *words).numpy())
    own = (combine.owners == rank).all(1)
    combine_tables_check.check_jobs(jobs, combine.owner_slots.max(1), own, groups, problem.pad, order, walk)


@settings(max_examples=40, deadline=None)
@given(problems(family="gemm_combine"), st.integers(0, 1000))
def test_tables_follow_from_the_slots_that_ranks_tell_each_other(problem, seed):
    ids = parse_routing(problem.routing).draw(problem, seed)
    schedules = [tables_torch.build(torch.as_tensor(ids), problem, rank) for rank in range(problem.world)]
    for rank, schedule in enumerate(schedules):
        planes = torch.stack([other.slots[rank] for other in schedules])
        found = combine_tables_torch.from_slots(schedule, planes, problem).numpy()
        for name, array in combine_tables.build(ids, problem, rank).arrays().items():
            np.testing.assert_array_equal(getattr(found, name), array)


def test_a_row_that_nobody_holds_has_no_owner():
    problem = problem_of(2, 2, 2, 5, 8)
    ids = parse_routing("uniform").draw(problem, 1)
    schedules = [tables_torch.build(torch.as_tensor(ids), problem, rank) for rank in range(2)]
    planes = torch.stack([other.slots[0] for other in schedules]).clone()
    planes[:, 3] = -1
    found = combine_tables_torch.from_slots(schedules[0], planes, problem)
    assert found.owners[3].tolist() == found.owner_slots[3].tolist() == [-1, -1]
    assert found.final_contrib[3].tolist() == [0, 0]


@settings(max_examples=40, deadline=None)
@given(problems(family="gemm_combine"), st.integers(0, 1000))
def test_readiness_order_with_one_group_is_the_schedules_job_order(problem, seed):
    ids = parse_routing(problem.routing).draw(problem, seed)
    for rank in range(problem.world):
        schedule = tables.build(ids, problem, rank)
        np.testing.assert_array_equal(
            combine_tables.push_jobs(schedule, problem, "ready"), schedule.job_order
        )


@settings(max_examples=40, deadline=None)
@given(problems(family="gemm_combine"), st.integers(0, 1000))
def test_partial_sums_of_all_ranks_add_up_to_each_token(problem, seed):
    """Runs the protocol on numbers: blocks land in a random order, jobs run when ready, watermarks rise once."""
    ids = parse_routing(problem.routing).draw(problem, seed)
    rng = np.random.default_rng(seed)
    combines, schedules = built(ids, problem)
    value = rng.integers(-9, 9, ids.shape)  # the expert's output of each assignment
    weight = rng.integers(0, 9, ids.shape)
    staging = np.full((problem.world, problem.world, problem.tokens), -(10**6))
    watermark = np.zeros((problem.world, problem.world), int)
    for r, t in enumerate(schedules):
        rows = np.zeros(t.rows, int)
        landed = np.zeros(t.num_pad_blocks, bool)
        pushed = np.zeros(problem.world, int)
        done: set[int] = set()
        where = np.argwhere(t.slots >= 0)
        for block in [*rng.permutation(t.num_pad_blocks), None]:
            if block is not None:
                for s, token, x in where[t.slots[tuple(where.T)] // problem.pad == block]:
                    rows[t.slots[s, token, x]] = value[s, token, x]
                landed[block] = True
            for job in combine_tables.push_jobs(t, problem, "ready").tolist():
                real = t.pull_slots[job] >= 0
                if job in done or not landed[t.pull_slots[job][real] // problem.pad].all():
                    continue
                done.add(job)
                s, token = t.pull_tokens[job]
                assert staging[s, r, token] == -(10**6), "one writer a row"
                staging[s, r, token] = (weight[s, token][real] * rows[t.pull_slots[job][real]]).sum()
                pushed[s] += 1
                if pushed[s] == combines[r].push_expected[s]:
                    watermark[s, r] += 1
        assert len(done) == len(t.pull_tokens)
    for s, c in enumerate(combines):
        assert (watermark[s] == (c.recv_from > 0)).all()
        planes = np.where(c.final_contrib.T > 0, staging[s], 0)
        np.testing.assert_array_equal(planes.sum(0), (weight[s] * value[s]).sum(1))


@pytest.mark.parametrize("build", [combine_tables, combine_tables_torch], ids=["golden", "torch"])
def test_tokens_of_one_rank_of_the_other_and_of_both(build):
    """Experts 0, 1 on rank 0 and 2, 3 on rank 1; pad 8."""
    problem = problem_of(2, 2, 2, 3, 8)
    ids = np.array([[[0, 1], [2, 3], [1, 2]], [[2, 3], [3, 2], [2, 3]]])
    zero, one = (build.build(ids, problem, rank).numpy() for rank in range(2))
    assert zero.final_contrib.tolist() == [[1, 0], [0, 1], [1, 1]]
    assert one.final_contrib.tolist() == [[0, 1]] * 3
    assert (zero.recv_from.tolist(), one.recv_from.tolist()) == ([2, 2], [0, 3])
    assert (zero.push_expected.tolist(), one.push_expected.tolist()) == ([2, 0], [2, 3])
    # On rank 1 expert 2 has rank 1's three rows first (slots 0..2), then rank 0's tokens 1 and 2.
    assert zero.owner_slots.tolist() == [[0, 8], [3, 11], [9, 4]]


def test_a_rank_that_holds_nothing_owes_nothing():
    problem = problem_of(4, 2, 1, 10, 8, "one:0")
    ids = parse_routing("one:0").draw(problem, 0)
    combines, schedules = built(ids, problem)
    assert combines[2].push_expected.tolist() == [0, 0, 0, 0]
    assert combines[2].recv_from.tolist() == [10, 0, 0, 0]
    assert combine_tables.push_jobs(schedules[2], problem, "ready", 2).shape == (0,)


def test_words_that_are_no_order_are_refused():
    problem = problem_of(1, 2, 1, 4, 8)
    ids = np.zeros((1, 4, 1), int)
    for build in (combine_tables, combine_tables_torch):
        with pytest.raises(WordsError, match="no job order 'soon'"):
            build.push_jobs(tables.build(ids, problem, 0), problem, "soon")
        with pytest.raises(WordsError, match="over 0 groups"):
            build.pull_jobs(build.build(ids, problem, 0), problem, "ready", 0)
        with pytest.raises(WordsError, match="no walk 'rows'"):
            build.pull_jobs(build.build(ids, problem, 0), problem, "ready", 2, "rows")


class TestMistakesAreNamed:
    problem = problem_of(3, 2, 2, 20, 8)

    def broken(self, name, change) -> str:
        ids = parse_routing("uniform").draw(self.problem, 1)
        combines, schedules = built(ids, self.problem)
        array = getattr(combines[1], name).copy()
        combines[1] = dataclasses.replace(combines[1], **{name: change(array)})
        with pytest.raises(AssertionError) as caught:
            combine_tables_check.check(combines, schedules, ids, self.problem)
        return str(caught.value)

    @pytest.mark.parametrize(
        ("name", "invariant"),
        [
            ("push_expected", "every_job_has_a_destination"),
            ("final_contrib", "contributes_exactly_where_it_holds_a_row"),
            ("recv_from", "recv_from_sums_contributions"),
            ("owners", "owner_holds_the_expert"),
            ("owner_slots", "owner_slots_are_those_of_the_owner"),
        ],
    )
    def test_one_off(self, name, invariant):
        def change(array):
            array.flat[0] += 1
            return array

        assert self.broken(name, change).startswith(invariant)

    def test_pushes_counted_for_another_rank(self):
        def change(array):
            array[[0, 2]] += [1, -1]
            return array

        assert self.broken("push_expected", change).startswith("pushed_is_received")

    def test_jobs_out_of_order(self):
        with pytest.raises(AssertionError, match="jobs_ascend"):
            combine_tables_check.check_jobs([1, 0], [3, 9], [False, False], 1, 8, "ready")
        with pytest.raises(AssertionError, match="late_jobs"):
            combine_tables_check.check_jobs([0, 1], [3, 9], [True, False], 1, 8, "remote")
        with pytest.raises(AssertionError, match="permutation"):
            combine_tables_check.check_jobs([0, 0], [3, 9], [False, False], 1, 8, "token")
