"""The dispatch fusion compiles for each GPU class without a GPU: no spills, no driver calls, and the compiler agrees
with the formulas.
"""

from __future__ import annotations

import re
import shutil
import subprocess

import pytest
from cuda_artifacts import built_as_predicted, device_words, spec_of

from tktune.build.cache import ArtifactCache
from tktune.build.toolchain import nvcc_present
from tktune.core.device import DeviceClass
from tktune.core.paths import csrc_root
from tktune.core.problem import Problem
from tktune.families.base import family
from tktune.families.cuda import push_globals
from tktune.families.cuda.dispatch_globals import globals_bytes, meeting_bytes, self_test_bytes
from tktune.families.dispatch_gemm.space import GATED_REGISTERS

pytestmark = pytest.mark.skipif(
    not nvcc_present(), reason="no nvcc on PATH, in CUDA_HOME or among the wheels"
)

VARIANTS = [
    ("sm_90a", 2, "enk", {}),
    ("sm_90a", 2, "ekn", {"DRAW": "dispenser"}),
    ("sm_90a", 8, "enk", {"CLUSTER": 2, "MMA_DEPTH": 0}),
    (
        "sm_90a",
        2,
        "enk",
        {
            "MAIN_LOOP": "wgmma_pingpong",
            "COL_BLOCK": 192,
            "STAGES": 5,
            "OUT_SLOTS": 1,
            "DRAW": "dispenser",
        },
    ),
    (
        "sm_90a",
        1,
        "ekn",
        {"ROW_BLOCK": 256, "COL_BLOCK": 192, "STAGES": 3, "MMA_DEPTH": 0, "DRAW": "dispenser"},
    ),
    ("sm_90a", 4, "enk", {"ROW_BLOCK": 192, "COL_BLOCK": 192, "OUT_SLOTS": 1, "CONSUMER_WARPS": 12}),
    ("sm_90a", 2, "enk", {"ROW_BLOCK": 64, "CONSUMER_WARPS": 4, "DRAW": "dispenser"}),
    ("sm_90a", 2, "enk", {"ACTIVATIONS": "indexed"}),
    ("sm_90a", 8, "ekn", {"ACTIVATIONS": "indexed", "DRAW": "dispenser"}),
    (
        "sm_90a",
        2,
        "ekn",
        {
            "ACTIVATIONS": "indexed",
            "MAIN_LOOP": "wgmma_pingpong",
            "COL_BLOCK": 192,
            "STAGES": 5,
            "OUT_SLOTS": 3,
            "DRAW": "dispenser",
        },
    ),
    (
        "sm_90a",
        2,
        "enk",
        {
            "ACTIVATIONS": "indexed",
            "ROW_BLOCK": 256,
            "COL_BLOCK": 192,
            "STAGES": 3,
            "MMA_DEPTH": 0,
            "DRAW": "dispenser",
        },
    ),
    (
        "sm_90a",
        1,
        "enk",
        {
            "ACTIVATIONS": "indexed",
            "ROW_BLOCK": 192,
            "COL_BLOCK": 192,
            "OUT_SLOTS": 1,
            "CONSUMER_WARPS": 12,
            "DRAW": "dispenser",
        },
    ),
    ("sm_90a", 2, "enk", {"ACTIVATIONS": "indexed", "ROW_BLOCK": 64, "CONSUMER_WARPS": 4}),
    ("sm_90a", 2, "enk", {"ACTIVATIONS": "indexed", "TRANSPORT": "push"}),
    ("sm_90a", 8, "ekn", {"ACTIVATIONS": "indexed", "TRANSPORT": "push", "DRAW": "dispenser"}),
    (
        "sm_90a",
        4,
        "enk",
        {
            "ACTIVATIONS": "indexed",
            "TRANSPORT": "push",
            "MAIN_LOOP": "wgmma_pingpong",
            "COL_BLOCK": 192,
            "STAGES": 5,
            "OUT_SLOTS": 3,
            "DRAW": "dispenser",
        },
    ),
    (
        "sm_90a",
        2,
        "enk",
        {
            "ACTIVATIONS": "indexed",
            "TRANSPORT": "push",
            "ROW_BLOCK": 256,
            "COL_BLOCK": 192,
            "STAGES": 3,
            "MMA_DEPTH": 0,
            "DRAW": "dispenser",
        },
    ),
    (
        "sm_90a",
        1,
        "enk",
        {
            "ACTIVATIONS": "indexed",
            "TRANSPORT": "push",
            "ROW_BLOCK": 192,
            "COL_BLOCK": 192,
            "OUT_SLOTS": 1,
            "CONSUMER_WARPS": 12,
            "DRAW": "dispenser",
        },
    ),
    ("sm_90a", 2, "enk", {"TRANSPORT": "push", "DRAW": "dispenser"}),
    ("sm_90a", 8, "ekn", {"TRANSPORT": "push", "CLUSTER": 2, "MMA_DEPTH": 0}),
    (
        "sm_90a",
        2,
        "enk",
        {
            "TRANSPORT": "push",
            "ROW_BLOCK": 256,
            "COL_BLOCK": 192,
            "STAGES": 3,
            "MMA_DEPTH": 0,
            "DRAW": "dispenser",
        },
    ),
    ("sm_120a", 2, "enk", {"TRANSPORT": "push"}),
    ("sm_120a", 8, "ekn", {"TRANSPORT": "push", "WARP_M": 64, "DRAW": "dispenser"}),
    ("sm_120a", 2, "enk", {}),
    ("sm_120a", 4, "ekn", {"WARP_M": 64, "DRAW": "dispenser"}),
    ("sm_120a", 8, "enk", {"ROW_BLOCK": 64, "CONSUMER_WARPS": 4, "STAGES": 4, "DRAW": "dispenser"}),
]


