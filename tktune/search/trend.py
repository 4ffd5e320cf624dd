"""What a prior expects of each row, laid beside what was measured: the mean that the surrogate starts from."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from tktune.search.coordinates import FeasibleRows, Floats, Ints

LEAST = 1e-9
# Before anything is measured: log times of a space have about this deviation.
_USUAL_SPREAD = 0.5
# A prior misses by about this share of its own spread, as surely as so many measurements would say it.
_USUAL_ERROR, _SURENESS = 0.5, 4.0
# Deviation of the factor by which a prior's differences turn out larger or smaller than it says (one).
_DISTRUST = 1.0
_UNKNOWN = 0.75  # rows without an estimate stand where the slowest quarter begins


@dataclass(frozen=True)
class Targets:
    """Log costs as the surrogate sees them.

    `values` (n,) is (log cost - `middle`) / `unit` less what the trend expects: (`prior` (rows,) + `level`) / unit (prior None:
    zero), of which values above `limit` were cut off as the log costs were; `best` is the least (log cost - middle) / unit.
    """

    values: Floats
    middle: float
    unit: float
    best: float
    prior: Floats | None
    level: float = 0.0
    limit: float = np.inf

    def expected_of(self, rows: Ints | slice) -> Floats | float:
        """What the trend expects of these rows, in units."""
        if self.prior is None:
            return 0.0
        expected: Floats = (self.prior[rows] + self.level) / self.unit
        return expected


class Trend:
    """`prior` (rows,): an estimate of each row's log cost up to a constant, NaN where there is none; or no prior.

    A prior's differences count as differences of log cost at first (a slope of one); the surrogate learns another
    slope, of either sign, from what is measured.
    """

    def __init__(self, rows: FeasibleRows, prior: Floats | None) -> None:
        self.expected: Floats | None = None
        self._rows, self._count = rows, len(rows)
        if prior is None or not np.isfinite(prior).any():
            return
        if len(prior) != len(rows):
            raise ValueError(f"a prior of {len(prior)} rows does not fit {len(rows)} rows")
        known = np.isfinite(prior)
        filled = np.where(known, prior, np.quantile(prior[known], _UNKNOWN))
        self._spread = float(filled.std())
        if self._spread > LEAST:
            self._middle = float(np.median(filled))
            self.expected = filled - self._middle

    @cached_property
    def foremost(self) -> Ints:
        """All rows, those that the prior expects most of first; none without a prior."""
        return np.arange(0) if self.expected is None else np.argsort(self.expected, kind="stable")

    @cached_property
    def basins(self) -> Ints:
        """Rows of which the prior expects more than of any row that differs in one parameter; best first.

        Of equals the first counts as the better one.
        """
        if self.expected is None:
            return self.foremost
        rank = np.empty(self._count, np.int64)
        rank[self.foremost] = np.arange(self._count)
        lowest = np.ones(self._count, bool)
        for groups in self._rows.lines():
            least = np.full(int(groups.max()) + 1, self._count)
            np.minimum.at(least, groups, rank)
            lowest &= rank == least[groups]
        return self.foremost[lowest[self.foremost]]

    def agreement(self, costs: Mapping[int, float]) -> float:
        """The rank correlation of what the prior expects with log `costs` by row; 1 where there is nothing to compare."""
        if self.expected is None or len(costs) < 2:
            return 1.0
        rows = np.fromiter(costs, np.int64)
        ranks = [np.unique(of, return_inverse=True)[1] for of in (self.expected[rows], [*costs.values()])]
        return 1.0 if min(of.max() for of in ranks) == 0 else float(np.asarray(np.corrcoef(ranks))[0, 1])

    def targets(self, observed: list[int], log_costs: Floats, clip: float) -> Targets:
        """Log costs above their median, at most `clip` x as far above it as the least is below."""
        if not len(log_costs):
            return self._unmeasured()
        middle = float(np.median(log_costs))
        y = log_costs - middle
        limit = clip * max(-float(y.min()), LEAST)
        y = np.minimum(y, limit)
        if self.expected is None:
            mean, unit = float(y.mean()), max(float(y.std()), LEAST)
            values = (y - mean) / unit
            return Targets(values, middle + mean, unit, float(values.min()), None)
        level = float(np.median(y - self.expected[observed]))
        missed = y - np.minimum(self.expected[observed] + level, limit)
        mean = float(missed.mean())
        squares = float(((missed - mean) ** 2).sum()) + _SURENESS * (_USUAL_ERROR * self._spread) ** 2
        unit = max(float(np.sqrt(squares / (len(y) + _SURENESS))), LEAST)
        return Targets(
            (missed - mean) / unit,
            middle + mean,
            unit,
            float((y.min() - mean) / unit),
            self.expected,
            level,
            limit / unit,
        )

    def _unmeasured(self) -> Targets:
        if self.expected is None:
            return Targets(np.zeros(0), 0.0, _USUAL_SPREAD, 0.0, None)
        unit = _USUAL_ERROR * self._spread
        return Targets(np.zeros(0), self._middle, unit, 0.0, self.expected)

    def columns(self, targets: Targets, level: float) -> Floats:
        """(rows, 1 or 2): how the whole may be off, `level` a deviation in units, and how the slope may."""
        column = np.full((self._count, 1), level)
        if targets.prior is None:
            return column
        expected = np.minimum(targets.expected_of(slice(None)), targets.limit)
        expected = expected - float(expected.mean())
        return np.column_stack([column, _DISTRUST * expected])
