"""The Python mirror of the combine tables' kernel argument against the compiler; what a plan holds, and where."""

from __future__ import annotations

import struct
import subprocess

import pytest
import torch
from cuda_artifacts import device_words

from tktune.build.toolchain import detect, nvcc_present
from tktune.core.config import Config
from tktune.core.errors import ProblemError
from tktune.core.paths import csrc_root
from tktune.core.problem import Problem
from tktune.families.cuda.gemm_globals import Guard
from tktune.families.gemm_combine import plan_globals as mirror
from tktune.families.gemm_combine.planner_cuda import listing_of
from tktune.families.gemm_combine.tables_cuda import DeviceCombineTables

POINTERS = [field.name for field in mirror.fields(mirror.CombinePlanAddresses)]
NUMBERS = (
    *("world", "tokens", "top_k", "local_experts", "pad"),
    *("form", "own_last", "groups", "passes", "group_tiles"),
)
LAYOUT = """
#include "comm/combine_plan.cuh"
using G = tkt::combine_plan_globals;
#define AT(field) static_cast<int32_t>(__builtin_offsetof(G, field))
extern "C" __device__ int32_t pointers[] = {POINTERS};
extern "C" __device__ int32_t others[] = {AT(region), AT(guard), NUMBERS, sizeof(G)};
extern "C" __device__ int32_t constants[] = {
    tkt::kCombinePlanWarps, tkt::kCombinePlanThreads, tkt::kCombinePlanMostBlocks, tkt::kCombineKeys,
    tkt::combine_region::kSignals, tkt::combine_region::kOwed, tkt::combine_region::kPlanes};
extern "C" __device__ int32_t shared_words[] = {
    tkt::combine_plan_shared_words(1, 6, 16, 1), tkt::combine_plan_shared_words(2, 2048, 128, 32),
    tkt::combine_plan_shared_words(8, 8192, 128, 32)};
"""


def problem_of(experts=64, tokens=2048, world=2, top_k=8, pad=128):
    return Problem("gemm_combine", 64, 1536, experts, top_k, tokens, world=world, pad=pad)


@pytest.mark.skipif(not nvcc_present(), reason="no nvcc on PATH, in CUDA_HOME or among the wheels")
def test_the_compiler_lays_out_what_the_mirror_packs(tmp_path):
    source, cubin = tmp_path / "layout.cu", tmp_path / "layout.cubin"
    text = LAYOUT.replace("POINTERS", ", ".join(f"AT({name})" for name in POINTERS))
    source.write_text(text.replace("NUMBERS", ", ".join(f"AT({name})" for name in NUMBERS)))
    nvcc = detect("nvcc", "sm_90a")
    command = [str(nvcc.path), "-cubin", "-std=c++20", *nvcc.flags, "-I", str(csrc_root()), str(source)]
    done = subprocess.run([*command, "-o", str(cubin)], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert device_words(cubin, "pointers") == [mirror.FIRST_POINTER + 8 * i for i in range(len(POINTERS))]
    assert device_words(cubin, "others") == [
        *(mirror.REGION, mirror.GUARD_AT, *(mirror.WORLD_AT + 4 * i for i in range(10))),
        mirror.GLOBALS_BYTES,
    ]
    assert device_words(cubin, "constants") == [
        *(mirror.WARPS, mirror.THREADS, mirror.MOST_BLOCKS, mirror.KEYS),
        *(mirror.SIGNALS, mirror.OWED, mirror.PLANES),
    ]
    sizes = [
        problem_of(6, 6, 1, 2, 16),
        problem_of(),
        problem_of(tokens=8192, world=8),
    ]
    assert [4 * words for words in device_words(cubin, "shared_words")] == [
        mirror.shared_bytes(problem) for problem in sizes
    ]


def test_each_field_is_packed_where_the_layout_says():
    problem = problem_of(experts=128, tokens=100, world=4)
    addresses = mirror.CombinePlanAddresses(*range(1, len(POINTERS) + 1))
    listing = mirror.Listing(1, True, 2, 2, 3)
    packed = mirror.packed_plan(problem, (11, 12, 13, 14), addresses, Guard(1.0, rank=3), listing)
    assert len(packed) == mirror.GLOBALS_BYTES
    assert struct.unpack_from("<8Q", packed) == (11, 12, 13, 14, 0, 0, 0, 0)
    found = struct.unpack_from(f"<{len(POINTERS)}Q", packed, mirror.FIRST_POINTER)
    assert list(found) == list(range(1, len(POINTERS) + 1))
    assert struct.unpack_from("<i", packed, mirror.WORLD_AT - 4)[0] == 3
    assert struct.unpack_from("<10i", packed, mirror.WORLD_AT) == (4, 100, 8, 32, 128, 1, 1, 2, 2, 3)


@pytest.mark.parametrize("world", range(1, 9))
@pytest.mark.parametrize("tokens", [1, 33, 2048, 100_000])
def test_blocks_stay_few_and_a_region_holds_every_plane_twice(world, tokens):
    problem = problem_of(8 * world, tokens, world)
    blocks = mirror.blocks_of(problem)
    assert 1 <= blocks <= mirror.MOST_BLOCKS
    assert blocks == mirror.MOST_BLOCKS or blocks * 64 >= tokens
    assert mirror.region_bytes(problem) >= mirror.PLANES + 2 * 2 * 4 * world * tokens * 8
    assert mirror.SIGNALS + 8 * world * blocks <= mirror.OWED


def test_a_listing_says_what_a_config_means():
    config = Config(form="pull", order="remote", signal_groups=2, walk="columns", COL_BLOCK=128)
    problem = problem_of()
    assert listing_of(config, problem) == mirror.Listing(1, True, 2, 2, 6)
    config = config.replace(form="prereduce", order="ready", walk="experts", signal_groups=4)
    assert listing_of(config, problem) == mirror.Listing(0, False, 4, 1, 3)


def test_tables_lie_apart_and_on_sixteen_bytes():
    problem = problem_of(8, 20, 2, 3, 16)
    made = DeviceCombineTables(problem, 2, 2, torch.device("cpu"))
    start = made.memory.data_ptr()
    for number, name in enumerate(made.at):
        made.view(name).fill_(number)
        assert (made.at[name] - start) % 16 == 0
    for number, name in enumerate(made.at):
        assert (made.view(name) == number).all(), name
        assert made.view(name).data_ptr() == made.at[name]
    made.view("plan")[1] = 7
    made.view("everyones").view(torch.float32).fill_(0.5)
    assert made.jobs().numel() == 7 and (made.topk_weights == 0.5).all()
    assert made.topk_weights.shape == (2, 20, 3)
    again = DeviceCombineTables(problem, 2, 2, torch.device("cpu"), made.memory)
    assert again.combine(1).owners.shape == (20, 3)
    with pytest.raises(ProblemError, match="this operator's plans are"):
        DeviceCombineTables(problem, 1, 1, torch.device("cpu"), made.memory)
