"""A call of the combine on GPUs, one a rank: expert rows are multiplied in place, and only sums travel. Every wait for a
peer is on the device, so that plan and call can be captured in a CUDA graph.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch.compiler import is_dynamo_compiling

from tktune.core.errors import ArtifactError, ProblemError, RoutingError, TktuneError
from tktune.families.cuda import dispatch_globals as wire
from tktune.families.cuda import plan_globals as schedule_mirror
from tktune.families.cuda.driver import current_stream, synchronize
from tktune.families.cuda.launch import Launch
from tktune.families.cuda.module import verified
from tktune.families.cuda.symmetric import HEADER_BYTES, MEETING
from tktune.families.cuda.tensor_map import TensorMaps
from tktune.families.dispatch_gemm.planner_cuda import Planner, plan_entry
from tktune.families.dispatch_gemm.tables_cuda import DeviceTables
from tktune.families.formulas import round_up
from tktune.families.gemm_combine import plan_globals as tables_mirror
from tktune.families.gemm_combine.fused_launch import launch_tables, packed_launch, rank_memory
from tktune.families.gemm_combine.globals_cuda import QUEUE_WORDS
from tktune.families.gemm_combine.launch_cuda import CombineModule
from tktune.families.gemm_combine.layout import SymmetricLayout
from tktune.families.gemm_combine.planner_cuda import CombinePlanner, combine_plan_entry, listing_of
from tktune.runtime import cuda_combine_library
from tktune.runtime.choice import Choice
from tktune.runtime.combine_operator import (
    CombinePlan,
    check_ids_given,
    check_same_routing,
    checked_weights,
)
from tktune.runtime.cuda_combine_plan import CudaCombinePlan
from tktune.runtime.cuda_dispatch_plan import CudaDispatchPlan
from tktune.runtime.cuda_output import OutputMaker
from tktune.runtime.cuda_seat import CudaSeat
from tktune.runtime.operator import Plan

_KEPT_LAUNCHES = 256
_BF16 = torch.bfloat16


class CudaCombineOperator:
    """`tktune.runtime.combine_operator.CombineOperator` on the current GPU of each rank of a group.

    Making it is collective. Each rank makes the same plans and calls in the same order, in one stream. One meeting of
    all ranks precedes a call: everybody is done with the one before, so that its partial rows may be written again; a
    call ends when all that this rank is owed is there. `plan` and a call allocate nothing but what they return, wait
    for no host, and count on the device, so a graph that captured them can be replayed.
    """

    def __init__(
        self,
        choice: Choice,
        path: Path,
        sha256: str,
        group: Any,
        spin_limit_s: float,
        capacity: int | None = None,
    ) -> None:
        self.choice = choice
        self.problem = problem = choice.problem
        self.capacity = _capacity(choice, capacity)
        self._seat = seat = CudaSeat(group, problem.world)
        self._open = True
        try:
            seat.guarded(lambda: self._load(path, sha256, spin_limit_s))
            self._share()
            seat.guarded(self._allocate)
            seat.guarded(lambda: seat.trust_peers(self._module.self_test, self._guard))
        except TktuneError:
            self._release()
            raise
        self.number = cuda_combine_library.enter(self)

    # Making it.

    def _load(self, path: Path, sha256: str, spin_limit_s: float) -> None:
        device = self.choice.device
        self._guard = self._seat.attach(device.sm_count, spin_limit_s)
        self._module = CombineModule(verified(path, sha256), device.sm_count, device.smem_optin_bytes)
        if self._module.world != self.problem.world:
            raise ArtifactError(
                f"{path} was built for {self._module.world} ranks.", "Build it for this world."
            )
        self._schedule_entry = plan_entry(self._module, schedule_mirror.shared_bytes(self.problem))
        self._tables_entry = combine_plan_entry(self._module, self.problem)

    def _share(self) -> None:
        """Symmetric memory: its header, expert rows and partial rows, then what plans exchange. Collective."""
        problem = self.problem
        self._layout = SymmetricLayout.of(problem, HEADER_BYTES, self.capacity)
        schedules_at = round_up(self._layout.bytes, 1024)
        tables_at = schedules_at + schedule_mirror.region_bytes(problem)
        memory = self._seat.share(tables_at + tables_mirror.region_bytes(problem))
        self._rows: torch.Tensor | None = memory.tensor(
            _BF16, (self._layout.num_rows, problem.cols), self._layout.rows
        )
        self._regions = memory.addresses(schedules_at), memory.addresses(tables_at)

    def _allocate(self) -> None:
        problem, device, guard, memory = self.problem, self._seat.device, self._guard, self._seat.memory
        assert memory is not None
        self._finished, self._queue, self._dispenser = (
            torch.zeros(n, dtype=torch.int32, device=device)
            for n in (self._layout.landed_stride, QUEUE_WORDS, 2)
        )
        self._sequence = torch.zeros(1, dtype=torch.int64, device=device)
        self._where = rank_memory(
            self._layout, memory, self._finished, self._queue, self._dispenser, self._sequence
        )
        self._schedules = Planner(problem, self._regions[0], guard, device, self.capacity)
        listing = listing_of(self.choice.config, problem)
        self._planner = CombinePlanner(problem, self._regions[1], guard, device, listing)
        arguments = wire.packed_meeting(memory.addresses(MEETING), self._sequence.data_ptr(), guard)
        self._meet = Launch(self._module.meet, 1, 32, 0, arguments)
        self._maps = TensorMaps()
        self._launches: dict[tuple[int, ...], tuple[Launch, tuple[Any, ...]]] = {}
        self._plan_launches: dict[tuple[int, ...], Launch] = {}
        ekn = problem.weight_layout == "ekn"
        matrix = (problem.hidden, problem.cols) if ekn else (problem.cols, problem.hidden)
        self._weights_shape = (problem.local_experts, *matrix)
        self._out_shape = (problem.tokens, problem.cols)
        self._make_out = OutputMaker(self._out_shape, self._seat.index)
        torch.cuda.synchronize(self._seat.index)

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
        if topk_ids is not None and tuple(topk_ids.shape) != (problem.tokens, problem.top_k):
            raise RoutingError(
                f"topk_ids is {tuple(topk_ids.shape)}, and the problem asks for {(problem.tokens, problem.top_k)}.",
                "Pass the ids of this rank's tokens.",
            )
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

    def enqueue_schedule(self, ids: torch.Tensor, schedule: torch.Tensor) -> None:
        """Fill a schedule's memory on the current stream."""
        if ids.dtype not in (torch.int32, torch.int64) or ids.device != self._seat.device:
            ids = ids.to(self._seat.device, torch.int32)
        ids = ids.contiguous()
        key = (ids.data_ptr(), ids.element_size(), schedule.data_ptr())
        launch = self._plan_launches.get(key)
        if launch is None:
            tables = DeviceTables(self.problem, self.capacity, self._seat.device, schedule)
            launch = self._schedules.launch(self._schedule_entry, ids, tables)
            self._keep(key, launch.without_buffers(self._module, self._schedules))
        launch(current_stream(self._seat.index))

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
            self._keep(key, launch.without_buffers(self._module, self._planner))
        launch(current_stream(self._seat.index))

    def _keep(self, key: tuple[int, ...], launch: Launch) -> None:
        if len(self._plan_launches) >= _KEPT_LAUNCHES:
            self._plan_launches.clear()
        self._plan_launches[key] = launch

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
                out = torch.empty(self._out_shape, dtype=_BF16, device=self._seat.device)
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
            if len(self._launches) >= _KEPT_LAUNCHES:
                self._launches.clear()
            self._launches[key] = found
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

    def _expect(self, name: str, tensor: torch.Tensor, shape: tuple[int, ...]) -> None:
        device = self._seat.device
        ok = tuple(tensor.shape) == shape and tensor.dtype == _BF16 and tensor.device == device
        if not (ok and tensor.is_contiguous()):
            raise ProblemError(
                f"{name} is {tensor.dtype} {tuple(tensor.shape)} on {tensor.device}, and the problem asks for "
                f"contiguous bfloat16 {shape} on {device}.",
                "Pass that, or load an operator for this shape.",
            )

    # The end.

    def check(self) -> None:
        """Wait for the current stream. Raises `LaunchFailed` when a peer did not come, `RoutingError` for ids that own
        schedules left out (on every rank) and for rows that did not fit `capacity` (on this rank).
        """
        with self._seat.launching():
            synchronize(current_stream(self._seat.index))
        self._schedules.raise_wrong()

    def close(self) -> None:
        """Free everything, together with the other ranks; one that died delays this by seconds and no more.

        Launches under way get a moment to end, then they are told to stop. No graph that captured a plan or a call
        may be replayed after this.
        """
        if not self._open:
            return
        cuda_combine_library.leave(self.number)
        self._seat.let_end()
        self._launches.clear()
        self._plan_launches.clear()
        self._release()

    def _release(self) -> None:
        self._open, self._rows = False, None
        self._seat.release()


def _capacity(choice: Choice, asked: int | None) -> int:
    """Rows of the activations, whole pad blocks."""
    problem = choice.problem
    if asked is None:
        return problem.capacity_rows
    if asked < 1:
        raise ProblemError(f"capacity = {asked} holds no row.", "Give at least one row.")
    return min(round_up(asked, problem.pad), problem.capacity_rows)
