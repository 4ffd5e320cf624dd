"""The combine operator as `torch.ops.tktune.combine_schedule`, `combine_plan` and `gemm_combine`, for torch.compile."""

from __future__ import annotations

from typing import Protocol

import torch

from tktune.runtime.cuda_library import Numbered, define


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


_OPERATORS = Numbered[Enqueues]()
enter, leave = _OPERATORS.enter, _OPERATORS.leave


def schedule_by_number(ids: torch.Tensor, schedule: torch.Tensor, number: int) -> None:
    """Fill `schedule`, the memory of a schedule of operator `number`, from `ids` (tokens, top_k)."""
    _OPERATORS.get(number).enqueue_schedule(ids, schedule)


def plan_by_number(
    topk_weights: torch.Tensor, schedule: torch.Tensor, workspace: torch.Tensor, number: int
) -> None:
    """Fill `workspace`, the memory of a plan of operator `number`, over `schedule`, from this rank's weights."""
    _OPERATORS.get(number).enqueue_tables(topk_weights, schedule, workspace)


def launch_by_number(
    activations: torch.Tensor,
    weights: torch.Tensor,
    out: torch.Tensor,
    schedule: torch.Tensor,
    workspace: torch.Tensor,
    number: int,
) -> None:
    """One call of operator `number`. Raises `ProblemError` when that was closed."""
    _OPERATORS.get(number).enqueue(activations, weights, out, schedule, workspace)


define("combine_schedule(Tensor ids, Tensor(a!) schedule, int number) -> ()", schedule_by_number)
define(
    "combine_plan(Tensor topk_weights, Tensor schedule, Tensor(a!) workspace, int number) -> ()",
    plan_by_number,
)
define(
    "gemm_combine(Tensor activations, Tensor weights, Tensor(a!) out, Tensor schedule, Tensor(b!) workspace, "
    "int number) -> ()",
    launch_by_number,
)
