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
from tktune.families.cuda import plan_globals, push_globals
from tktune.families.cuda.gemm_globals import Guard
from tktune.families.dispatch_gemm import planner_cuda, timed_plan
from tktune.families.dispatch_gemm.launch_cuda import CudaDispatchWorkbench
from tktune.families.dispatch_gemm.plan_cuda import make_plan
from tktune.families.dispatch_gemm.push_cuda import Pushes, PushMemory
from tktune.families.dispatch_gemm.timed_plan import TimedPlans

PROBLEM = Problem("dispatch_gemm", 64, 40, 8, 3, 24, world=2, pad=16)
TABLES = ("words", "pull_indices", "pull_tokens", "pull_slots", "slack", "own_slack", "walk")
PUSHED = ("push_plan", "push_tokens", "push_blocks", "push_expected", "missing", "gate_sources")


class Launched:
    """Stands for `Launch`; a plan's fills the tables as the kernel would, a fused one its rows, outputs and flags."""

    def __init__(self, log, function, grid, threads, smem_bytes, arguments, kept=()):
        self.log, self.function, self.arguments, self.kept = log, function, arguments, kept
        log.made.append(self)

    def __call__(self, stream):
        self.log.called.append(self.function)
        if self.function == "plan":
            _, ids, memory, _, plan = self.kept
            tables = self.log.timed.tables(self.log.pushes)
            for name in TABLES:
                tables.view(name)[: len(getattr(plan, name))] = getattr(plan, name)
            if tables.pushes:
                whole = Pushes.within(tables)
                for name, table in vars(plan.pushes).items():
                    getattr(whole, name)[: len(table)] = table
            assert torch.equal(ids, plan.ids) and memory is tables.memory
        if self.function == "fused":
            _, plan, _, space, _ = self.kept
            space.gathered[plan.case.slots] = plan.case.activations[plan.case.slots]
            space.out[plan.case.slots] = plan.case.reference.bfloat16()
            if self.log.pushes:
                self.log.push(plan)
            self.log.spoil()


class Watch:
    def time(self, work, iterations, warmup, before=None):
        for _ in range(warmup + iterations):
            before(0)
            work(0)
        return [1.0] * iterations


@pytest.fixture
def seated(monkeypatch):
    log = types.SimpleNamespace(made=[], called=[], spoil=lambda: None, pushes=False)
    made = CudaDispatchWorkbench.__new__(CudaDispatchWorkbench)
    policy = Policy(launch_mode="direct", warmup=1, include_plan=True)
    seat(made, PROBLEM, device_class("sm_90a"), policy)
    made._stopwatch = Watch()
    made._timed_plans = log.timed = TimedPlans(PROBLEM, (0x5000, 0x6000), Guard(9.0, rank=1), CPU)
    play(monkeypatch, lambda *words: Launched(log, *words), planner_cuda)
    monkeypatch.setattr(timed_plan, "plan_entry", lambda module, nbytes, pushes: "plan")
    return made, log


def config_of(bench):
    return family("dispatch_gemm").space(PROBLEM, bench.seat.device).default


def addresses(launch):
    fields = plan_globals.fields(plan_globals.PlanAddresses)
    words = struct.unpack_from(f"<{len(fields)}Q", launch.arguments, plan_globals.FIRST_POINTER)
    return dict(zip([field.name for field in fields], words, strict=True))


@pytest.mark.parametrize("routing", ["uniform", "empty:4", "hot:0.9@7"])
def test_the_gate_builds_the_plan_and_multiplies_by_it(seated, routing):
    bench, log = seated
    verdict = bench.gate(config_of(bench), routing, 5, 77)
    assert verdict.passed, verdict
    assert log.called == ["meet", "plan", "fused", "meet"]
    assert log.timed._planner._state.tolist() == [77, 77 * plan_globals.blocks_of(PROBLEM)]
    (plan,) = [one for one in log.made if one.function == "plan"]
    named = addresses(plan)
    assert named["arrivals"] == bench._space.arrivals.data_ptr()
    assert (named["queue"], named["dispenser"]) == (0, 0)
    assert [named[name] for name in PUSHED] == [0] * 6
    assert struct.unpack_from("<8Q", plan.arguments)[:3] == (0x5000, 0x6000, 0)
    (fused,) = [one for one in log.made if one.function == "fused"]
    reads = struct.unpack_from("<7Q", fused.arguments, mirror.GATHERED)[1:6]
    at = log.timed.tables(False).at
    assert list(reads) == [at[n] for n in ("words", "pull_indices", "pull_tokens", "pull_slots", "slack")]


