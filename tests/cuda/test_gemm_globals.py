"""The Python mirror of the kernels' argument, against the compiler and against itself."""

from __future__ import annotations

import struct
import subprocess

import pytest
from cuda_artifacts import device_words

from tktune.build.toolchain import detect, nvcc_present
from tktune.core.config import Config
from tktune.core.paths import csrc_root
from tktune.families import control_page
from tktune.families.cuda import gemm_globals as mirror
from tktune.families.cuda.gemm_globals import GemmGlobals, Guard, View, boxes_of, walk_entries
from tktune.families.cuda.tensor_map import SWIZZLE_64B, SWIZZLE_128B, MapKey

LAYOUT = """
#include "gemm/build_config.cuh"
#include "gemm/grouped_gemm.cuh"
using G = tkt::gemm_globals<tkt::build_config>;
using view = decltype(G::activations);
#define AT(type, field) static_cast<int32_t>(__builtin_offsetof(type, field))
extern "C" __device__ int32_t globals_layout[] = {
    AT(G, activations), AT(G, weights), AT(G, outputs), AT(G, walk), AT(G, dispenser), AT(G, guard),
    AT(G, num_experts), AT(G, reduction), AT(G, cols), AT(G, pad), AT(G, raster_rows), AT(G, turn_back), sizeof(G)};
extern "C" __device__ int32_t view_layout[] = {
    AT(view, data), AT(view, rows), AT(view, cols), sizeof(view), alignof(view)};
extern "C" __device__ int32_t guard_layout[] = {
    AT(tkt::spin_guard, report), AT(tkt::spin_guard, abort_word), AT(tkt::spin_guard, limit_kilo_ns),
    AT(tkt::spin_guard, rank), sizeof(tkt::spin_guard)};
extern "C" __device__ int32_t walk_layout[] = {
    AT(tkt::expert_rows, expert), AT(tkt::expert_rows, first_row), AT(tkt::expert_rows, rows),
    sizeof(tkt::expert_rows)};
extern "C" __device__ int32_t report_layout[] = {
    AT(tkt_spin_report, set), AT(tkt_spin_report, rank), AT(tkt_spin_report, block), AT(tkt_spin_report, role),
    AT(tkt_spin_report, word), AT(tkt_spin_report, index), AT(tkt_spin_report, expected),
    AT(tkt_spin_report, seen), sizeof(tkt_spin_report)};
"""


@pytest.mark.skipif(not nvcc_present(), reason="no nvcc on PATH, in CUDA_HOME or among the wheels")
def test_the_compiler_lays_out_what_the_mirror_packs(tmp_path):
    source, cubin = tmp_path / "layout.cu", tmp_path / "layout.cubin"
    source.write_text(LAYOUT)
    nvcc = detect("nvcc", "sm_90a")
    command = [str(nvcc.path), "-cubin", "-std=c++20", *nvcc.flags, "-I", str(csrc_root())]
    done = subprocess.run([*command, str(source), "-o", str(cubin)], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    offsets = (
        *(mirror.ACTIVATIONS, mirror.WEIGHTS, mirror.OUTPUTS, mirror.WALK, mirror.DISPENSER, mirror.GUARD),
        *(
            mirror.NUM_EXPERTS,
            mirror.REDUCTION,
            mirror.COLS,
            mirror.PAD,
            mirror.RASTER_ROWS,
            mirror.TURN_BACK,
        ),
    )
    assert device_words(cubin, "globals_layout") == [*offsets, mirror.GLOBALS_BYTES]
    assert device_words(cubin, "view_layout") == [128, 136, 140, mirror.VIEW_BYTES, 64]
    assert device_words(cubin, "guard_layout") == [0, 8, 16, 20, mirror.GUARD_BYTES]
    assert device_words(cubin, "walk_layout") == [0, 4, 8, mirror.EXPERT_ROWS_BYTES]
    assert device_words(cubin, "report_layout") == [0, 4, 8, 12, 28, 52, 56, 64, control_page._REPORT.size]


def test_each_field_is_packed_where_the_layout_says():
    views = [View(bytes([i] * 128), 0x1000 * i, 10 * i, 64 * i) for i in (1, 2, 3)]
    guard = Guard(2.0, rank=5, report=0xAA00, abort_word=0xBB00)
    packed = GemmGlobals(*views, 0xCC00, 0xDD00, guard, 32, 4096, 3072, 128, 2, 1).packed()
    assert len(packed) == mirror.GLOBALS_BYTES
    for at, view in zip((mirror.ACTIVATIONS, mirror.WEIGHTS, mirror.OUTPUTS), views, strict=True):
        assert packed[at : at + 128] == view.tensor_map
        assert struct.unpack_from("<Qii", packed, at + 128) == (view.pointer, view.rows, view.cols)
    assert struct.unpack_from("<QQ", packed, mirror.WALK) == (0xCC00, 0xDD00)
    assert struct.unpack_from("<QQIi", packed, mirror.GUARD) == (0xAA00, 0xBB00, 1953125, 5)
    assert struct.unpack_from("<6i", packed, mirror.NUM_EXPERTS) == (32, 4096, 3072, 128, 2, 1)


def test_a_spin_limit_is_told_in_units_of_1024_ns_and_never_zero():
    assert Guard(2.0).limit_kilo_ns == 1953125
    assert Guard(1e-9).limit_kilo_ns == 1
    assert Guard(1e9).limit_kilo_ns == 2**32 - 1


def test_boxes_follow_the_pieces_of_a_tile():
    part = Config(ROW_BLOCK=256, COL_BLOCK=192, RED_BLOCK=64, CLUSTER=2)
    box, boxes = mirror.Box, mirror.Boxes
    assert boxes_of(part, "enk") == boxes(box(64, 64), box(96, 64), box(64, 64))
    assert boxes_of(part, "ekn") == boxes(box(64, 64), box(64, 64), box(64, 64))
    deep = Config(ROW_BLOCK=64, COL_BLOCK=128, RED_BLOCK=128)
    assert boxes_of(deep, "enk") == boxes(box(64, 64), box(128, 64), box(64, 64))
    low = Config(ROW_BLOCK=32, COL_BLOCK=128, RED_BLOCK=128)
    assert boxes_of(low, "ekn") == boxes(box(32, 64), box(128, 64), box(32, 64))


def test_a_stage_of_32_has_boxes_of_32_along_the_reduction_and_their_swizzle():
    box, boxes = mirror.Box, mirror.Boxes
    part = Config(ROW_BLOCK=128, COL_BLOCK=256, RED_BLOCK=32)
    assert boxes_of(part, "enk") == boxes(box(64, 32), box(256, 32), box(64, 64))
    assert boxes_of(part, "ekn") == boxes(box(64, 32), box(32, 64), box(64, 64))
    swizzles = {cols: MapKey(0, 1, 64, 64, cols).swizzle for cols in (32, 64)}
    assert swizzles == {32: SWIZZLE_64B, 64: SWIZZLE_128B}


def test_a_walk_orders_experts_by_rows_and_ties_by_index():
    counts, base = [3, 0, 200, 3], [0, 128, 128, 384]
    longest = walk_entries(counts, base, "longest")
    assert longest == [(2, 128, 200, 0), (0, 0, 3, 0), (3, 384, 3, 0), (1, 128, 0, 0)]
    assert [entry[0] for entry in walk_entries(counts, base, "shortest")] == [1, 0, 3, 2]
    assert [entry[0] for entry in walk_entries(counts, base, "index")] == [0, 1, 2, 3]
