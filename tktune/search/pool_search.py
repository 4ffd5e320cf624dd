"""Decides which row of a feasible set is measured next, from what the others cost and from what a prior says.

Rows are numbers here; configs, Optuna and the driver are not known.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from tktune.search.acquisition import log_expected_improvement, spread_out
from tktune.search.coordinates import FeasibleRows, Floats, Ints
from tktune.search.kernel import prior
from tktune.search.success import SuccessModel
from tktune.search.surrogate import Surrogate

_DESIGN = 6  # rows before the model chooses
_BEST_OF_PRIOR = 0.1  # the share of rows that a prior's first rows are spread over
_FEWEST_TIMES = 3  # successes that a model needs
# Beyond this many rows a pool is drawn: what is around the best rows and a random rest.
_MOST_POOLED = 20_000
_CENTRES = 4
_MOST_OBSERVED = 240  # rows that a fit learns from: the best half and a random half of the others
_REFIT_GROWTH, _MOST_BETWEEN_FITS = 1.1, 24
_SUCCESSES_BETWEEN_FITS = 8
_LEVEL = 2.0  # deviation of the mean of all log times, in deviations of what was seen
_TRUST = 1.0  # deviation of the slope of log times over the prior, of either sign
_LEAST_SCALE = 1e-9
# Where all that is left promises little, logarithms of improvement differ by more than any probability; so rows
# that rather fail than not come after all others.
_EVEN, _LAST = float(np.log(0.5)), 1e9


@dataclass(frozen=True)
class _View:
    """One way to look at the times. Slow rows count as at most `clip` x as far above the median as the best is below;
    `share` is the prior logit of effects that add up."""

    clip: float
    share: float


# All rows as they are; and the fast half alone, whose differences are small beside those of the slow half.
_WHOLE, _FAST = _View(np.inf, -3.0), _View(0.5, 0.0)
# Whose word counts in turn, and whether among all rows or among those one step from the best.
_TURNS = ((_FAST, False), (_WHOLE, False), (_FAST, True), (_WHOLE, False))


class PoolSearch:
    """Proposes rows, never one that was proposed or told before. The same seed and calls give the same rows.

    `prior` (rows,) is an estimate of each row's log cost up to a linear map, NaN where it has none; its best
    comes first, and the next few from its best tenth for as long as it agrees with what is measured. It enters the
    model as a trend whose slope, of either sign, is learnt.
    """

    def __init__(self, rows: FeasibleRows, seed: int, prior: Floats | None = None) -> None:
        self._rows = rows
        self._draw = np.random.default_rng(seed)
        self._free = np.ones(len(rows), bool)
        self._standing = None if prior is None else _standardised(prior)
        trend = np.full((len(rows), 1 if prior is None else 2), _LEVEL)
        if self._standing is not None:
            trend[:, 1] = _TRUST * self._standing
        self._models = {view: _model(rows, trend, view) for view in (_WHOLE, _FAST)}
        self._success = SuccessModel(rows)
        self._pool: Ints = np.arange(0)
        self._hot = np.zeros((0, 0), np.float32)
        self._log_odds: Floats | None = None
        self._log_odds_at = 0
        self._failures_seen = 0
        self._cost: dict[int, float] = {}  # log cost by row, in the order of tells
        self._failed: list[int] = []
        self._pending: list[int] = []
        self._fitted: list[int] = []  # what the last fit learnt from
        self._fitted_at = 0

    def __len__(self) -> int:
        """Rows not proposed nor told yet."""
        return int(np.count_nonzero(self._free))

    def tell(self, row: int, cost: float | None) -> None:
        """What a row cost (> 0, any unit), None when it failed. Also for rows it did not propose."""
        self.take(row)
        self._pending.remove(row)
        if cost is None:
            self._failed.append(row)
        else:
            self._cost[row] = float(np.log(cost))

    def take(self, row: int) -> None:
        """Somebody measures this row: never propose it."""
        self._free[row] = False
        if row not in self._pending:
            self._pending.append(row)

    def release(self, row: int) -> None:
        """Nobody measures this row after all."""
        self._free[row] = True
        self._pending.remove(row)

    def choose(self) -> int:
        """The next row; it counts as being measured until it is told. Raises IndexError when none is left."""
        left = np.flatnonzero(self._free)
        if not len(left):
            raise IndexError("every row was proposed")
        turn = len(self._cost) + len(self._failed) + len(self._pending)
        if turn < _DESIGN or len(self._cost) < _FEWEST_TIMES:
            row = self._opening(left, turn)
        else:
            row = self._promising(*_TURNS[turn % len(_TURNS)])
        self.take(row)
        return row

    def _opening(self, left: Ints, turn: int) -> int:
        if self._standing is not None and turn < _DESIGN:
            if turn == 0:
                return int(left[np.argmin(self._standing[left])])
            if self._prior_agrees():
                best = left[self._standing[left] <= np.quantile(self._standing, _BEST_OF_PRIOR)]
                left = best if len(best) else left
        odds = None
        if self._failed:
            left = left if len(left) <= _MOST_POOLED else self._draw.choice(left, _MOST_POOLED, replace=False)
            observed, succeeded = self._outcomes()
            odds = np.log(
                self._success.probability(observed, succeeded, self._rows.one_hot(left, np.float32))
            )
        taken = [*self._cost, *self._failed, *self._pending]
        return spread_out(self._rows, left, taken, self._draw, odds)

    def _prior_agrees(self) -> bool:
        """Whether what was measured rises with the prior."""
        standing = (
            np.array([self._standing[row] for row in self._cost])
            if self._standing is not None
            else np.zeros(0)
        )
        costs = np.fromiter(self._cost.values(), float)
        return len(costs) > 1 and float((standing - standing.mean()) @ (costs - costs.mean())) > 0

    def _promising(self, view: _View, near_best: bool) -> int:
        values = self._promise(view)
        free = self._free[self._pool]
        if near_best:
            best = min(self._cost, key=self._cost.__getitem__)
            near = free & np.isin(self._pool, self._rows.neighbours(best))
            free = near if near.any() else free
        if not free.any():  # only where the pool was drawn
            return int(self._draw.choice(np.flatnonzero(self._free)))
        return int(self._pool[np.argmax(np.where(free, values, -np.inf))])

    def _promise(self, view: _View) -> Floats:
        """Log of expected improvement times probability of success, up to a constant, for each row of the pool."""
        done = list(self._cost)
        limit = min(self._fitted_at * _REFIT_GROWTH, self._fitted_at + _MOST_BETWEEN_FITS)
        if len(done) > self._fitted_at and len(done) >= int(limit):
            self._refit(done)
        y = self._targets(view)
        followed = [*self._fitted, *done[self._fitted_at :]]
        model = self._models[view]
        model.follow([*followed, *self._pending])
        value_of = dict(zip(done, y, strict=True))
        mean, deviation = model.predict(np.array([value_of[row] for row in followed]))
        values = log_expected_improvement(mean, deviation, float(y.min()))
        if not self._failed:
            return values
        odds = self._odds()
        return values + odds - _LAST * (odds < _EVEN)

    def _refit(self, done: list[int]) -> None:
        self._draw_pool(done)
        self._fitted, self._fitted_at = self._lesson(done), len(done)
        for view, model in self._models.items():
            value_of = dict(zip(done, self._targets(view), strict=True))
            model.refit(
                self._fitted, np.array([value_of[row] for row in self._fitted]), self._pool, self._hot
            )

    def _targets(self, view: _View) -> Floats:
        """Log costs of all successes in the order of tells, standardised."""
        y = np.fromiter(self._cost.values(), float)
        y = y - np.median(y)
        y = np.minimum(y, view.clip * max(float(-y.min()), _LEAST_SCALE))
        found: Floats = (y - y.mean()) / max(float(y.std()), _LEAST_SCALE)
        return found

    def _lesson(self, done: list[int]) -> list[int]:
        if len(done) <= _MOST_OBSERVED:
            return list(done)
        ranked = sorted(done, key=self._cost.__getitem__)
        half = _MOST_OBSERVED // 2
        others = self._draw.choice(len(ranked) - half, _MOST_OBSERVED - half, replace=False) + half
        return ranked[:half] + [ranked[i] for i in sorted(others)]

    def _draw_pool(self, done: list[int]) -> None:
        if len(self._rows) <= _MOST_POOLED:
            if not len(self._pool):
                self._pool = np.arange(len(self._rows))
                self._hot = self._rows.one_hot(self._pool, np.float32)
            return
        centres = sorted(done, key=self._cost.__getitem__)[:_CENTRES]
        near = [self._rows.neighbours(row) for row in centres]
        steps = np.unique(np.concatenate(near))[: _MOST_POOLED // 4]
        wider = [self._rows.neighbours(int(row)) for row in near[0][:64]]
        rest = self._draw.choice(len(self._rows), _MOST_POOLED // 2, replace=False)
        if self._standing is not None:
            wider.append(np.argsort(self._standing, kind="stable")[: _MOST_POOLED // 8])
        self._pool = np.unique(np.concatenate([steps, np.concatenate(wider)[: _MOST_POOLED // 4], rest]))
        self._hot = self._rows.one_hot(self._pool, np.float32)
        self._log_odds = None

    def _outcomes(self) -> tuple[list[int], NDArray[np.bool_]]:
        """Rows that succeeded or failed; of each at most half of what a fit learns from, the latest."""
        half = _MOST_OBSERVED // 2
        good, bad = list(self._cost)[-half:], self._failed[-half:]
        return good + bad, np.arange(len(good) + len(bad)) < len(good)

    def _odds(self) -> Floats:
        """Log probability of success of the pool, learnt anew after each failure and now and then."""
        told = len(self._cost) + len(self._failed)
        stale = (
            len(self._failed) != self._failures_seen or told >= self._log_odds_at + _SUCCESSES_BETWEEN_FITS
        )
        if self._log_odds is None or stale:
            observed, succeeded = self._outcomes()
            self._log_odds = np.log(self._success.probability(observed, succeeded, self._hot))
            self._log_odds_at, self._failures_seen = told, len(self._failed)
        return self._log_odds


def _model(rows: FeasibleRows, trend: Floats, view: _View) -> Surrogate:
    return Surrogate(rows, trend, prior(rows, view.share))


def _standardised(prior: Floats) -> Floats:
    """Mean zero, deviation one; rows without an estimate count as slow as the slowest quarter begins."""
    known = np.isfinite(prior)
    if not known.any():
        return np.zeros(len(prior))
    filled = np.where(known, prior, np.quantile(prior[known], 0.75))
    found: Floats = (filled - filled.mean()) / max(float(filled.std()), _LEAST_SCALE)
    return found
