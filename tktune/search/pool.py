"""The rows that a model looks at: all of a set, or, of a large one, what lies around the best and an even rest."""

from __future__ import annotations

from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from tktune.search.coordinates import FeasibleRows, Floats, Ints

MOST_WHOLE = 20_000  # rows of a set that is looked at whole
_DRAWN = 10_000  # at most, of a larger one; about half of them evenly drawn
_CENTRES = 4  # best rows whose neighbours belong to a drawn pool
_STEPS_FROM_NEAR = 64


class Pool:
    """Rows, their one-hot form, and what was last thought of their success.

    `log_odds` (rows,) is the log probability of success, None before it is known; `judged_at` is for its owner.
    """

    def __init__(self, rows: FeasibleRows, members: Ints) -> None:
        self._rows = rows
        self.members = members
        self.log_odds: Floats | None = None
        self.judged_at = (-1, -1)

    @cached_property
    def hot(self) -> NDArray[np.float32]:
        """(members, all values)"""
        return self._rows.one_hot(self.members, np.float32)


class Pools:
    """Gives the pool for each fit: always the same one of all rows, or one drawn anew."""

    def __init__(self, rows: FeasibleRows, draw: np.random.Generator) -> None:
        self._rows, self._draw = rows, draw

    @cached_property
    def whole(self) -> Pool:
        return Pool(self._rows, np.arange(len(self._rows)))

    def of(self, best: list[int], foremost: Ints) -> Pool:
        """For a set of which `best` rows are the fastest known and `foremost` those that a prior likes best."""
        if len(self._rows) <= MOST_WHOLE:
            return self.whole
        near = [self._rows.neighbours(row) for row in best[:_CENTRES]] or [np.arange(0)]
        steps = np.unique(np.concatenate(near))[: _DRAWN // 4]
        wider = [self._rows.neighbours(int(row)) for row in near[0][:_STEPS_FROM_NEAR]]
        wider.insert(0, foremost[: _DRAWN // 8])
        rest = self._draw.choice(len(self._rows), _DRAWN // 2, replace=False)
        return Pool(self._rows, np.unique(np.concatenate([steps, *wider, rest]))[:_DRAWN])
