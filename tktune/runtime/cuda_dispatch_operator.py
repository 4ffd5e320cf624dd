"""A call of the dispatch on GPUs, one a rank: plans and rows travel through symmetric memory, and every wait for a peer
is on the device, so that plan and call can be captured in a CUDA graph.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch.compiler import is_dynamo_compiling

from tktune.core.errors import ArtifactError, GangError, LaunchFailed, ProblemError, RoutingError, TktuneError
from tktune.families import glu
from tktune.families.control_page import ControlPage
from tktune.families.cuda import dispatch_globals as mirror
from tktune.families.cuda import plan_globals
from tktune.families.cuda.control import Control
from tktune.families.cuda.driver import attach, current_stream, synchronize
from tktune.families.cuda.launch import Launch
from tktune.families.cuda.module import verified
from tktune.families.cuda.symmetric import HEADER_BYTES, MEETING, MemfdExchange, SymmetricMemory, try_peers
from tktune.families.cuda.tensor_map import TensorMaps
from tktune.families.dispatch_gemm import launch_cuda
from tktune.families.dispatch_gemm.fused_launch import fused_launch
from tktune.families.dispatch_gemm.glu_cuda import glu_pass
from tktune.families.dispatch_gemm.launch_cuda import DispatchModule
from tktune.families.dispatch_gemm.launch_words import token_rows
from tktune.families.dispatch_gemm.planner_cuda import Planner, plan_entry
from tktune.families.dispatch_gemm.rows_cuda import is_indexed
from tktune.families.dispatch_gemm.tables_cuda import DeviceTables
from tktune.families.dispatch_gemm.transport import refuse_push
from tktune.families.formulas import round_up
from tktune.runtime import cuda_dispatch_library
from tktune.runtime.agree import unanimous
from tktune.runtime.choice import Choice
from tktune.runtime.cuda_dispatch_plan import CudaDispatchPlan
from tktune.runtime.cuda_exchange import each_on_its_own_gpu, shared_files
from tktune.runtime.cuda_output import OutputMaker
from tktune.runtime.operator import Plan

EXCHANGE_S = 120.0  # ranks load and allocate at their own pace
LAST_CALLS_S = 5.0  # what a closing operator grants its launches before it tells them to stop
_KEPT_LAUNCHES = 256
_BF16 = torch.bfloat16


class CudaDispatchOperator:
    """`tktune.runtime.operator.Operator` for a dispatch, on the current GPU of each rank of a group.

    Making it is collective. Each rank makes the same plans and calls in the same order, in one stream. Two meetings
    of all ranks enclose a call: inputs are in place everywhere, and all peers have read them. `plan` and a call
    allocate nothing but what they return, wait for no host, and count on the device, so a graph that captured
    them can be replayed. Plans judge ids on the device: `check` raises what they found.
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
        self._group_rank(group)
        self._index = torch.cuda.current_device()
        self._device = torch.device("cuda", self._index)
        self._input: torch.Tensor | None = None
        self._rows: torch.Tensor | None = None
        self._packed: torch.Tensor | None = None  # the GEMM's outputs where SwiGLU is separate
        self._memory: SymmetricMemory | None = None
        self._control: Control | None = None
        each_on_its_own_gpu(group, self._index)
        self._page = ControlPage.create(problem.world)
        self._fds: tuple[int, ...] = ()
        try:
            self._fds = shared_files(group)
            self._guarded(group, lambda: self._load(path, sha256, spin_limit_s))
            self._share()
            self._guarded(group, self._allocate)
            self._guarded(group, self._trust_peers)
        except TktuneError:
            self._release()
            raise
        self.number = cuda_dispatch_library.enter(self)

    # Making it.

    def _group_rank(self, group: Any) -> None:
        self._rank = 0
        if group is not None:
            import torch.distributed as dist

            self._rank = dist.get_rank(group)

    def _guarded(self, group: Any, step: Callable[[], None]) -> None:
        """A step of this rank alone that all must get through: when one fails, all raise."""
        failure: TktuneError | None = None
        try:
            step()
        except TktuneError as error:
            failure = error
        if group is not None:
            unanimous(group, "artifacts", "", failure)
        elif failure is not None:
            raise failure

    def _load(self, path: Path, sha256: str, spin_limit_s: float) -> None:
        refuse_push(self.choice.config)
        device, sms = self.choice.device, _sm_count(self._index)
        if sms < device.sm_count:
            raise ProblemError(
                f"The config is for {device.sm_count} SMs, and GPU {self._index} has {sms}.",
                "Use GPUs of one kind.",
            )
        attach(self._index)
        self._module = DispatchModule(verified(path, sha256), device.sm_count, device.smem_optin_bytes)
        if self._module.world != self.problem.world:
            raise ArtifactError(
                f"{path} was built for {self._module.world} ranks.", "Build it for this world."
            )
        self._plan_entry = plan_entry(self._module, plan_globals.shared_bytes(self.problem))
        self._control = Control(self._page, self._rank, spin_limit_s)
        self._guard = self._control.guard

    def _share(self) -> None:
        """Symmetric memory: its header, the token rows, the plan region. Collective, all or none."""
        problem = self.problem
        shape = (problem.tokens, problem.hidden)
        section = 2 * problem.tokens * problem.hidden
        self._indexed = is_indexed(self.choice.config)
        sections = (
            problem.world if self._indexed else 1
        )  # indexed: one for each rank's rows, this rank's own is its input
        own_at = HEADER_BYTES + (self._rank * section if self._indexed else 0)
        plans_at = round_up(HEADER_BYTES + sections * section, 1024)
        exchange = MemfdExchange(self._fds, self._rank, EXCHANGE_S)
        nbytes = plans_at + plan_globals.region_bytes(problem)
        self._memory = memory = SymmetricMemory(nbytes, self._rank, problem.world, exchange)
        self._rows = memory.tensor(_BF16, (sections * problem.tokens, problem.hidden), HEADER_BYTES)
        self._input = memory.tensor(_BF16, shape, own_at)
        self._input_at, self._input_shape = self._input.data_ptr(), self._input.shape
        starts = memory.addresses(HEADER_BYTES)
        self._token_rows = token_rows(starts, section) if self._indexed else starts
        self._regions, self._words = memory.addresses(plans_at), memory.addresses(MEETING)

    def _allocate(self) -> None:
        problem, device, guard = self.problem, self._device, self._guard
        try:
            if not self._indexed:
                self._rows = torch.empty(self.capacity, problem.hidden, dtype=_BF16, device=device)
            if glu.is_separate(self.choice.config):
                self._packed = torch.empty(self.capacity, problem.cols, dtype=_BF16, device=device)
        except torch.OutOfMemoryError as error:
            raise ProblemError(
                f"{self.capacity} rows of the workspace do not fit the memory of {device}.",
                "Load the operator with a smaller capacity.",
            ) from error
        self._planner = Planner(problem, self._regions, guard, device, self.capacity)
        self._sequence = torch.zeros(1, dtype=torch.int64, device=device)
        arguments = mirror.packed_meeting(self._words, self._sequence.data_ptr(), guard)
        self._meet = Launch(self._module.meet, 1, 32, 0, arguments)
        self._maps = TensorMaps()
        self._launches: dict[tuple[int, int, int], tuple[tuple[Launch, ...], tuple[Any, ...]]] = {}
        self._plan_launches: dict[tuple[int, int, int], Launch] = {}
        ekn = problem.weight_layout == "ekn"
        matrix = (problem.hidden, problem.cols) if ekn else (problem.cols, problem.hidden)
        self._weights_shape = (problem.local_experts, *matrix)
        self._out_shape = (self.capacity, problem.out_cols)
        self._make_out = OutputMaker(self._out_shape, self._index)
        torch.cuda.synchronize(self._index)

    def _trust_peers(self) -> None:
        """The self-test of all pairs. Raises `GangError` when this rank cannot trust its peers' memory."""
        assert self._memory is not None
        stream = current_stream(self._index)
        with self._launching():
            wrong = try_peers(
                self._module.self_test, self._memory, self._guard, 0, launch_cuda.SELF_TEST_ROUNDS, stream
            )
        if wrong:
            raise GangError(wrong, "Check the topology and the IOMMU settings; run `tktune doctor`.")

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
        problem = self.problem
        if tuple(topk_ids.shape) != (problem.tokens, problem.top_k):
            raise RoutingError(
                f"topk_ids is {tuple(topk_ids.shape)}, and the problem asks for {(problem.tokens, problem.top_k)}.",
                "Pass the ids of this rank's tokens.",
            )
        if out is None:
            plan = CudaDispatchPlan(self._planner.tables(), self._rank)
        else:
            plan, held = out, out.device_tables
            if held.problem != problem or held.capacity != self.capacity:
                raise ProblemError(
                    "The plan to fill is of another operator.", "Pass one that this operator made."
                )
            if is_dynamo_compiling():
                torch.ops.tktune.dispatch_plan(topk_ids, plan.memory, self.number)
                return plan
        self.enqueue_plan(topk_ids, plan.memory)
        return plan

    def enqueue_plan(self, ids: torch.Tensor, memory: torch.Tensor) -> None:
        """Fill a plan's `memory` on the current stream."""
        if ids.dtype not in (torch.int32, torch.int64) or ids.device != self._device:
            ids = ids.to(self._device, torch.int32)
        ids = ids.contiguous()
        key = (ids.data_ptr(), ids.element_size(), memory.data_ptr())
        launch = self._plan_launches.get(key)
        if launch is None:
            tables = DeviceTables(self.problem, self.capacity, self._device, memory)
            launch = self._planner.launch(self._plan_entry, ids, tables, own_in_place=self._indexed)
            launch.without_buffers(self._module, self._planner)
            if len(self._plan_launches) >= _KEPT_LAUNCHES:
                self._plan_launches.clear()
            self._plan_launches[key] = launch
        launch(current_stream(self._index))

    def __call__(
        self, x: torch.Tensor, weights: torch.Tensor, plan: Plan, out: torch.Tensor | None = None
    ) -> torch.Tensor:
        assert isinstance(plan, CudaDispatchPlan)
        if is_dynamo_compiling():
            if out is None:
                out = torch.empty(self._out_shape, dtype=_BF16, device=self._device)
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
        stream = current_stream(self._index)
        self._meet(stream)
        for launch in launches:
            launch(stream)
        self._meet(stream)

    def bring(self, x: torch.Tensor) -> None:
        """Enqueue the copy of `x` to where peers read it, unless it lies there."""
        there = x.data_ptr() == self._input_at and x.shape == self._input_shape and x.dtype is _BF16
        if not (there and x.is_contiguous()):
            self._copy_in(x)

    def enqueue_between(self, weights: torch.Tensor, out: torch.Tensor, memory: torch.Tensor) -> None:
        """The launches of a call alone, for a caller whose own steps are its meetings: its plan was enqueued after
        `bring`, so that whoever has the ids of all ranks finds their rows; and all ranks meet before rows are brought again.
        """
        stream = current_stream(self._index)
        for launch in self._bound(weights, out, memory):
            launch(stream)

    def check(self) -> None:
        """Wait for the current stream. Raises `LaunchFailed` when a peer did not come, `RoutingError` for ids that
        plans left out (on every rank) and for rows that did not fit `capacity` (on this rank)."""
        with self._launching():
            synchronize(current_stream(self._index))
        self._planner.raise_wrong()

    def close(self) -> None:
        """Free everything, together with the other ranks; one that died delays this by seconds and no more.

        Launches under way get a moment to end, then they are told to stop. No graph that captured a plan or a call
        may be replayed, and `input` not be touched, after this.
        """
        if self._input is None:
            return
        cuda_dispatch_library.leave(self.number)
        with contextlib.suppress(LaunchFailed), self._launching():
            self._let_end()
        self._launches.clear()
        self._plan_launches.clear()
        self._release()

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
            if len(self._launches) >= _KEPT_LAUNCHES:
                self._launches.clear()
            self._launches[key] = found
        return found[0]

    def _bind(self, weights: torch.Tensor, out: torch.Tensor, memory: torch.Tensor) -> tuple[Launch, ...]:
        """The launches on these buffers. They keep none of them: they are valid for whatever lies there later."""
        self._expect("weights", weights, self._weights_shape)
        self._expect("out", out, self._out_shape)
        assert self._rows is not None
        tables = DeviceTables(self.problem, self.capacity, self._device, memory)
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
        ).without_buffers(module)
        if packed is None:
            return (bound,)
        sms, plan = self.choice.device.sm_count, (tables.at["words"], tables.at["pull_indices"])
        second = glu_pass(module.glu_pass, sms, packed, out, *plan)
        return bound, second.without_buffers(module)

    def _copy_in(self, x: torch.Tensor) -> None:
        if x.shape != self._input_shape or x.dtype is not _BF16 or x.device != self._device:
            raise self._unfit("x", x, tuple(self._input_shape))
        self.input.copy_(x.detach() if x.requires_grad else x)

    def _expect(self, name: str, tensor: torch.Tensor, shape: tuple[int, ...]) -> None:
        ok = tuple(tensor.shape) == shape and tensor.dtype == _BF16 and tensor.device == self._device
        if not (ok and tensor.is_contiguous()):
            raise self._unfit(name, tensor, shape)

    def _unfit(self, name: str, tensor: torch.Tensor, shape: tuple[int, ...]) -> ProblemError:
        return ProblemError(
            f"{name} is {tensor.dtype} {tuple(tensor.shape)} on {tensor.device}, and the problem asks for contiguous "
            f"bfloat16 {shape} on {self._device}.",
            "Pass that, or load an operator for this shape.",
        )

    def _let_end(self) -> None:
        last = torch.cuda.Event()  # type: ignore[no-untyped-call]
        last.record()
        until = time.monotonic() + LAST_CALLS_S
        while not last.query():  # type: ignore[no-untyped-call]
            if time.monotonic() > until:
                self._page.abort()
                break
            time.sleep(0.0005)
        torch.cuda.synchronize(self._index)

    def _launching(self) -> contextlib.AbstractContextManager[None]:
        assert self._control is not None
        return self._control.launching()

    def _release(self) -> None:
        """Not collective: what peers do not close in time is freed all the same."""
        self._input = self._rows = self._packed = None
        if self._memory is not None:
            self._memory.close()
        if self._control is not None:
            self._control.close()
        self._page.close()
        for fd in self._fds:
            os.close(fd)
        self._fds = ()


def _capacity(choice: Choice, asked: int | None) -> int:
    """Rows of an output, whole pad blocks."""
    problem = choice.problem
    if asked is None:
        return problem.capacity_rows
    if asked < 1:
        raise ProblemError(f"capacity = {asked} holds no row.", "Give at least one row.")
    return min(round_up(asked, problem.pad), problem.capacity_rows)


def _sm_count(index: int) -> int:
    return int(torch.cuda.get_device_properties(index).multi_processor_count)
