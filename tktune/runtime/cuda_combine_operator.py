"""A call of the combine on GPUs, one a rank: expert rows are multiplied in place, and only sums travel. Every wait for a
peer is on the device, so that plan and call can be captured in a CUDA graph.
"""

from __future__ import annotations

from pathlib import Path

import torch
from torch.compiler import is_dynamo_compiling

from tktune.core.errors import ProblemError
from tktune.families.cuda import dispatch_globals as wire
from tktune.families.cuda import plan_globals as schedule_mirror
from tktune.families.cuda.driver import current_stream
from tktune.families.cuda.launch import Launch
from tktune.families.cuda.module import verified
from tktune.families.cuda.symmetric import HEADER_BYTES
from tktune.families.dispatch_gemm.planner_cuda import Planner, plan_entry
from tktune.families.dispatch_gemm.tables_cuda import DeviceTables
from tktune.families.formulas import round_up
from tktune.families.gemm_combine import plan_globals as tables_mirror
from tktune.families.gemm_combine.fused_launch import launch_tables, packed_launch, rank_memory
from tktune.families.gemm_combine.globals_cuda import QUEUE_WORDS
from tktune.families.gemm_combine.layout import SymmetricLayout
from tktune.families.gemm_combine.module_cuda import CombineModule
from tktune.families.gemm_combine.planner_cuda import CombinePlanner, combine_plan_entry, listing_of
from tktune.runtime import cuda_combine_library
from tktune.runtime.combine_operator import (
    CombinePlan,
    check_ids_given,
    check_same_routing,
    checked_weights,
)
from tktune.runtime.cuda_combine_plan import CudaCombinePlan
from tktune.runtime.cuda_dispatch_plan import CudaDispatchPlan
from tktune.runtime.cuda_ranks_operator import BF16, CudaRanksOperator, keep
from tktune.runtime.operator import Plan


