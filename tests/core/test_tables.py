"""Schedule tables: two independent builders agree element by element, and both meet every invariant."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from table_problems import problem_of, problems

from tktune.core import tables, tables_check, tables_torch
from tktune.core.errors import RoutingError
from tktune.core.problem import Problem
from tktune.core.routing import parse_routing


def same(golden: tables.ScheduleTables, other: tables.ScheduleTables) -> None:
    assert (golden.rank, golden.rows, golden.num_pad_blocks) == (other.rank, other.rows, other.num_pad_blocks)
    theirs = other.numpy().arrays()
    for name, array in golden.arrays().items():
        assert theirs[name].dtype == np.int32, name
        np.testing.assert_array_equal(array, theirs[name], err_msg=name)


def both(ids, problem: Problem, rank: int) -> tables.ScheduleTables:
    golden = tables.build(ids, problem, rank)
    vectorised = tables_torch.build(torch.as_tensor(np.asarray(ids)), problem, rank)
    same(golden, vectorised)
    tables_check.check(golden, ids, problem, rank)
    tables_check.check(vectorised, ids, problem, rank)
    assert golden.digest == vectorised.digest
    return golden


@settings(max_examples=120, deadline=None)
@given(problems(most_tokens=40), st.integers(0, 1000))
def test_both_builders_agree_and_meet_every_invariant_on_every_rank(problem, seed):
    ids = parse_routing(problem.routing).draw(problem, seed)
    ranks = [both(ids, problem, rank) for rank in range(problem.world)]
    # Every assignment has a slot on exactly one rank, and the pushes of all ranks are the wanted tokens.
    assert sum((t.slots >= 0).astype(int) for t in ranks).min() == 1
    assert sum(int(t.counts.sum()) for t in ranks) == problem.assignments


@settings(max_examples=40, deadline=None)
@given(problems(most_tokens=40), st.integers(0, 1000), st.booleans())
def test_arrivals_seeded_with_slack_open_each_gate_exactly_when_its_rows_are_there(
    problem, seed, own_in_place
):
    """Runs pull and gate in a random order on small numbers: the result is the grouped sum of every expert. With own
    rows in place from the start, the other seed leaves just the other ranks' rows to wait for."""
    ids = parse_routing(problem.routing).draw(problem, seed)
    rng = np.random.default_rng(seed)
    rank = int(rng.integers(problem.world))
    t = tables.build(ids, problem, rank)
    x = rng.integers(-8, 8, (problem.world, problem.tokens))
    weights = rng.integers(1, 9, problem.local_experts)
    gathered = np.full(t.rows, np.nan)
    arrivals = (t.own_slack if own_in_place else t.slack).copy()
    out = np.full(t.rows, np.nan)
    if own_in_place:
        own = t.pull_indices[:, 0] == rank
        gathered[own] = x[rank, t.pull_indices[own, 1]]
        for block in np.flatnonzero(arrivals == problem.pad):
            rows = slice(block * problem.pad, block * problem.pad + t.block_rows[block])
            out[rows] = gathered[rows] * weights[t.block_expert[block]]
    for job in rng.permutation(len(t.pull_tokens)):
        source, token = t.pull_tokens[job]
        if own_in_place and source == rank:
            continue
        for slot in t.pull_slots[job][t.pull_slots[job] >= 0]:
            gathered[slot] = x[source, token]
            block = slot // problem.pad
            arrivals[block] += 1
            if arrivals[block] == problem.pad:
                rows = slice(block * problem.pad, block * problem.pad + t.block_rows[block])
                assert not np.isnan(gathered[rows]).any()
                out[rows] = gathered[rows] * weights[t.block_expert[block]]
    assert (arrivals == problem.pad).all()
    for source, token, k in np.argwhere(t.slots >= 0):
        expert = ids[source, token, k] - rank * problem.local_experts
        assert out[t.slots[source, token, k]] == x[source, token] * weights[expert]


def ids_with_counts(counts: list[int], tokens: int) -> np.ndarray:
    flat = np.repeat(np.arange(len(counts)), counts)
    return flat.reshape(1, tokens, 1)


