"""A call of the dispatch on GPUs, one a rank: plans and rows travel through symmetric memory, and every wait for a peer
is on the device, so that plan and call can be captured in a CUDA graph.
"""

from __future__ import annotations

from pathlib import Path

import torch
from torch.compiler import is_dynamo_compiling

from tktune.core.errors import ProblemError
from tktune.families import glu
from tktune.families.cuda import plan_globals, push_globals
from tktune.families.cuda.driver import current_stream
from tktune.families.cuda.launch import Launch
from tktune.families.cuda.module import verified
from tktune.families.cuda.symmetric import HEADER_BYTES
from tktune.families.dispatch_gemm.fused_launch import fused_launch
from tktune.families.dispatch_gemm.glu_cuda import glu_pass
from tktune.families.dispatch_gemm.launch_words import token_rows
from tktune.families.dispatch_gemm.module_cuda import DispatchModule
from tktune.families.dispatch_gemm.planner_cuda import Planner, plan_entry
from tktune.families.dispatch_gemm.push_cuda import PushMemory
from tktune.families.dispatch_gemm.tables_cuda import DeviceTables
from tktune.families.dispatch_gemm.transport import is_indexed, is_push
from tktune.families.formulas import round_up
from tktune.runtime import cuda_dispatch_library
from tktune.runtime.cuda_dispatch_plan import CudaDispatchPlan
from tktune.runtime.cuda_ranks_operator import BF16, CudaRanksOperator, keep
from tktune.runtime.operator import Plan


