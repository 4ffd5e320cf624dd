"""The combine roles' own source, run on the CPU lane by lane on all ranks at once, with bulk loads and stores that are always
late: results and partial rows bit for bit, words left as they were found. Mistakes planted in the source are caught.
"""

from __future__ import annotations

import shutil
import struct
import subprocess

import numpy as np
import pytest

from tktune.core import combine_tables, tables
from tktune.core.paths import csrc_root
from tktune.core.problem import Problem
from tktune.core.routing import parse_routing
from tktune.families.bf16 import from_float, to_float
from tktune.families.gemm_combine.layout import MOST_GROUPS

pytestmark = pytest.mark.skipif(shutil.which("g++") is None, reason="g++ is not on PATH")

HERE = csrc_root().parent / "tests" / "cuda" / "combine_lanes"
SOURCES = (
    *("combine.cuh", "combine_jobs.cuh", "combine_stream.cuh", "combine_config.cuh"),
    "row_ring.cuh",
)
POISON = 0xFFFF
FORMS = {"prereduce": 0, "pull": 1}
WALKS = ("experts", "columns")


def compiled(folder, world, mistake=None, vectors=4):
    """The roles' program, of lanes that sum up to `vectors` at once; `mistake`: a source, a text of it, what stands instead."""
    shutil.copytree(HERE, folder, dirs_exist_ok=True)
    for name in SOURCES:  # the real ones, beside the stand-ins
        shutil.copy(csrc_root() / "comm" / name, folder / "comm" / name)
    if mistake is not None:
        name, text, instead = mistake
        source = folder / "comm" / name
        assert source.read_text().count(text) == 1, mistake
        source.write_text(source.read_text().replace(text, instead))
    program = folder / "main"
    command = [
        "g++",
        "-std=c++20",
        "-O1",
        "-Wall",
        "-Wno-unknown-pragmas",
        f"-DRANKS={world}",
        f"-DMOST_VECTORS={vectors}",
    ]
    command += ["-I", str(folder), "-I", str(csrc_root()), str(folder / "main.cpp"), "-o", str(program)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return program


@pytest.fixture(scope="module")
def programs(tmp_path_factory):
    made = {}

    def program(world):
        if world not in made:
            made[world] = compiled(
                tmp_path_factory.mktemp(f"world{world}"), world, vectors=8 if world == 2 else 4
            )
        return made[world]

    return program


class Inputs:
    """One problem on all ranks: what the program reads, and what it must write."""

    def __init__(self, problem, routing, seed, form, order, groups, walk="experts"):
        self.problem, self.form, self.walk = problem, form, walk
        ids = parse_routing(routing).draw(problem, seed)
        stream = np.random.default_rng(seed)
        values = from_float(stream.integers(-8, 9, (*ids.shape, problem.cols)) / 4)  # of each assignment
        weights = (stream.integers(0, 64, ids.shape) / 64).astype(np.float32)
        schedules = [tables.build(ids, problem, rank) for rank in range(problem.world)]
        combines = [combine_tables.build(ids, problem, rank) for rank in range(problem.world)]
        capacity = max(t.rows for t in schedules) + problem.pad
        stride = (capacity // problem.pad + 1) * MOST_GROUPS
        head = [problem.pad, problem.cols, capacity, problem.tokens, problem.top_k, stride]
        self.content = b""
        for t, c in zip(schedules, combines, strict=True):
            rows = np.full((capacity, problem.cols), POISON, np.int32)
            here = t.slots >= 0
            rows[t.slots[here]] = values[here]
            if form == "prereduce":
                jobs, slots = combine_tables.push_jobs(t, problem, order, groups, walk), t.pull_slots
            else:
                jobs, slots = combine_tables.pull_jobs(c, problem, order, groups, walk), c.owner_slots
            experts = np.stack([t.base, t.counts], 1)
            for array in (
                *(head, t.block_expert, experts, jobs, t.pull_tokens, slots, c.owners, c.push_expected),
                *(c.recv_from, c.final_contrib, weights.view(np.int32), rows),
            ):
                flat = np.ascontiguousarray(array, np.int32).reshape(-1)
                self.content += struct.pack("<i", len(flat)) + flat.tobytes()
        self.expected = [self._of_rank(r, ids[r], values[r], weights[r]) for r in range(problem.world)]

    def _of_rank(self, rank, ids, values, weights):
        """Result and partial rows of own tokens, from their own loops."""
        problem = self.problem
        partial = np.full((problem.world, problem.tokens, problem.cols), POISON, np.uint16)
        y = np.zeros((problem.tokens, problem.cols), np.uint16)
        for token in range(problem.tokens):
            total = np.zeros(problem.cols, np.float32)
            for owner in range(problem.world):
                held = [x for x in range(problem.top_k) if ids[token, x] // problem.local_experts == owner]
                if not held:
                    continue
                summed = np.zeros(problem.cols, np.float32)
                for x in held:
                    summed += weights[token, x] * to_float(values[token, x])
                partial[owner, token] = from_float(summed)
                total += to_float(partial[owner, token])
            y[token] = from_float(total)
        return y, partial if self.form == "prereduce" else np.full_like(partial, POISON)


def ran(program, folder, inputs, groups, words, timeout=60):
    """`words`: compute blocks, communication blocks, reducers, warps, slots, vectors, rounds, seed; a pull has half the
    vectors.
    """
    if inputs.form == "pull":
        words = (*words[:5], -(-words[5] // 2), *words[6:])
    (folder / "tables").write_bytes(inputs.content)
    command = [program, folder / "tables", folder / "out", FORMS[inputs.form], groups, *words]
    command.append(int(inputs.walk == "columns"))
    return subprocess.run([*map(str, command)], capture_output=True, text=True, timeout=timeout)


def wrong(folder, inputs):
    """What of the output is not as expected; empty when all is."""
    out = np.fromfile(folder / "out", np.uint16)
    at = 0
    for rank, arrays in enumerate(inputs.expected):
        for name, array in zip(("the result", "partial rows"), arrays, strict=True):
            if not np.array_equal(out[at : at + array.size].reshape(array.shape), array):
                return f"{name} of rank {rank}"
            at += array.size
    return ""


PROBLEMS = [
    (Problem("gemm_combine", 8, 32, 6, 3, 34, world=2, pad=16), "uniform"),
    (
        Problem("gemm_combine", 8, 288, 12, 5, 9, world=3, pad=32),
        "empty:0,5",
    ),  # rows of three ranks in two stretches
    (Problem("gemm_combine", 8, 64, 40, 32, 2, world=1, pad=8), "uniform"),  # a row in every lane
    (Problem("gemm_combine", 8, 32, 4, 1, 11, world=2, pad=24), "one:3"),  # rank 0 holds nothing
    (Problem("gemm_combine", 8, 640, 4, 2, 3, world=2, pad=8), "uniform"),  # lanes have more than one vector
]
# compute blocks, communication blocks, reducers, warps, slots of a warp, vectors of a piece in a lane
SHAPES = [(1, 1, 1, 1, 1, 1), (2, 1, 2, 2, 2, 4), (1, 2, 1, 2, 3, 1), (2, 1, 3, 1, 8, 3), (1, 3, 2, 2, 4, 2)]


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize(("groups", "walk"), [(1, "experts"), (2, "experts"), (2, "columns")])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_every_token_gets_its_sum_and_every_rank_what_it_is_owed(
    programs, tmp_path, form, groups, walk, shape
):
    for number, (problem, routing) in enumerate(PROBLEMS):
        order = combine_tables.JOB_ORDERS[number % 3]
        inputs = Inputs(problem, routing, number, form, order, groups, walk)
        done = ran(programs(problem.world), tmp_path, inputs, groups, (*shape, 2, 7 * number + 1))
        assert done.returncode == 0, f"{problem} {routing} {shape}: {done.stderr}"
        assert wrong(tmp_path, inputs) == "", f"{problem} {routing} {shape}"


BASE, JOBS, STREAM = "combine.cuh", "combine_jobs.cuh", "combine_stream.cuh"
MISTAKES = {
    "a row is counted before its store is performed": (STREAM, "        wait_performed(pending);\n", ""),
    "the last rows are not waited for": (STREAM, "            add();\n        }\n        retire(0);", "            add();\n        }"),
    "a stretch is formed while the one before is still read": (STREAM, "        wait_read(kCombineSums - 1);\n", ""),
    "a stretch forgets whose row it ends": (STREAM, "if (lane_id() == lane_of(stored)) held =", "if (lane_id() == 0) held ="),
    "a row counts with its first stretch": (STREAM, "held = words & kEnds ?", "held = first == 0 ?"),
    "every stretch counts as a row": (STREAM, "held = words & kEnds ?", "held = true ?"),
    "a slot is loaded while its piece is added": (STREAM, "asked - added < G.warp_slots)", "asked - added <= G.warp_slots)"),
    "a phase never turns": (STREAM, "adding.phase, G", "0, G"),
    "a piece is added before it is here": (STREAM, "        wait<wait_role::combine, wait_word::stage_full>(full[adding.index], adding.phase, G.gemm.guard);\n", ""),
    "a piece forgets whose it is": (STREAM, "            held_token = jobs.now.token.y;\n", ""),
    "weights of the newest job": (STREAM, "__shfl_sync(kAll, held_weight, lane_of(added))", "__shfl_sync(kAll, held_weight, lane_of(asked - 1))"),
    "loads without a fence behind the acquire": (JOBS, "        fence_async();\n", ""),
    "a store without a fence": (STREAM, "        fence_async_shared();\n        __syncwarp();\n", "        __syncwarp();\n"),
    "a load over a slot without a fence": (STREAM, "            fence_async_shared();  // all lanes", "            // all lanes"),
    "a block is announced one tile early": (BASE, "row_tiles(pad_block) * tiles - 1)", "row_tiles(pad_block) * tiles - 2)"),
    "a run of columns is announced one block early": (BASE, "1) == blocks - 1)", "1) == blocks - 2)"),
    "tiles are counted by block alone": (BASE, "return tile_of(t, end - 1) - tile_of(t, begin) + 1", "return 1"),
    "rows are read before they have landed": (JOBS, "return !(G.roles & TKT_GATED) ||", "return true ||"),
    "one run of columns stands for all": (JOBS, "landed_groups |= 1u << now.group;", "landed_groups = ~0u;"),
    "one watermark a lot": (STREAM, "!= __ldg(G.push_expected + to)) continue", "< 0) continue"),
    "the watermark rises one row early": (STREAM, "!= __ldg(G.push_expected + to)) continue", "< __ldg(G.push_expected + to) - 1) continue"),
    "one count for all runs of columns": (STREAM, "G.queue + kPushed + was_for, rows", "G.queue + kPushed + to * kMostCombineGroups, rows"),
    "a lot is told of twice": (STREAM, "there = untold = 0;", "untold = 0;"),
    "peers are told before all is there for them": (STREAM, "            fence_system();\n", ""),
    "the last lot is kept": (STREAM, "untold >= kLot || pending == 0", "untold >= kLot"),
    "the reduce does not wait": (JOBS, "whole_groups >> now.group & 1 || look_whole(now.group, may_wait)", "true"),
    "whole once is whole for all": (JOBS, "whole_groups |= 1u << group;", "whole_groups = ~0u;"),
    "a blocked warp keeps what others wait for": (STREAM, "                    retire(0);\n                    waits", "                    waits"),
    "the reduce adds planes nobody owes": (JOBS, "__ldg(G.final_contrib + at)", "true"),
    "rows go to one plane": (STREAM, "at(jobs.me * G.tokens + token", "at(0 * G.tokens + token"),
    "weights of another rank": (JOBS, "static_cast<int64_t>(token.x) * G.tokens + token.y", "token.y"),
    "sums are not cleared": (STREAM, "        clear<kVectors>();\n    }\n", "    }\n"),
    "a stretch ends a row early": (STREAM, "        if (left == 0) words |=", "        if ((left & (left - 1)) == 0) words |="),
    "rows of the job to come": (JOBS, "        row = slot;\n", "        row = slot = now.token.y % 2 ? slot : row;\n"),
    "the tail leaves the counts": (BASE, "G.finished[word] = 0", "(void)word"),
    "the tail leaves the counts of runs": (BASE, "kCombinePlanBlocks) + 1) * G.groups;", "kCombinePlanBlocks)) * G.groups;"),
    "columns of the first group only": (STREAM, "token, column(group, first))", "token, column(0, first))"),
    "every stretch goes to the first": (STREAM, "token, column(group, first))", "token, column(group, 0))"),
    "ranks are not rounded apart": (STREAM, "((next & (next - 1)) == 0 ? kTurns : 0)", "0"),
    "every pulled row is rounded": (STREAM, "((next & (next - 1)) == 0 ? kTurns : 0)", "kTurns"),
    "ranks come in the order of their rows": (STREAM, "jobs.owner == turn", "true"),
    "a pull waits for rows here only": (JOBS, "pulls ? owner : me, row", "me, row"),
    "rows are pulled from here only": (STREAM, "? jobs.owner : jobs.me", "? jobs.me : jobs.me"),
    "weights of the first own token": (JOBS, "pulls ? make_int2(me, item)", "pulls ? make_int2(me, 0)"),
}  # fmt: skip
PULLING = tuple(MISTAKES)[-6:]


@pytest.mark.parametrize("name", MISTAKES)
def test_a_mistake_in_the_roles_is_caught(tmp_path, name):
    """In one of a few schedules, something ends, is refused, or is wrong."""
    (tmp_path / "lanes").mkdir()
    program = compiled(tmp_path / "lanes", 2, MISTAKES[name])
    problem, routing = PROBLEMS[0]
    form = "pull" if name in PULLING else "prereduce"
    sizes = [
        Inputs(problem.replace(tokens=tokens, cols=cols), routing, 1, form, "ready", 2, walk)
        for tokens, cols in ((40, 32), (14, 640))
        for walk in WALKS
    ]
    for seed in range(24):
        inputs = sizes[seed % 4]
        shape = ((2, 1, 3, 2, 2, 1), (1, 3, 3, 1, 2, 1), (2, 1, 3, 2, 3, 2))[seed // 4 % 3]
        done = ran(program, tmp_path, inputs, 2, (*shape, 1, seed))
        if done.returncode != 0 or wrong(tmp_path, inputs) != "":
            return
    pytest.fail(f"nothing was wrong although {name}")
