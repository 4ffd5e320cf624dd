"""The Python mirror of the dispatch kernels' arguments and of the symmetric memory, against the compiler and itself."""

from __future__ import annotations

import struct
import subprocess

import pytest
from cuda_artifacts import device_words

from tktune.build.toolchain import detect, nvcc_present
from tktune.core.paths import csrc_root
from tktune.families import abi
from tktune.families.cuda import dispatch_globals as mirror
from tktune.families.cuda.dispatch_globals import NO_SLOTS, DispatchGlobals, RowSlots
from tktune.families.cuda.gemm_globals import GLOBALS_BYTES, GemmGlobals, Guard, View

LAYOUT = """
#include "comm/dispatch.cuh"
#include "comm/self_test.cuh"
#include "gemm/build_config.cuh"
constexpr int W = RANKS;
using G = tkt::dispatch_globals<tkt::build_config, W>;
using M = tkt::meeting<W>;
using S = tkt::self_test_globals<W>;
using L = tkt::symmetric_layout;
#define AT(type, field) static_cast<int32_t>(__builtin_offsetof(type, field))
extern "C" __device__ int32_t globals_layout[] = {
    AT(G, gathered), AT(G, plan), AT(G, pull_indices), AT(G, pull_tokens), AT(G, pull_slots), AT(G, slack),
    AT(G, arrivals), AT(G, queue), AT(G, roles), AT(G, pending), AT(G, tokens), sizeof(G)};
extern "C" __device__ int32_t roles_layout[] = {
    AT(G, num_comp_blocks) - AT(G, roles), AT(G, head) - AT(G, roles), AT(G, top_k) - AT(G, roles),
    AT(G, wave) - AT(G, roles), AT(G, opening) - AT(G, roles), AT(G, warp_slots) - AT(G, roles),
    AT(G, comm_warps) - AT(G, roles), AT(G, pending) - AT(G, roles), AT(G, unread) - AT(G, roles),
    AT(G, pieces) - AT(G, roles), AT(G, beside) - AT(G, roles), AT(G, beside_slots) - AT(G, roles),
    AT(G, beside_pending) - AT(G, roles), AT(G, beside_unread) - AT(G, roles),
    AT(G, beside_pieces) - AT(G, roles), AT(G, openers) - AT(G, roles)};
extern "C" __device__ int32_t meeting_layout[] = {AT(M, words), AT(M, sequence), AT(M, guard), sizeof(M)};
extern "C" __device__ int32_t self_test_layout[] = {
    AT(S, memory), AT(S, errors), AT(S, first), AT(S, guard), AT(S, rounds), sizeof(S)};
extern "C" __device__ int32_t symmetric[] = {
    L::kMeeting, L::kFlags, L::kAcknowledged, L::kInbox, L::kInboxBytes, L::kHeaderBytes};
extern "C" __device__ int32_t constants[] = {
    tkt::kCommunicate, tkt::kCompute, tkt::kGated, tkt::kNeverLast,
    tkt::kSlotReserveBytes, tkt::kMostSlots, tkt::kBesideReserveBytes, tkt::kMostOpen};
"""