@pytest.mark.parametrize("count", [0, 15, 16, 17, 32, 33])
def test_an_expert_with_no_row_one_block_or_one_row_more(count):
    problem = problem_of(1, 3, 1, count + 5, 16)
    t = both(ids_with_counts([3, count, 2], count + 5), problem, 0)
    assert t.padded.tolist() == [16, -(-count // 16) * 16, 16]
    assert t.block_rows.tolist() == [3, *[16] * (count // 16), *([count % 16] if count % 16 else []), 2]


def test_all_rows_to_one_expert_leaves_the_other_ranks_empty():
    problem = problem_of(4, 2, 1, 10, 8, "one:0")
    ids = parse_routing("one:0").draw(problem, 0)
    assert both(ids, problem, 0).counts.tolist() == [40, 0]
    empty = both(ids, problem, 2)
    assert (empty.rows, empty.num_pad_blocks, len(empty.pull_tokens)) == (0, 0, 0)


@pytest.mark.parametrize("world", range(1, 9))
def test_one_token_a_rank_with_every_expert_chosen(world):
    problem = problem_of(world, 2, 2 * world, 1, 8)
    ids = parse_routing("uniform").draw(problem, 0)
    for rank in range(world):
        t = both(ids, problem, rank)
        assert t.counts.tolist() == [world, world]
        # Ring order: own token first.
        assert t.pull_indices[:world, 0].tolist() == [(rank + i) % world for i in range(world)]


def test_the_worst_routing_fits_the_capacity():
    problem = problem_of(2, 2, 2, 11, 8)
    ids = np.zeros((2, 11, 2), np.int32)
    ids[..., 1] = 1
    t = both(ids, problem, 0)
    assert t.rows == 48 <= problem.capacity_rows


def test_tables_of_a_grouped_gemm_are_those_of_its_rank():
    fused = problem_of(4, 2, 2, 9, 8)
    grouped = Problem("grouped_gemm", 64, 64, 8, 2, 9, pad=8, ep_world=4, ep_rank=3)
    ids = parse_routing("uniform").draw(fused, 0)
    assert (ids == parse_routing("uniform").draw(grouped, 0)).all()
    same(tables.build(ids, fused, 3), tables.build(ids, grouped, 3))


@pytest.mark.parametrize("build", [tables.build, tables_torch.build])
@pytest.mark.parametrize(
    ("ids", "rank", "says"),
    [
        (np.zeros((1, 4, 2), int), 0, "have shape"),
        (np.zeros((2, 4, 2), int), 0, "distinct"),
        (np.full((2, 4, 2), [0, 4]), 0, "distinct numbers in 0..3"),
        (np.full((2, 4, 2), [0, -1]), 0, "distinct numbers in 0..3"),
        (np.full((2, 4, 2), [0, 1]), 2, "rank = 2 is not in 0..1"),
    ],
)
def test_ids_that_cannot_be_routed_are_refused(build, ids, rank, says):
    with pytest.raises(RoutingError, match=says):
        build(ids, problem_of(2, 2, 2, 4, 8), rank)


class TestMistakesAreNamed:
    """A corrupted table fails the check under the name of the invariant it breaks."""

    problem = problem_of(4, 3, 2, 30, 16)
    rank = 1

    def broken(self, change) -> str:
        ids = parse_routing("zipf:0.8").draw(self.problem, 0)
        t = tables.build(ids, self.problem, self.rank)
        arrays = {name: a.copy() for name, a in t.arrays().items() if "[" not in name}
        arrays["push_order"] = tuple(order.copy() for order in t.push_order)
        plain = change(arrays) or {}
        with pytest.raises(AssertionError) as caught:
            tables_check.check(dataclasses.replace(t, **arrays, **plain), ids, self.problem, self.rank)
        return str(caught.value)

    def test_slack_off_by_one(self):
        def change(a):
            a["slack"][a["slack"].argmax()] -= 1

        assert self.broken(change).startswith("slack_sum")

    def test_slack_moved_to_another_block(self):
        def change(a):
            a["slack"][[0, -1]] += [1, -1]

        assert "slack" in self.broken(change)

    def test_a_slot_given_twice(self):
        def change(a):
            taken = np.argwhere(a["slots"] >= 0)
            a["slots"][tuple(taken[0])] = a["slots"][tuple(taken[1])]

        assert self.broken(change).startswith("slots_distinct")

    def test_a_slot_in_the_padding(self):
        def change(a):
            where = np.argwhere(a["slots"] == a["base"][0] + a["counts"][0] - 1)[0]
            a["slots"][tuple(where)] += 1

        assert self.broken(change).startswith("slots_in_expert_range")

    def test_global_token_ids_where_local_ones_belong(self):
        def change(a):
            a["push_order"] = tuple(
                (order + s * self.problem.tokens).astype(np.int32) for s, order in enumerate(a["push_order"])
            )

        assert self.broken(change).startswith("push_order_is_local")

        def pulls(a):
            real = a["pull_indices"][:, 0] >= 0
            a["pull_indices"][real, 1] += a["pull_indices"][real, 0] * self.problem.tokens

        assert self.broken(pulls).startswith("token_is_local_to_its_source")

    def test_local_token_ids_where_global_ones_belong(self):
        def change(a):
            a["slot_token"] %= self.problem.tokens

        assert self.broken(change).startswith("slot_token_is_global")

    def test_rows_of_two_experts_exchanged(self):
        def change(a):
            one, other = a["base"][0], a["base"][1]
            a["pull_indices"][[one, other]] = a["pull_indices"][[other, one]]

        assert self.broken(change).startswith(("row_belongs_to_its_expert", "ring_order"))

    def test_the_ring_started_at_the_wrong_rank(self):
        def change(a):
            a["pull_indices"][:2] = a["pull_indices"][1::-1]

        assert self.broken(change).startswith("ring_order")

    @pytest.mark.parametrize(
        ("name", "invariant"),
        [
            ("pull_tokens", "pull_slots_agree_with_slots"),
            ("job_order", "job_order_ascends"),
            ("counts", "counts_match_routing"),
            ("padded", "padded_is_smallest"),
            ("base", "base_is_prefix_of_padded"),
            ("block_expert", "block_expert_ascends"),
            ("block_rows", "rows_and_slack_fill_the_block"),
            ("own_slack", "own_slack_lacks_the_rows_of_other_ranks"),
            ("pull_slots", "pull_slots_agree_with_slots"),
            ("dtype", "dtype_int32"),
            ("shape", "shapes"),
            ("rows", "shapes"),
        ],
    )
    def test_every_table_is_looked_at(self, name, invariant):
        def change(a):
            match name:
                case "counts":
                    a[name][0] -= 1
                case "padded":
                    a[name][0] += self.problem.pad
                case "base":
                    a[name][1] += 1
                case "block_rows":
                    a[name][0] -= 1
                case "dtype":
                    a["counts"] = a["counts"].astype(np.int64)
                case "shape":
                    a["slot_token"] = a["slot_token"][:-1]
                case "rows":
                    return {"rows": 16}
                case "pull_slots":
                    a[name][0] = a[name][0][::-1]
                case "block_expert":
                    a[name][:] = a[name][::-1]
                case _:
                    a[name][[0, 1]] = a[name][[1, 0]]
            return None

        assert self.broken(change).startswith(invariant)
