"""The model of log time: a Gaussian process over a pool of rows, grown one observation at a time.

Knows nothing of failures, of what is proposed next or of Optuna.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tktune.search.coordinates import FeasibleRows, Floats, Ints
from tktune.search.kernel import Kernel
from tktune.search.minimise import minimise

# Inverse gamma prior of the process variance: so many observations, of so much squared deviation in all.
_FREEDOM, _SQUARES = 2.0, 2.0
_FIT_STEPS, _LATER_STEPS = 12, 4
_ROOM = 32  # rows by which the factor grows
_AT_ONCE = 4  # from so many on, rows are added together: products of matrices instead of as many of vectors
_LEAST_VARIANCE = 1e-6  # single precision does not hold less


def fit(
    rows: FeasibleRows,
    observed: list[int],
    y: Floats,
    trend: Floats,
    start: Floats,
    belief: tuple[Floats, Floats],
    steps: int = _FIT_STEPS,
) -> Floats:
    """Theta of nearly the highest posterior density, from `start`, given observations `y` (n,).

    The process variance is integrated out (Rasmussen and Williams, section 5.4.1 for the slopes). `trend` (n, T)
    has columns whose outer products are added to the covariance: the level, and what a prior says. `belief` is
    mean and standard deviation of theta.
    """
    hot = rows.one_hot(observed)
    mean, deviation = belief
    base = trend @ trend.T
    count = len(y)
    freedom = count + _FREEDOM

    def value_and_slope(theta: Floats) -> tuple[float, Floats]:
        kernel = Kernel(rows, theta)
        product, additive = kernel.parts(hot, hot)
        k = base + (1 - kernel.share) * product + kernel.share * additive
        k[np.diag_indices(count)] += kernel.nugget
        try:
            lower = np.linalg.cholesky(k)
        except np.linalg.LinAlgError:
            return np.inf, np.zeros_like(theta)
        inverse = np.linalg.inv(k)
        pull = inverse @ y
        squares = _SQUARES + float(y @ pull)
        gap = (theta - mean) / deviation
        value = 0.5 * freedom * np.log(squares) + float(np.log(np.diag(lower)).sum()) + 0.5 * float(gap @ gap)
        w = np.outer(pull, pull) * (freedom / squares) - inverse
        by_value = hot.T @ (w * product) @ hot * (1 - kernel.share)
        by_value += hot.T @ w @ hot * kernel.additive * kernel.share
        slope = [
            float((by_value[block, block] * table).sum())
            for block, table in zip(kernel.blocks, kernel.slopes, strict=True)
        ]
        slope.append(float((w * (additive - product)).sum()) * kernel.share * (1 - kernel.share))
        slope.append(float(np.trace(w)) * kernel.nugget)
        return value, gap / deviation - 0.5 * np.array(slope)

    return minimise(value_and_slope, start, steps, lower=mean - 3 * deviation, upper=mean + 3 * deviation)


class Surrogate:
    """Mean and deviation of every row of a pool, kept up to date as observations come.

    Times do not repeat exactly, but nearly: what no coordinate explains (the nugget) is taken for a property of the row,
    and adds to the deviation of rows not measured.

    With L the Cholesky factor of the observations' covariance, it keeps L^-1 and V = L^-1 K(observed, pool), so that
    an observation costs one row of each (n x pool operations), not a new factor. Memory: n x pool x 4 bytes; the rows of V
    that the last `condition` made are never changed, and shared by models that began from each other.
    """

    _kernel: Kernel
    _trend: Floats
    _pool: Ints
    _pool_trend: NDArray[np.float32]
    _hot: NDArray[np.float32]
    _variance: NDArray[Any]

    def __init__(self, rows: FeasibleRows, belief: tuple[Floats, Floats]) -> None:
        """`belief` as for `fit`."""
        self._rows, self._belief = rows, belief
        self._theta = belief[0]
        self.observed: list[int] = []
        self.drop()

    def drop(self) -> None:
        """Forget every row, and give back what they take: before `condition` or `become`."""
        self.observed = []
        self._inverse: Floats = np.zeros((0, 0))
        self._base: NDArray[np.float32] = np.zeros((0, 0), np.float32)
        self._later: NDArray[np.float32] = self._base

    def learn(self, observed: list[int], y: Floats, trend: Floats, *, briefly: bool) -> None:
        """Learn theta from observations `y` (n,); `trend` (n, T) as for `fit`. `briefly`: it is nearly known."""
        steps = _LATER_STEPS if briefly else _FIT_STEPS
        self._theta = fit(self._rows, observed, y, trend, self._theta, self._belief, steps)

    def afresh(self) -> Surrogate:
        """A model without rows, with what theta is known here: another thread may make it ready while this one is asked."""
        found = Surrogate(self._rows, self._belief)
        found._theta = self._theta
        return found

    def become(self, other: Surrogate) -> None:
        """Start anew as `other` is now; from here on each follows its own rows."""
        self._theta, self._kernel, self._trend = other._theta, other._kernel, other._trend
        self._pool, self._pool_trend, self._hot = other._pool, other._pool_trend, other._hot
        self._inverse, self._variance = other._inverse.copy(), other._variance.copy()
        self._base, self._later = other._base, other._later.copy()  # rows of the base never change
        self.observed = list(other.observed)

    def scale(self, y: Floats) -> float:
        """The deviation of the process, by the values (m,) of the first m observed rows: what deviations are multiples of."""
        count = len(y)
        weights = self._inverse[:count, :count] @ y
        return float(np.sqrt((_SQUARES + float(weights @ weights)) / (_FREEDOM + count)))

    def condition(self, observed: list[int], trend: Floats, pool: Ints, hot: NDArray[np.float32]) -> None:
        """Start anew from these observed rows, with what theta is known. `trend` is (rows, T), `hot` (pool, values)."""
        self.drop()
        self._trend = trend
        self._kernel = Kernel(self._rows, self._theta)
        self._pool, self._pool_trend, self._hot = pool, self._trend[pool].astype(np.float32), hot
        count, room = len(observed), len(observed) + _ROOM
        trend = self._trend[observed]
        own = self._rows.one_hot(observed)
        k = self._kernel.between(own, own) + trend @ trend.T
        k[np.diag_indices(count)] += self._kernel.nugget
        self._inverse = np.zeros((room, room))
        self._inverse[:count, :count] = np.tril(np.linalg.inv(np.linalg.cholesky(k)))
        cross = self._kernel.between(own.astype(np.float32), hot)
        cross += trend.astype(np.float32) @ self._pool_trend.T
        self._base = self._inverse[:count, :count].astype(np.float32) @ cross
        self._later = np.empty((_ROOM, len(pool)), np.float32)
        self._variance = 1 + self._kernel.nugget + np.einsum("ij,ij->i", self._pool_trend, self._pool_trend)
        self._variance -= np.einsum("ij,ij->j", self._base, self._base)
        self.observed = list(observed)

    def follow(self, rows: Sequence[int]) -> None:
        """Condition on exactly `rows`, in this order, keeping what is already there."""
        same = 0
        for have, want in zip(self.observed, rows, strict=False):
            if have != want:
                break
            same += 1
        while len(self.observed) > same:
            self.observed.pop()
            count = len(self.observed)
            if count < len(self._base):
                self._variance += self._base[count] ** 2
                self._base = self._base[:count]
            else:
                self._variance += self._later[count - len(self._base)] ** 2
        new = list(rows[same:])
        if len(new) >= _AT_ONCE and self._push_all(new):
            return
        for row in new:
            self._push(row)

    def _make_room(self, more: int) -> None:
        count = len(self.observed)
        if count - len(self._base) + more > len(self._later):
            self._later = np.concatenate(
                [self._later, np.empty((max(_ROOM, more), len(self._pool)), np.float32)]
            )
        if count + more > len(self._inverse):
            room = len(self._inverse) + max(_ROOM, more)
            wider = np.zeros((room, room))
            wider[:count, :count] = self._inverse[:count, :count]
            self._inverse = wider

    def _push_all(self, rows: list[int]) -> bool:
        """As `_push` for each; False, with nothing changed, where they are too much alike for a factor of their own."""
        count, more = len(self.observed), len(rows)
        own, trend = self._rows.one_hot(rows), self._trend[rows]
        inverse = self._inverse[:count, :count]
        known = self._kernel.between(self._rows.one_hot(self.observed), own)
        known += self._trend[self.observed] @ trend.T
        lower = inverse @ known
        k = self._kernel.between(own, own) + trend @ trend.T - lower.T @ lower
        k[np.diag_indices(more)] += self._kernel.nugget
        try:
            corner = np.tril(np.linalg.inv(np.linalg.cholesky(k)))
        except np.linalg.LinAlgError:
            return False
        self._make_room(more)
        self._inverse[count : count + more, :count] = -corner @ (lower.T @ inverse)
        self._inverse[count : count + more, count : count + more] = corner
        at, held = count - len(self._base), len(self._base)
        cross = self._kernel.between(own.astype(np.float32), self._hot)
        cross += trend.astype(np.float32) @ self._pool_trend.T
        light = lower.T.astype(np.float32)
        cross -= light[:, :held] @ self._base
        if at:
            cross -= light[:, held:] @ self._later[:at]
        self._later[at : at + more] = corner.astype(np.float32) @ cross
        self._variance -= np.einsum("ij,ij->j", self._later[at : at + more], self._later[at : at + more])
        self.observed += rows
        return True

    def _push(self, row: int) -> None:
        count = len(self.observed)
        at = count - len(self._base)
        self._make_room(1)
        trend = self._trend[row]
        known = self._kernel.from_row(row, self.observed) + self._trend[self.observed] @ trend
        inverse = self._inverse[:count, :count]
        lower = inverse @ known
        own = 1 + float(trend @ trend) + self._kernel.nugget
        diagonal = float(np.sqrt(max(own - float(lower @ lower), self._kernel.nugget)))
        self._inverse[count, :count] = -(lower @ inverse) / diagonal
        self._inverse[count, count] = 1 / diagonal
        cross = self._kernel.from_row_to(row, self._hot) + self._pool_trend @ trend
        self._later[at] = (cross - self._times_v(lower)) / diagonal
        self._variance -= self._later[at] ** 2
        self.observed.append(row)

    def predict(self, y: Floats) -> tuple[Floats, Floats]:
        """Mean and standard deviation (pool,) given values (m,) of the first m observed rows.

        Rows beyond m count as measured at their mean: they narrow the deviation only.
        """
        weights = self._inverse[: len(y), : len(y)] @ y
        return self._times_v(weights).astype(np.float64), self._deviation(self._variance, y)

    def predict_rows(self, rows: Ints, y: Floats) -> tuple[Floats, Floats]:
        """The same for any rows, in double precision; costs (observations^2 x rows) operations."""
        count = len(self.observed)
        cross = self._kernel.between(self._rows.one_hot(self.observed), self._rows.one_hot(rows))
        cross += self._trend[self.observed] @ self._trend[rows].T
        v = self._inverse[:count, :count] @ cross
        variance = 1 + self._kernel.nugget + np.einsum("ij,ij->i", self._trend[rows], self._trend[rows])
        variance -= np.einsum("ij,ij->j", v, v)
        weights = self._inverse[: len(y), : len(y)] @ y
        return weights @ v[: len(y)], self._deviation(variance, y)

    def mean_rows(self, rows: Ints, y: Floats) -> Floats:
        """The mean alone, for as many values as observed rows; costs (observations x rows) operations."""
        count = len(self.observed)
        inverse = self._inverse[:count, :count]
        pull = inverse.T @ (inverse @ y)
        own, hot = self._rows.one_hot(self.observed, np.float32), self._rows.one_hot(rows, np.float32)
        mean: Floats = pull @ self._kernel.between(own, hot)
        mean += (pull @ self._trend[self.observed]) @ self._trend[rows].T
        return mean

    def _times_v(self, weights: Floats) -> NDArray[np.float32]:
        """(pool,): the first rows of V, as many as there are `weights`, each times its weight."""
        held, light = len(self._base), weights.astype(np.float32)
        found: NDArray[np.float32] = light[:held] @ self._base[: len(weights)]
        if len(weights) > held:
            found += light[held:] @ self._later[: len(weights) - held]
        return found

    def _deviation(self, variance: NDArray[Any], y: Floats) -> Floats:
        deviation: Floats = self.scale(y) * np.sqrt(np.maximum(variance.astype(np.float64), _LEAST_VARIANCE))
        return deviation