class CudaDispatchOperator(CudaRanksOperator):
    """`tktune.runtime.operator.Operator` for a dispatch, on the current GPU of each rank of a group.

    Making it is collective. Each rank makes the same plans and calls in the same order, in one stream. Two meetings
    of all ranks enclose a call: inputs are in place everywhere, and all peers have read them, or are done with what was
    pushed to them; the first numbers the flags of pushed rows. `plan` and a call allocate nothing but what they return,
    wait for no host, and count on the device, so a graph that captured them can be replayed. Plans judge ids on the
    device: `check` raises what they found.
    """

    _module: DispatchModule
    _input: torch.Tensor | None = None
    _rows: torch.Tensor | None = None
    _packed: torch.Tensor | None = None  # the GEMM's outputs where SwiGLU is separate
    _pushes = False  # whether rows are pushed
    _pushing: PushMemory | None = None  # and where to

    # Making it.

    def _load(self, path: Path, sha256: str, spin_limit_s: float) -> None:
        device = self.choice.device
        self._pushes = is_push(self.choice.config)
        self._guard = self._seat.attach(device.sm_count, spin_limit_s)
        self._module = DispatchModule(verified(path, sha256), device.sm_count, device.smem_optin_bytes)
        self._module.expect_world(self.problem.world, path)
        nbytes = plan_globals.shared_bytes(self.problem)
        self._schedule_entry = plan_entry(self._module, nbytes, self._pushes)

    def _share(self) -> None:
        """Symmetric memory: its header, the token rows, the plan region, flags of pushed rows. Collective, all or none."""
        problem, rank = self.problem, self._seat.rank
        shape = (problem.tokens, problem.hidden)
        section = 2 * problem.tokens * problem.hidden
        self._own_in_place = is_indexed(self.choice.config)
        # Rows by index, and those that peers push, have a section for each rank's rows; this rank's own is its input.
        all_sections = self._own_in_place or self._pushes
        sections = problem.world if all_sections else 1
        own_at = HEADER_BYTES + (rank * section if all_sections else 0)
        plans_at = round_up(HEADER_BYTES + sections * section, 1024)
        self._flags_at = round_up(plans_at + plan_globals.region_bytes(problem), 1024)
        memory = self._seat.share(
            self._flags_at + (sum(push_globals.flag_bytes(problem)) if self._pushes else 0)
        )
        self._rows = memory.tensor(BF16, (sections * problem.tokens, problem.hidden), HEADER_BYTES)
        self._input = memory.tensor(BF16, shape, own_at)
        self._input_at, self._input_shape = self._input.data_ptr(), self._input.shape
        starts = memory.addresses(HEADER_BYTES)
        self._token_rows = token_rows(starts, section) if all_sections else starts
        self._regions = memory.addresses(plans_at)

    def _allocate(self) -> None:
        problem, device = self.problem, self._seat.device
        try:
            if not self._own_in_place:
                self._rows = torch.empty(self.capacity, problem.hidden, dtype=BF16, device=device)
            if glu.is_separate(self.choice.config):
                self._packed = torch.empty(self.capacity, problem.cols, dtype=BF16, device=device)
        except torch.OutOfMemoryError as error:
            raise ProblemError(
                f"{self.capacity} rows of the workspace do not fit the memory of {device}.",
                "Load the operator with a smaller capacity.",
            ) from error
        self._schedules = Planner(
            problem, self._regions, self._guard, device, self.capacity, pushes=self._pushes
        )
        self._make_ready((self.capacity, problem.out_cols))
        if self._pushes:
            memory = self._seat.memory
            assert memory is not None
            self._pushing = PushMemory(problem, memory, HEADER_BYTES, self._flags_at, self._sequence)
        torch.cuda.synchronize(self._seat.index)

    def _enter(self) -> int:
        return cuda_dispatch_library.enter(self)

    def _leave(self) -> None:
        cuda_dispatch_library.leave(self.number)

    # Using it.

    @property
    def input(self) -> torch.Tensor:
        """This rank's symmetric rows (tokens, hidden) bf16; free to be written after a call, in the order of its stream."""
        if self._input is None:
            raise ProblemError("The operator was closed.", "Load it again.")
        return self._input

    def plan(self, topk_ids: torch.Tensor, out: CudaDispatchPlan | None = None) -> CudaDispatchPlan:
        """Enqueue the building of tables for this rank's `topk_ids` (tokens, top_k), any int dtype, global expert ids.

        `out` is a plan of this operator to fill anew. Raises `RoutingError` for a wrong shape; wrong ids raise at
        the next `check` of every rank, and are left out until then.
        """
        self._expect_ids(topk_ids)
        if out is None:
            plan = CudaDispatchPlan(self._schedules.tables(), self._seat.rank)
        else:
            plan, held = out, out.device_tables
            ours = (self.problem, self.capacity, self._pushes)
            if (held.problem, held.capacity, held.pushes) != ours:
                raise ProblemError(
                    "The plan to fill is of another operator.", "Pass one that this operator made."
                )
            if is_dynamo_compiling():
                torch.ops.tktune.dispatch_plan(topk_ids, plan.memory, self.number)
                return plan
        self.enqueue_plan(topk_ids, plan.memory)
        return plan

    def enqueue_plan(self, ids: torch.Tensor, memory: torch.Tensor) -> None:
        """Fill a plan's `memory` on the current stream: a schedule is all of it."""
        self.enqueue_schedule(ids, memory)

    def __call__(
        self, x: torch.Tensor, weights: torch.Tensor, plan: Plan, out: torch.Tensor | None = None
    ) -> torch.Tensor:
        assert isinstance(plan, CudaDispatchPlan)
        if is_dynamo_compiling():
            if out is None:
                out = torch.empty(self._out_shape, dtype=BF16, device=self._seat.device)
            torch.ops.tktune.dispatch_gemm(x, weights, out, plan.memory, self.number)
            return out
        if out is None:
            out = self._make_out()
        self.enqueue(x, weights, out, plan.memory)
        return out

    def enqueue(
        self, x: torch.Tensor, weights: torch.Tensor, out: torch.Tensor, memory: torch.Tensor
    ) -> None:
        """One call on the current stream; `memory` is that of a plan of this operator."""
        launches = self._bound(weights, out, memory)
        self.bring(x)
        stream = current_stream(self._seat.index)
        self._meet(stream)
        for launch in launches:
            launch(stream)
        self._meet(stream)

    def bring(self, x: torch.Tensor) -> None:
        """Enqueue the copy of `x` to where peers read it, unless it lies there."""
        there = x.data_ptr() == self._input_at and x.shape == self._input_shape and x.dtype is BF16
        if not (there and x.is_contiguous()):
            self._copy_in(x)

    def enqueue_between(self, weights: torch.Tensor, out: torch.Tensor, memory: torch.Tensor) -> None:
        """The launches of a call alone, for a caller whose own steps are its meetings: its plan was enqueued after
        `bring`, so that whoever has the ids of all ranks finds their rows; and all ranks meet before rows are brought again.
        Rows that are pushed need one meeting more, which numbers their flags.
        """
        stream = current_stream(self._seat.index)
        launches = self._bound(weights, out, memory)
        if self._pushing is not None:
            self._meet(stream)
        for launch in launches:
            launch(stream)

    # One call.

    def _bound(self, weights: torch.Tensor, out: torch.Tensor, memory: torch.Tensor) -> tuple[Launch, ...]:
        key = (weights.data_ptr(), out.data_ptr(), memory.data_ptr())
        what = (
            weights.shape,
            out.shape,
            weights.dtype,
            out.dtype,
            weights.is_contiguous(),
            out.is_contiguous(),
        )
        found = self._launches.get(key)
        if found is None or found[1] != what:
            found = (self._bind(weights, out, memory), what)
            keep(self._launches, key, found)
        launches: tuple[Launch, ...] = found[0]
        return launches

    def _bind(self, weights: torch.Tensor, out: torch.Tensor, memory: torch.Tensor) -> tuple[Launch, ...]:
        """The launches on these buffers. They keep none of them: they are valid for whatever lies there later."""
        self._expect("weights", weights, self._weights_shape)
        self._expect("out", out, self._out_shape)
        assert self._rows is not None
        tables = DeviceTables(self.problem, self.capacity, self._seat.device, memory)
        module, packed = self._module, self._packed
        bound = fused_launch(
            self._module,
            self.choice.config,
            self.problem,
            self.choice.device.sm_count,
            self._maps,
            self._guard,
            self._token_rows,
            self._rows,
            weights,
            out if packed is None else packed,
            tables,
            pushing=self._pushing,
        ).without_buffers(module)
        if packed is None:
            return (bound,)
        sms, plan = self.choice.device.sm_count, (tables.at["words"], tables.at["pull_indices"])
        second = glu_pass(module.glu_pass, sms, packed, out, *plan)
        return bound, second.without_buffers(module)

    def _copy_in(self, x: torch.Tensor) -> None:
        if x.shape != self._input_shape or x.dtype is not BF16 or x.device != self._seat.device:
            raise self._unfit("x", x, tuple(self._input_shape))
        self.input.copy_(x.detach() if x.requires_grad else x)

    def _release(self) -> None:
        self._input = self._rows = self._packed = self._pushing = None
        super()._release()
