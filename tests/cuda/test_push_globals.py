"""The Python mirror of what a push launch takes beyond a pull, against the compiler and itself."""

from __future__ import annotations

import struct
import subprocess

import pytest
from cuda_artifacts import device_words

from tktune.build.toolchain import detect, nvcc_present
from tktune.core.paths import csrc_root
from tktune.core.problem import Problem
from tktune.families.cuda import dispatch_globals as mirror
from tktune.families.cuda import push_globals as push
from tktune.families.cuda.push_globals import PushPart

LAYOUT = """
#include "comm/push.cuh"
#include "gemm/build_config.cuh"
using P = tkt::push_part<RANKS>;
using G = tkt::push_globals<tkt::build_config, RANKS>;
#define AT(field) static_cast<int32_t>(__builtin_offsetof(P, field))
extern "C" __device__ int32_t layout[] = {
    AT(push_plan), AT(push_tokens), AT(push_blocks), AT(push_expected), AT(missing), AT(gate_sources), AT(sequence),
    AT(sections), AT(flags), AT(num_push_blocks), sizeof(P), sizeof(G), P::kTurns};
extern "C" __global__ void where(G g, int64_t* to) {
    *to = reinterpret_cast<const char*>(&g.push_plan) - reinterpret_cast<const char*>(&g.gemm);
}
"""


@pytest.mark.skipif(not nvcc_present(), reason="no nvcc on PATH, in CUDA_HOME or among the wheels")
@pytest.mark.parametrize("world", [1, 2, 5, 8])
def test_the_compiler_lays_out_what_the_mirror_packs(tmp_path, world):
    source, cubin = tmp_path / "layout.cu", tmp_path / "layout.cubin"
    checked = f"static_assert(sizeof(G) >= {mirror.globals_bytes(world)} + sizeof(P));"
    source.write_text(LAYOUT + checked)
    nvcc = detect("nvcc", "sm_90a")
    command = [str(nvcc.path), "-cubin", "-std=c++20", *nvcc.flags, "-I", str(csrc_root())]
    command += [f"-DRANKS={world}", "-DTKT_ACTIVATIONS=1", str(source), "-o", str(cubin)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    p = push
    assert device_words(cubin, "layout") == [
        *(p.PLAN, p.TOKENS, p.BLOCKS, p.EXPECTED, p.MISSING, p.GATE_SOURCES, p.SEQUENCE, p.SECTIONS),
        *(p.SECTIONS + 16 * world, p.SECTIONS + 24 * world, p.part_bytes(world), p.globals_bytes(world)),
        world + 1,
    ]


def test_each_field_is_packed_behind_the_arguments_of_a_pull():
    dispatch = bytes(range(256)) * 4
    dispatch = dispatch[: mirror.globals_bytes(2)].ljust(mirror.globals_bytes(2), b"x")
    packed = PushPart(1, 2, 3, 4, 5, 6, 7, (0xA000, 0xB000), 96, (0xC000, 0xD000), 5).behind(dispatch, 4096)
    assert len(packed) == push.globals_bytes(2)
    assert packed.startswith(dispatch)
    part = packed[len(dispatch) :]
    assert struct.unpack_from("<7Q", part) == (1, 2, 3, 4, 5, 6, 7)
    assert struct.unpack_from("<QiiQii", part, push.SECTIONS) == (0xA000, 96, 4096, 0xB000, 96, 4096)
    assert struct.unpack_from("<2Qi", part, push.SECTIONS + 32) == (0xC000, 0xD000, 5)


def test_there_is_a_flag_for_each_source_of_every_pad_block_and_for_every_row():
    problem = Problem("dispatch_gemm", 64, 40, 8, 3, 24, world=2, pad=16)
    assert push.flag_bytes(problem) == (problem.capacity_rows // 16 * 2 * 8, 2 * 24 * 8)
