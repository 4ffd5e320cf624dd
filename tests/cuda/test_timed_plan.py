"""Plans in the timed region, as far as no GPU is needed: which launches a policy that includes the plan makes, and that a
wrong table is noticed and named.
"""

from __future__ import annotations

import struct
import types

import pytest
import torch

pytest.importorskip("cuda.bindings", reason="cuda-bindings is not installed (the extra `cuda`)")

from seated_dispatch import CPU, play, seat

from tktune.core.device import device_class
from tktune.core.policy import Policy
from tktune.core.problem import Problem
from tktune.families.base import family
from tktune.families.cuda import dispatch_globals as mirror
from tktune.families.cuda import plan_globals
from tktune.families.cuda.gemm_globals import Guard
from tktune.families.dispatch_gemm import planner_cuda, timed_plan
from tktune.families.dispatch_gemm.launch_cuda import CudaDispatchWorkbench
from tktune.families.dispatch_gemm.plan_cuda import make_plan
from tktune.families.dispatch_gemm.timed_plan import TimedPlans

PROBLEM = Problem("dispatch_gemm", 64, 40, 8, 3, 24, world=2, pad=16)
TABLES = ("words", "pull_indices", "pull_tokens", "pull_slots", "slack", "own_slack", "walk")


class Launched:
    """Stands for `Launch`; a plan's fills the tables as the kernel would, a fused one its outputs."""

    def __init__(self, log, function, grid, threads, smem_bytes, arguments, kept=()):
        self.log, self.function, self.arguments, self.kept = log, function, arguments, kept
        log.made.append(self)

    def __call__(self, stream):
        self.log.called.append(self.function)
        if self.function == "plan":
            _, ids, memory, _, plan = self.kept
            for name in TABLES:
                self.log.timed._tables.view(name)[: len(getattr(plan, name))] = getattr(plan, name)
            assert torch.equal(ids, plan.ids) and memory is self.log.timed._tables.memory
        if self.function == "fused":
            _, plan, _, space, _ = self.kept
            space.gathered[plan.case.slots] = plan.case.activations[plan.case.slots]
            space.out[plan.case.slots] = plan.case.reference.bfloat16()
            self.log.spoil()


class Watch:
    def time(self, work, iterations, warmup, before=None):
        for _ in range(warmup + iterations):
            before(0)
            work(0)
        return [1.0] * iterations


@pytest.fixture
def seated(monkeypatch):
    log = types.SimpleNamespace(made=[], called=[], spoil=lambda: None)
    made = CudaDispatchWorkbench.__new__(CudaDispatchWorkbench)
    policy = Policy(launch_mode="direct", warmup=1, include_plan=True)
    seat(made, PROBLEM, device_class("sm_90a"), policy)
    made._stopwatch = Watch()
    made._timed_plans = log.timed = TimedPlans(PROBLEM, (0x5000, 0x6000), Guard(9.0, rank=1), CPU)
    play(monkeypatch, lambda *words: Launched(log, *words), planner_cuda)
    monkeypatch.setattr(timed_plan, "plan_entry", lambda module, nbytes: "plan")
    return made, log


def config_of(bench):
    return family("dispatch_gemm").space(PROBLEM, bench.seat.device).default


@pytest.mark.parametrize("routing", ["uniform", "empty:4", "hot:0.9@7"])
def test_the_gate_builds_the_plan_and_multiplies_by_it(seated, routing):
    bench, log = seated
    verdict = bench.gate(config_of(bench), routing, 5, 77)
    assert verdict.passed, verdict
    assert log.called == ["meet", "plan", "fused", "meet"]
    assert log.timed._planner._state.tolist() == [77, 77 * plan_globals.blocks_of(PROBLEM)]
    (plan,) = [one for one in log.made if one.function == "plan"]
    words = struct.unpack_from("<19Q", plan.arguments, plan_globals.FIRST_POINTER)
    named = dict(zip([f.name for f in plan_globals.fields(plan_globals.PlanAddresses)], words, strict=True))
    assert named["arrivals"] == bench._space.arrivals.data_ptr()
    assert (named["queue"], named["dispenser"]) == (0, 0)
    assert struct.unpack_from("<8Q", plan.arguments)[:3] == (0x5000, 0x6000, 0)
    (fused,) = [one for one in log.made if one.function == "fused"]
    reads = struct.unpack_from("<7Q", fused.arguments, mirror.GATHERED)[1:6]
    at = log.timed._tables.at
    assert list(reads) == [at[n] for n in ("words", "pull_indices", "pull_tokens", "pull_slots", "slack")]


@pytest.mark.parametrize("table", TABLES)
def test_a_table_that_the_device_built_wrong_is_named(seated, table):
    bench, log = seated

    def spoil():
        log.timed._tables.view(table).view(-1)[0] += 1

    log.spoil = spoil
    verdict = bench.gate(config_of(bench), "uniform", 5, 1)
    assert not verdict.passed and f"The table {table} that the device built" in verdict.sentence


@pytest.mark.parametrize(
    ("mode", "each"),
    [
        ("fused", ["plan", "fused"]),
        ("serial", ["plan", "fused", "fused"]),
        ("comm", ["fused"]),
        ("comp", ["fused"]),
    ],
)
def test_what_is_whole_pays_for_its_plan_and_parts_do_not(seated, mode, each):
    bench, log = seated
    bench.time(config_of(bench), mode, 5, 3, 9)
    assert log.called == ["meet", "fused", *(["meet", *each] * 4), "meet"]


def test_a_policy_without_the_plan_builds_none(seated):
    bench, log = seated
    bench._timed_plans = None
    assert bench.gate(config_of(bench), "uniform", 5, 1).passed
    assert log.called == ["meet", "fused", "meet"]


def test_the_ids_of_a_plan_are_this_ranks():
    weights = torch.zeros(4, 64, 40, dtype=torch.bfloat16)
    ids = torch.stack([torch.rand(24, 8).topk(3).indices for _ in range(2)])
    plan = make_plan(PROBLEM, weights, 1, "uniform", 2, ids.numpy())
    assert torch.equal(plan.ids, ids[1].int()) and plan.ids.is_contiguous()
