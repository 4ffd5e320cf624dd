"""The small interface between the driver and whatever decides what to look at next."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from tktune.core.config import Config


class ConfigSampler(Protocol):
    """Picks rows of a fixed set of feasible rows; a row is a build part (as the driver uses it) or a whole config.

    A sampler never proposes a row twice, nor one that it was told of, nor one outside its set, however many
    asks precede the tells.
    """

    name: str

    def ask(self, count: int) -> list[Config]:
        """Up to `count` distinct rows that were never asked nor told; fewer only when no more are left."""
        ...

    def tell(self, row: Config, cost_us: float | None) -> None:
        """What `row` cost in microseconds; None when it failed. Also for rows it did not propose.

        Raises ValueError for a row outside the set or one told before.
        """
        ...


class SamplerMaker(Protocol):
    """Makes a sampler over `rows` (fixed order, distinct). The same seed and tells give the same asks."""

    def __call__(self, rows: Sequence[Config], seed: int) -> ConfigSampler: ...


class UnseenRows:
    """The bookkeeping every sampler shares: which rows were asked or told, and which are left, in order."""

    def __init__(self, rows: Sequence[Config]) -> None:
        self._left: dict[Config, None] = dict.fromkeys(rows)
        self.members = frozenset(rows)
        self._told: set[Config] = set()
        if len(self.members) != len(rows):
            raise ValueError("rows repeat")

    def __len__(self) -> int:
        return len(self._left)

    def __contains__(self, row: Config) -> bool:
        return row in self._left

    def listed(self) -> list[Config]:
        return list(self._left)

    def take(self, row: Config) -> None:
        """Mark `row` as asked."""
        del self._left[row]

    def tell(self, row: Config) -> None:
        """Mark `row` as told. Raises ValueError for a stranger or a second time."""
        if row not in self.members:
            raise ValueError(f"{row} is not in the set")
        if row in self._told:
            raise ValueError(f"{row} was told before")
        self._told.add(row)
        self._left.pop(row, None)
