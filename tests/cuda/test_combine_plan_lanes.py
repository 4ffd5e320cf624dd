"""The source of the kernel of combine tables, run on the CPU thread by thread: all ranks at once and plan after plan,
every table equals the golden one element by element, and nothing else is written. Mistakes planted in it are caught.
"""

from __future__ import annotations

import dataclasses
import shutil
import subprocess

import lane_programs
import numpy as np
import pytest

from tktune.core import combine_tables, tables
from tktune.core.problem import Problem
from tktune.core.routing import parse_routing

REAL = ["comm/combine_plan.cuh", "comm/combine_plan_config.cuh", "abi.h"]
UNTOUCHED = -77
FORMS = {"prereduce": 0, "pull": 1}
pytestmark = pytest.mark.skipif(shutil.which("g++") is None, reason="g++ is not on PATH")

# What stands beside the stand-ins of the schedule's own emulation.
BLOCKS = """
namespace tkt {
inline uint64_t add_acquire_release(uint64_t* word, uint64_t value) {
    lanes::yield();
    return (*word += value) - value;
}
}
"""


def compiled(folder, mistake=None):
    lane_programs.laid_out(folder, ["plan_lanes", "combine_plan_lanes"], REAL)
    spin = folder / "tile" / "spin.cuh"
    spin.write_text(
        spin.read_text().replace("enum class wait_word { ids, blocks };", "enum class wait_word { weights };")
    )
    (folder / "comm" / "blocks.cuh").write_text('#pragma once\n#include "../tile/spin.cuh"\n' + BLOCKS)
    if mistake is not None:
        lane_programs.plant(folder, REAL, *mistake)
    return lane_programs.compiled(folder, "-O2")


@pytest.fixture(scope="module")
def runner(tmp_path_factory):
    return compiled(tmp_path_factory.mktemp("combine_plan_lanes"))


@dataclasses.dataclass(frozen=True)
class Words:
    form: str = "prereduce"
    order: str = "ready"
    groups: int = 1
    walk: str = "experts"
    tiles: int = 3  # column tiles of a run

    @property
    def passes(self):
        return self.groups if self.walk == "columns" else 1


def schedule_of(problem, ids, rank, empty=False):
    """The arrays of a schedule at their full length; junk behind what is in use. `empty`: its rows did not fit."""
    t = tables.build(ids, problem, rank)
    wanted, everyone = len(t.pull_tokens), problem.world * problem.tokens

    def whole(array, count):
        flat = np.full(count, -99, np.int32)
        flat[: array.size] = array.reshape(-1)
        return flat

    words = [0, 0, 0] if empty else [t.rows, t.num_pad_blocks, wanted]
    nothing = np.zeros_like(t.counts)
    return t, [
        np.array(words, np.int32),
        nothing if empty else t.counts,
        nothing if empty else t.base,
        np.full_like(t.slots, -1) if empty else t.slots,
        whole(t.pull_tokens, 2 * everyone),
        whole(t.pull_slots, problem.top_k * everyone),
        whole(t.job_order, everyone),
    ]


def sizes(problem, words):
    local, tokens, world, top_k = problem.local_experts, problem.tokens, problem.world, problem.top_k
    return {
        "plan": 2,
        "experts": 2 * local,
        "walk": 4 * words.passes * local,
        "jobs": world * tokens * words.groups,
        "push_expected": world,
        "recv_from": world,
        "final_contrib": tokens * world,
        "owners": tokens * top_k,
        "owner_slots": tokens * top_k,
        "everyones": world * tokens * top_k,
    }


def build(runner, folder, problem, words, ids, weights, *, blocks, seed=0, empty=()):
    """The arrays of every [plan][rank] by name. `empty` lists (plan, rank) whose rows did not fit."""
    head = [problem.world, problem.tokens, problem.top_k, problem.local_experts, problem.pad]
    head += [FORMS[words.form], int(words.order == "remote"), words.groups, words.passes, words.tiles]
    content = np.array([*head, blocks, len(ids), seed], np.int32).tobytes()
    for plan in range(len(ids)):
        for rank in range(problem.world):
            _, arrays = schedule_of(problem, ids[plan], rank, (plan, rank) in empty)
            content += b"".join(np.ascontiguousarray(array, np.int32).tobytes() for array in arrays)
            content += weights[plan][rank].tobytes()
    (folder / "in").write_bytes(content)
    done = lane_programs.ran(runner, folder / "in", folder / "out")
    assert done.returncode == 0, done.stderr
    said = np.fromfile(folder / "out", np.int32).reshape(len(ids), problem.world, -1)
    outcome = []
    for plan in range(len(ids)):
        outcome.append([])
        for rank in range(problem.world):
            flat, at, named = said[plan, rank], 0, {}
            for name, size in sizes(problem, words).items():
                named[name] = flat[at : at + size]
                at += size
                assert (flat[at : at + 8] == UNTOUCHED).all(), f"written behind {name}"
                at += 8
            assert at == len(flat)
            outcome[-1].append(named)
    return outcome


def wrong(found, problem, words, ids, weights, rank):
    """The name of the first table that is not the golden one, or an empty text."""
    t, c = tables.build(ids, problem, rank), combine_tables.build(ids, problem, rank)
    if words.form == "pull":
        jobs = combine_tables.pull_jobs(c, problem, words.order, words.groups, words.walk)
    else:
        jobs = combine_tables.push_jobs(t, problem, words.order, words.groups, words.walk)
    walk = [
        [e, t.base[e], t.counts[e], 0 if words.passes == 1 else run * words.tiles << 16 | words.tiles]
        for run in range(words.passes)
        for e in range(problem.local_experts)
    ]
    wanted = {
        "plan": [t.num_pad_blocks, len(jobs)],
        "experts": np.stack([t.base, t.counts], 1),
        "walk": np.array(walk),
        "jobs": jobs,
        "everyones": weights.view(np.int32),
        **c.arrays(),
    }
    for name, array in found.items():
        used = np.asarray(wanted[name]).reshape(-1)
        if not np.array_equal(array[: len(used)], used) or (array[len(used) :] != UNTOUCHED).any():
            return name
    return ""


