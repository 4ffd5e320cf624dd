"""What is found of a space: its feasible configs, or how many they are, and the waterfall of what each constraint removed."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

from tktune.core.config import Config

SAME_BEHAVIOUR = "same_behaviour"


@dataclass(frozen=True)
class WaterfallRow:
    """What one constraint removed from those that the ones before it left."""

    name: str
    meaning: str
    removed: int
    left: int
    example: str


@dataclass(frozen=True)
class Counts:
    """Of a space: every combination of values, the feasible configs, the builds those come from, and how the rest fell."""

    total: int
    feasible: int
    builds: int
    waterfall: tuple[WaterfallRow, ...]


@dataclass(frozen=True)
class FeasibleSet:
    """Every config that passes, in a fixed order, and how the others fell.

    `total` counts the product of all values; each waterfall row takes its part, and what the last row leaves is
    `len(self)`.
    """

    configs: tuple[Config, ...]
    total: int
    waterfall: tuple[WaterfallRow, ...]

    def __len__(self) -> int:
        return len(self.configs)

    def __iter__(self) -> Iterator[Config]:
        return iter(self.configs)

    @cached_property
    def members(self) -> frozenset[Config]:
        return frozenset(self.configs)


def same_row(removed: int, left: int) -> WaterfallRow:
    """The row of configs that behave like others."""
    return WaterfallRow(
        SAME_BEHAVIOUR,
        "behaves like another config that is listed",
        removed,
        left,
        "a value has no effect here",
    )
