"""Push tables: two independent builders agree element by element, and all ranks together meet every invariant; pushes
in any order open each gate exactly when its rows are there.
"""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from table_problems import problem_of, problems

from tktune.core import push_tables, push_tables_check, push_tables_torch, tables
from tktune.core.routing import parse_routing


def built(ids, problem):
    """Golden tables of all ranks, compared with the vectorised ones, and their schedules."""
    pushes, schedules = [], []
    for rank in range(problem.world):
        golden = push_tables.build(ids, problem, rank)
        fast = push_tables_torch.build(torch.as_tensor(np.asarray(ids)), problem, rank)
        assert golden.turns == fast.turns
        for name, array in golden.arrays().items():
            other = fast.numpy().arrays()[name]
            assert other.dtype == np.int32, name
            np.testing.assert_array_equal(array, other, err_msg=name)
        pushes.append(golden)
        schedules.append(tables.build(ids, problem, rank))
    push_tables_check.check(pushes, schedules, problem)
    return pushes, schedules


@settings(max_examples=100, deadline=None)
@given(problems(), st.integers(0, 1000))
def test_both_builders_agree_and_all_ranks_meet_every_invariant(problem, seed):
    pushes, _ = built(parse_routing(problem.routing).draw(problem, seed), problem)
    remote = sum(int(p.expected.sum()) for p in pushes)
    own = sum(int(p.gate_expected[:, p.rank].sum()) for p in pushes)
    assert remote + own == problem.assignments


@settings(max_examples=40, deadline=None)
@given(problems(), st.integers(0, 1000))
def test_flags_open_each_gate_exactly_when_its_rows_are_there(problem, seed):
    """Pushes all ranks' rows in a random order on small numbers: counters elect, flags announce, gates look."""
    ids = parse_routing(problem.routing).draw(problem, seed)
    rng = np.random.default_rng(seed)
    world, tokens, sequence = problem.world, problem.tokens, 7
    pushes = [push_tables.build(ids, problem, rank) for rank in range(world)]
    schedules = [tables.build(ids, problem, rank) for rank in range(world)]
    x = rng.integers(1, 99, (world, tokens))
    sections = [np.full((world, tokens), -1) for _ in range(world)]
    for rank in range(world):
        sections[rank][rank] = x[rank]
    missing = [p.expected.copy() for p in pushes]
    flags = [np.zeros((s.num_pad_blocks, world), int) for s in schedules]
    work = [(s, d, place) for s, p in enumerate(pushes) for d in range(world) for place in range(p.counts[d])]
    for number in rng.permutation(len(work)):
        source, to, place = work[number]
        push = pushes[source]
        token = push.tokens[to, place]
        sections[to][source, token] = x[source, token]
        for block in push.blocks[to, place][push.blocks[to, place] >= 0]:
            word = push.offsets[to] + block
            missing[source][word] -= 1
            if missing[source][word] == 0:
                assert flags[to][block, source] == 0
                flags[to][block, source] = sequence
                slots = np.arange(block * problem.pad, (block + 1) * problem.pad)
                mine = schedules[to].pull_indices[slots]
                mine = mine[mine[:, 0] == source]
                assert (sections[to][source, mine[:, 1]] == x[source, mine[:, 1]]).all()
    for rank in range(world):
        bits = (pushes[rank].gate_sources[:, None] >> np.arange(world)) & 1
        assert ((flags[rank] == sequence) == (bits == 1)).all()  # nobody announces what nobody waits for
        real = schedules[rank].pull_indices
        real = real[real[:, 0] >= 0]
        assert (sections[rank][real[:, 0], real[:, 1]] == x[real[:, 0], real[:, 1]]).all()
        wanted = np.zeros((world, tokens), bool)
        wanted[real[:, 0], real[:, 1]] = True
        wanted[rank] = True
        assert (sections[rank][~wanted] == -1).all()  # and nobody pushes what nobody wants


def test_a_rank_whose_experts_nobody_picks_gets_nothing():
    problem = problem_of(3, 2, 2, 10, 8)
    ids = np.zeros((3, 10, 2), np.int32)
    ids[..., 1] = 1
    pushes, _ = built(ids, problem)
    assert pushes[1].counts.tolist() == [10, 0, 0]
    assert pushes[0].counts.tolist() == [0, 0, 0]
    assert pushes[0].turns == 0
    assert (
        pushes[0].gate_sources.tolist() == [0, 2, 6, 4] * 2
    )  # 10 rows of each source in turn, in blocks of 8
    assert len(pushes[1].gate_sources) == 0


