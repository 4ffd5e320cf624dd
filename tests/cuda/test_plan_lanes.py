"""The table kernel's own source, run on the CPU thread by thread: all ranks at once and plan after plan, every table
equals the golden one element by element, and nothing else is written.
"""

from __future__ import annotations

import dataclasses
import shutil

import numpy as np
import pytest
from plan_programs import UNTOUCHED, build, compare, problem_of, program

from tktune.core import tables, tables_torch
from tktune.core.routing import parse_routing

pytestmark = pytest.mark.skipif(shutil.which("g++") is None, reason="g++ is not on PATH")


@pytest.fixture(scope="module")
def runner(tmp_path_factory):
    return program(tmp_path_factory.mktemp("plan_lanes"))


CASES = [
    (problem_of(8, 3, 70, 2, 16), ["uniform", "zipf:1.2", "uniform"], 2),
    (problem_of(8, 3, 70, 2, 16), ["hot:0.9@3", "empty:0,5", "one:3", "empty:4,5,6,7"], 1),
    (problem_of(64, 40, 33, 1), ["uniform", "zipf:0.8"], 2),  # more experts a token than lanes
    (problem_of(12, 2, 65, 3, 32), ["empty:0,5", "uniform"], 3),
    (problem_of(16, 4, 20, 8), ["hot:0.9@3", "uniform"], 1),
    (problem_of(4, 1, 9, 2), ["one:3", "one:0", "uniform"], 1),  # a rank wants nothing
    (problem_of(512, 8, 40, 2), ["uniform", "zipf:1.5"], 2),  # 256 experts a rank
    (problem_of(30, 5, 31, 5), ["uniform", "one:7"], 2),  # more blocks than words
    (problem_of(7, 7, 64, 7), ["uniform"], 2),  # every token to every expert
    (problem_of(6, 2, 500, 1, 128), ["uniform", "one:1"], 3),
]


@pytest.mark.parametrize("number", range(len(CASES)))
def test_every_table_is_the_golden_one(runner, tmp_path, number):
    problem, routings, blocks = CASES[number]
    ids = [parse_routing(text).draw(problem, 17 * number + i) for i, text in enumerate(routings)]
    id_bytes = 8 if number % 2 else 4
    in_place = number % 3 == 0
    words = {"blocks": blocks, "seed": number, "id_bytes": id_bytes, "in_place": in_place}
    outcome = build(runner, tmp_path, problem, ids, **words)
    for plan, of_ranks in zip(ids, outcome, strict=True):
        for rank, found in enumerate(of_ranks):
            compare(found, tables.build(plan, problem, rank), problem.local_experts, in_place)


def test_many_seeds_of_one_shape(runner, tmp_path):
    problem = problem_of(12, 3, 45, 2)
    for seed in range(12):
        ids = [parse_routing("uniform").draw(problem, 100 + 2 * seed + i) for i in range(2)]
        outcome = build(runner, tmp_path, problem, ids, blocks=1 + seed % 3, seed=seed)
        for plan, of_ranks in zip(ids, outcome, strict=True):
            for rank, found in enumerate(of_ranks):
                compare(found, tables.build(plan, problem, rank), problem.local_experts)


@pytest.mark.parametrize("wrong", [-5, 8, 2**31 - 1, "twice"])
def test_every_rank_hears_of_a_wrong_id_and_leaves_it_out(runner, tmp_path, wrong):
    problem = problem_of(8, 3, 40, 2)
    ids = parse_routing("uniform").draw(problem, 3)
    clean = ids.copy()
    ids[1, 37, 2] = ids[1, 37, 0] if wrong == "twice" else wrong
    (first, second) = build(runner, tmp_path, problem, [ids, clean], blocks=2)
    for rank in range(2):
        assert first[rank]["status"].tolist() == [1, 0]
        slots = first[rank]["slots"].reshape(ids.shape)
        assert slots[1, 37, 2] == -1
        others = np.delete(slots.reshape(-1, 3), 40 + 37, axis=0)
        here = np.delete(ids.reshape(-1, 3), 40 + 37, axis=0) // problem.local_experts == rank
        assert np.array_equal(others >= 0, here)
        compare(second[rank], tables.build(clean, problem, rank), problem.local_experts)


def test_minus_one_is_no_expert_and_no_mistake(runner, tmp_path):
    """Tokens that are not there: the tables are those of the other tokens, also where a rank brings none at all."""
    problem = problem_of(8, 3, 40, 2)
    ids = parse_routing("uniform").draw(problem, 3)
    ids[1, 30:] = -1
    ids[0, 5, 1] = -1
    empty = ids.copy()
    empty[0] = -1
    for plan, of_ranks in zip(
        [ids, empty], build(runner, tmp_path, problem, [ids, empty], blocks=2), strict=True
    ):
        for rank, found in enumerate(of_ranks):
            golden = tables_torch.build(plan, problem, rank, check_ids=False).numpy()
            compare(found, golden, problem.local_experts)


def test_rows_that_do_not_fit_make_an_empty_plan_and_say_how_many_there_were(runner, tmp_path):
    problem = problem_of(4, 2, 60, 2)
    crowded, spread = (parse_routing(text).draw(problem, 1) for text in ("hot:1.0@0", "uniform"))
    goldens = [tables.build(ids, problem, 0) for ids in (crowded, spread)]
    capacity = goldens[1].rows
    assert goldens[0].rows > capacity
    (full, fine) = build(runner, tmp_path, problem, [crowded, spread], blocks=1, capacity=capacity)
    found = full[0]
    assert found["status"].tolist() == [0, goldens[0].rows]
    assert found["words"].tolist() == [0, 0, 0]
    assert (found["slots"] == -1).all() and (found["pull_indices"] == UNTOUCHED).all()
    assert found["walk"].reshape(-1, 4)[:, 2].tolist() == [0, 0]
    compare(fine[0], goldens[1], problem.local_experts)


def test_the_check_would_notice_a_changed_table(runner, tmp_path):
    problem = problem_of(8, 3, 40, 2)
    ids = parse_routing("uniform").draw(problem, 3)
    ((found, _),) = build(runner, tmp_path, problem, [ids], blocks=2)
    golden = tables.build(ids, problem, 0)
    swapped = golden.pull_tokens.copy()
    swapped[[0, 1]] = swapped[[1, 0]]
    with pytest.raises(AssertionError, match="pull_tokens"):
        compare(found, dataclasses.replace(golden, pull_tokens=swapped), problem.local_experts)
