"""The schedule tables of one rank as device memory of a fixed size, so that a replayed graph can fill it anew: one int32
tensor, and its views by name.
"""

from __future__ import annotations

from functools import lru_cache

import torch

from tktune.core.errors import ProblemError
from tktune.core.problem import Problem
from tktune.core.tables import ScheduleTables
from tktune.families.cuda.dispatch_globals import PLAN_WORDS, QUEUE_WORDS

_ALIGNED_WORDS = 4  # each table begins at 16 bytes
DISPENSER_WORDS = 2


@lru_cache(maxsize=64)
def _layout(problem: Problem, capacity: int) -> tuple[dict[str, tuple[int, tuple[int, ...]]], int]:
    """Where each table begins (in words) and its largest shape; then the words of all."""
    local, blocks = problem.local_experts, capacity // problem.pad
    ranks, tokens, top_k = problem.expert_ranks, problem.tokens, problem.top_k
    shapes: dict[str, tuple[int, ...]] = {
        "words": (PLAN_WORDS,),
        "queue": (QUEUE_WORDS,),
        "dispenser": (DISPENSER_WORDS,),
        "counts": (local,),
        "base": (local,),
        "walk": (local, 4),
        "pull_indices": (capacity, 2),
        "block_expert": (blocks,),
        "slack": (blocks,),
        "own_slack": (blocks,),
        "arrivals": (blocks,),
        "slots": (ranks, tokens, top_k),
        "pull_tokens": (ranks * tokens, 2),
        "pull_slots": (ranks * tokens, top_k),
        "job_order": (ranks * tokens,),
    }
    places, at = {}, 0
    for name, shape in shapes.items():
        places[name] = (at, shape)
        at += -(-torch.Size(shape).numel() // _ALIGNED_WORDS) * _ALIGNED_WORDS
    return places, at


class DeviceTables:
    """Tables for up to `capacity` rows (a multiple of pad) in one int32 tensor, `memory`.

    `at[name]` is where a table lies; `view(name)` is all of it, whatever part is in use. Tables: words (3: padded
    rows, pad blocks, tokens wanted here), queue, dispenser, arrivals (a launch's counters), counts, base, walk (local
    experts, 4), pull_indices, block_expert, slack, own_slack, slots, pull_tokens, pull_slots,
    job_order (`tktune.core.tables.ScheduleTables`). Raises `ProblemError` for a `memory` of other plans.
    """

    def __init__(
        self, problem: Problem, capacity: int, device: torch.device, memory: torch.Tensor | None = None
    ) -> None:
        self.problem, self.capacity = problem, capacity
        self._places, words = _layout(problem, capacity)
        if memory is None:
            memory = torch.empty(words, dtype=torch.int32, device=device)
        if memory.numel() != words or memory.dtype != torch.int32 or not memory.is_contiguous():
            raise ProblemError(
                f"The plan's memory is {memory.numel()} words of {memory.dtype}, and this operator's plans are {words} int32.",
                "Pass a plan that this operator made.",
            )
        self.memory = memory
        start = self.memory.data_ptr()
        self.at = {name: start + 4 * first for name, (first, _) in self._places.items()}

    def view(self, name: str) -> torch.Tensor:
        first, shape = self._places[name]
        return self.memory[first : first + torch.Size(shape).numel()].view(shape)

    def used(self) -> tuple[int, int, int]:
        """Padded rows, pad blocks, tokens wanted here. Waits for the device."""
        rows, blocks, tokens = self.view("words").tolist()
        return rows, blocks, tokens

    def schedule(self, rank: int) -> ScheduleTables:
        """The tables in use as they are now, copied. Waits for the device."""
        rows, blocks, tokens = self.used()
        problem, pad = self.problem, self.problem.pad
        cut = {"pull_indices": rows, "block_expert": blocks, "slack": blocks, "own_slack": blocks}
        cut |= {"pull_tokens": tokens, "pull_slots": tokens, "job_order": tokens}
        t = {name: self.view(name)[: cut.get(name)].clone() for name in ("counts", "base", "slots", *cut)}
        source, token = t["pull_indices"].unbind(1)
        flat = torch.where(source < 0, -1, source * problem.tokens + token)
        pulled = t["pull_tokens"]
        return ScheduleTables(
            rank=rank,
            rows=rows,
            num_pad_blocks=blocks,
            padded=(t["counts"] + pad - 1).div(pad, rounding_mode="floor").int() * pad,
            block_rows=pad - t["slack"],
            slot_token=flat.int(),
            push_order=tuple(pulled[pulled[:, 0] == s, 1].clone() for s in range(problem.expert_ranks)),
            **t,
        )