class TestMistakesAreNamed:
    """A corrupted table fails the check under the name of the invariant it breaks."""

    problem = problem_of(3, 3, 3, 20, 8)

    def broken(self, change) -> str:
        ids = parse_routing("zipf:0.8").draw(self.problem, 0)
        pushes = [push_tables.build(ids, self.problem, rank) for rank in range(3)]
        schedules = [tables.build(ids, self.problem, rank) for rank in range(3)]
        arrays = {name: a.copy() for name, a in pushes[1].arrays().items()}
        plain = change(arrays)
        plain = plain if isinstance(plain, dict) else {}
        pushes[1] = dataclasses.replace(pushes[1], **arrays, **plain)
        with pytest.raises(AssertionError) as caught:
            push_tables_check.check(pushes, schedules, self.problem)
        return str(caught.value)

    @pytest.mark.parametrize(
        ("name", "change", "invariant"),
        [
            ("turns", lambda a: {"turns": 1}, "turns_are_the_most_pushes"),
            ("rank", lambda a: {"rank": 2}, "rank"),
            ("dtype", lambda a: a.update(counts=a["counts"].astype(np.int64)), "dtype_int32"),
            ("shape", lambda a: a.update(gate_sources=a["gate_sources"][:-1]), "shapes"),
            ("own bit", lambda a: a["gate_sources"].__ior__(2), "gate_waits_for_sources_with_rows_only"),
            ("row lost", lambda a: a["gate_expected"].__setitem__((0, 1), 0), "gate_rows_and_slack"),
            (
                "sources",
                lambda a: a.update(gate_expected=a["gate_expected"][:, ::-1].copy()),
                "gate_waits_for",
            ),
            ("own", lambda a: a.update(gate_expected=np.roll(a["gate_expected"], 1, 1)), "own_rows_are_not"),
            ("counts", lambda a: a["counts"].__isub__(np.int32([1, 0, 0])), "every_wanted_token_is_pushed"),
            (
                "twice",
                lambda a: a["tokens"].__setitem__((0, 0), a["tokens"][0, 1]),
                "no_token_is_pushed_twice",
            ),
            ("tokens", lambda a: a.update(tokens=_turned(a["tokens"], a["counts"])), "blocks_are_those"),
            ("order", lambda a: a.update(_all_turned(a)), "pushed_in_the_order_of_need"),
            ("beyond", lambda a: a["tokens"].__setitem__((1, 0), 0), "nothing_beyond_the_count"),
            (
                "block",
                lambda a: a["blocks"].__setitem__(a["blocks"] >= 0, 0),
                "blocks_are_those_of_the_slots",
            ),
            ("expected", lambda a: a["expected"].__setitem__(0, a["expected"][0] + 1), "expected_counts"),
            ("offsets", lambda a: a["offsets"].__setitem__(1, a["offsets"][1] - 1), "a_counter_for_each"),
        ],
        ids=lambda value: value if isinstance(value, str) else "",
    )
    def test_a_wrong_table(self, name, change, invariant):
        assert self.broken(change).startswith(invariant)

    def test_a_receiver_that_waits_for_more(self):
        ids = parse_routing("uniform").draw(self.problem, 0)
        other = parse_routing("uniform").draw(self.problem, 1)
        pushes = [push_tables.build(ids, self.problem, rank) for rank in range(3)]
        late = push_tables.build(other, self.problem, 2)
        schedules = [tables.build(ids, self.problem, rank) for rank in range(2)]
        schedules.append(tables.build(other, self.problem, 2))
        with pytest.raises(AssertionError):
            push_tables_check.check([*pushes[:2], late], schedules, self.problem)


def _all_turned(arrays):
    return {name: _turned(arrays[name], arrays["counts"]) for name in ("tokens", "blocks")}


def _turned(table, counts):
    """What belongs to every destination's tokens, the other way round."""
    turned = table.copy()
    for row, count in zip(turned, counts, strict=True):
        row[:count] = row[:count][::-1]
    return turned
