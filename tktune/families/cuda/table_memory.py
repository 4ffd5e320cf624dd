"""Tables of one plan as device memory of a fixed size, so that a replayed graph can fill it anew: one int32 tensor, and
its views by name.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import torch

from tktune.core.errors import ProblemError
from tktune.families.formulas import round_up

_ALIGNED_WORDS = 4  # each table begins at 16 bytes


@dataclass(frozen=True)
class TableLayout:
    """Where each table begins (in words) and its largest shape; `words` of all."""

    places: Mapping[str, tuple[int, tuple[int, ...]]]
    words: int

    @staticmethod
    def of(shapes: Mapping[str, tuple[int, ...]]) -> TableLayout:
        """One table after the other, in the order of `shapes`."""
        places, at = {}, 0
        for name, shape in shapes.items():
            places[name] = (at, shape)
            at += round_up(math.prod(shape), _ALIGNED_WORDS)
        return TableLayout(places, at)


class TableMemory:
    """`memory` (None: new) with tables as `layout` says. `at[name]` is where a table lies; `view(name)` is all of it.

    Raises `ProblemError` for a `memory` of other plans.
    """

    def __init__(self, layout: TableLayout, device: torch.device, memory: torch.Tensor | None) -> None:
        self._places, words = layout.places, layout.words
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
        return self.memory[first : first + math.prod(shape)].view(shape)
