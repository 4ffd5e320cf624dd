"""A call on one GPU: descriptors and argument blocks prebuilt per set of buffers, one launch on torch's current stream,
and the same call as a `torch.library` operator for torch.compile.
"""

from __future__ import annotations

import weakref
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch.compiler import is_dynamo_compiling

from tktune.core import tables_torch
from tktune.core.errors import ArtifactError, ProblemError, RoutingError
from tktune.families.control_page import ControlPage
from tktune.families.cuda.control import Control
from tktune.families.cuda.driver import attach, current_stream, synchronize
from tktune.families.cuda.gemm_globals import DISPENSER_WORDS, GLOBALS_BYTES
from tktune.families.cuda.launch import Launch
from tktune.families.cuda.module import Module, verified
from tktune.families.cuda.tensor_map import TensorMaps
from tktune.families.grouped_gemm.launch_cuda import gemm_launch
from tktune.runtime.choice import Choice
from tktune.runtime.cuda_library import Numbered, define
from tktune.runtime.cuda_output import OutputMaker
from tktune.runtime.operator import Plan

_KEPT_LAUNCHES = 256
_BF16 = torch.bfloat16
_raw_stream = getattr(torch._C, "_cuda_getCurrentRawStream", None) or current_stream
_DISPENSER_AT = 4  # words kept free at the workspace's start, so that the walk lies on 16 bytes


@dataclass(frozen=True)
class CudaPlan(Plan):
    """`workspace` (int32) holds the dispenser, which launches use and leave as they found it, then the walk.

    `address` is where it lies, `used` the rows in use: both are read at every call.
    """

    workspace: torch.Tensor
    address: int
    used: int


class CudaOperator:
    """`tktune.runtime.operator.Operator` for a grouped GEMM on the current GPU.

    A call enqueues one launch on torch's current stream and returns; it can be captured in a CUDA graph (buffers and
    plan must outlive the graph) and compiled by torch.compile. Two streams must not call one plan at the same time.
    """

    def __init__(self, choice: Choice, path: Path, sha256: str, group: Any, spin_limit_s: float) -> None:
        if choice.problem.family != "grouped_gemm":
            raise ProblemError(
                f"There is no operator of {choice.problem.family} for {choice.device} yet.",
                "Use device='cpu'.",
            )
        self.choice = choice
        self.problem = problem = choice.problem
        self.capacity = problem.capacity_rows
        index = torch.cuda.current_device()
        attach(index)
        self._index = index
        self._device = torch.device("cuda", index)
        self._module = Module(verified(path, sha256), problem.family, _sm_count(index))
        if self._module.facts.globals_bytes != GLOBALS_BYTES:
            raise ArtifactError(f"{path} was made by another version.", "Pass build=True to build it now.")
        self._page = ControlPage.create(1)
        self._control = Control(self._page, 0, spin_limit_s)
        self._maps = TensorMaps()
        self._launches: dict[tuple[int, int, int, int], _Bound] = {}
        ekn = problem.weight_layout == "ekn"
        matrix = (problem.hidden, problem.cols) if ekn else (problem.cols, problem.hidden)
        self._weights_shape = (problem.local_experts, *matrix)
        self._out_shape = (self.capacity, problem.cols)
        self._make_out = OutputMaker(self._out_shape, index)
        self._input: torch.Tensor | None = None
        self._longest_first = choice.config["walk"] == "longest"
        self.number = OPERATORS.enter(self)

    @property
    def input(self) -> torch.Tensor:
        """A buffer for the packed rows, (capacity, hidden) bf16, made when first asked for."""
        if self._input is None:
            shape = (self.capacity, self.problem.hidden)
            self._input = torch.empty(shape, dtype=torch.bfloat16, device=self._device)
        return self._input

    def plan(self, topk_ids: torch.Tensor) -> CudaPlan:
        """Tables and walk for `topk_ids` (ep_world, tokens, top_k), built on the device. Raises `RoutingError`."""
        problem = self.problem
        if problem.expert_ranks == 1 and topk_ids.dim() == 2:
            topk_ids = topk_ids[None]
        shape = (problem.expert_ranks, problem.tokens, problem.top_k)
        if tuple(topk_ids.shape) != shape:
            raise RoutingError(f"topk_ids is {tuple(topk_ids.shape)}, and the problem asks for {shape}.")
        tables = tables_torch.build(topk_ids.to(self._device), problem, problem.ep_rank or 0)
        counts, base = tables.counts, tables.base
        order = torch.argsort(counts, descending=self._longest_first, stable=True)
        walk = torch.stack([order.int(), base[order], counts[order], torch.zeros_like(counts)], dim=1)
        workspace = torch.zeros(_DISPENSER_AT + walk.numel(), dtype=torch.int32, device=self._device)
        workspace[_DISPENSER_AT:] = walk.flatten()
        dispenser = workspace[:DISPENSER_WORDS]
        return CudaPlan(tables, workspace[:0], dispenser, workspace, workspace.data_ptr(), tables.rows)

    def __call__(
        self, x: torch.Tensor, weights: torch.Tensor, plan: Plan, out: torch.Tensor | None = None
    ) -> torch.Tensor:
        assert isinstance(plan, CudaPlan)
        if is_dynamo_compiling():
            if out is None:
                out = torch.empty(self._out_shape, dtype=torch.bfloat16, device=self._device)
            torch.ops.tktune.grouped_gemm(x, weights, out, plan.workspace, plan.used, self.number)
            return out
        if out is None:  # made like all others of this operator: nothing to check
            out = self._make_out()
            bound = self._launches.get((x.data_ptr(), weights.data_ptr(), out.data_ptr(), plan.address))
            if (
                bound is not None
                and bound.rows == plan.used
                and ((bound.x() is x and bound.weights() is weights) or bound.takes(x, weights))
            ):
                bound.launch(_raw_stream(self._index))
                return out
        self.enqueue(x, weights, out, plan.workspace, plan.address, plan.used)
        return out

    def enqueue(
        self,
        x: torch.Tensor,
        weights: torch.Tensor,
        out: torch.Tensor,
        workspace: torch.Tensor,
        address: int,
        rows: int,
    ) -> None:
        """One launch on the current stream. Buffers seen before cost a dictionary access, others new descriptors.

        What lies at a known address must still be what was checked when it was first seen; a tensor that is the very
        object of last time is taken at its word.
        """
        key = (x.data_ptr(), weights.data_ptr(), out.data_ptr(), address)
        bound = self._launches.get(key)
        if (
            bound is None
            or bound.rows != rows
            or not ((bound.x() is x and bound.weights() is weights) or bound.takes(x, weights))
            or not bound.writes(out)
        ):
            bound = _Bound(self._bind(x, weights, out, workspace, rows), x, weights, out, rows)
            if len(self._launches) >= _KEPT_LAUNCHES:
                self._launches.clear()
            self._launches[key] = bound
        bound.launch(_raw_stream(self._index))

    def check(self) -> None:
        """Wait for the current stream; raises `LaunchFailed` with what a launch of it left behind."""
        with self._control.launching():
            synchronize(current_stream(self._index))

    def close(self) -> None:
        """Forget everything. No graph that captured a call may be replayed after this."""
        OPERATORS.leave(self.number)
        self._launches.clear()
        self._input = None
        self._control.close()
        self._page.close()

    def _bind(
        self, x: torch.Tensor, weights: torch.Tensor, out: torch.Tensor, workspace: torch.Tensor, rows: int
    ) -> Launch:
        """The launch on these buffers. It keeps none of them: it is valid for whatever lies there later."""
        self._expect("x", x, (max(x.shape[0], rows), self.problem.hidden))
        self._expect("weights", weights, self._weights_shape)
        self._expect("out", out, self._out_shape)
        bound = gemm_launch(
            self._module,
            self.choice.config,
            self.problem.weight_layout,
            self.problem.pad,
            self._maps,
            self._control.guard,
            self.choice.device.sm_count,
            x,
            weights,
            out,
            workspace[_DISPENSER_AT:].view(-1, 4),
            workspace,
        )
        return bound.without_buffers(self._module)

    def _expect(self, name: str, tensor: torch.Tensor, shape: tuple[int, ...]) -> None:
        ok = tuple(tensor.shape) == shape and tensor.dtype == torch.bfloat16
        if not (ok and tensor.is_contiguous() and tensor.device == self._device):
            raise ProblemError(
                f"{name} is {tensor.dtype} {tuple(tensor.shape)} on {tensor.device}, and the problem asks for "
                f"contiguous bfloat16 {shape} on {self._device}.",
                "Pass that, or load an operator for this shape.",
            )


