"""The combine operator of GPUs as far as it can be judged without one: which plan it fills, its library form, and the
words it refuses.
"""

from __future__ import annotations

import types

import pytest
import torch

pytest.importorskip("cuda.bindings", reason="cuda-bindings is not installed (the extra `cuda`)")

from tktune.core import combine_tables_torch, tables_torch
from tktune.core.errors import ProblemError, RoutingError
from tktune.core.problem import Problem
from tktune.families.dispatch_gemm.tables_cuda import DeviceTables
from tktune.families.gemm_combine.plan_globals import Listing
from tktune.families.gemm_combine.tables_cuda import DeviceCombineTables
from tktune.runtime import cuda_combine_library
from tktune.runtime.cuda_combine_operator import CudaCombineOperator
from tktune.runtime.cuda_dispatch_plan import CudaDispatchPlan

CPU = torch.device("cpu")
PROBLEM = Problem("gemm_combine", 16, 32, 4, 2, 20, world=1, pad=16)


class TorchOperator(CudaCombineOperator):
    """The operator of one rank alone, whose launches are torch on the CPU."""

    def __init__(self):
        self.problem, self.capacity = PROBLEM, PROBLEM.capacity_rows
        self._seat = types.SimpleNamespace(device=CPU, rank=0, index=0)
        self._out_shape = (20, 32)
        self._make_out = lambda: torch.empty(self._out_shape, dtype=torch.bfloat16)
        self._schedules = types.SimpleNamespace(tables=lambda: DeviceTables(PROBLEM, self.capacity, CPU))
        self._planner = types.SimpleNamespace(
            listing=Listing(0, False, 1, 1, 1),
            tables=lambda memory=None: DeviceCombineTables(PROBLEM, 1, 1, CPU, memory),
        )
        self.done = []
        self.number = cuda_combine_library.enter(self)

    def enqueue_schedule(self, ids, schedule):
        self.done.append("schedule")
        held = DeviceTables(PROBLEM, self.capacity, CPU, schedule)
        made = tables_torch.build(ids[None].int(), PROBLEM, 0)
        held.view("words").copy_(torch.tensor([made.rows, made.num_pad_blocks, len(made.pull_tokens)]))
        for name in ("slots", "block_expert", "pull_tokens", "pull_slots", "counts", "base"):
            held.view(name)[: len(getattr(made, name))] = getattr(made, name)

    def enqueue_tables(self, topk_weights, schedule, memory):
        self.done.append("tables")
        tables = self._planner.tables(memory)
        held = DeviceTables(PROBLEM, self.capacity, CPU, schedule)
        tables.view("owner_slots").copy_(held.view("slots")[0])
        tables.view("owners").zero_()
        tables.topk_weights.copy_(topk_weights[None])

    def enqueue(self, activations, weights, out, schedule, memory):
        self.done.append("call")
        tables = self._planner.tables(memory)
        held = DeviceTables(PROBLEM, self.capacity, CPU, schedule)
        slots = tables.view("owner_slots").long()
        expert = held.view("block_expert")[slots // PROBLEM.pad].long()
        rows = torch.einsum("txk,txkn->txn", activations[slots].float(), weights[expert].float())
        out.copy_((rows * tables.topk_weights[0][..., None]).sum(1))


@pytest.fixture
def operator():
    library = torch.library.Library("tktune", "IMPL")
    library.impl("combine_schedule", cuda_combine_library.schedule_by_number, "CPU")
    library.impl("combine_plan", cuda_combine_library.plan_by_number, "CPU")
    library.impl("gemm_combine", cuda_combine_library.launch_by_number, "CPU")
    made = TorchOperator()
    yield made
    cuda_combine_library.leave(made.number)
    library._destroy()


def inputs(seed):
    stream = torch.Generator().manual_seed(seed)
    ids = torch.rand(20, 4, generator=stream).topk(2).indices
    topk_weights = torch.rand(20, 2, generator=stream)
    activations = torch.randn(PROBLEM.capacity_rows, 16, generator=stream).bfloat16()
    weights = torch.randn(4, 16, 32, generator=stream).bfloat16()
    return ids, topk_weights, activations, weights


def test_a_plan_of_ids_fills_both_tables_and_one_of_a_schedule_only_its_own(operator):
    ids, topk_weights, *_ = inputs(1)
    plan = operator.plan(ids, topk_weights)
    assert operator.done == ["schedule", "tables"] and plan.owns_schedule
    over = operator.plan(None, topk_weights, schedule=plan.schedule)
    assert operator.done[2:] == ["tables"] and over.schedule is plan.schedule and not over.owns_schedule
    again = operator.plan(None, topk_weights * 2, over)
    assert again is over and torch.equal(over.topk_weights[0], topk_weights * 2)
    assert operator.plan(ids, topk_weights, plan) is plan
    assert operator.done[3:] == ["tables", "schedule", "tables"]
    assert plan.tables.owners.shape == (20, 2)
    whole = operator.plan(ids, topk_weights.to(torch.bfloat16))
    assert whole.topk_weights.dtype == torch.float32


def test_compiled_code_plans_and_calls_as_eager_code_does(operator):
    ids, topk_weights, *_ = inputs(2)
    plan = operator.plan(ids, topk_weights)
    shared = operator.plan(None, topk_weights, schedule=plan.schedule)

    @torch.compile(fullgraph=True, backend="aot_eager")
    def step(ids, topk_weights, activations, weights):
        operator.plan(ids, topk_weights, plan)
        operator.plan(None, topk_weights * 2, shared)
        return operator(activations, weights, plan), operator(activations, weights, shared)

    for seed in range(3):
        given = inputs(seed)
        first, second = step(*given)
        eager = operator(given[2], given[3], operator.plan(*given[:2]))
        assert torch.equal(first, eager)
        torch.testing.assert_close(second.float(), 2 * eager.float(), rtol=1e-2, atol=1e-2)


def test_the_library_operators_keep_their_promises(operator):
    ids, topk_weights, activations, weights = inputs(3)
    plan = operator.plan(ids, topk_weights)
    out = torch.empty(20, 32, dtype=torch.bfloat16)
    ops, schedule = torch.ops.tktune, plan.schedule.memory
    for op, arguments in (
        (ops.combine_schedule, (ids, schedule)),
        (ops.combine_plan, (topk_weights, schedule, plan.memory)),
        (ops.gemm_combine, (activations, weights, out, schedule, plan.memory)),
    ):
        told = torch.library.opcheck(
            op.default, (*arguments, operator.number), test_utils=("test_schema", "test_faketensor")
        )
        assert set(told.values()) == {"SUCCESS"}
    cuda_combine_library.leave(operator.number)
    with pytest.raises(ProblemError, match="was closed"):
        ops.gemm_combine(activations, weights, out, schedule, plan.memory, operator.number)


def test_what_does_not_fit_is_told(operator):
    ids, topk_weights, *_ = inputs(4)
    plan = operator.plan(ids, topk_weights)
    with pytest.raises(RoutingError, match=r"topk_ids is \(3, 2\)"):
        operator.plan(ids[:3], topk_weights)
    with pytest.raises(RoutingError, match=r"topk_weights is torch\.int64"):
        operator.plan(ids, ids)
    with pytest.raises(ProblemError, match="both were given"):
        operator.plan(ids, topk_weights, schedule=plan.schedule)
    with pytest.raises(ProblemError, match="stands over another schedule"):
        operator.plan(None, topk_weights, plan, schedule=operator.plan(ids, topk_weights).schedule)
    larger = PROBLEM.replace(tokens=21)
    other = CudaDispatchPlan(DeviceTables(larger, operator.capacity, CPU), 0)
    with pytest.raises(ProblemError, match="tokens = 21"):
        operator.plan(None, topk_weights, schedule=other)
    narrow = CudaDispatchPlan(DeviceTables(PROBLEM, 16, CPU), 0)
    with pytest.raises(ProblemError, match="schedule is for 16 rows"):
        operator.plan(None, topk_weights, schedule=narrow)


def test_the_vectorised_tables_are_what_the_stand_in_reads():
    """The stand-in above takes slots for owners' slots; over one rank they are the same."""
    ids = inputs(5)[0]
    schedule = tables_torch.build(ids[None].int(), PROBLEM, 0)
    assert torch.equal(combine_tables_torch.build(ids[None].int(), PROBLEM, 0).owner_slots, schedule.slots[0])
