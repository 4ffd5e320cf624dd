"""Where a launch finds and leaves token rows on one GPU, in both forms: gathered by slot, or all ranks' tokens indexed
by source and token; what seeds its counters; and whether the right rows came.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod

import torch

from tktune.families.dispatch_gemm.plan_cuda import Plan, Workspace
from tktune.families.dispatch_gemm.transport import is_indexed as is_indexed


def walk_own_first(plan: Plan, pad: int, experts: int) -> torch.Tensor:
    """The walk of `plan` (entries, 4) where the first `experts` begin with their pad blocks of own rows alone.

    An expert's own rows are its first, so blocks of own rows wait for nobody: computing those of a few experts before
    anything else fills the time until the first rows arrive. Their weights are read twice.
    """
    walk = plan.walk.tolist()
    whole = ((plan.own_slack - plan.slack) == pad).tolist()
    own, rest = [], []
    for expert, first, rows, _ in walk[:experts]:
        blocks = sum(whole[first // pad : (first + rows) // pad])
        own.append([expert, first, blocks * pad, 0])
        rest.append([expert, first + blocks * pad, rows - blocks * pad, 0])
    return torch.tensor([*own, *rest, *walk[experts:]], dtype=torch.int32, device=plan.walk.device)


class Rows(ABC):
    """`buffer` (rows, hidden) is what the GEMM reads, `slack` (pad blocks) what its counters begin with."""

    buffer: torch.Tensor
    slack: torch.Tensor

    @abstractmethod
    def poison(self) -> None:
        """NaN wherever a launch must bring rows, and where it must bring none."""

    @abstractmethod
    def wrong(self) -> str:
        """After a launch on poisoned rows: a sentence on what is wrong with them, or an empty text."""


class GatheredRows(Rows):
    """Slot order: row s of the buffer is the token of slot s."""

    def __init__(self, plan: Plan, space: Workspace) -> None:
        self.buffer, self.slack, self._case = space.gathered, plan.slack, plan.case

    def poison(self) -> None:
        self.buffer.fill_(math.nan)

    def wrong(self) -> str:
        case = self._case
        differ = (self.buffer[case.slots] != case.activations[case.slots]).any(1)
        wrong = torch.nonzero(differ).flatten()
        if len(wrong):
            return f"{len(wrong)} gathered rows differ, the first at slot {int(case.slots[wrong[0]])}."
        if not bool(torch.isnan(self.buffer[case.rows :]).all()):
            return "A row behind the last expert was gathered."
        return ""


class IndexedRows(Rows):
    """Token order: row source × tokens + token of the buffer; this rank's own section is its input."""

    def __init__(self, plan: Plan, everyone: torch.Tensor, rank: int) -> None:
        self.buffer, self.slack = everyone, plan.own_slack
        self._plan, self._rank = plan, rank

    def _sections(self) -> torch.Tensor:
        return self.buffer.view(-1, *self._plan.x.shape)

    def poison(self) -> None:
        for source, section in enumerate(self._sections()):
            if source != self._rank:
                section.fill_(math.nan)

    def wrong(self) -> str:
        plan, case, buffer = self._plan, self._plan.case, self.buffer
        wanted = case.slot_token.to(buffer.device)[case.slots]
        wrong = torch.nonzero((buffer[wanted] != case.activations[case.slots]).any(1)).flatten()
        if len(wrong):
            source, token = divmod(int(wanted[wrong[0]]), len(plan.x))
            return f"Rows of {len(wrong)} slots differ, first token {token} of rank {source}."
        if not torch.equal(self._sections()[self._rank], plan.x):
            return "The launch changed this rank's own rows."
        left = torch.ones(len(buffer), dtype=torch.bool, device=buffer.device)
        left[wanted] = False
        left.view(-1, len(plan.x))[self._rank] = False
        if not bool(torch.isnan(buffer[left]).all()):
            return "A row was fetched that no expert here wants."
        return ""


class StagedRows(GatheredRows):
    """Slot order, of rows that peers pushed to their sections of `everyone` first."""

    def __init__(self, plan: Plan, space: Workspace, everyone: torch.Tensor, rank: int) -> None:
        super().__init__(plan, space)
        self._staged = IndexedRows(plan, everyone, rank)

    def poison(self) -> None:
        super().poison()
        self._staged.poison()

    def wrong(self) -> str:
        return self._staged.wrong() or super().wrong()
