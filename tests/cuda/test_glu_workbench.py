"""The workbench of a dispatch with SwiGLU, with launches that torch plays on the CPU: which launches each mode has and in
which order, where the GEMM writes, and what a gate notices.
"""

from __future__ import annotations

import struct
from typing import Any, ClassVar

import pytest
import torch

pytest.importorskip("cuda.bindings", reason="cuda-bindings is not installed (the extra `cuda`)")

from seated_dispatch import play, seat

from tktune.core.device import device_class
from tktune.core.policy import Policy
from tktune.core.problem import Problem
from tktune.families import glu
from tktune.families.base import family
from tktune.families.bf16 import swiglu_tolerance
from tktune.families.cuda import dispatch_globals as mirror
from tktune.families.cuda import gemm_globals
from tktune.families.dispatch_gemm import glu_cuda, launch_cuda
from tktune.families.dispatch_gemm.launch_cuda import CudaDispatchWorkbench

DEVICE = device_class("sm_90a")
PROBLEM = Problem("dispatch_gemm", 64, 48, 8, 3, 24, world=2, pad=16, weight_layout="enk", finish="swiglu")
NAMES = {mirror.FUSED: "fused", mirror.COMPUTE: "comp", mirror.COMMUNICATE: "comm"}


class Played:
    """Stands for every launch and keeps its name; each does what the kernel would, to what its arguments point at."""

    bench: ClassVar[Any]
    ran: ClassVar[list[str]] = []
    spoil: ClassVar[Any] = None

    def __init__(self, function, grid, threads, smem_bytes, arguments, kept=()):
        self.function, self.grid, self.kept = function, grid, kept
        self.arguments = arguments
        if function == "fused":
            (roles,) = struct.unpack_from("<i", arguments, mirror.ROLES)
            self.function = NAMES[roles]
            (self.outputs,) = struct.unpack_from("<Q", arguments, gemm_globals.OUTPUTS + 128)

    def __call__(self, stream):
        Played.ran.append(self.function)
        if self.function in ("fused", "comm"):
            self.bring()
        if self.function in ("fused", "comp"):
            self.multiply()
        if self.function == "glu":
            self.finish()
        if Played.spoil is not None:
            Played.spoil(self.function)

    def bring(self):
        case = self.kept[1].case
        Played.bench._space.gathered[case.slots] = case.activations[case.slots]

    def multiply(self):
        """Columns as the weights have them; a fused GEMM halves them."""
        case, space, weights = self.kept[1].case, Played.bench._space, Played.bench._weights
        fused = self.outputs == space.out.data_ptr()
        assert fused or self.outputs == space.packed.data_ptr()
        experts = case.offsets
        for slot in case.slots.tolist():
            expert = int((experts <= slot).sum())
            sums = case.activations[slot].float() @ weights[expert].float().T
            if fused:
                gate, up = glu.gate_and_up(sums)
                space.out[slot] = torch.nn.functional.silu(gate) * up
            else:
                space.packed[slot] = sums

    def finish(self):
        packed, out, words, indices, cols, _ = struct.unpack(glu_cuda._ARGUMENTS.format, self.arguments)
        space, plan = Played.bench._space, self.kept[3]
        assert (packed, out, cols) == (space.packed.data_ptr(), space.out.data_ptr(), PROBLEM.out_cols)
        assert (words, indices) == (plan.words.data_ptr(), plan.pull_indices.data_ptr())
        for slot in plan.case.slots.tolist():
            gate, up = glu.gate_and_up(space.packed[slot].float())
            space.out[slot] = torch.nn.functional.silu(gate) * up


class TorchStopwatch:
    def time(self, work, iterations, warmup, before=None):
        work(0)
        return [1.0]


@pytest.fixture
def bench(monkeypatch):
    made = CudaDispatchWorkbench.__new__(CudaDispatchWorkbench)
    seat(made, PROBLEM, DEVICE, Policy(launch_mode="direct", warmup=0), smem_bytes=230400)
    made._stopwatch = TorchStopwatch()
    Played.bench, Played.ran, Played.spoil = made, [], None
    play(monkeypatch, Played, glu_cuda)
    return made


def config_of(form):
    return family("dispatch_gemm").space(PROBLEM, DEVICE).default.replace(GLU=form)


def kernels(ran):
    return [one for one in ran if one != "meet"]


@pytest.mark.parametrize("form", glu.CODES)
@pytest.mark.parametrize("routing", ["uniform", "empty:4", "one:2"])
def test_a_right_launch_of_each_form_passes_the_gate(bench, form, routing):
    verdict = bench.gate(config_of(form), routing, 5, 77)
    assert verdict.passed, verdict
    assert verdict.tolerance == swiglu_tolerance(64, form == "separate")
    assert kernels(Played.ran) == (["fused", "glu"] if form == "separate" else ["fused"])


@pytest.mark.parametrize(
    ("mode", "fused", "separate"),
    [
        ("fused", ["fused"], ["fused", "glu"]),
        ("comp", ["comp"], ["comp", "glu"]),
        ("comm", ["comm"], ["comm"]),
        ("serial", ["comm", "comp"], ["comm", "comp", "glu"]),
    ],
)
def test_whatever_computes_is_followed_by_the_pass_where_that_is_separate(bench, mode, fused, separate):
    for form, wanted in (("fused", fused), ("separate", separate)):
        Played.ran = []
        bench.time(config_of(form), mode, 0, 1, 5)
        assert kernels(Played.ran)[1:] == wanted  # the first one put the rows in place


def spoil_out(function):
    if function == "glu":
        space = Played.bench._space
        space.out[:1] = 9.0


def no_pass(function):
    if function == "glu":
        Played.bench._space.out.fill_(float("nan"))


def beyond(function):
    if function == "fused":
        Played.bench._space.packed[-1, 0] = 0


def pass_beyond(function):
    if function == "glu":
        Played.bench._space.out[-1, 0] = 0


@pytest.mark.parametrize(
    ("spoil", "said"),
    [
        (spoil_out, "rows differ"),
        (no_pass, "rows differ"),
        (beyond, "The GEMM wrote a row behind"),
        (pass_beyond, "lies behind the last expert"),
    ],
)
def test_a_gate_sees_what_either_launch_does_wrong(bench, spoil, said):
    Played.spoil = staticmethod(spoil)
    verdict = bench.gate(config_of("separate"), "uniform", 5, 77)
    assert not verdict.passed and said in verdict.sentence


def test_the_library_makes_both_halves_and_their_product(bench, monkeypatch):
    seen = {}
    monkeypatch.setattr(launch_cuda, "library_work", lambda call, mode: seen.setdefault("made", call()))
    monkeypatch.setattr(
        torch,
        "_grouped_mm",
        lambda rows, weights, offs: torch.cat([rows[:, :24].float(), rows[:, 24:48].float()], dim=1),
        raising=False,
    )
    plan = bench._prepare("uniform", 1)
    bench._peer(plan)
    rows = plan.case.activations[: plan.case.rows].float()
    wanted = torch.nn.functional.silu(rows[:, :24]) * rows[:, 24:48]
    assert torch.equal(seen["made"].nan_to_num(), wanted.nan_to_num())
