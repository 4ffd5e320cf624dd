"""The combine fusion compiles for each GPU class without a GPU: no spills, no calls, and the compiler agrees with the
formulas.
"""

from __future__ import annotations

import re
import shutil
import subprocess

import pytest
from cuda_artifacts import built_as_predicted, device_words

from tktune.build.cache import ArtifactCache
from tktune.build.toolchain import nvcc_present
from tktune.core.device import DeviceClass, device_class
from tktune.core.paths import csrc_root
from tktune.core.problem import Problem
from tktune.families.base import family
from tktune.families.cuda.dispatch_globals import meeting_bytes, self_test_bytes
from tktune.families.gemm_combine import space_cuda

pytestmark = pytest.mark.skipif(
    not nvcc_present(), reason="no nvcc on PATH, in CUDA_HOME or among the wheels"
)

BENCH = family("gemm_combine")
PINGPONG = {"MAIN_LOOP": "wgmma_pingpong", "COL_BLOCK": 192, "STAGES": 5, "OUT_SLOTS": 1, "DRAW": "dispenser"}
TALL = {"ROW_BLOCK": 192, "COL_BLOCK": 192, "OUT_SLOTS": 1, "CONSUMER_WARPS": 12}
SQUARE = {"ROW_BLOCK": 128, "COL_BLOCK": 128, "RED_BLOCK": 32, "WARP_M": 64, "PRODUCER_WARPS": 1, "STAGES": 4}
VARIANTS = [
    ("sm_90a", 2, "enk", {}),
    ("sm_90a", 8, "ekn", {"CLUSTER": 2, "MMA_DEPTH": 0}),
    ("sm_90a", 2, "enk", PINGPONG),
    ("sm_90a", 4, "enk", TALL),
    ("sm_90a", 1, "ekn", {"ROW_BLOCK": 64, "CONSUMER_WARPS": 4, "DRAW": "dispenser"}),
    ("sm_120a", 2, "enk", {}),
    ("sm_120a", 8, "ekn", SQUARE),
]


def spec_of(device: DeviceClass, world: int, layout: str, changes):
    problem = Problem("gemm_combine", 1536, 4096 if device.arch != "sm_90a" else 4608, 64, 8, 512, world=world,
                      weight_layout=layout)  # fmt: skip
    space = space_cuda.space(problem, device, BENCH.roles)
    config = space.default_config().replace(**changes)
    assert space.broken(config) == [], space.broken(config)
    return BENCH.build_spec(space.build_part(config), problem, device), config


@pytest.fixture(scope="module")
def cache(tmp_path_factory):
    return ArtifactCache(tmp_path_factory.mktemp("cache"))


def judged(cache, spec, config, world):
    path = built_as_predicted(cache, spec)
    smem, threads, nbytes, _ = device_words(path, "tktune_gemm_combine_facts")
    assert (smem, threads) == (spec.facts["smem_bytes"], spec.facts["threads"])
    assert nbytes == -(-(800 + 48 * world) // 64) * 64  # rows, staging: 16 bytes a rank; two words each
    assert device_words(path, "tktune_gemm_combine_world") == [
        *(
            world,
            space_cuda.slots_bytes(config),
            config["CONSUMER_WARPS"],
            space_cuda.most_piece_vectors(config),
        ),
        *(meeting_bytes(world), self_test_bytes(world)),
    ]
    return path


@pytest.mark.parametrize(
    ("arch", "world", "layout", "changes"),
    VARIANTS,
    ids=lambda value: (
        "-".join(map(str, value.values())) or "default" if isinstance(value, dict) else str(value)
    ),
)
def test_a_variant_compiles_within_its_formulas(cache, arch, world, layout, changes):
    spec, config = spec_of(device_class(arch), world, layout, changes)
    path = judged(cache, spec, config, world)
    dumper = shutil.which("cuobjdump")
    if dumper is None:
        return
    dump = [dumper, "-sass", "-fun", "tktune_gemm_combine", str(path)]
    sass = subprocess.run(dump, capture_output=True, text=True, check=True).stdout
    assert re.findall(r"UBLKCP\.\S+", sass) == [
        "UBLKCP.S.G",
        "UBLKCP.G.S",
    ]  # a row piece comes, a stretch goes
    assert not re.findall(r"@!?U?P\d+ UBLKCP", sass)
    assert not re.findall(r"\b(?:CALL|LDL|STL)\.?\S*", sass)


def test_the_rehearsal_of_sm_120a_compiles_for_sm_90(cache):
    rehearsal = DeviceClass("cuda", "sm_90", 110, 101376, 50331648, "nvlink", remote_atomics=False)
    spec, config = spec_of(rehearsal, 2, "enk", {})
    judged(cache, spec, config, 2)


def test_the_registers_of_signalling_roles_are_the_kernels_own_defaults():
    """They stand in csrc/kernels/gemm_combine.cu and in the space; the pool of a block bounds their sum."""
    text = (csrc_root() / "kernels" / "gemm_combine.cu").read_text()
    assert re.search(r"define TKT_PRODUCER_REGISTERS 56\b", text)
    found = re.search(r"define TKT_CONSUMER_REGISTERS \(TKT_CONSUMER_WARPS <= 8 \? (\d+) : (\d+)\)", text)
    registers = space_cuda.SIGNALLING_REGISTERS
    assert (int(found[1]), int(found[2])) == (registers[8][1], registers[12][1])
    for warps, (producer, consumer) in registers.items():
        changes = {4: {"ROW_BLOCK": 64, "CONSUMER_WARPS": 4}, 8: {}, 12: TALL}[warps]
        spec, _ = spec_of(device_class("sm_90a"), 2, "enk", changes)
        assert spec.defines["TKT_PRODUCER_REGISTERS"] == str(producer)
        assert spec.defines["TKT_CONSUMER_REGISTERS"] == str(consumer)
        pool = spec.facts["registers"] // 8 * 8 * 32 * (warps + 4)
        assert 128 * producer + 32 * warps * consumer <= pool


def test_every_define_of_a_build_is_documented():
    heads = [
        (csrc_root() / "kernels" / f"{name}.cu").read_text().split("#include")[0]
        for name in ("gemm_combine", "grouped_gemm")
    ]
    for arch in ("sm_90a", "sm_120a"):
        for name in spec_of(device_class(arch), 2, "enk", {})[0].defines:
            assert any(name in head or name.removeprefix("TKT") in head for head in heads), name
