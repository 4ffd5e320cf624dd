"""The dispatch role's own source, run on the CPU lane by lane with a copy engine that is always late: rows reach every
slot, no row slot is reused early, and a pad block is never complete before its rows are.
"""

from __future__ import annotations

import shutil
import struct
import subprocess
from pathlib import Path

import numpy as np
import pytest

from tktune.core import tables
from tktune.core.paths import csrc_root
from tktune.core.problem import Problem
from tktune.core.routing import parse_routing

LANES = Path(__file__).with_name("lanes")
pytestmark = pytest.mark.skipif(shutil.which("g++") is None, reason="g++ is not on PATH")


@pytest.fixture(scope="module")
def runner(tmp_path_factory):
    folder = tmp_path_factory.mktemp("lanes")
    shutil.copytree(LANES, folder, dirs_exist_ok=True)
    for name in ("dispatch.cuh", "dispatch_config.cuh"):  # the real ones, beside the stand-ins
        shutil.copy(csrc_root() / "comm" / name, folder / "comm" / name)
    program = folder / "main"
    command = ["g++", "-std=c++20", "-O2", "-Wall", "-Wno-unknown-pragmas", "-I", str(folder)]
    command += ["-I", str(csrc_root()), str(folder / "main.cpp"), "-o", str(program)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return program


def tables_file(path, problem, rank, routing, seed):
    ids = parse_routing(routing).draw(problem, seed)
    built = tables.build(ids, problem, rank)
    head = [
        *(built.rows, built.num_pad_blocks, len(built.pull_tokens), problem.top_k),
        *(problem.hidden, problem.pad, problem.world, problem.tokens),
    ]
    arrays = (head, built.pull_indices, built.pull_tokens, built.pull_slots, built.slack)
    flat = [np.asarray(array, np.int32).reshape(-1) for array in arrays]
    path.write_bytes(b"".join(struct.pack("<i", len(one)) + one.tobytes() for one in flat))
    return path


PROBLEMS = [
    (Problem("dispatch_gemm", 16, 16, 8, 3, 40, world=2, pad=16), "uniform"),
    (Problem("dispatch_gemm", 24, 16, 64, 40, 6, world=1, pad=8), "uniform"),  # more destinations than lanes
    (Problem("dispatch_gemm", 16, 16, 12, 2, 30, world=3, pad=32), "empty:0,5"),
    (Problem("dispatch_gemm", 8, 16, 16, 4, 20, world=8, pad=8), "hot:0.9@3"),
    (Problem("dispatch_gemm", 16, 16, 4, 1, 9, world=2, pad=8), "one:3"),  # rank 0 wants nothing
]
# blocks, warps, slots of a warp, pending, wave, opening compute blocks, their waves
SHAPES = [
    (2, 3, 2, 1, 4, 0, 0),
    (1, 1, 1, 0, 1, 0, 0),
    (3, 2, 4, 2, 1, 2, 1),
    (2, 2, 8, 4, 8, 1, 2),
    (1, 2, 3, 2, 32, 0, 0),
]


@pytest.mark.parametrize("head", [2**31 - 1, 0, 32, 96], ids=["slot", "token", "mixed", "mixed more"])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_every_row_arrives_before_it_is_counted(runner, tmp_path, head, shape):
    blocks, warps, slots, pending, wave, openers, opening = shape
    for number, (problem, routing) in enumerate(PROBLEMS):
        for rank in {0, problem.world - 1}:
            path = tables_file(tmp_path / "tables", problem, rank, routing, number)
            words = (head, blocks, warps, slots, pending, wave, openers, opening, 11 * number + rank)
            done = subprocess.run(
                [str(runner), str(path), *map(str, words)], capture_output=True, text=True, timeout=60
            )
            assert done.returncode == 0, f"{problem} {routing} rank {rank} {words}: {done.stderr}"


def test_the_check_would_notice_a_slot_that_is_reused_too_early(runner, tmp_path):
    """With as many pending rows as slots, the wait no longer protects the slot that is loaded next."""
    problem, routing = PROBLEMS[0]
    path = tables_file(tmp_path / "tables", problem, 0, routing, 0)
    words = (2**31 - 1, 1, 1, 2, 2, 4, 0, 0, 1)
    done = subprocess.run(
        [str(runner), str(path), *map(str, words)], capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 1
