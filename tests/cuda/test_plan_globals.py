"""The Python mirror of the table kernel's argument against the compiler; the kernel compiles for each GPU class, lean."""

from __future__ import annotations

import struct
import subprocess

import pytest
from cuda_artifacts import device_words

from tktune.build.cache import ArtifactCache
from tktune.build.toolchain import detect, nvcc_present
from tktune.core.device import device_class
from tktune.core.paths import csrc_root
from tktune.core.problem import Problem
from tktune.families.cuda import plan_globals as mirror
from tktune.families.cuda.gemm_globals import Guard

needs_nvcc = pytest.mark.skipif(
    not nvcc_present(), reason="no nvcc on PATH, in CUDA_HOME or among the wheels"
)
POINTERS = [field.name for field in mirror.fields(mirror.PlanAddresses)]
LAYOUT = """
#include "comm/push_plan.cuh"
using G = tkt::plan_globals;
#define AT(field) static_cast<int32_t>(__builtin_offsetof(G, field))
extern "C" __device__ int32_t pointers[] = {POINTERS};
extern "C" __device__ int32_t others[] = {
    AT(region), AT(guard), AT(world), AT(tokens), AT(top_k), AT(experts), AT(pad), AT(capacity), AT(id_bytes),
    AT(never_last), AT(own_in_place), AT(unused), sizeof(G)};
extern "C" __device__ int32_t constants[] = {
    tkt::kPlanWarps, tkt::kPlanThreads, tkt::kPlanMostBlocks, tkt::kPlanMostExperts, tkt::kKinds, tkt::kWrongIds,
    tkt::kRowsWanted, tkt::plan_region::kSignals, tkt::plan_region::kIds, tkt::kCountQuad};
extern "C" __device__ int32_t shared_words[] = {
    tkt::plan_shared_words(1, 6), tkt::plan_shared_words(2, 32), tkt::plan_shared_words(8, 256)};
"""


def problem_of(experts=64, tokens=2048, world=2, top_k=8):
    return Problem("dispatch_gemm", 64, 64, experts, top_k, tokens, world=world)


@needs_nvcc
def test_the_compiler_lays_out_what_the_mirror_packs(tmp_path):
    source, cubin = tmp_path / "layout.cu", tmp_path / "layout.cubin"
    source.write_text(LAYOUT.replace("POINTERS", ", ".join(f"AT({name})" for name in POINTERS)))
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
        *(mirror.WARPS, mirror.THREADS, mirror.MOST_BLOCKS, mirror.MOST_EXPERTS, mirror.KINDS),
        *(mirror.WRONG_IDS, mirror.ROWS_WANTED, mirror.SIGNALS, mirror.IDS, mirror.COUNT_QUAD),
    ]
    sizes = [problem_of(6, world=1, top_k=2), problem_of(64), problem_of(2048, world=8)]
    assert [4 * words for words in device_words(cubin, "shared_words")] == [
        mirror.shared_bytes(problem) for problem in sizes
    ]


def test_each_field_is_packed_where_the_layout_says():
    problem = problem_of(experts=128, tokens=100, world=4)
    addresses = mirror.PlanAddresses(*range(1, len(POINTERS) + 1))
    packed = mirror.packed_plan(problem, (11, 12, 13, 14), addresses, Guard(1.0, rank=3), 256, 8, True)
    assert len(packed) == mirror.GLOBALS_BYTES
    assert struct.unpack_from("<8Q", packed) == (11, 12, 13, 14, 0, 0, 0, 0)
    assert list(struct.unpack_from(f"<{len(POINTERS)}Q", packed, mirror.FIRST_POINTER)) == list(
        range(1, len(POINTERS) + 1)
    )
    assert struct.unpack_from("<i", packed, mirror.WORLD_AT - 4)[0] == 3
    assert struct.unpack_from("<9i", packed, mirror.WORLD_AT) == (4, 100, 8, 128, 128, 256, 8, 1 << 20, 1)


@pytest.mark.parametrize("world", range(1, 9))
@pytest.mark.parametrize("tokens", [1, 31, 33, 512, 2048, 8191, 100_000])
def test_blocks_cover_all_tokens_and_stay_few(world, tokens):
    problem = problem_of(8 * world, tokens, world)
    blocks = mirror.blocks_of(problem)
    assert 1 <= blocks <= mirror.MOST_BLOCKS
    words = -(-tokens // 32)
    of_block = -(-words // blocks)
    of_warp = -(-of_block // (mirror.WARPS // world))
    assert blocks == mirror.MOST_BLOCKS or of_warp == 1
    counts = 2 * 4 * world * blocks * problem.experts
    assert mirror.region_bytes(problem) >= mirror.IDS + 2 * 4 * world * tokens * 8 + counts


def test_addresses_of_pushes_are_left_out_where_rows_are_pulled():
    pulled = mirror.PlanAddresses(*range(1, len(POINTERS) - 5))
    packed = mirror.packed_plan(problem_of(), (1, 2), pulled, Guard(1.0), 128, 4)
    at = mirror.FIRST_POINTER + 8 * (len(POINTERS) - 6)
    assert struct.unpack_from("<6Q", packed, at) == (0,) * 6
    assert POINTERS[-6:] == [
        "push_plan",
        "push_tokens",
        "push_blocks",
        "push_expected",
        "missing",
        "gate_sources",
    ]


@needs_nvcc
@pytest.mark.parametrize("arch", ["sm_90a", "sm_120a"])
def test_the_table_kernel_alone_is_a_small_cubin(tmp_path, arch):
    from tktune.families.dispatch_gemm.planner_cuda import ENTRY, plan_build_spec

    device = device_class(arch)
    (outcome,) = ArtifactCache(tmp_path).build([plan_build_spec(device)])
    assert outcome.ok, outcome.error_sentence
    assert outcome.mismatches == ()
    assert device_words(outcome.artifact.path, f"{ENTRY}_pushes") == [1]
    facts = outcome.artifact.facts
    assert facts["spill_store_bytes"] == facts["spill_load_bytes"] == facts["stack_bytes"] == 0
    assert facts["syscalls"] == []
    smem, threads, nbytes, cluster = device_words(outcome.artifact.path, f"{ENTRY}_facts")
    assert (threads, nbytes, cluster) == (mirror.THREADS, mirror.GLOBALS_BYTES, 1)
    assert smem == mirror.shared_bytes(problem_of(2048, world=8)) <= device.smem_optin_bytes
