"""The dispatch operator as `torch.ops.tktune.dispatch_plan` and `dispatch_gemm`, for torch.compile."""

from __future__ import annotations

from typing import Protocol

import torch

from tktune.runtime.cuda_library import Numbered, define


class Enqueues(Protocol):
    def enqueue_plan(self, ids: torch.Tensor, memory: torch.Tensor) -> None: ...

    def enqueue(
        self, x: torch.Tensor, weights: torch.Tensor, out: torch.Tensor, memory: torch.Tensor
    ) -> None: ...


_OPERATORS = Numbered[Enqueues]()
enter, leave = _OPERATORS.enter, _OPERATORS.leave


def launch_by_number(
    x: torch.Tensor, weights: torch.Tensor, out: torch.Tensor, workspace: torch.Tensor, number: int
) -> None:
    """`workspace` is the memory of a plan of operator `number`. Raises `ProblemError` when that was closed."""
    _OPERATORS.get(number).enqueue(x, weights, out, workspace)


def plan_by_number(ids: torch.Tensor, workspace: torch.Tensor, number: int) -> None:
    """Fill `workspace`, the memory of a plan of operator `number`, from `ids` (tokens, top_k)."""
    _OPERATORS.get(number).enqueue_plan(ids, workspace)


define("dispatch_plan(Tensor ids, Tensor(a!) workspace, int number) -> ()", plan_by_number)
define(
    "dispatch_gemm(Tensor x, Tensor weights, Tensor(a!) out, Tensor(b!) workspace, int number) -> ()",
    launch_by_number,
)
