"""The GPU spaces: register and shared-memory formulas against known numbers and against the kernel template itself,
and each rule by its name.
"""

from __future__ import annotations

import shutil
import subprocess

import pytest

from tktune.core.device import DeviceClass, device_class
from tktune.core.paths import csrc_root
from tktune.core.problem import Problem
from tktune.families.base import family
from tktune.families.formulas import launch_register_cap
from tktune.families.grouped_gemm import space_cuda, space_mma
from tktune.search.start import start_configs


def space_of(name, device, hidden=256, cols=256, experts=8, top_k=2, pad=64, **more):
    ranks = {"ep_world": 2} if name == "grouped_gemm" else {"world": 2}
    problem = Problem(name, hidden, cols, experts, top_k, 256, pad=pad, **ranks, **more)
    found = device if isinstance(device, DeviceClass) else device_class(device)
    return family(name).space(problem, found)


@pytest.mark.parametrize(("warps", "cap"), [(9, 168), (5, 255), (12, 168), (16, 128), (8, 255)])
def test_the_register_cap_is_the_one_seen_on_devices(warps, cap):
    assert launch_register_cap(32 * warps) == cap


def test_shared_memory_of_known_tiles():
    mma = space_cuda.DEFAULT_MMA_SYNC
    assert space_cuda.smem_bytes(mma) == 98304 + 1024  # three stages of 32 KB, semaphores in the last KB
    assert space_cuda.smem_bytes(space_cuda.DEFAULT_WGMMA) == 4 * 49152 + 4 * 8192 + 1024
    assert (space_cuda.threads(mma), space_cuda.threads(space_cuda.DEFAULT_WGMMA)) == (288, 384)
    assert space_cuda.threads(mma.replace(PRODUCER_WARPS=0)) == 256


def test_accumulators_of_known_tiles():
    mma, wgmma = space_cuda.DEFAULT_MMA_SYNC, space_cuda.DEFAULT_WGMMA
    assert space_cuda.accumulators(mma) == 64  # 64 × 32 a warp
    assert space_cuda.accumulators(wgmma) == 128  # 64 × 256 a warpgroup
    assert space_cuda.accumulators(wgmma.replace(MAIN_LOOP="wgmma_pingpong")) == 256
    assert [space_mma.warp_n(mma.replace(WARP_M=height)) for height in (16, 32, 64)] == [128, 64, 32]


def test_fragments_of_known_warp_tiles():
    mma = space_cuda.DEFAULT_MMA_SYNC
    square = mma.replace(
        COL_BLOCK=256
    )  # 64 × 64 a warp: two slices of 16 registers, a ring of two times four chunks
    assert space_cuda.fragments(square) == 2 * 16 + 2 * 4 * 4
    assert space_cuda.fragments(mma.replace(COL_BLOCK=192)) == 2 * 16 + 2 * 3 * 4
    assert space_cuda.fragments(mma.replace(WARP_M=16)) == 2 * 4 + 2 * 4 * 4  # eight chunks wide, four early
    assert [space_mma.chunks_ahead(16 * wide) for wide in (1, 2, 3, 4, 5, 6, 8, 12)] == [
        1,
        2,
        3,
        4,
        1,
        3,
        4,
        4,
    ]


@pytest.mark.parametrize("device", ["sm_90a", "sm_120a"])
def test_the_default_of_a_gpu_is_feasible_as_it_stands(device):
    space = space_of("dispatch_gemm", device, hidden=4096, cols=3072, experts=64, top_k=8, pad=128)
    assert space.default_config() == (space.recommended or space.default)
    assert space.is_feasible(space.default)


def test_where_the_recommended_config_cannot_run_the_default_does():
    space = space_of("dispatch_gemm", "sm_90a", hidden=4096, cols=3072, experts=64, top_k=8, pad=128)
    assert space.recommended is not None and space.recommended["order"] == "beside"
    by_token = space.restrict({"order": ("token", "slot")})
    assert by_token.default_config() == space.default
    finished = space_of(
        "dispatch_gemm", "sm_90a", hidden=4096, cols=3072, experts=64, top_k=8, pad=128, finish="swiglu"
    )
    assert finished.default_config() == finished.recommended != finished.default


