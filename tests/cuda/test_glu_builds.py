"""The dispatch with SwiGLU compiles for each GPU class without a GPU: no spills, the formulas of halved outputs agree with
the compiler, and the host's mirror of the second launch's arguments with the header.
"""

from __future__ import annotations

import subprocess
from pathlib import Path
from typing import Any

import pytest
from cuda_artifacts import built_as_predicted, device_words, spec_of

pytest.importorskip("cuda.bindings", reason="cuda-bindings is not installed (the extra `cuda`)")

from tktune.build.cache import ArtifactCache
from tktune.build.toolchain import detect, nvcc_present
from tktune.core.device import DeviceClass
from tktune.core.paths import csrc_root
from tktune.core.problem import Problem
from tktune.families.base import family
from tktune.families.dispatch_gemm import glu_cuda
from tktune.families.glu import CODES

pytestmark = pytest.mark.skipif(
    not nvcc_present(), reason="no nvcc on PATH, in CUDA_HOME or among the wheels"
)
PINGPONG = {"MAIN_LOOP": "wgmma_pingpong", "COL_BLOCK": 192, "STAGES": 5, "DRAW": "dispenser"}
TALL = {"ROW_BLOCK": 256, "COL_BLOCK": 192, "STAGES": 3, "MMA_DEPTH": 0, "DRAW": "dispenser"}
THREE = {"ROW_BLOCK": 192, "COL_BLOCK": 192, "OUT_SLOTS": 1, "CONSUMER_WARPS": 12}
VARIANTS: list[tuple[str, int, str, str, dict[str, Any]]] = [
    ("sm_90a", 2, "enk", "fused", {}),
    ("sm_90a", 2, "ekn", "separate", {"DRAW": "dispenser"}),
    ("sm_90a", 2, "ekn", "fused", {**PINGPONG, "OUT_SLOTS": 3}),
    ("sm_90a", 8, "enk", "fused", {"CLUSTER": 2, "MMA_DEPTH": 0}),
    ("sm_90a", 1, "ekn", "fused", TALL),
    ("sm_90a", 4, "enk", "fused", THREE),
    ("sm_90a", 2, "enk", "fused", {"ROW_BLOCK": 64, "COL_BLOCK": 64, "CONSUMER_WARPS": 4}),
    ("sm_90a", 2, "enk", "fused", {"ROW_BLOCK": 64, "COL_BLOCK": 128}),
    ("sm_90a", 2, "ekn", "fused", {"ACTIVATIONS": "indexed", **PINGPONG, "OUT_SLOTS": 3}),
    ("sm_90a", 2, "enk", "separate", {"ACTIVATIONS": "indexed", "DRAW": "dispenser"}),
    ("sm_90a", 2, "enk", "fused", {"ACTIVATIONS": "indexed", **TALL}),
    ("sm_120a", 2, "enk", "fused", {}),
    ("sm_120a", 2, "ekn", "fused", {"COL_BLOCK": 192, "STAGES": 2, "PRODUCER_WARPS": 0}),
    ("sm_120a", 4, "enk", "separate", {"DRAW": "dispenser"}),
]


def problem_of(world: int, layout: str) -> Problem:
    return Problem(
        "dispatch_gemm", 4096, 3072, 64, 8, 512, world=world, weight_layout=layout, finish="swiglu"
    )


@pytest.fixture(scope="module")
def cache(tmp_path_factory):
    return ArtifactCache(tmp_path_factory.mktemp("cache"))


def judged(cache, spec, form):
    path = built_as_predicted(cache, spec)
    smem, threads, _, _ = device_words(path, "tktune_dispatch_gemm_facts")
    assert (smem, threads) == (spec.facts["smem_bytes"], spec.facts["threads"])
    assert device_words(path, "tktune_dispatch_gemm_glu_facts") == [CODES[form], glu_cuda.ARGUMENT_BYTES]
    assert (b"tktune_dispatch_gemm_glu\0" in path.read_bytes()) == (form == "separate")


@pytest.mark.parametrize(
    ("arch", "world", "layout", "form", "changes"),
    VARIANTS,
    ids=lambda v: ("-".join(map(str, v.values())) or "default") if isinstance(v, dict) else str(v),
)
def test_a_variant_compiles_within_its_formulas(cache, arch, world, layout, form, changes):
    judged(cache, spec_of(arch, problem_of(world, layout), GLU=form, **changes), form)


def test_the_rehearsal_of_sm_120a_compiles_for_sm_90(cache):
    rehearsal = DeviceClass("cuda", "sm_90", 110, 101376, 50331648, "nvlink", remote_atomics=False)
    bench, problem = family("dispatch_gemm"), problem_of(2, "enk")
    space = bench.space(problem, rehearsal)
    part = space.build_part(space.default_config())
    judged(cache, bench.build_spec(part, problem, rehearsal), "fused")


def test_the_host_knows_the_layout_of_the_second_launchs_arguments(tmp_path: Path):
    source = tmp_path / "layout.cu"
    source.write_text(
        '#include "gemm/glu_pass.cuh"\n'
        "using G = tkt::glu_pass_globals;\n"
        'extern "C" __device__ int glu_layout[] = {__builtin_offsetof(G, packed), __builtin_offsetof(G, out),\n'
        "    __builtin_offsetof(G, rows), __builtin_offsetof(G, pull_indices), __builtin_offsetof(G, cols), sizeof(G)};\n"
    )
    nvcc = detect("nvcc", "sm_90a")
    cubin = tmp_path / "layout.cubin"
    command = [str(nvcc.path), "-cubin", "-std=c++20", *nvcc.flags, "-I", str(csrc_root()), str(source)]
    subprocess.run([*command, "-o", str(cubin)], check=True)
    assert device_words(cubin, "glu_layout") == [0, 8, 16, 24, 32, glu_cuda.ARGUMENT_BYTES]
