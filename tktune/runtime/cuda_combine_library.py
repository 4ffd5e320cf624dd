"""The combine operator as `torch.ops.tktune.combine_schedule`, `combine_plan` and `gemm_combine`, for torch.compile:
operators go by numbers, since compiled code may only hold tensors and numbers. They write what they are given and return
nothing.
"""

from __future__ import annotations

import itertools
import weakref
from typing import Protocol

import torch

from tktune.core.errors import ProblemError


class Enqueues(Protocol):
    def enqueue_schedule(self, ids: torch.Tensor, schedule: torch.Tensor) -> None: ...

    def enqueue_tables(
        self, topk_weights: torch.Tensor, schedule: torch.Tensor, memory: torch.Tensor
    ) -> None: ...

    def enqueue(
        self,
        activations: torch.Tensor,
        weights: torch.Tensor,
        out: torch.Tensor,
        schedule: torch.Tensor,
        memory: torch.Tensor,
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


def _numbered(number: int) -> Enqueues:
    operator = _OPERATORS.get(number)
    if operator is None:
        raise ProblemError(
            f"Operator {number} was closed.", "Keep it open as long as compiled code calls it."
        )
    return operator


_LIBRARY = torch.library.Library("tktune", "FRAGMENT")  # type: ignore[no-untyped-call]
for _schema in (
    "combine_schedule(Tensor ids, Tensor(a!) schedule, int number) -> ()",
    "combine_plan(Tensor topk_weights, Tensor schedule, Tensor(a!) workspace, int number) -> ()",
    "gemm_combine(Tensor activations, Tensor weights, Tensor(a!) out, Tensor schedule, Tensor(b!) workspace, "
    "int number) -> ()",
):
    _LIBRARY.define(_schema)  # type: ignore[no-untyped-call]


def schedule_by_number(ids: torch.Tensor, schedule: torch.Tensor, number: int) -> None:
    """Fill `schedule`, the memory of a schedule of operator `number`, from `ids` (tokens, top_k)."""
    _numbered(number).enqueue_schedule(ids, schedule)


def plan_by_number(
    topk_weights: torch.Tensor, schedule: torch.Tensor, workspace: torch.Tensor, number: int
) -> None:
    """Fill `workspace`, the memory of a plan of operator `number`, over `schedule`, from this rank's weights."""
    _numbered(number).enqueue_tables(topk_weights, schedule, workspace)


def launch_by_number(
    activations: torch.Tensor,
    weights: torch.Tensor,
    out: torch.Tensor,
    schedule: torch.Tensor,
    workspace: torch.Tensor,
    number: int,
) -> None:
    """One call of operator `number`. Raises `ProblemError` when that was closed."""
    _numbered(number).enqueue(activations, weights, out, schedule, workspace)


def _fake_schedule(ids: torch.Tensor, schedule: torch.Tensor, number: int) -> None:
    """`schedule` is written, nothing is returned."""


def _fake_plan(
    topk_weights: torch.Tensor, schedule: torch.Tensor, workspace: torch.Tensor, number: int
) -> None:
    """`workspace` is written, nothing is returned."""


def _fake(
    activations: torch.Tensor,
    weights: torch.Tensor,
    out: torch.Tensor,
    schedule: torch.Tensor,
    workspace: torch.Tensor,
    number: int,
) -> None:
    """`out` and `workspace` are written, nothing is returned: there is no shape to infer."""


for _name, _real, _shape in (
    ("combine_schedule", schedule_by_number, _fake_schedule),
    ("combine_plan", plan_by_number, _fake_plan),
    ("gemm_combine", launch_by_number, _fake),
):
    _LIBRARY.impl(_name, _real, "CUDA")  # type: ignore[no-untyped-call]
    torch.library.register_fake(f"tktune::{_name}", _shape, lib=_LIBRARY)
