"""One way to look at what was measured: a surrogate kept up to date, and what each row promises by it.

Knows nothing of failures, of who measures what, or of Optuna.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

import numpy as np

from tktune.search.acquisition import log_expected_improvement
from tktune.search.coordinates import FeasibleRows, Floats, Ints
from tktune.search.kernel import prior as kernel_prior
from tktune.search.pool import Pool, Pools
from tktune.search.surrogate import Surrogate
from tktune.search.trend import Targets, Trend

FEWEST_TIMES = 3  # successes that theta is learnt from
# Rows that a model is conditioned on, and that theta is learnt from: the best half and a random half of the others.
_MOST_OBSERVED, _MOST_LEARNT = 240, 128
_REFIT_GROWTH, _MOST_BETWEEN_FITS = 1.1, 24
_NO_VALUES = np.zeros(0)  # with these a model gives its deviation before scaling
_LEVEL = 2.0  # deviation of the mean of all log times, in deviations of what was seen


@dataclass(frozen=True)
class View:
    """Slow rows count as at most `clip` x as far above the median as the best is below; `share` is the prior logit of
    effects that add up over parameters."""

    clip: float
    share: float


class Outlook:
    """Mean, deviation and expected improvement of log cost, by one view.

    `costs` (log cost by row, in the order of tells) and `pending` rows are given with every question; theta is learnt
    anew, and a large set's pool drawn anew, when the costs have grown by a tenth.
    """

    def __init__(self, view: View, rows: FeasibleRows, trend: Trend, pools: Pools, seed: int) -> None:
        self._view, self._trend, self._pools = view, trend, pools
        self._draw = np.random.default_rng(seed)
        belief = kernel_prior(rows, view.share, of_misses=trend.expected is not None)
        # Means come from what is done. What is pending narrows deviations alone, and stays where it is in the second
        # model once it is done: in one model every row that is done would move all pending ones.
        self._model, self._spread = Surrogate(rows, belief), Surrogate(rows, belief)
        self._later: dict[
            int, None
        ] = {}  # rows of the second model beyond the last fit, in the order in which they came
        self._fitted: list[int] = []  # what the last fit learnt from
        self._fitted_at = -1
        self._looked_at: tuple[int, tuple[int, ...]] | None = None  # costs and pending rows of the last look
        self._seen: Targets | None = None  # what came of it
        self.pool = Pool(rows, np.arange(0))

    def look(self, costs: dict[int, float], pending: Iterable[int]) -> Targets:
        """Bring the model up to date: conditioned on `costs`, which only grow, and on `pending` rows as measured at their
        mean."""
        at = len(costs), tuple(pending)
        if self._seen is None or at != self._looked_at:
            self._seen, self._looked_at = self._look(costs, at[1]), at
        return self._seen

    def _look(self, costs: dict[int, float], pending: Iterable[int]) -> Targets:
        done = list(costs)
        limit = min(self._fitted_at * _REFIT_GROWTH, self._fitted_at + _MOST_BETWEEN_FITS)
        if len(done) > self._fitted_at and len(done) >= int(limit):
            self._refit(costs, done)
        followed = [*self._fitted, *done[max(self._fitted_at, 0) :]]
        self._model.follow(followed)
        wanted = dict.fromkeys([*followed[len(self._fitted) :], *pending])
        self._later = {row: None for row in [*self._later, *wanted] if row in wanted}
        self._spread.follow([*self._fitted, *self._later])
        return self._targets(costs, done, followed)

    def log_improvement(self, targets: Targets, rows: Ints | None = None) -> Floats:
        """Log of expected improvement in `targets.unit`, of `rows` or of the pool."""
        if rows is None:
            mean, _ = self._model.predict(targets.values)
            _, deviation = self._spread.predict(_NO_VALUES)
            rows = self.pool.members
        else:
            mean, _ = self._model.predict_rows(rows, targets.values)
            _, deviation = self._spread.predict_rows(rows, _NO_VALUES)
        deviation = deviation * self._model.scale(targets.values)
        return log_expected_improvement(mean + targets.expected_of(rows), deviation, targets.best)

    def predict(self, targets: Targets, rows: Ints) -> tuple[Floats, Floats]:
        """Mean and standard deviation of log cost."""
        mean, _ = self._model.predict_rows(rows, targets.values)
        _, deviation = self._spread.predict_rows(rows, _NO_VALUES)
        deviation = deviation * self._model.scale(targets.values)
        return targets.middle + targets.unit * (mean + targets.expected_of(rows)), targets.unit * deviation

    def mean(self, targets: Targets, rows: Ints) -> Floats:
        """Mean of log cost alone, for many rows, while nothing is pending."""
        return targets.middle + targets.unit * (
            self._model.mean_rows(rows, targets.values) + targets.expected_of(rows)
        )

    def _refit(self, costs: dict[int, float], done: list[int]) -> None:
        ranked = sorted(done, key=costs.__getitem__)
        self.pool = self._pools.of(ranked, self._trend.foremost)
        briefly = self._fitted_at >= _MOST_LEARNT
        self._fitted, self._fitted_at = self._lesson(done, ranked, _MOST_OBSERVED), len(done)
        columns = self._trend.columns(self._targets(costs, done, done), _LEVEL)
        if len(done) >= FEWEST_TIMES:
            learnt = self._lesson(done, ranked, _MOST_LEARNT)
            y = self._targets(costs, done, learnt).values
            self._model.learn(learnt, y, columns[learnt], briefly=briefly)
        self._spread.drop()
        self._model.condition(self._fitted, columns, self.pool.members, self.pool.hot)
        self._spread.become(self._model)
        self._later = {}

    def _targets(self, costs: dict[int, float], done: list[int], wanted: list[int]) -> Targets:
        """Of all that was measured, with the values of `wanted` alone, in that order."""
        targets = self._trend.targets(done, np.fromiter(costs.values(), float), self._view.clip)
        value_of = dict(zip(done, targets.values, strict=True))
        return replace(targets, values=np.array([value_of[row] for row in wanted]))

    def _lesson(self, done: list[int], ranked: list[int], most: int) -> list[int]:
        """All that is done, or its best half of `most` and others at random."""
        if len(done) <= most:
            return done
        half = most // 2
        others = self._draw.choice(len(ranked) - half, most - half, replace=False) + half
        return ranked[:half] + [ranked[i] for i in sorted(others)]