class CudaCombineOperator(CudaRanksOperator):
    """`tktune.runtime.combine_operator.CombineOperator` on the current GPU of each rank of a group.

    Making it is collective. Each rank makes the same plans and calls in the same order, in one stream. One meeting of
    all ranks precedes a call: everybody is done with the one before, so that its partial rows may be written again; a
    call ends when all that this rank is owed is there. `plan` and a call allocate nothing but what they return, wait
    for no host, and count on the device, so a graph that captured them can be replayed.
    """

    _module: CombineModule
    _rows: torch.Tensor | None = None

    # Making it.

    def _load(self, path: Path, sha256: str, spin_limit_s: float) -> None:
        device = self.choice.device
        self._guard = self._seat.attach(device.sm_count, spin_limit_s)
        self._module = CombineModule(verified(path, sha256), device.sm_count, device.smem_optin_bytes)
        self._module.expect_world(self.problem.world, path)
        self._schedule_entry = plan_entry(self._module, schedule_mirror.shared_bytes(self.problem))
        self._tables_entry = combine_plan_entry(self._module, self.problem)

    def _share(self) -> None:
        """Symmetric memory: its header, expert rows and partial rows, then what plans exchange. Collective."""
        problem = self.problem
        self._layout = SymmetricLayout.of(problem, HEADER_BYTES, self.capacity)
        schedules_at = round_up(self._layout.bytes, 1024)
        tables_at = schedules_at + schedule_mirror.region_bytes(problem)
        memory = self._seat.share(tables_at + tables_mirror.region_bytes(problem))
        self._rows = memory.tensor(BF16, (self._layout.num_rows, problem.cols), self._layout.rows)
        self._regions = memory.addresses(schedules_at), memory.addresses(tables_at)

    def _allocate(self) -> None:
        problem, device, guard, memory = self.problem, self._seat.device, self._guard, self._seat.memory
        assert memory is not None
        self._finished, self._queue, self._dispenser = (
            torch.zeros(n, dtype=torch.int32, device=device)
            for n in (self._layout.landed_stride, QUEUE_WORDS, 2)
        )
        self._make_ready((problem.tokens, problem.cols))
        self._where = rank_memory(
            self._layout, memory, self._finished, self._queue, self._dispenser, self._sequence
        )
        self._schedules = Planner(problem, self._regions[0], guard, device, self.capacity)
        listing = listing_of(self.choice.config, problem)
        self._planner = CombinePlanner(problem, self._regions[1], guard, device, listing)
        torch.cuda.synchronize(self._seat.index)

    def _enter(self) -> int:
        return cuda_combine_library.enter(self)

    def _leave(self) -> None:
        cuda_combine_library.leave(self.number)

    # Plans.

    def plan(
        self,
        topk_ids: torch.Tensor | None,
        topk_weights: torch.Tensor,
        out: CombinePlan | None = None,
        *,
        schedule: Plan | None = None,
    ) -> CudaCombinePlan:
        """See `CombineOperator.plan`. Enqueues one launch, and one before it when ids are given; wrong ids raise at the
        next `check` of every rank, here or where the schedule was made, and are left out until then.
        """
        plan = self._plan_to_fill(topk_ids, out, schedule)
        topk_weights = checked_weights(self.problem, topk_weights, self._seat.device)
        if is_dynamo_compiling():
            if topk_ids is not None:
                torch.ops.tktune.combine_schedule(topk_ids, plan.schedule.memory, self.number)
            torch.ops.tktune.combine_plan(topk_weights, plan.schedule.memory, plan.memory, self.number)
            return plan
        if topk_ids is not None:
            self.enqueue_schedule(topk_ids, plan.schedule.memory)
        self.enqueue_tables(topk_weights, plan.schedule.memory, plan.memory)
        return plan

    def _plan_to_fill(
        self, topk_ids: torch.Tensor | None, out: CombinePlan | None, schedule: Plan | None
    ) -> CudaCombinePlan:
        problem = self.problem
        if out is not None:
            assert isinstance(out, CudaCombinePlan)
            if schedule is None and not out.owns_schedule:
                schedule = out.schedule
            if schedule is not None and schedule is not out.schedule:
                raise ProblemError(
                    "The plan to fill stands over another schedule.",
                    "Fill that schedule, or make a new plan.",
                )
        check_ids_given(topk_ids, schedule)
        if topk_ids is not None:
            self._expect_ids(topk_ids)
        if out is not None:
            assert isinstance(out, CudaCombinePlan)
            return out
        if schedule is None:
            made = CudaDispatchPlan(self._schedules.tables(), self._seat.rank)
            return CudaCombinePlan(made, self._planner.tables(), self._seat.rank, True)
        assert isinstance(schedule, CudaDispatchPlan)
        held = schedule.device_tables
        check_same_routing(problem, held.problem)
        if held.capacity != self.capacity:
            raise ProblemError(
                f"The schedule is for {held.capacity} rows, and this operator for {self.capacity}.",
                "Load both operators with the same capacity.",
            )
        return CudaCombinePlan(schedule, self._planner.tables(), self._seat.rank, False)

    def enqueue_tables(
        self, topk_weights: torch.Tensor, schedule: torch.Tensor, memory: torch.Tensor
    ) -> None:
        """Fill a plan's `memory` over a schedule on the current stream."""
        topk_weights = checked_weights(self.problem, topk_weights, self._seat.device)
        key = (topk_weights.data_ptr(), schedule.data_ptr(), memory.data_ptr(), 0)
        launch = self._plan_launches.get(key)
        if launch is None:
            held = DeviceTables(self.problem, self.capacity, self._seat.device, schedule)
            tables = self._planner.tables(memory)
            launch = self._planner.launch(self._tables_entry, topk_weights, held, tables)
            keep(self._plan_launches, key, launch.without_buffers(self._module, self._planner))
        launch(current_stream(self._seat.index))

    # Calls.

    def __call__(
        self,
        activations: torch.Tensor,
        weights: torch.Tensor,
        plan: CombinePlan,
        out: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """See `CombineOperator.__call__`."""
        assert isinstance(plan, CudaCombinePlan)
        if is_dynamo_compiling():
            if out is None:
                out = torch.empty(self._out_shape, dtype=BF16, device=self._seat.device)
            schedule, memory = plan.schedule.memory, plan.memory
            torch.ops.tktune.gemm_combine(activations, weights, out, schedule, memory, self.number)
            return out
        if out is None:
            out = self._make_out()
        self.enqueue(activations, weights, out, plan.schedule.memory, plan.memory)
        return out

    def enqueue(
        self,
        activations: torch.Tensor,
        weights: torch.Tensor,
        out: torch.Tensor,
        schedule: torch.Tensor,
        memory: torch.Tensor,
    ) -> None:
        """One call on the current stream, by the plan that `schedule` and `memory` hold."""
        key = (
            activations.data_ptr(),
            weights.data_ptr(),
            out.data_ptr(),
            schedule.data_ptr(),
            memory.data_ptr(),
        )
        what = (
            activations.shape,
            weights.shape,
            out.shape,
            activations.dtype,
            weights.dtype,
            out.dtype,
            activations.is_contiguous(),
            weights.is_contiguous(),
            out.is_contiguous(),
        )
        found = self._launches.get(key)
        if found is None or found[1] != what:
            found = (self._bind(activations, weights, out, schedule, memory), what)
            keep(self._launches, key, found)
        stream = current_stream(self._seat.index)
        self._meet(stream)
        found[0](stream)

    def _bind(
        self,
        activations: torch.Tensor,
        weights: torch.Tensor,
        out: torch.Tensor,
        schedule: torch.Tensor,
        memory: torch.Tensor,
    ) -> Launch:
        """The launch on these buffers. It keeps none of them: it is valid for whatever lies there later."""
        problem, config, device = self.problem, self.choice.config, self._seat.device
        if self._rows is None:
            raise ProblemError("The operator was closed.", "Load it again.")
        rows = max(self.capacity, activations.shape[0]) if activations.dim() == 2 else self.capacity
        self._expect("activations", activations, (rows, problem.hidden))
        self._expect("weights", weights, self._weights_shape)
        self._expect("out", out, self._out_shape)
        facts = self._module.facts
        grid = self.choice.device.sm_count // facts.cluster * facts.cluster
        held = DeviceTables(problem, self.capacity, device, schedule)
        arguments = packed_launch(
            config,
            problem,
            self._maps,
            self._guard,
            self._where,
            launch_tables(config, held, self._planner.tables(memory)),
            activations,
            weights,
            self._rows,
            out,
            wire.FUSED,
            grid - config.number("num_comm_sms"),
        )
        return Launch(
            self._module.function, grid, facts.threads, self._module.smem_bytes, arguments, (self._module,)
        )

    def _release(self) -> None:
        self._rows = None
        super()._release()