@pytest.mark.skipif(not nvcc_present(), reason="no nvcc on PATH, in CUDA_HOME or among the wheels")
@pytest.mark.parametrize("world", [1, 2, 5, 8])
def test_the_compiler_lays_out_what_the_mirror_packs(tmp_path, world):
    source, cubin = tmp_path / "layout.cu", tmp_path / "layout.cubin"
    source.write_text(LAYOUT)
    nvcc = detect("nvcc", "sm_90a")
    command = [
        str(nvcc.path),
        "-cubin",
        "-std=c++20",
        *nvcc.flags,
        "-I",
        str(csrc_root()),
        f"-DRANKS={world}",
    ]
    done = subprocess.run([*command, str(source), "-o", str(cubin)], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    m = mirror
    assert device_words(cubin, "globals_layout") == [
        *(m.GATHERED, m.PLAN, m.PULL_INDICES, m.PULL_TOKENS, m.PULL_SLOTS, m.SLACK),
        *(m.ARRIVALS, m.QUEUE, m.ROLES, m.PENDING, m.TOKENS, m.globals_bytes(world)),
    ]
    assert device_words(cubin, "roles_layout") == list(range(4, 68, 4))
    after = 8 * world
    assert device_words(cubin, "meeting_layout") == [0, after, after + 8, m.meeting_bytes(world)]
    assert device_words(cubin, "self_test_layout") == [
        *(0, after, after + 8, after + 16, after + 40, m.self_test_bytes(world))
    ]
    assert device_words(cubin, "constants") == [
        *(m.COMMUNICATE, m.COMPUTE, m.GATED, m.NEVER_LAST),
        *(m.SLOT_RESERVE_BYTES, m.MOST_SLOTS, m.BESIDE_RESERVE_BYTES, m.MOST_PENDING),
    ]
    pytest.importorskip("cuda.bindings", reason="cuda-bindings is not installed (the extra `cuda`)")
    from tktune.families.cuda import symmetric as s

    assert device_words(cubin, "symmetric") == [
        *(s.MEETING, s.FLAGS, s.ACKNOWLEDGED, s.INBOX, s.INBOX_BYTES, s.HEADER_BYTES)
    ]


def test_each_field_is_packed_where_the_layout_says():
    views = [View(bytes([i] * 128), 0x1000 * i, 10 * i, 64 * i) for i in (1, 2, 3)]
    guard = Guard(2.0, rank=1, report=0xAA00, abort_word=0xBB00)
    gemm = GemmGlobals(*views, 0xCC00, 0xDD00, guard, 32, 4096, 3072, 128)
    packed = DispatchGlobals(
        *(gemm, 1, 2, 3, 4, 5, 6, 7, 8),
        *(mirror.FUSED, 116, 256, 6, 4, 1, RowSlots(12, 2, 3, 1, 4), (0xE000, 0xF000), 512),
        *(RowSlots(2, 5, 6, 7, 8), 3),
    ).packed()
    assert len(packed) == mirror.globals_bytes(2)
    assert packed[:GLOBALS_BYTES] == gemm.packed()
    assert struct.unpack_from("<8Q", packed, mirror.GATHERED) == (1, 2, 3, 4, 5, 6, 7, 8)
    assert struct.unpack_from("<11i", packed, mirror.ROLES) == (7, 116, 256, 6, 4, 1, 2, 12, 3, 1, 4)
    assert struct.unpack_from("<6i", packed, mirror.PENDING + 12) == (2, 5, 6, 7, 8, 3)
    assert struct.unpack_from("<QiiQii", packed, mirror.TOKENS) == (0xE000, 512, 4096, 0xF000, 512, 4096)


def test_roles_are_those_of_the_cpu_backend():
    assert (mirror.COMMUNICATE, mirror.COMPUTE) == (abi.COMMUNICATE, abi.COMPUTE)
    assert mirror.FUSED == abi.FUSED


def test_smaller_arguments_have_the_sizes_that_are_told():
    guard = Guard(1.0, rank=3)
    for world in (1, 2, 8):
        addresses = tuple(range(world))
        assert len(mirror.packed_meeting(addresses, 9, guard)) == mirror.meeting_bytes(world)
        assert len(mirror.packed_self_test(addresses, 1, 2, guard, 64)) == mirror.self_test_bytes(world)


@pytest.mark.parametrize(
    ("smem", "hidden", "warps", "wanted"),
    [
        (232448, 4096, 12, RowSlots(12, 2, 1, 1)),
        (232448, 7168, 12, RowSlots(8, 2, 1, 1)),
        (232448, 2048, 12, RowSlots(12, 4, 2, 2)),
        (101376, 4096, 9, RowSlots(6, 2, 1, 1)),
        (101376, 7168, 9, RowSlots(3, 2, 1, 1)),
        (101376, 32768, 9, RowSlots(1, 1, 0, 0)),
        (232448, 64, 12, RowSlots(12, 8, 4, 4)),
    ],
)
def test_row_slots_are_as_many_as_fit(smem, hidden, warps, wanted):
    slots = RowSlots.within(smem, 2 * hidden, warps)
    assert slots == wanted
    assert slots.smem_bytes(2 * hidden) <= smem
    assert slots.unread < slots.of_warp and slots.pending + slots.of_warp <= 32


@pytest.mark.parametrize(
    ("gemm", "hidden", "warps", "wanted"),
    [
        (205216, 4096, 1, RowSlots(1, 3, 3, 1)),
        (205216, 4096, 2, RowSlots(2, 3, 3, 1, 2)),
        (205216, 7168, 2, RowSlots(2, 3, 3, 1, 4)),
        (188832, 7168, 2, RowSlots(2, 3, 3, 1, 2)),
        (188832, 64, 2, RowSlots(2, 8, 8, 4)),
        (229376 + 600, 4096, 1, RowSlots(1, 4, 4, 2, 16)),  # 512 bytes a piece
        (229376 + 600, 4096, 2, RowSlots(2, 2, 2, 1, 16)),
        (232448 - 700, 4096, 2, NO_SLOTS),
        (188832, 4096, 0, NO_SLOTS),
        (205216, 4096 + 8, 2, NO_SLOTS),  # a row of 513 × 16 bytes has no halves
    ],
)
def test_slots_beside_a_gemm_fit_what_it_leaves(gemm, hidden, warps, wanted):
    slots = RowSlots.beside(232448, gemm, 2 * hidden, warps)
    assert slots == wanted
    if slots.warps:
        taken = slots.warps * slots.of_warp * (2 * hidden // slots.pieces)
        assert gemm + 127 + mirror.BESIDE_RESERVE_BYTES + taken <= 232448 + 127
        assert 8 * slots.warps * slots.of_warp <= mirror.BESIDE_RESERVE_BYTES


def test_a_row_that_fits_no_memory_is_refused():
    with pytest.raises(ValueError, match="does not fit"):
        RowSlots.within(101376, 2 * 65536, 9)
