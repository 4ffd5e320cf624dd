"""Push tables as the table kernel's own source builds them, run on the CPU thread by thread: all ranks at once and plan after
plan, every table equals the golden one element by element. Mistakes planted in the source are caught.
"""

from __future__ import annotations

import shutil

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from plan_programs import UNTOUCHED, build, compare, compare_pushes, problem_of, program

from tktune.core import push_tables, tables
from tktune.core.routing import parse_routing

pytestmark = pytest.mark.skipif(shutil.which("g++") is None, reason="g++ is not on PATH")


@pytest.fixture(scope="module")
def runner(tmp_path_factory):
    return program(tmp_path_factory.mktemp("push_plan_lanes"))


def judge(problem, ids, outcome):
    """Tables of every [plan][rank] against golden ones, those of the schedule too."""
    for plan, of_ranks in zip(ids, outcome, strict=True):
        for rank, found in enumerate(of_ranks):
            compare(found, tables.build(plan, problem, rank), problem.local_experts)
            compare_pushes(found, push_tables.build(plan, problem, rank))


def drawn(problem, routings, seed):
    return [parse_routing(text).draw(problem, seed + number) for number, text in enumerate(routings)]


CASES = [
    (problem_of(8, 3, 70, 2, 16), ["uniform", "zipf:1.2", "uniform"], 2),
    (problem_of(8, 3, 70, 2, 16), ["hot:0.9@3", "empty:0,5", "one:3", "empty:4,5,6,7"], 1),
    (problem_of(64, 40, 33, 1), ["uniform"], 2),  # a rank alone pushes nothing
    (problem_of(12, 2, 65, 3, 32), ["empty:0,5", "uniform"], 3),
    (problem_of(16, 4, 20, 8), ["hot:0.9@3", "uniform"], 1),
    (problem_of(4, 1, 9, 2), ["one:3", "one:0", "uniform"], 1),  # a rank wants nothing
    (problem_of(512, 8, 40, 2), ["uniform", "zipf:1.5"], 2),  # 256 experts a rank
    (problem_of(30, 5, 31, 5), ["uniform", "one:7"], 2),  # more blocks than words; no whole quads of experts
    (problem_of(7, 7, 64, 7), ["uniform"], 2),  # every token to every rank
    (problem_of(8, 2, 400, 4, 128), ["uniform", "one:1", "zipf:1.2"], 3),  # warps with runs of several words
    (problem_of(6, 6, 40, 6), ["uniform", "uniform"], 1),
]


@pytest.mark.parametrize("number", range(len(CASES)))
def test_every_table_is_the_golden_one(runner, tmp_path, number):
    problem, routings, blocks = CASES[number]
    ids = drawn(problem, routings, 17 * number)
    words = {"blocks": blocks, "seed": number, "id_bytes": 8 if number % 2 else 4}
    judge(problem, ids, build(runner, tmp_path, problem, ids, pushes=True, **words))


@st.composite
def small_problems(draw):
    world, local = draw(st.integers(1, 8)), draw(st.integers(1, 5))
    experts = world * local
    top_k = draw(st.one_of(st.just(1), st.integers(1, min(experts, 6))))
    routings = ["uniform", "zipf:1.2", f"hot:0.8@{experts - 1}", "one:0"]
    of_a_rank = range(local * draw(st.integers(0, world - 1)))[-local:]
    if experts - len(of_a_rank) >= top_k and of_a_rank:
        routings.append("empty:" + ",".join(map(str, of_a_rank)))
    return problem_of(
        experts, top_k, draw(st.integers(1, 80)), world, draw(st.sampled_from([8, 16, 32]))
    ), draw(st.lists(st.sampled_from(routings), min_size=1, max_size=2))


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(small_problems(), st.integers(1, 3), st.integers(0, 1000))
def test_any_problem_and_routing(runner, tmp_path, drawing, blocks, seed):
    problem, routings = drawing
    ids = drawn(problem, routings, seed)
    judge(problem, ids, build(runner, tmp_path, problem, ids, blocks=blocks, seed=seed, pushes=True))


def test_a_pull_is_told_nothing_of_pushes(runner, tmp_path):
    """Its tables are the same, and nothing of a push's is touched: they are not even given."""
    problem = problem_of(8, 3, 70, 2, 16)
    ids = drawn(problem, ["uniform"], 3)
    ((pull, _),) = build(runner, tmp_path, problem, ids, blocks=2)
    ((push, _),) = build(runner, tmp_path, problem, ids, blocks=2, pushes=True)
    assert "push_plan" not in pull
    assert all(np.array_equal(array, push[name]) for name, array in pull.items())


