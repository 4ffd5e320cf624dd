"""The dispatch operator as `torch.ops.tktune.dispatch_plan` and `dispatch_gemm`, for torch.compile: operators go by
numbers, since compiled code may only hold tensors and numbers. They return nothing: an operator that returned a buffer
it owns would be broken by graphs.
"""

from __future__ import annotations

import itertools
import weakref
from typing import Protocol

import torch

from tktune.core.errors import ProblemError


class Enqueues(Protocol):
    def enqueue_plan(self, ids: torch.Tensor, memory: torch.Tensor) -> None: ...

    def enqueue(
        self, x: torch.Tensor, weights: torch.Tensor, out: torch.Tensor, memory: torch.Tensor
    ) -> None: ...


_OPERATORS: weakref.WeakValueDictionary[int, Enqueues] = weakref.WeakValueDictionary()
_numbers = itertools.count(1)


def enter(operator: Enqueues) -> int:
    """The number under which compiled code calls `operator`; it is not kept alive."""
    number = next(_numbers)
    _OPERATORS[number] = operator
    return number


def leave(number: int) -> None:
    _OPERATORS.pop(number, None)


_LIBRARY = torch.library.Library("tktune", "FRAGMENT")  # type: ignore[no-untyped-call]
_LIBRARY.define(  # type: ignore[no-untyped-call]
    "dispatch_plan(Tensor ids, Tensor(a!) workspace, int number) -> ()"
)
_LIBRARY.define(  # type: ignore[no-untyped-call]
    "dispatch_gemm(Tensor x, Tensor weights, Tensor(a!) out, Tensor(b!) workspace, int number) -> ()"
)


def launch_by_number(
    x: torch.Tensor, weights: torch.Tensor, out: torch.Tensor, workspace: torch.Tensor, number: int
) -> None:
    """`workspace` is the memory of a plan of operator `number`. Raises `ProblemError` when that was closed."""
    _numbered(number).enqueue(x, weights, out, workspace)


def plan_by_number(ids: torch.Tensor, workspace: torch.Tensor, number: int) -> None:
    """Fill `workspace`, the memory of a plan of operator `number`, from `ids` (tokens, top_k)."""
    _numbered(number).enqueue_plan(ids, workspace)


def _numbered(number: int) -> Enqueues:
    operator = _OPERATORS.get(number)
    if operator is None:
        raise ProblemError(
            f"Operator {number} was closed.", "Keep it open as long as compiled code calls it."
        )
    return operator


def _fake(
    x: torch.Tensor, weights: torch.Tensor, out: torch.Tensor, workspace: torch.Tensor, number: int
) -> None:
    """`out` and `workspace` are written, nothing is returned: there is no shape to infer."""


def _fake_plan(ids: torch.Tensor, workspace: torch.Tensor, number: int) -> None:
    """`workspace` is written, nothing is returned."""


_LIBRARY.impl("dispatch_gemm", launch_by_number, "CUDA")  # type: ignore[no-untyped-call]
_LIBRARY.impl("dispatch_plan", plan_by_number, "CUDA")  # type: ignore[no-untyped-call]
torch.library.register_fake("tktune::dispatch_gemm", _fake, lib=_LIBRARY)
torch.library.register_fake("tktune::dispatch_plan", _fake_plan, lib=_LIBRARY)
