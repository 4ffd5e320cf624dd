"""The table kernel's source as a program of the CPU (`plan_lanes`): what it is given, what it says, and how that is held against
golden tables.
"""

from __future__ import annotations

import numpy as np
from lane_programs import compiled, laid_out, plant, ran

from tktune.core.problem import Problem

UNTOUCHED = -77
REAL = ["comm/plan.cuh", "comm/plan_config.cuh", "comm/push_plan.cuh", "abi.h"]
PUSHED = ("push_plan", "push_tokens", "push_blocks", "push_expected", "missing", "gate_sources")


def program(folder, mistake=None):
    """The program; `mistake` is a text of the kernel's source and what stands there instead."""
    laid_out(folder, ["plan_lanes"], REAL)
    if mistake is not None:
        plant(folder, REAL, *mistake)
    return compiled(folder, "-O2" if mistake is None else "-O0")


def sizes(problem, capacity, pushes=False):
    """Words of each array, in the order in which the program writes them."""
    local, blocks, everyone = problem.local_experts, capacity // problem.pad, problem.world * problem.tokens
    found = {
        "status": 2,
        "words": 3,
        "counts": local,
        "base": local,
        "walk": 4 * local,
        "pull_indices": 2 * capacity,
        "block_expert": blocks,
        "slack": blocks,
        "own_slack": blocks,
        "arrivals": blocks,
        "slots": everyone * problem.top_k,
        "pull_tokens": 2 * everyone,
        "pull_slots": everyone * problem.top_k,
        "job_order": everyone,
        "queue": 3,
        "dispenser": 2,
    }
    if pushes:
        counters = (problem.world - 1) * blocks
        found |= {"push_plan": problem.world + 2, "push_tokens": everyone}
        found |= {"push_blocks": everyone * problem.top_k, "push_expected": counters, "missing": counters}
        found["gate_sources"] = blocks
    return found


def build(
    runner,
    folder,
    problem,
    ids,
    *,
    blocks,
    seed=0,
    id_bytes=4,
    capacity=None,
    in_place=False,
    pushes=False,
    slow=-1,
    patience=0,
):
    """The arrays of every [plan][rank] by name; each is followed by words that must be untouched.

    `slow` is a rank; waits of the first plan go on after so many looks as they do after an abort, if `patience` is set.
    """
    plans = len(ids)
    capacity = problem.capacity_rows if capacity is None else capacity
    head = (problem.world, problem.tokens, problem.top_k, problem.experts, problem.pad, capacity)
    head = np.array(
        [*head, id_bytes, blocks, plans, seed, int(in_place), int(pushes), slow, patience], np.int32
    )
    (folder / "in").write_bytes(head.tobytes() + np.asarray(ids, np.int32).tobytes())
    done = ran(runner, folder / "in", folder / "out")
    assert done.returncode == 0, done.stderr
    said = np.fromfile(folder / "out", np.int32).reshape(plans, problem.world, -1)
    outcome = []
    for plan in range(plans):
        outcome.append([])
        for rank in range(problem.world):
            flat, at, named = said[plan, rank], 0, {}
            for name, size in sizes(problem, capacity, pushes).items():
                named[name] = flat[at : at + size]
                at += size
                if name != "status":
                    assert (flat[at : at + 8] == UNTOUCHED).all(), f"written behind {name}"
                    at += 8
            assert at == len(flat)
            outcome[-1].append(named)
    return outcome


def compare(found, golden, local, in_place=False):
    """Every array of a schedule in its used part; the rest was not touched."""
    tokens = len(golden.pull_tokens)
    assert found["words"].tolist() == [golden.rows, golden.num_pad_blocks, tokens]
    walk = [[e, golden.base[e], golden.counts[e], 0] for e in range(local)]
    found = {name: array for name, array in found.items() if name not in PUSHED}
    wanted = {name: getattr(golden, name) for name in found if hasattr(golden, name)}
    wanted |= {
        "walk": np.array(walk),
        "arrivals": golden.own_slack if in_place else golden.slack,
        "status": np.zeros(2),
    }
    wanted |= {"queue": np.zeros(3), "dispenser": np.array([0, 1 << 20])}
    compare_used({name: array for name, array in found.items() if name != "words"}, wanted)


def compare_pushes(found, golden):
    """Every array of a rank's pushes, `push_tables` made `golden`."""
    wanted = {
        "push_plan": [*golden.offsets, golden.turns],
        "push_tokens": golden.tokens,
        "push_blocks": golden.blocks,
        "push_expected": golden.expected,
        "missing": golden.expected,
        "gate_sources": golden.gate_sources,
    }
    assert len(found["push_plan"]) == golden.counts.size + 2
    compare_used({name: found[name] for name in wanted}, wanted)


def compare_used(found, wanted):
    for name, array in found.items():
        used = np.asarray(wanted[name]).reshape(-1)
        assert np.array_equal(array[: len(used)], used), name
        assert (array[len(used) :] == UNTOUCHED).all(), f"{name} was written beyond its end"


def problem_of(experts, top_k, tokens, world, pad=8):
    return Problem("dispatch_gemm", 16, 16, experts, top_k, tokens, world=world, pad=pad)