def kept(ids, problem):
    """Golden push tables know no −1: those of a smaller problem, whose tokens are those that are there."""
    tokens = int((ids >= 0).all(2).sum(1).max())
    return ids[:, :tokens], problem.replace(tokens=tokens)


def test_minus_one_is_no_expert(runner, tmp_path):
    """The last tokens of all ranks are not there: tables are those of the others."""
    problem = problem_of(8, 3, 40, 2)
    ids = parse_routing("uniform").draw(problem, 3)
    ids[:, 30:] = -1
    ((*ranks,),) = build(runner, tmp_path, problem, [ids], blocks=2, pushes=True)
    there, smaller = kept(ids, problem)
    for rank, found in enumerate(ranks):
        golden = push_tables.build(there, smaller, rank)
        assert found["push_plan"].tolist() == [*golden.offsets, golden.turns]
        tokens = found["push_tokens"].reshape(2, 40)
        assert np.array_equal(tokens[:, :30], golden.tokens) and (tokens[:, 30:] == -1).all()
        blocks = found["push_blocks"].reshape(2, 40, 3)
        assert np.array_equal(blocks[:, :30], golden.blocks) and (blocks[:, 30:] == -1).all()
        assert np.array_equal(found["push_expected"][: len(golden.expected)], golden.expected)
        assert np.array_equal(found["gate_sources"][: len(golden.gate_sources)], golden.gate_sources)


@pytest.mark.parametrize("wrong", [-5, 8, "twice"])
def test_wrong_ids_are_left_out_by_sender_and_receiver_alike(runner, tmp_path, wrong):
    """What a rank counts for each pad block of a peer is what that peer's tables hold of it, and the next plan is right."""
    problem = problem_of(8, 3, 40, 2)
    ids = parse_routing("uniform").draw(problem, 3)
    clean = ids.copy()
    ids[1, 37, 2] = ids[1, 37, 0] if wrong == "twice" else wrong
    first, second = build(runner, tmp_path, problem, [ids, clean], blocks=2, pushes=True)
    agree(problem, first)
    judge(problem, [clean], [second])


def agree(problem, ranks):
    for me, sender in enumerate(ranks):
        for to, receiver in enumerate(ranks):
            begin, end = sender["push_plan"][to : to + 2]
            if to == me:
                assert begin == end
                continue
            blocks = receiver["words"][1]
            where = receiver["pull_indices"].reshape(-1, 2)[: receiver["words"][0]]
            of_me = (where[:, 0] == me).reshape(blocks, problem.pad).sum(1)
            assert sender["push_expected"][begin:end].tolist() == of_me.tolist()
            assert ((receiver["gate_sources"][:blocks] >> me & 1) == (of_me > 0)).all()
            pushed = sender["push_blocks"].reshape(problem.world, -1)[to]
            assert np.array_equal(np.bincount(pushed[pushed >= 0], minlength=blocks), of_me)


def test_nothing_is_pushed_to_a_rank_whose_rows_do_not_fit(runner, tmp_path):
    problem = problem_of(4, 2, 60, 2)
    crowded, spread = (parse_routing(text).draw(problem, 1) for text in ("hot:1.0@0", "uniform"))
    capacity = max(tables.build(spread, problem, rank).rows for rank in range(2))
    assert tables.build(crowded, problem, 0).rows > capacity > tables.build(crowded, problem, 1).rows
    words = {"blocks": 1, "capacity": capacity, "pushes": True}
    full, fine = build(runner, tmp_path, problem, [crowded, spread], **words)
    assert full[1]["push_plan"].tolist() == [0, 0, 0, 0]
    assert (full[1]["push_tokens"] == -1).all() and (full[1]["push_blocks"] == -1).all()
    assert (full[1]["push_expected"] == UNTOUCHED).all()
    assert full[0]["push_plan"][2] > 0 and (full[0]["gate_sources"] == UNTOUCHED).all()
    judge(problem, [spread], [fine])