def dispatch_problem(world: int, layout: str = "enk") -> Problem:
    return Problem("dispatch_gemm", 4096, 3072, 64, 8, 512, world=world, weight_layout=layout)


@pytest.fixture(scope="module")
def cache(tmp_path_factory):
    return ArtifactCache(tmp_path_factory.mktemp("cache"))


def judged(cache, spec, world):
    path = built_as_predicted(cache, spec)
    smem, threads, nbytes, _ = device_words(path, "tktune_dispatch_gemm_facts")
    assert (smem, threads) == (spec.facts["smem_bytes"], spec.facts["threads"])
    pushes = spec.defines.get("TKT_TRANSPORT") == "1"
    assert nbytes == (push_globals.globals_bytes if pushes else globals_bytes)(world)
    words = device_words(path, "tktune_dispatch_gemm_world")
    joins, indexed, pushes = (
        int(spec.defines.get(f"TKT_{name}", "0")) for name in ("DRAW", "ACTIVATIONS", "TRANSPORT")
    )
    assert words == [world, joins, meeting_bytes(world), self_test_bytes(world), indexed, pushes]
    return path


def row_movers(spec, world):
    """Pieces of code that move rows: one that pulls and another beside the GEMM where warps are idle there, or one that
    pushes, where there is anybody to push to, and one that scatters what was staged.
    """
    gathered = spec.defines.get("TKT_ACTIVATIONS", "0") == "0"
    if spec.defines["TKT_TRANSPORT"] == "1":
        return (world > 1) + gathered
    return 1 + (spec.arch == "sm_90a" and gathered and spec.defines.get("TKT_CLUSTER", "1") == "1")


@pytest.mark.parametrize(
    ("arch", "world", "layout", "changes"),
    VARIANTS,
    ids=lambda value: (
        "-".join(map(str, value.values())) or "default" if isinstance(value, dict) else str(value)
    ),
)
def test_a_variant_compiles_within_its_formulas(cache, arch, world, layout, changes):
    spec = spec_of(arch, dispatch_problem(world, layout), **changes)
    path = judged(cache, spec, world)
    dumper = shutil.which("cuobjdump")
    if dumper is None:
        return
    dump = [dumper, "-sass", "-fun", "tktune_dispatch_gemm", str(path)]
    sass = subprocess.run(dump, capture_output=True, text=True, check=True).stdout
    assert sass.count("UBLKCP") == 2 * row_movers(spec, world)  # each has a bulk load and a bulk store
    assert not re.findall(r"@!?U?P\d+ U(?:TMALDG|TMASTG|BLKCP)\S*", sass)
    assert not re.findall(r"\b(?:CALL|LDL|STL)\.?\S*", sass)


@pytest.mark.parametrize("transport", ["pull", "push"])
def test_the_rehearsal_of_sm_120a_compiles_for_sm_90(cache, transport):
    rehearsal = DeviceClass("cuda", "sm_90", 110, 101376, 50331648, "nvlink", remote_atomics=False)
    problem = dispatch_problem(2)
    bench = family("dispatch_gemm")
    space = bench.space(problem, rehearsal)
    config = space.default.replace(DRAW="dispenser", TRANSPORT=transport)
    assert space.broken(config) == []
    judged(cache, bench.build_spec(space.build_part(config), problem, rehearsal), 2)


def test_the_registers_of_gated_roles_are_the_kernels_own_defaults():
    """They stand in csrc/kernels/dispatch_gemm.cu and in the space; the pool of a block bounds their sum."""
    text = (csrc_root() / "kernels" / "dispatch_gemm.cu").read_text()
    assert re.search(r"define TKT_PRODUCER_REGISTERS 56\b", text)
    found = re.search(r"define TKT_CONSUMER_REGISTERS \(TKT_CONSUMER_WARPS <= 8 \? (\d+) : (\d+)\)", text)
    assert (int(found[1]), int(found[2])) == (GATED_REGISTERS[8][1], GATED_REGISTERS[12][1])
    for warps, (producer, consumer) in GATED_REGISTERS.items():
        spec = spec_of(
            "sm_90a",
            dispatch_problem(2),
            **{
                4: {"ROW_BLOCK": 64, "CONSUMER_WARPS": 4},
                8: {},
                12: {"ROW_BLOCK": 192, "COL_BLOCK": 192, "OUT_SLOTS": 1, "CONSUMER_WARPS": 12},
            }[warps],
        )
        assert spec.defines["TKT_PRODUCER_REGISTERS"] == str(producer)
        assert spec.defines["TKT_CONSUMER_REGISTERS"] == str(consumer)
        pool = spec.facts["registers"] // 8 * 8 * 32 * (warps + 4)
        assert 128 * producer + 32 * warps * consumer <= pool


def test_every_define_of_a_build_is_documented():
    heads = [
        (csrc_root() / "kernels" / f"{name}.cu").read_text().split("#include")[0]
        for name in ("dispatch_gemm", "grouped_gemm")
    ]
    for arch in ("sm_90a", "sm_120a"):
        for name in spec_of(arch, dispatch_problem(2)).defines:
            assert any(name in head or name.removeprefix("TKT") in head for head in heads), name
