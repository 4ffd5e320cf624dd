"""One way to look at what was measured: a surrogate kept up to date, and what each row promises by it.

Knows nothing of failures, of who measures what, or of Optuna.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from concurrent.futures import Executor, Future
from dataclasses import dataclass, field, replace

import numpy as np

from tktune.search.acquisition import log_expected_improvement
from tktune.search.coordinates import FeasibleRows, Floats, Ints
from tktune.search.kernel import prior as kernel_prior
from tktune.search.one_thread import one_thread
from tktune.search.pool import Pool, Pools
from tktune.search.surrogate import Surrogate
from tktune.search.trend import Targets, Trend

FEWEST_TIMES = 3  # successes that theta is learnt from
# Rows that a model is conditioned on, and that theta is learnt from: the best half and a random half of the others.
_MOST_OBSERVED, _MOST_LEARNT = 240, 128
_REFIT_GROWTH, _MOST_BETWEEN_FITS = 1.1, 24
_LEAST_ASIDE = 16  # below so many costs a fit is a matter of milliseconds, and each cost says much
_NO_VALUES = np.zeros(0)  # with these a model gives its deviation before scaling
_LEVEL = 2.0  # deviation of the mean of all log times, in deviations of what was seen


@dataclass(frozen=True)
class View:
    """Slow rows count as at most `clip` x as far above the median as the best is below; `share` is the prior logit of
    effects that add up over parameters."""

    clip: float
    share: float


@dataclass
class _Fit:
    """What a fit comes to: the pool, the rows it learnt from (`fitted`, chosen when `at` costs were known), and two models.

    Means come from what is done. What is pending narrows deviations alone, and stays where it is in the second model
    (`spread`) once it is done: in one model every row that is done would move all pending ones. `later` are the rows of the
    second model beyond the fit, in the order in which they came.
    """

    pool: Pool
    fitted: list[int]
    at: int
    model: Surrogate
    spread: Surrogate
    later: dict[int, None] = field(default_factory=dict)


class Outlook:
    """Mean, deviation and expected improvement of log cost, by one view.

    `costs` (log cost by row, in the order of tells) and `pending` rows are given with every question; theta is learnt
    anew, and a large set's pool drawn anew, when the costs have grown by a tenth. With an executor `aside` that is done
    there, and the last fit answers until the next one is there.
    """

    def __init__(
        self,
        view: View,
        rows: FeasibleRows,
        trend: Trend,
        pools: Pools,
        seed: int,
        aside: Executor | None = None,
    ) -> None:
        self._view, self._trend, self._pools = view, trend, pools
        self._draw = np.random.default_rng(seed)
        belief = kernel_prior(rows, view.share, of_misses=trend.expected is not None)
        self._fit = _Fit(Pool(rows, np.arange(0)), [], -1, Surrogate(rows, belief), Surrogate(rows, belief))
        self._aside = aside
        self._coming: Future[_Fit] | None = None
        self._looked_at: tuple[int, tuple[int, ...]] | None = None  # costs and pending rows of the last look
        self._seen: Targets | None = None  # what came of it

    @property
    def pool(self) -> Pool:
        """The rows that are looked at."""
        return self._fit.pool

    def look(
        self,
        costs: dict[int, float],
        pending: Iterable[int],
        dress: Callable[[Pool], None] = lambda pool: None,
    ) -> Targets:
        """Bring the model up to date: conditioned on `costs`, which only grow, and on `pending` rows as measured at their
        mean. `dress` is called aside with a pool that is drawn there."""
        at = len(costs), tuple(pending)
        if self._seen is None or at != self._looked_at:
            self._seen, self._looked_at = self._look(costs, at[1], dress), at
        return self._seen

    def _look(
        self, costs: dict[int, float], pending: tuple[int, ...], dress: Callable[[Pool], None]
    ) -> Targets:
        done = list(costs)
        if self._coming is not None and self._coming.done():
            self._fit, self._coming = self._coming.result(), None
        fit = self._fit
        limit = min(fit.at * _REFIT_GROWTH, fit.at + _MOST_BETWEEN_FITS)
        if len(done) > fit.at and len(done) >= int(limit) and self._coming is None:
            if self._aside is None or fit.at < _LEAST_ASIDE:
                fit = self._fit = self._fitted(costs, done, fit.model, fit.spread)
            else:
                self._coming = self._aside.submit(self._fitted_aside, dict(costs), done, pending, dress)
        followed = [*fit.fitted, *done[max(fit.at, 0) :]]
        fit.model.follow(followed)
        wanted = dict.fromkeys([*followed[len(fit.fitted) :], *pending])
        fit.later = {row: None for row in [*fit.later, *wanted] if row in wanted}
        fit.spread.follow([*fit.fitted, *fit.later])
        return self._targets(costs, done, followed)

    def log_improvement(self, targets: Targets, rows: Ints | None = None) -> Floats:
        """Log of expected improvement in `targets.unit`, of `rows` or of the pool."""
        if rows is None:
            mean, _ = self._fit.model.predict(targets.values)
            _, deviation = self._fit.spread.predict(_NO_VALUES)
            rows = self.pool.members
        else:
            mean, _ = self._fit.model.predict_rows(rows, targets.values)
            _, deviation = self._fit.spread.predict_rows(rows, _NO_VALUES)
        deviation = deviation * self._fit.model.scale(targets.values)
        return log_expected_improvement(mean + targets.expected_of(rows), deviation, targets.best)

    def predict(self, targets: Targets, rows: Ints) -> tuple[Floats, Floats]:
        """Mean and standard deviation of log cost."""
        mean, _ = self._fit.model.predict_rows(rows, targets.values)
        _, deviation = self._fit.spread.predict_rows(rows, _NO_VALUES)
        deviation = deviation * self._fit.model.scale(targets.values)
        return targets.middle + targets.unit * (mean + targets.expected_of(rows)), targets.unit * deviation

    def mean(self, targets: Targets, rows: Ints) -> Floats:
        """Mean of log cost alone, for many rows, while nothing is pending."""
        return targets.middle + targets.unit * (
            self._fit.model.mean_rows(rows, targets.values) + targets.expected_of(rows)
        )

    @one_thread()
    def _fitted_aside(
        self,
        costs: dict[int, float],
        done: list[int],
        pending: tuple[int, ...],
        dress: Callable[[Pool], None],
    ) -> _Fit:
        """As `_fitted`, while the last fit is asked."""
        now = self._fit
        found = self._fitted(costs, done, now.model.afresh(), now.spread.afresh())
        found.later = dict.fromkeys(pending)
        found.spread.follow([*found.fitted, *found.later])
        dress(found.pool)
        return found

    def _fitted(self, costs: dict[int, float], done: list[int], model: Surrogate, spread: Surrogate) -> _Fit:
        """A fit to all that is `done`, in these two models."""
        ranked = sorted(done, key=costs.__getitem__)
        pool = self._pools.of(ranked, self._trend.foremost)
        fitted = self._lesson(done, ranked, _MOST_OBSERVED)
        columns = self._trend.columns(self._targets(costs, done, done), _LEVEL)
        if len(done) >= FEWEST_TIMES:
            learnt = self._lesson(done, ranked, _MOST_LEARNT)
            y = self._targets(costs, done, learnt).values
            model.learn(learnt, y, columns[learnt], briefly=self._fit.at >= _MOST_LEARNT)
        spread.drop()
        model.condition(fitted, columns, pool.members, pool.hot)
        spread.become(model)
        return _Fit(pool, fitted, len(done), model, spread)

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