def test_the_tensor_share_of_known_forms():
    """Slices of 64 × 32, of 64 × 64 with a warp a sub-partition, and of 16-row strips, counted by hand."""
    mma = space_cuda.DEFAULT_MMA_SYNC
    assert space_mma.tensor_share(mma) == 192 / (8 * 6 * 4 + 64)
    assert space_mma.tensor_share(mma.replace(CONSUMER_WARPS=4)) == space_mma.ALONE_SHARE
    assert space_mma.tensor_share(mma.replace(WARP_M=16)) == 192 / (8 * 9 * 4 + 64)
    square = mma.replace(COL_BLOCK=256, RED_BLOCK=32, PRODUCER_WARPS=0)
    slowed = space_mma.FED_SHARE * space_mma.SHORT_SHARE
    assert space_mma.tensor_share(square) == pytest.approx(slowed * 384 / (8 * 8 * 4 + 2 * 32 + 64))


def gpu_broken(device, default_changes, **shape):
    space = space_of("dispatch_gemm", device, **{"hidden": 4096, "cols": 3072, "pad": 256, **shape})
    return [constraint.name for constraint, _ in space.broken(space.default.replace(**default_changes))]


@pytest.mark.parametrize(
    ("changes", "names"),
    [
        ({}, []),
        ({"STAGES": 5}, ["smem"]),
        ({"MAIN_LOOP": "wgmma_pingpong"}, ["registers"]),
        ({"MAIN_LOOP": "wgmma_pingpong", "COL_BLOCK": 128}, []),
        (
            {"MAIN_LOOP": "wgmma_pingpong", "COL_BLOCK": 128, "CONSUMER_WARPS": 4},
            ["warpgroups_tile_the_block"],
        ),
        ({"CONSUMER_WARPS": 12, "STAGES": 3}, ["warpgroups_tile_the_block"]),
        ({"COL_BLOCK": 192, "CLUSTER": 2}, ["cluster_splits_columns"]),
        ({"STAGES": 2, "MMA_DEPTH": 1}, ["stages_cover_depth"]),
        ({"MAIN_LOOP": "wgmma_pingpong", "ROW_BLOCK": 256, "COL_BLOCK": 64}, ["warpgroups_tile_the_block"]),
        ({"ROW_BLOCK": 256, "COL_BLOCK": 64, "CONSUMER_WARPS": 4}, ["warpgroups_tile_the_block"]),
        ({"CLUSTER": 2}, []),
        ({"CLUSTER": 2, "num_comm_sms": 5}, ["clusters_fill_roles"]),
        ({"num_comm_sms": 132}, ["D2"]),
    ],
)
def test_wgmma_rules_speak_by_name(changes, names):
    assert gpu_broken("sm_90a", changes) == names


@pytest.mark.parametrize(
    ("changes", "names"),
    [
        ({}, []),
        ({"RED_BLOCK": 32, "STAGES": 6, "PRODUCER_WARPS": 0}, []),
        ({"STAGES": 4}, ["smem"]),
        ({"COL_BLOCK": 256, "RED_BLOCK": 32, "STAGES": 4, "PRODUCER_WARPS": 0}, []),
        ({"COL_BLOCK": 256, "RED_BLOCK": 32, "STAGES": 4}, ["registers"]),
        ({"COL_BLOCK": 256, "RED_BLOCK": 32, "STAGES": 4, "CONSUMER_WARPS": 4}, ["registers"]),
        ({"COL_BLOCK": 192, "STAGES": 2}, ["registers"]),
        ({"COL_BLOCK": 192, "STAGES": 2, "PRODUCER_WARPS": 0}, []),
        ({"ROW_BLOCK": 256, "RED_BLOCK": 32, "STAGES": 4, "PRODUCER_WARPS": 0}, []),
        ({"WARP_M": 64, "CONSUMER_WARPS": 8, "COL_BLOCK": 64}, []),
        ({"WARP_M": 64, "ROW_BLOCK": 64, "CONSUMER_WARPS": 8, "COL_BLOCK": 64}, ["warps_tile_the_block"]),
        ({"WARP_M": 16, "CONSUMER_WARPS": 4}, ["warps_tile_the_block"]),
        ({"RED_BLOCK": 128}, ["smem"]),
    ],
)
def test_mma_sync_rules_speak_by_name(changes, names):
    assert gpu_broken("sm_120a", changes) == names


def test_rows_must_be_aligned_for_tma():
    assert gpu_broken("sm_90a", {}, cols=3076) == ["tma_alignment"]
    assert gpu_broken("sm_90a", {}, hidden=2880) == []


def test_a_row_that_does_not_fit_a_slot_is_refused():
    assert gpu_broken("sm_120a", {}, hidden=64 * 1024) == ["row_fits_a_slot"]


