"""The schedule tables of one rank as device memory, and those of its pushes behind them where rows are pushed."""

from __future__ import annotations

from functools import lru_cache

import torch

from tktune.core.problem import Problem
from tktune.core.tables import ScheduleTables
from tktune.families.cuda.dispatch_globals import PLAN_WORDS, QUEUE_WORDS
from tktune.families.cuda.table_memory import TableLayout, TableMemory

DISPENSER_WORDS = 2


@lru_cache(maxsize=64)
def _layout(problem: Problem, capacity: int, pushes: bool) -> TableLayout:
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
    if pushes:  # last, so that whoever reads the schedule alone finds it at the same places
        counters = (ranks - 1) * blocks
        shapes |= {
            "push_plan": (ranks + 2,),
            "push_tokens": (ranks, tokens),
            "push_blocks": (ranks, tokens, top_k),
            "push_expected": (counters,),
            "missing": (counters,),
            "gate_sources": (blocks,),
        }
    return TableLayout.of(shapes)


class DeviceTables(TableMemory):
    """Tables for up to `capacity` rows (a multiple of pad) in one int32 tensor, `memory`.

    `view(name)` is all of a table, whatever part is in use. Tables: words (3: padded rows, pad blocks, tokens wanted
    here), queue, dispenser, arrivals (a launch's counters), counts, base, walk (local experts, 4), pull_indices,
    block_expert, slack, own_slack, slots, pull_tokens, pull_slots, job_order (`tktune.core.tables.ScheduleTables`).
    With `pushes` also (`tktune.core.push_tables.PushTables`): push_plan (offsets, then turns), push_tokens, push_blocks,
    push_expected, missing (a launch's counters), gate_sources; a `memory` that is given says itself whether it has them.
    """

    def __init__(
        self,
        problem: Problem,
        capacity: int,
        device: torch.device,
        memory: torch.Tensor | None = None,
        *,
        pushes: bool = False,
    ) -> None:
        if memory is not None:
            pushes = memory.numel() == _layout(problem, capacity, True).words
        self.problem, self.capacity, self.pushes = problem, capacity, pushes
        super().__init__(_layout(problem, capacity, pushes), device, memory)

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
