"""Combine tables of one rank as device memory of a fixed size, so that a replayed graph can fill it anew: one int32
tensor, and its views by name.
"""

from __future__ import annotations

from functools import lru_cache

import torch

from tktune.core.combine_tables import CombineTables
from tktune.core.errors import ProblemError
from tktune.core.problem import Problem

_ALIGNED_WORDS = 4  # each table begins at 16 bytes


@lru_cache(maxsize=64)
def _layout(problem: Problem, groups: int, passes: int) -> tuple[dict[str, tuple[int, tuple[int, ...]]], int]:
    """Where each table begins (in words) and its shape; then the words of all."""
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
    places, at = {}, 0
    for name, shape in shapes.items():
        places[name] = (at, shape)
        at += -(-torch.Size(shape).numel() // _ALIGNED_WORDS) * _ALIGNED_WORDS
    return places, at


class DeviceCombineTables:
    """Tables in one int32 tensor, `memory`. `at[name]` is where a table lies; `view(name)` is all of it.

    Tables: plan (2: pad blocks, jobs), experts, walk, jobs, everyones (float32 weights as int32 words), and those of
    `CombineTables`. Raises `ProblemError` for a `memory` of other plans.
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
        self._places, words = _layout(problem, groups, passes)
        if memory is None:
            memory = torch.empty(words, dtype=torch.int32, device=device)
        if memory.numel() != words or memory.dtype != torch.int32 or not memory.is_contiguous():
            raise ProblemError(
                f"The plan's memory is {memory.numel()} words of {memory.dtype}, and this operator's plans are {words} int32.",
                "Pass a plan that this operator made.",
            )
        self.memory = memory
        start = memory.data_ptr()
        self.at = {name: start + 4 * first for name, (first, _) in self._places.items()}

    def view(self, name: str) -> torch.Tensor:
        first, shape = self._places[name]
        return self.memory[first : first + torch.Size(shape).numel()].view(shape)

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
