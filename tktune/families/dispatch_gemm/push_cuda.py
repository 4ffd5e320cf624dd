"""What launches that push need beside the tables of the pull form: push tables with their counters on the device, each
rank's sections and flags, and whether a launch left all of them right.
"""

from __future__ import annotations

from typing import Any

import torch

from tktune.core import push_tables_torch
from tktune.core.config import Config
from tktune.core.problem import Problem
from tktune.families.cuda.push_globals import PushPart, flag_bytes
from tktune.families.cuda.symmetric import SymmetricMemory
from tktune.families.dispatch_gemm.transport import is_indexed, push_sms


class Pushes:
    """The push tables of one (routing, seed) on one rank, int32 on `device`, and `missing`, the counters of launches."""

    def __init__(self, topk_ids: Any, problem: Problem, rank: int, device: torch.device) -> None:
        made = push_tables_torch.build(torch.as_tensor(topk_ids), problem, rank)
        self.plan = torch.cat([made.offsets, torch.tensor([made.turns], dtype=torch.int32)]).to(device)
        self.tokens, self.blocks = made.tokens.to(device), made.blocks.to(device)
        self.expected, self.gate_sources = made.expected.to(device), made.gate_sources.to(device)
        self.missing = self.expected.clone()

    def seed(self) -> None:
        """Make the counters what a launch expects and leaves behind."""
        self.missing.copy_(self.expected)

    def left_as_found(self) -> bool:
        return bool(self.missing.equal(self.expected))


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

    def behind(self, dispatch: bytes, pushes: Pushes, config: Config, communicating: int) -> bytes:
        """The arguments of a launch that pushes, with so many blocks that communicate: those of a pull, and these."""
        problem = self._problem
        part = PushPart(
            plan=pushes.plan.data_ptr(),
            tokens=pushes.tokens.data_ptr(),
            blocks=pushes.blocks.data_ptr(),
            expected=pushes.expected.data_ptr(),
            missing=pushes.missing.data_ptr(),
            gate_sources=pushes.gate_sources.data_ptr(),
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