def problem_of(experts, top_k, tokens, world, pad=8):
    return Problem("gemm_combine", 16, 96, experts, top_k, tokens, world=world, pad=pad)


WAYS = [
    Words(form, order, groups, walk)
    for form in FORMS
    for order in ("ready", "remote")
    for groups, walk in ((1, "experts"), (2, "experts"), (3, "columns"))
]
CASES = [
    (problem_of(8, 3, 70, 2, 16), ["uniform", "zipf:1.2", "one:3"], 2),
    (problem_of(8, 3, 70, 2, 16), ["hot:0.9@3", "empty:0,5", "empty:4,5,6,7"], 3),
    (problem_of(12, 2, 65, 3, 32), ["empty:0,5", "uniform"], 2),
    (problem_of(4, 1, 9, 2), ["one:3", "one:0", "uniform"], 1),  # a rank wants nothing
    (problem_of(40, 32, 20, 1), ["uniform"], 1),  # a row in every lane
    (problem_of(16, 4, 20, 8), ["hot:0.9@3", "uniform"], 1),
]


def weights_of(problem, count, seed):
    stream = np.random.default_rng(seed)
    return stream.random((count, problem.world, problem.tokens, problem.top_k), np.float32)


@pytest.mark.parametrize("number", range(len(CASES)))
@pytest.mark.parametrize("words", WAYS, ids=lambda words: "-".join(map(str, dataclasses.astuple(words)[:4])))
def test_every_table_is_the_golden_one(runner, tmp_path, words, number):
    problem, routings, blocks = CASES[number]
    ids = [parse_routing(text).draw(problem, 31 * number + i) for i, text in enumerate(routings)]
    weights = weights_of(problem, len(ids), number)
    outcome = build(runner, tmp_path, problem, words, ids, weights, blocks=blocks, seed=number)
    for plan, of_ranks in enumerate(outcome):
        for rank, found in enumerate(of_ranks):
            assert wrong(found, problem, words, ids[plan], weights[plan], rank) == "", (plan, rank)


@pytest.mark.parametrize("form", FORMS)
def test_a_rank_whose_rows_do_not_fit_owes_nothing_and_all_know_it(runner, tmp_path, form):
    problem, words = problem_of(8, 3, 40, 2), Words(form)
    ids = [parse_routing("uniform").draw(problem, seed) for seed in (1, 2)]
    weights = weights_of(problem, 2, 0)
    (first, second) = build(runner, tmp_path, problem, words, ids, weights, blocks=2, empty={(0, 1)})
    assert first[1]["push_expected"].tolist() == [0, 0] and first[1]["plan"][0] == 0
    for rank in range(2):
        assert first[rank]["recv_from"][1] == 0
        assert (first[rank]["final_contrib"].reshape(-1, 2)[:, 1] == 0).all()
        here = first[rank]["owners"].reshape(40, 3) == 0
        assert np.array_equal(here, ids[0][rank] < 4)
        assert (first[rank]["owner_slots"].reshape(40, 3)[~here] == -1).all()
        assert wrong(second[rank], problem, words, ids[1], weights[1], rank) == ""


MISTAKES = {
    "one half of the planes": ("((sequence & 1) * G.world + source) * 2 + which", "source * 2 + which"),
    "planes are read before they are there": ("        await_planes(sequence, pulls ?", "        if (false) await_planes(sequence, pulls ?"),
    "weights and slots are one": ("plane(rank, sequence, me, 1)[at] =", "plane(rank, sequence, me, 0)[at] ="),
    "the slots of another rank": ("G.slots[static_cast<int64_t>(rank) * G.tokens * G.top_k + at]", "G.slots[at]"),
    "own tokens are not last": ("const int rank = rank_at(i), behind = late ? wanted - own : 0;", "const int rank = rank_at(i), behind = 0;"),
    "neighbours only before": ("while (end < high && ends[end - low] == ends[i - low]) ++end;", ""),
    "neighbours of the block's share only": ("const int low = max(from - G.pad, 0)", "const int low = from"),
    "ties by nothing": ("|| (key == mine[i] && chunk + at < token)", ""),
    "the group leads nothing": ("G.passes > 1 ? group * wanted + behind + rank", "false ? 0"),
}  # fmt: skip


@pytest.mark.parametrize("name", MISTAKES)
def test_a_mistake_in_the_kernel_is_caught(tmp_path, name):
    (tmp_path / "lanes").mkdir()
    program = compiled(tmp_path / "lanes", MISTAKES[name])
    problem = problem_of(6, 3, 45, 2)
    ids = [parse_routing("uniform").draw(problem, seed) for seed in range(8)]
    weights = weights_of(problem, 8, 7)
    for seed, words in enumerate(WAYS):
        blocks = 1 + seed % 3
        try:
            outcome = build(program, tmp_path, problem, words, ids, weights, blocks=blocks, seed=seed)
        except (AssertionError, subprocess.TimeoutExpired):
            return
        for plan, of_ranks in enumerate(outcome):
            for rank, found in enumerate(of_ranks):
                if wrong(found, problem, words, ids[plan], weights[plan], rank):
                    return
    pytest.fail(f"nothing was wrong although {name}")
