"""The model of success: how likely a row is to build, launch and pass, learnt from the rows that did not."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from tktune.search.coordinates import FeasibleRows, Floats

_ROOT5 = float(np.sqrt(5.0))
# Variances of the log odds: their level, straight lines along positions (a resource is a product of sizes, so a
# sum of their logarithms), steps at single values, and what is particular to a corner of the set.
_LEVEL, _LINE, _STEP, _CORNER = 4.0, 16.0, 4.0, 4.0
_LENGTH = 0.5
_USUAL = 2.0  # log odds before anything is known: seven of eight succeed
_NEWTON_STEPS = 12
_STILL = 1e-2  # of the log odds


@dataclass(frozen=True)
class Lesson:
    """What outcomes taught: the one-hot rows that were seen (n, all values), and how each pulls the log odds (n,)."""

    seen: Floats
    pull: Floats


class SuccessModel:
    """Gaussian process classification by Laplace's approximation (Rasmussen and Williams, algorithm 3.1).

    The covariance is fixed: failures are too few to learn it from. Limits on resources are straight lines in
    logarithms of sizes, which few failures settle; the rest of the covariance holds what is not such a limit.
    """

    def __init__(self, rows: FeasibleRows) -> None:
        self._rows = rows
        total = int(rows.offsets[-1])
        self._additive = np.zeros((total, total))
        self._log_product = np.zeros((total, total))
        for p in range(len(rows.sizes)):
            block = rows.block(p)
            for feature in (f for f in rows.features if f.parameter == p):
                if feature.kind == "choice":
                    self._log_product[block, block] -= feature.gap
                else:
                    r = _ROOT5 * feature.gap / _LENGTH
                    self._log_product[block, block] += np.log(1 + r + r * r / 3) - r
            gaps = sum(f.gap for f in rows.features if f.parameter == p)
            first = next(f for f in rows.features if f.parameter == p)
            line = 2 * first.gap[0] - 1 if first.kind == "position" else np.linspace(-1, 1, rows.sizes[p])
            self._additive[block, block] = _STEP * np.exp(-gaps / _LENGTH) + _LINE * np.outer(line, line)
        self._additive /= max(len(rows.sizes), 1) ** 0.5

    def probability(
        self, observed: list[int], succeeded: NDArray[np.bool_], hot: NDArray[np.float32]
    ) -> Floats:
        """Of success, for each of the one-hot rows `hot`, given which of `observed` succeeded."""
        return self.by(self.lesson(observed, succeeded), hot)

    def lesson(self, observed: list[int], succeeded: NDArray[np.bool_]) -> Lesson:
        """Learn from which of `observed` succeeded; costs observed^3 operations a few times."""
        own = self._rows.one_hot(observed)
        k = _LEVEL + own @ self._additive @ own.T + _CORNER * np.exp(own @ self._log_product @ own.T)
        odds = np.zeros(len(observed))
        pull = np.zeros(len(observed))
        for _ in range(_NEWTON_STEPS):
            p = _logistic(odds + _USUAL)
            w = p * (1 - p)
            root = np.sqrt(w)
            b = w * odds + succeeded - p
            inner = np.eye(len(observed)) + root[:, None] * k * root[None]
            pull = b - root * np.linalg.solve(inner, root * (k @ b))
            moved, odds = odds, k @ pull
            if np.abs(odds - moved).max() < _STILL:
                break
        return Lesson(own, pull)

    def by(self, lesson: Lesson, hot: NDArray[np.float32]) -> Floats:
        """Probability of success by a lesson, for each of the one-hot rows `hot`."""
        own, pull = lesson.seen, lesson.pull
        corner = hot @ (self._log_product @ own.T).astype(np.float32)
        np.exp(corner, out=corner)
        mean = _USUAL + _LEVEL * float(pull.sum()) + corner @ (_CORNER * pull).astype(np.float32)
        mean += hot @ (self._additive @ (own.T @ pull)).astype(np.float32)
        return _logistic(mean.astype(np.float64))


def _logistic(odds: Floats) -> Floats:
    found: Floats = 1 / (1 + np.exp(-np.clip(odds, -30, 30)))
    return found