@pytest.mark.parametrize("table", TABLES)
def test_a_table_that_the_device_built_wrong_is_named(seated, table):
    bench, log = seated

    def spoil():
        log.timed.tables(False).view(table).view(-1)[0] += 1

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


class Memory:
    """Symmetric memory as far as a push looks at it."""

    def __init__(self):
        self.blocks = torch.zeros(PROBLEM.capacity_rows // PROBLEM.pad, 2, dtype=torch.int64)
        self.rows = torch.zeros(2, PROBLEM.tokens, dtype=torch.int64)

    def addresses(self, offset=0):
        return 0x10000000 + offset, 0x20000000 + offset

    def tensor(self, dtype, shape, offset):
        return self.rows if offset > 0x800 else self.blocks


@pytest.fixture(params=["gathered", "indexed"])
def pushing(seated, monkeypatch, request):
    """The bench, its log, and a config that pushes, whose launches raise the flags that are waited for."""
    bench, log = seated
    bench._memory = memory = Memory()
    bench._push = PushMemory(PROBLEM, memory, 0x400, 0x800, bench._sequence)
    log.pushes = True

    def push(plan):
        bench._sequence += 1  # the meeting before the launch
        tokens = plan.case.slot_token[plan.case.slots]
        bench._everyone[tokens] = plan.case.activations[plan.case.slots]
        sources = plan.pushes.gate_sources
        raised = ((sources.unsqueeze(1) >> torch.arange(2)) & 1).bool()
        memory.blocks[: len(sources)][raised] = bench._sequence
        memory.rows.view(-1)[tokens[tokens // PROBLEM.tokens != 1]] = bench._sequence

    log.push = push
    return bench, log, config_of(bench).replace(TRANSPORT="push", ACTIVATIONS=request.param)


@pytest.mark.parametrize("routing", ["uniform", "empty:4", "hot:0.9@7", "one:2"])
def test_a_launch_that_pushes_reads_the_pushes_that_the_device_built(pushing, routing):
    bench, log, config = pushing
    assert bench.gate(config, routing, 5, 77).passed
    assert log.called == ["meet", "plan", "fused", "meet"]
    plan, fused = (next(one for one in log.made if one.function == name) for name in ("plan", "fused"))
    at = log.timed.tables(True).at
    assert [addresses(plan)[name] for name in PUSHED] == [at[name] for name in PUSHED]
    assert list(struct.unpack_from("<6Q", fused.arguments, mirror.globals_bytes(2))) == [
        at[name] for name in PUSHED
    ]
    assert len(fused.arguments) == push_globals.globals_bytes(2)


@pytest.mark.parametrize("table", PUSHED)
def test_a_table_of_pushes_that_the_device_built_wrong_is_named(pushing, table):
    bench, log, config = pushing

    def spoil():
        log.timed.tables(True).view(table).view(-1)[0] += 1

    log.spoil = spoil
    verdict = bench.gate(config, "uniform", 5, 1)
    assert not verdict.passed and f"The table {table} that the device built" in verdict.sentence


def test_pulls_and_pushes_have_tables_of_their_own(pushing):
    bench, log, config = pushing
    for pushes in (True, False, True):
        log.pushes = pushes
        pulled = config.replace(TRANSPORT="pull", ACTIVATIONS="gathered")
        assert bench.gate(config if pushes else pulled, "uniform", 5, 9).passed
    at = [addresses(one)["walk"] for one in log.made if one.function == "plan"]
    assert at[0] == at[2] != at[1]


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