MISTAKES = {
    "a token is first for each of its experts": ("is_first = is_first &&", "is_first = is_first ||"),
    "the ring begins at the sender": ("step_of(source, owner) < step_of(me, owner)", "source < me"),
    "rows of blocks before are forgotten": ("own[expert] = all[0];", "own[expert] = all[0], sooner[0] = 0;"),
    "tokens of blocks before are forgotten": (
        "firsts[expert] = all[1];",
        "firsts[expert] = all[1], sooner[1] = 0;",
    ),
    "every block counts every pad block from its own start": (
        "first = before[expert], last",
        "first = 0, last",
    ),
    "an expert's rows are not padded": (
        "ceil_div(slots[from + expert], G.pad) * G.pad",
        "slots[from + expert]",
    ),
    "tokens beyond the count stay": ("G.push_tokens[i] = -1", "G.push_tokens[i] = G.push_tokens[i]"),
    "counters are not made ready": ("G.missing[at + block] = pushed;", ""),
    "the fewest turns": ("turns = max(turns, wanted[rank])", "turns = wanted[rank]"),
    "own rows are pushed": ("rank != me && rows", "rows"),
    "a word of tokens is not counted on": (
        "+= __popc(alike);\n            __syncwarp();",
        "+= 0;\n            __syncwarp();",
    ),
    "a word of rows is not counted on": (
        "+= __popc(held[expert]);\n            if (lowest",
        "+= 0;\n            if (lowest",
    ),
}


def test_counts_that_the_next_plan_overwrites_are_caught(tmp_path):
    """Ranks run ahead of each other by a plan, so counts have two halves, as ids do."""
    planted = program(tmp_path, ("((sequence & 1) * G.world + source) * gridDim.x", "source * gridDim.x"))
    problem = problem_of(6, 2, 40, 2, 8)
    ids = drawn(problem, ["uniform", "zipf:1.2", "one:5"], 5)
    with pytest.raises(AssertionError):
        judge(problem, ids, build(planted, tmp_path, problem, ids, blocks=1, pushes=True, slow=1))


@pytest.mark.parametrize("slow", range(3))
@pytest.mark.parametrize("patience", [1, 7, 60])
def test_a_plan_that_was_given_up_writes_nowhere_else_and_the_next_is_right(runner, tmp_path, slow, patience):
    """Its waits go on without what they wait for: ids and counts are then those of nobody, or of some blocks alone."""
    problem = problem_of(9, 2, 70, 3, 8)
    for seed in range(4):
        ids = drawn(problem, ["uniform", "zipf:1.2", "one:5"], seed)
        words = {"blocks": 2, "seed": seed, "pushes": True, "slow": slow, "patience": patience}
        given_up, *outcome = build(runner, tmp_path, problem, ids, **words)
        judge(problem, ids[1:], outcome)
        tables_are_within_their_bounds(problem, given_up)


def tables_are_within_their_bounds(problem, ranks):
    """Whoever launches by them stays within its memory: places that were written, whatever they say."""
    most = problem.capacity_rows // problem.pad
    for found in ranks:
        offsets = found["push_plan"][:-1]
        assert (offsets >= 0).all() and (np.diff(offsets) >= 0).all() and (np.diff(offsets) <= most).all()
        assert 0 <= found["push_plan"][-1] <= problem.tokens
        for name, end in (("push_tokens", problem.tokens), ("push_blocks", most)):
            written = found[name][found[name] != UNTOUCHED]
            assert (written >= -1).all() and (written < end).all(), name
        for name in ("push_expected", "missing"):
            assert (found[name][found[name] != UNTOUCHED] >= 0).all()
        sources = found["gate_sources"][found["gate_sources"] != UNTOUCHED]
        assert (sources >> problem.world == 0).all()


@pytest.mark.parametrize("slow", range(3))
def test_a_rank_may_be_slower_than_others(runner, tmp_path, slow):
    problem = problem_of(9, 2, 70, 3, 8)
    ids = drawn(problem, ["uniform", "zipf:1.2", "one:5", "uniform"], 5)
    judge(problem, ids, build(runner, tmp_path, problem, ids, blocks=2, pushes=True, slow=slow))


@pytest.mark.parametrize("name", MISTAKES)
def test_a_mistake_is_caught(tmp_path, name):
    planted = program(tmp_path, MISTAKES[name])
    problem = problem_of(9, 3, 400, 3, 16)  # warps with runs of several words
    ids = drawn(problem, ["uniform", "zipf:1.2"], 5)
    with pytest.raises(AssertionError):
        judge(problem, ids, build(planted, tmp_path, problem, ids, blocks=2, pushes=True))