class _Bound:
    """A launch on the buffers at four addresses, and what was there when they were checked."""

    __slots__ = ("_out_shape", "_weights_shape", "_x_shape", "launch", "rows", "weights", "x")

    def __init__(
        self, launch: Launch, x: torch.Tensor, weights: torch.Tensor, out: torch.Tensor, rows: int
    ) -> None:
        self.launch, self.rows = launch, rows
        self._x_shape, self._weights_shape, self._out_shape = x.shape, weights.shape, out.shape
        self.x, self.weights = weakref.ref(x), weakref.ref(weights)

    def takes(self, x: torch.Tensor, weights: torch.Tensor) -> bool:
        """Whether these other tensors at the same addresses are as the first ones were."""
        if x.shape != self._x_shape or x.dtype is not _BF16 or not x.is_contiguous():
            return False
        if self.weights() is not weights:
            same = weights.shape == self._weights_shape and weights.dtype is _BF16
            if not (same and weights.is_contiguous()):
                return False
            self.weights = weakref.ref(weights)
        return True

    def writes(self, out: torch.Tensor) -> bool:
        return out.shape == self._out_shape and out.dtype is _BF16 and out.is_contiguous()


def _sm_count(index: int) -> int:
    return int(torch.cuda.get_device_properties(index).multi_processor_count)


# The library form.

OPERATORS = Numbered[CudaOperator]()


def _launch_by_number(
    x: torch.Tensor,
    weights: torch.Tensor,
    out: torch.Tensor,
    workspace: torch.Tensor,
    rows: int,
    number: int,
) -> None:
    OPERATORS.get(number).enqueue(x, weights, out, workspace, workspace.data_ptr(), rows)


define(
    "grouped_gemm(Tensor x, Tensor weights, Tensor(a!) out, Tensor(b!) workspace, int rows, int number) -> ()",
    _launch_by_number,
)