def test_the_rehearsal_arch_runs_the_mma_sync_path():
    rehearsal = DeviceClass("cuda", "sm_90", 110, 101376, 50331648, "nvlink", remote_atomics=False)
    space = space_of("dispatch_gemm", rehearsal, pad=128)
    assert "WARP_M" in space.build_names
    part = space.build_part(space.default_config())
    spec = family("dispatch_gemm").build_spec(part, space.problem, rehearsal)
    assert (spec.arch, spec.kind, spec.source.name) == ("sm_90", "cubin", "dispatch_gemm.cu")
    assert spec.defines["TKT_MAIN_LOOP"] == "0"
    assert (spec.defines["TKT_WARP_N"], spec.defines["TKT_PRODUCER_WARPS"]) == ("32", "1")


def test_a_gpu_artifact_is_described_by_the_defines_of_the_kernel():
    space = space_of("grouped_gemm", "sm_90a", pad=128, weight_layout="ekn")
    spec = family("grouped_gemm").build_spec(
        space.build_part(space.default_config()), space.problem, space.device
    )
    assert spec.defines == {
        "TKT_MAIN_LOOP": "1",
        "TKT_ROW_BLOCK": "128",
        "TKT_COL_BLOCK": "256",
        "TKT_RED_BLOCK": "64",
        "TKT_STAGES": "4",
        "TKT_CONSUMER_WARPS": "8",
        "TKT_CLUSTER": "1",
        "TKT_OUT_SLOTS": "2",
        "TKT_MMA_DEPTH": "1",
        "TKT_DRAW": "0",
        "TKT_WEIGHT_LAYOUT": "0",
        "TKT_PRODUCER_REGISTERS": str(space_cuda.WGMMA_REGISTERS[8][0]),
        "TKT_CONSUMER_REGISTERS": str(space_cuda.WGMMA_REGISTERS[8][1]),
    }
    assert (spec.facts["smem_bytes"], spec.facts["threads"]) == (230400, 384)


# What a variant does not say it takes from the kernel's own defaults.
VARIANT = """
struct {name} : tkt::build_config {{
    {fields}
}};
static_assert(sizeof(tkt::shared_storage<{name}>) == {smem});
static_assert(tkt::geometry<{name}>::kThreads == {threads});
"""
CODES = {"MAIN_LOOP": "main_loop", "DRAW": "task_draw", "WEIGHT_LAYOUT": "weight_layout"}


def field(name: str, value: object) -> str:
    said = f"tkt::{CODES[name]}::{value}" if name in CODES else str(value)
    return f"static constexpr auto {name} = {said};"


@pytest.mark.skipif(shutil.which("nvcc") is None, reason="nvcc is not installed")
@pytest.mark.parametrize("device", ["sm_90a", "sm_120a"])
def test_the_kernel_template_accepts_what_the_rules_pass_and_has_its_sizes(device, tmp_path):
    """Every twentieth build, both weight layouts, checked by the compiler's static assertions."""
    space = space_of("grouped_gemm", device, hidden=4096, cols=3072, experts=64, pad=256)
    builds = sorted({space.build_part(config) for config in space.feasible}, key=str)
    text = ['#include "gemm/build_config.cuh"']
    for number, part in enumerate(builds[::20]):
        loop = space_cuda.main_loop(part)
        values = {"MAIN_LOOP": loop, **part}
        if loop == "mma_sync":
            values["WARP_N"] = space_mma.warp_n(part)
        for layout in ("ekn", "enk"):
            fields = [field(name, value) for name, value in {**values, "WEIGHT_LAYOUT": layout}.items()]
            sizes = {"smem": space_cuda.smem_bytes(part), "threads": space_cuda.threads(part)}
            text.append(VARIANT.format(name=f"v{number}_{layout}", fields="\n    ".join(fields), **sizes))
    source = tmp_path / "sizes.cu"
    source.write_text("\n".join(text))
    command = ["nvcc", "-std=c++20", f"-arch={device}", "-cubin", "-o", str(tmp_path / "sizes.cubin")]
    done = subprocess.run([*command, "-I", str(csrc_root()), str(source)], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr


def test_changes_that_do_not_fit_the_recommended_config_begin_from_the_default():
    space = space_of("dispatch_gemm", "sm_90a", hidden=4096, cols=3072, experts=64, top_k=8, pad=128)
    by_index, other_stages = start_configs(space, ("ACTIVATIONS=indexed", "OUT_SLOTS=1"))
    assert by_index == space.default.replace(ACTIVATIONS="indexed")
    assert space.recommended is not None and other_stages == space.recommended.replace(OUT_SLOTS=1)
