"""What one (routing, seed) means for a dispatch on one GPU, and the buffers that launches of a rank write."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch

from tktune.core import tables_torch
from tktune.core.problem import Problem
from tktune.core.routing import parse_routing
from tktune.families.cuda import dispatch_globals as mirror
from tktune.families.cuda.gemm_inputs import GUARD_ROWS, Case, draw_tokens, make_case
from tktune.families.dispatch_gemm.push_cuda import Pushes


@dataclass(frozen=True)
class Plan:
    """One (routing, seed) on one rank: the GEMM's case, this rank's token rows, and the tables on the device.

    `case.activations` holds the gathered rows as they should become. int32: `ids` (tokens, top_k) of this rank,
    `words` (3), `pull_indices` (P, 2), `pull_tokens` (U, 2), `pull_slots` (U, top_k), `slack` and `own_slack` (B),
    `walk` (experts, 4).
    """

    case: Case
    x: torch.Tensor
    ids: torch.Tensor
    words: torch.Tensor
    pull_indices: torch.Tensor
    pull_tokens: torch.Tensor
    pull_slots: torch.Tensor
    slack: torch.Tensor
    own_slack: torch.Tensor
    walk: torch.Tensor
    routed: tuple[Any, Problem, int]  # all ranks' ids, the problem, this rank
    built_pushes: Pushes | None = None  # where the device has built them

    @cached_property
    def pushes(self) -> Pushes:
        """Its push tables and their counters, made for the first config that pushes."""
        return self.built_pushes or Pushes.of_ids(*self.routed, self.x.device)

    @property
    def bytes(self) -> int:
        return self.case.bytes + self.x.nbytes


def make_plan(
    problem: Problem, weights: torch.Tensor, rank: int, routing: str, seed: int, topk_ids: Any = None
) -> Plan:
    """The plan of `rank` when `routing` is drawn with `seed`, or of these `topk_ids` (ranks, tokens, top_k)."""
    ids = parse_routing(routing).draw(problem, seed) if topk_ids is None else topk_ids
    case = make_case(problem, weights, rank, routing, seed, ids)
    tables = tables_torch.build(torch.as_tensor(ids), problem, rank)
    there = weights.device
    words = torch.tensor(
        [tables.rows, tables.num_pad_blocks, len(tables.pull_tokens)], dtype=torch.int32, device=there
    )
    x = draw_tokens(problem, seed, there)[rank * problem.tokens : (rank + 1) * problem.tokens].clone()
    mine = torch.as_tensor(ids)[rank].to(torch.int32).contiguous()
    return Plan(
        case,
        x,
        ids=mine.to(there),
        words=words,
        pull_indices=tables.pull_indices.to(there),
        pull_tokens=tables.pull_tokens.to(there),
        pull_slots=tables.pull_slots.to(there),
        slack=tables.slack.to(there),
        own_slack=tables.own_slack.to(there),
        walk=case.walks["index"],  # rows arrive in the order of the experts
        routed=(ids, problem, rank),
    )


class Workspace:
    """What launches of one rank write: gathered rows, outputs, counters. As large as any plan has needed.

    `packed` (rows, cols) are the GEMM's outputs where a second launch finishes them; it has no columns elsewhere.
    """

    def __init__(self, problem: Problem, device: torch.device) -> None:
        self._device = device
        self._widths = (problem.hidden, problem.out_cols, problem.cols if problem.finish != "none" else 0)
        self._buffers = tuple(self._rows(0, cols) for cols in self._widths)
        self.arrivals = torch.zeros(0, dtype=torch.int32, device=device)
        self.queue = torch.zeros(mirror.QUEUE_WORDS, dtype=torch.int32, device=device)
        self.dispenser = torch.zeros(2, dtype=torch.int32, device=device)

    def _rows(self, rows: int, cols: int) -> torch.Tensor:
        return torch.empty(rows, cols, dtype=torch.bfloat16, device=self._device)

    def fit(self, plan: Plan) -> None:
        rows, blocks = plan.case.rows + GUARD_ROWS, len(plan.slack)
        if len(self._buffers[0]) < rows:
            self._buffers = tuple(self._rows(rows, cols) for cols in self._widths)
        self.gathered, self.out, self.packed = (buffer[:rows] for buffer in self._buffers)
        if len(self.arrivals) < blocks:
            self.arrivals = torch.zeros(blocks, dtype=torch.int32, device=self._device)

    def seed(self, slack: torch.Tensor) -> None:
        """Make the counters what a launch expects and leaves behind; those of pad blocks begin with `slack` (B)."""
        self.arrivals[: len(slack)].copy_(slack)
        self.queue.zero_()
        self.dispenser.copy_(self._idle())

    def _idle(self) -> torch.Tensor:
        return torch.tensor([0, mirror.NEVER_LAST], dtype=torch.int32)

    def left_as_found(self, slack: torch.Tensor) -> bool:
        found = self.arrivals[: len(slack)].equal(slack) and not bool(self.queue.any())
        return bool(found and self.dispenser.cpu().equal(self._idle()))
