"""What launches that push need beside the tables of the pull form: push tables with their counters on the device, each
rank's sections and flags, and whether a launch left all of them right.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from tktune.core import push_tables_torch
from tktune.core.config import Config
from tktune.core.problem import Problem
from tktune.families.cuda.push_globals import PushPart, flag_bytes
from tktune.families.cuda.symmetric import SymmetricMemory
from tktune.families.dispatch_gemm.tables_cuda import DeviceTables
from tktune.families.dispatch_gemm.transport import is_indexed, push_sms

# Tables of pushes by the names that they have among those of a plan on the device.
_VIEWS = {
    "plan": "push_plan",
    "tokens": "push_tokens",
    "blocks": "push_blocks",
    "expected": "push_expected",
    "missing": "missing",
    "gate_sources": "gate_sources",
}


@dataclass(frozen=True)
class Pushes:
    """The push tables of one plan on one rank, int32 on its device, and `missing`, the counters of launches.

    `plan` (ranks + 2) are offsets, then turns; the others are those of `PushTables`.
    """

    plan: torch.Tensor
    tokens: torch.Tensor
    blocks: torch.Tensor
    expected: torch.Tensor
    missing: torch.Tensor
    gate_sources: torch.Tensor

    @classmethod
    def of_ids(cls, topk_ids: Any, problem: Problem, rank: int, device: torch.device) -> Pushes:
        """As the host builds them from all ranks' ids."""
        made = push_tables_torch.build(torch.as_tensor(topk_ids), problem, rank)
        plan = torch.cat([made.offsets, torch.tensor([made.turns], dtype=torch.int32)])
        tables = (plan, made.tokens, made.blocks, made.expected, made.expected.clone(), made.gate_sources)
        return cls(*(table.to(device) for table in tables))

    @classmethod
    def within(cls, tables: DeviceTables, like: Pushes | None = None) -> Pushes:
        """Views of what a plan on the device holds, each as long as `like`'s; all of them without it."""
        views = {field: tables.view(name) for field, name in _VIEWS.items()}
        if like is not None:
            views = {field: view[: len(getattr(like, field))] for field, view in views.items()}
        return cls(**views)

    @property
    def at(self) -> dict[str, int]:
        """Where they lie, under the names of `DeviceTables`."""
        return {name: getattr(self, field).data_ptr() for field, name in _VIEWS.items()}

    def seed(self) -> None:
        """Make the counters what a launch expects and leaves behind."""
        self.missing.copy_(self.expected)

    def left_as_found(self) -> bool:
        return bool(self.missing.equal(self.expected))

    def wrong_table(self, right: Pushes) -> str:
        """The name of the first table that is not that of `right`, or an empty text."""
        pairs = ((name, getattr(self, field), getattr(right, field)) for field, name in _VIEWS.items())
        return next((name for name, found, wanted in pairs if not found.equal(wanted)), "")


class PushMemory:
    """Where pushes go and what announces them: in every rank's symmetric memory its sections, one for each rank's rows,
    from byte `sections_at`, and from `flags_at` its flags, those of pad blocks (pad blocks, ranks) and those of rows
    (ranks, tokens), int64. `sequence` (1) int64 counts the meetings of all ranks.
    """

    def __init__(
        self,
        problem: Problem,
        memory: SymmetricMemory,
        sections_at: int,
        flags_at: int,
        sequence: torch.Tensor,
    ) -> None:
        self._problem, self._sequence, self._memory = problem, sequence, memory
        world, rows_at = problem.world, flags_at + flag_bytes(problem)[0]
        self._sections = memory.addresses(sections_at)
        self._block_flags_at, self._row_flags_at = memory.addresses(flags_at), memory.addresses(rows_at)
        blocks = problem.capacity_rows // problem.pad
        self.block_flags = memory.tensor(torch.int64, (blocks, world), flags_at)
        self.row_flags = memory.tensor(torch.int64, (world, problem.tokens), rows_at)

    def behind(self, dispatch: bytes, at: Mapping[str, int], config: Config, communicating: int) -> bytes:
        """The arguments of a launch that pushes, with so many blocks that communicate: those of a pull, and these. `at`
        are the addresses of its plan's tables.
        """
        problem = self._problem
        part = PushPart(
            **{field: at[name] for field, name in _VIEWS.items()},
            sequence=self._sequence.data_ptr(),
            sections=self._sections,
            section_rows=problem.world * problem.tokens,
            flags=self._block_flags_at if is_indexed(config) else self._row_flags_at,
            num_push_blocks=push_sms(config, communicating),
        )
        return part.behind(dispatch, problem.hidden)

    def wrong(
        self, config: Config, pushes: Pushes, pull_tokens: torch.Tensor, rank: int, sequence: int
    ) -> str:
        """After the launch of `sequence`, a sentence on the first word it left wrong, or an empty text.

        `pull_tokens` (U, 2): source rank and token of all that `rank` wants.
        """
        if not pushes.left_as_found():
            return "The launch left its counters of pushed rows other than it found them."
        if is_indexed(config):
            found, what = self.block_flags, "block {0} from rank {1}"
            sources = torch.arange(self._problem.world, device=found.device)
            awaited = torch.zeros_like(found, dtype=torch.bool)
            awaited[: len(pushes.gate_sources)] = (pushes.gate_sources.unsqueeze(1) >> sources & 1).bool()
        else:
            found, what = self.row_flags, "token {1} of rank {0}"
            awaited = torch.zeros_like(found, dtype=torch.bool)
            awaited[pull_tokens[:, 0].long(), pull_tokens[:, 1].long()] = True
            awaited[rank] = False
        wrong = torch.nonzero((found == sequence) != awaited)
        if len(wrong):
            at = wrong[0].tolist()
            first = f"first that of {what.format(*at)}: {int(found[tuple(at)])}"
            return f"{len(wrong)} flags are not what is waited for, {first}."
        if bool((found > sequence).any()):
            return "A flag is ahead of the launch."
        return ""
