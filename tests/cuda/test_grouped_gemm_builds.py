"""The grouped GEMM compiles for each GPU class without a GPU, and the compiler agrees with the formulas."""

from __future__ import annotations

import re

import pytest
from cuda_artifacts import built_as_predicted, device_words, problem_of, spec_of

from tktune.build.cache import ArtifactCache
from tktune.build.toolchain import nvcc_present
from tktune.core.config import Config
from tktune.core.paths import csrc_root
from tktune.families.cuda.gemm_globals import GLOBALS_BYTES
from tktune.families.grouped_gemm import space_cuda

needs_nvcc = pytest.mark.skipif(
    not nvcc_present(), reason="no nvcc on PATH, in CUDA_HOME or among the wheels"
)

VARIANTS = [
    ("sm_90a", "enk", {}),
    ("sm_90a", "ekn", {"CLUSTER": 2, "MMA_DEPTH": 0}),
    (
        "sm_90a",
        "enk",
        {"MAIN_LOOP": "wgmma_pingpong", "COL_BLOCK": 192, "STAGES": 5, "OUT_SLOTS": 3, "MMA_DEPTH": 1},
    ),
    ("sm_90a", "ekn", {"ROW_BLOCK": 256, "COL_BLOCK": 192, "STAGES": 3, "DRAW": "dispenser"}),
    ("sm_120a", "enk", {}),
    ("sm_120a", "ekn", {"WARP_M": 64, "DRAW": "dispenser"}),
    ("sm_120a", "enk", {"ROW_BLOCK": 64, "CONSUMER_WARPS": 4, "STAGES": 4}),
]


@pytest.fixture(scope="module")
def cache(tmp_path_factory):
    return ArtifactCache(tmp_path_factory.mktemp("cache"))


@needs_nvcc
@pytest.mark.parametrize(
    ("arch", "layout", "changes"),
    VARIANTS,
    ids=lambda value: "-".join(map(str, value.values())) or "default" if isinstance(value, dict) else value,
)
def test_a_variant_compiles_within_its_formulas(cache, arch, layout, changes):
    spec = spec_of(arch, problem_of(weight_layout=layout), **changes)
    smem, threads, globals_bytes, cluster = device_words(
        built_as_predicted(cache, spec), "tktune_grouped_gemm_facts"
    )
    assert (smem, threads) == (spec.facts["smem_bytes"], spec.facts["threads"])
    assert globals_bytes == GLOBALS_BYTES
    assert cluster == changes.get("CLUSTER", 1)


def test_the_registers_of_the_roles_are_the_kernels_own_defaults():
    """TKT_PRODUCER_REGISTERS and TKT_CONSUMER_REGISTERS stand in csrc/gemm and in the space."""
    text = (csrc_root() / "gemm" / "build_config.cuh").read_text()
    for place, role in enumerate(("PRODUCER", "CONSUMER")):
        found = re.search(rf"define TKT_{role}_REGISTERS \(TKT_CONSUMER_WARPS <= 8 \? (\d+) : (\d+)\)", text)
        few, many = int(found.group(1)), int(found.group(2))
        told = {warps: pair[place] for warps, pair in space_cuda.WGMMA_REGISTERS.items()}
        assert told == {warps: few if warps <= 8 else many for warps in told}


def test_every_define_of_a_build_is_documented_in_the_kernel_file():
    text = (csrc_root() / "kernels" / "grouped_gemm.cu").read_text()
    head = text[: text.index("#include")]
    for arch in ("sm_90a", "sm_120a"):
        for name in spec_of(arch, problem_of()).defines:
            assert name in head or name.removeprefix("TKT") in head


def test_the_kernels_defaults_are_the_spaces_defaults():
    text = (csrc_root() / "kernels" / "grouped_gemm.cu").read_text()
    rows = dict(re.findall(r"^//   TKT_(\w+) +(\d+) ", text, re.MULTILINE))
    default: Config = space_cuda.DEFAULT_WGMMA
    for name, value in default.items():
        code = {"wgmma": 1, "stride": 0}.get(value, value)
        assert int(rows[name]) == code, name
