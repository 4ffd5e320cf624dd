"""The space of a dispatch with SwiGLU: its form is a build parameter, everything else is as it was, and the formulas follow
the halved outputs.
"""

from __future__ import annotations

import pytest

from tktune.core.config import Config
from tktune.core.device import DeviceClass, device_class
from tktune.core.problem import Problem
from tktune.families import glu
from tktune.families.base import family
from tktune.families.bf16 import gemm_tolerance, swiglu_tolerance
from tktune.families.cuda.gemm_globals import Box, boxes_of
from tktune.families.grouped_gemm import space_cuda

BENCH = family("dispatch_gemm")
PLAIN = Problem("dispatch_gemm", 2048, 1536, 16, 4, 512, world=2)
GLU = PLAIN.replace(finish="swiglu")
CPU = DeviceClass("cpu", "test", 4, 1 << 20, 1 << 22, "shm")
DEVICES = [CPU, device_class("sm_90a"), device_class("sm_120a")]


@pytest.mark.parametrize("device", DEVICES, ids=str)
def test_only_a_problem_with_swiglu_has_the_form_and_nothing_else_differs(device):
    plain, glu_space = BENCH.space(PLAIN, device), BENCH.space(GLU, device)
    assert "GLU" not in {p.name for p in plain.parameters} | plain.default.keys()
    names = [p.name for p in glu_space.parameters]
    assert [n for n in names if n != "GLU"] == [p.name for p in plain.parameters]
    assert "GLU" in glu_space.build_names and glu_space.default["GLU"] == "fused"
    both = {tuple(c.replace(GLU="x").items()) for c in glu_space.feasible}
    of_plain = {tuple(c.replace(GLU="x").items()) for c in plain.feasible}
    assert of_plain <= both  # half the output leaves more shared memory, never less
    separate = {tuple(c.replace(GLU="x").items()) for c in glu_space.feasible if c["GLU"] == "separate"}
    assert separate == of_plain


@pytest.mark.parametrize("device", DEVICES, ids=str)
def test_the_form_is_a_define_of_its_artifact_and_of_no_other(device):
    space = BENCH.space(GLU, device)
    specs = {
        form: BENCH.build_spec(space.build_part(space.default_config().replace(GLU=form)), GLU, device)
        for form in ("fused", "separate")
    }
    plain_space = BENCH.space(PLAIN, device)
    plain = BENCH.build_spec(plain_space.build_part(plain_space.default_config()), PLAIN, device)
    assert "TKT_GLU" not in plain.defines
    assert {form: spec.defines["TKT_GLU"] for form, spec in specs.items()} == {"fused": "1", "separate": "2"}
    assert len({plain.name, *(spec.name for spec in specs.values())}) == 3
    assert glu.build_part(0) == {} and glu.build_part(2) == {"GLU": "separate"}


@pytest.mark.parametrize(
    ("changes", "panel"),
    [
        ({}, 64),  # 128 × 256: each warpgroup has 128 output columns
        ({"COL_BLOCK": 192}, 32),  # 96
        ({"COL_BLOCK": 128}, 64),
        ({"COL_BLOCK": 64}, 32),
        ({"ROW_BLOCK": 64, "COL_BLOCK": 256}, 64),  # two warpgroups beside each other: 64 each
        ({"ROW_BLOCK": 64, "COL_BLOCK": 128}, 32),
        ({"MAIN_LOOP": "wgmma_pingpong", "COL_BLOCK": 192}, 32),
    ],
)
def test_outputs_leave_in_panels_that_halved_columns_fill(changes, panel):
    fused = space_cuda.DEFAULT_WGMMA.replace(GLU="fused", **changes)
    separate = fused.replace(GLU="separate")
    assert (space_cuda.out_panel_cols(fused), space_cuda.out_panel_cols(separate)) == (panel, 64)
    assert boxes_of(fused, "enk").outputs == Box(64, panel)
    slots = fused.number("OUT_SLOTS") * (1 if "PING" in str(changes).upper() else 2)
    saved = slots * space_cuda.OUT_SLOT_BYTES * (64 - panel) // 64
    assert space_cuda.smem_bytes(separate) - space_cuda.smem_bytes(fused) == saved


def test_a_block_that_a_smaller_output_lets_in_is_feasible_only_when_fused():
    """The verdict on shared memory is remembered by parameters, and the form is one of them."""
    device = device_class("sm_90a")
    space = BENCH.space(GLU, device)
    config = space.default.replace(COL_BLOCK=192, STAGES=5, OUT_SLOTS=2)
    sizes = {f: space_cuda.smem_bytes(config.replace(GLU=f)) for f in ("fused", "separate")}
    assert sizes["fused"] <= device.smem_optin_bytes < sizes["separate"], sizes
    assert space.broken(config.replace(GLU="fused")) == []
    assert [c.name for c, _ in space.broken(config.replace(GLU="separate"))] == ["smem"]


def test_a_second_launch_costs_something_everywhere():
    for device in DEVICES:
        config = BENCH.space(GLU, device).default
        cost = {f: BENCH.cost_us(config.replace(GLU=f), GLU, device) for f in ("fused", "separate")}
        assert cost["fused"] < cost["separate"] < 1.5 * cost["fused"], (str(device), cost)
        plain = BENCH.space(PLAIN, device).default
        assert cost["fused"] == pytest.approx(BENCH.cost_us(plain, PLAIN, device))


def test_what_is_allowed_covers_the_roundings_of_each_form():
    assert gemm_tolerance(4096) < swiglu_tolerance(4096, False) < swiglu_tolerance(4096, True) < 0.012
    roundings = 2.0**-9 * (1 + 1 + 1.1)
    assert swiglu_tolerance(64, True) > roundings > swiglu_tolerance(64, False) > 2.0**-9


def test_a_config_without_the_form_is_neither():
    assert not glu.is_fused(Config()) and not glu.is_separate(Config(GLU="fused"))
