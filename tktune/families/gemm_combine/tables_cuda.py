"""Combine tables of one rank as device memory."""

from __future__ import annotations

from functools import lru_cache

import torch

from tktune.core.combine_tables import CombineTables
from tktune.core.problem import Problem
from tktune.families.cuda.table_memory import TableLayout, TableMemory


@lru_cache(maxsize=64)
def _layout(problem: Problem, groups: int, passes: int) -> TableLayout:
    world, tokens, top_k, local = problem.world, problem.tokens, problem.top_k, problem.local_experts
    shapes: dict[str, tuple[int, ...]] = {
        "plan": (2,),
        "experts": (local, 2),
        "walk": (passes * local, 4),
        "jobs": (world * tokens * groups,),
        "push_expected": (world,),
        "recv_from": (world,),
        "final_contrib": (tokens, world),
        "owners": (tokens, top_k),
        "owner_slots": (tokens, top_k),
        "everyones": (world, tokens, top_k),
    }
    return TableLayout.of(shapes)


class DeviceCombineTables(TableMemory):
    """Tables in one int32 tensor, `memory`.

    Tables: plan (2: pad blocks, jobs), experts, walk, jobs, everyones (float32 weights as int32 words), and those of
    `CombineTables`.
    """

    def __init__(
        self,
        problem: Problem,
        groups: int,
        passes: int,
        device: torch.device,
        memory: torch.Tensor | None = None,
    ) -> None:
        self.problem, self.groups, self.passes = problem, groups, passes
        super().__init__(_layout(problem, groups, passes), device, memory)

    @property
    def topk_weights(self) -> torch.Tensor:
        """Everybody's weights, (ranks, tokens, top_k) float32."""
        return self.view("everyones").view(torch.float32)

    def jobs(self) -> torch.Tensor:
        """The list of jobs in use, copied. Waits for the device."""
        return self.view("jobs")[: int(self.view("plan")[1])].clone()

    def combine(self, rank: int) -> CombineTables:
        """The tables as they are now, copied. Waits for the device."""
        names = ("push_expected", "final_contrib", "recv_from", "owners", "owner_slots")
        return CombineTables(rank=rank, **{name: self.view(name).clone() for name in names})
