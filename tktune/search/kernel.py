"""How alike the times of two rows are: the covariance of the surrogate as tables over values, and its prior.

Knows nothing of observations.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from tktune.search.coordinates import FeasibleRows, Floats, Ints

_ROOT5 = float(np.sqrt(5.0))
# What is learnt, in logarithms (or logits), each with a normal prior (mean, standard deviation). Positions and
# alignments lie in 0..1, observations have a standard deviation of one.
_LENGTH = {"position": (-0.5, 0.8), "alignment": (0.7, 1.0)}
_DECAY = (-1.5, 1.0)  # between different choices
# The same of what a prior misses: it changes slowly along sizes and abruptly between choices, since a prior errs by
# the way a thing is done (through shared memory or not) rather than by how much of it is done.
_LENGTH_OF_MISSES = {"position": (0.2, 0.8), "alignment": (1.4, 1.0)}
_DECAY_OF_MISSES = (-0.75, 1.0)
_WEIGHT = (3.0, 1.0)  # logit: how much of what is known of one value says nothing of another
_SHARE = (-3.0, 1.0)  # logit: the share of effects that add up over parameters
# Variance of what no coordinate explains. It belongs to the row, so a row that was not measured may have it too: it
# counts in predictions. Repeated timings differ by a few percent at most.
_NUGGET = (-7.0, 1.5)


def prior(rows: FeasibleRows, share: float = _SHARE[0], *, of_misses: bool = False) -> tuple[Floats, Floats]:
    """Mean and standard deviation of `theta`: one entry a feature, one a parameter, the share, the nugget.

    `of_misses`: what is modelled is not log time but what a prior of it misses.
    """
    lengths, decay = (_LENGTH_OF_MISSES, _DECAY_OF_MISSES) if of_misses else (_LENGTH, _DECAY)
    parts = [lengths.get(feature.kind, decay) for feature in rows.features]
    parts += [_WEIGHT] * len(rows.sizes) + [(share, _SHARE[1]), _NUGGET]
    return np.array([mean for mean, _ in parts]), np.array([deviation for _, deviation in parts])


class Kernel:
    """(1 - share) x a product over parameters of C_p + share x their mean; variance one, without the nugget.

    C_p = 1 - weight + weight x Matern 5/2 in each distance (Rasmussen and Williams, Gaussian Processes for Machine
    Learning, 2006, eq. 4.17), exp(-decay) between different choices. The additive part is the first order of
    Duvenaud, Nickisch and Rasmussen, Additive Gaussian Processes, 2011.

    Sums over parameters of a table over values are matrix products with one-hot rows: `log_product` (M, M) is
    block diagonal with log C_p, `additive` (M, M) with C_p / parameters, M being the number of all values.
    """

    def __init__(self, rows: FeasibleRows, theta: Floats) -> None:
        self._rows = rows
        count = len(rows.sizes)
        alike = [np.zeros((size, size)) for size in rows.sizes]  # logarithms at first
        slopes: list[Floats] = []
        for feature, value in zip(rows.features, theta, strict=False):
            if feature.kind == "choice":
                slopes.append(-np.exp(value) * feature.gap)
                alike[feature.parameter] += slopes[-1]
            else:
                r = _ROOT5 * feature.gap * np.exp(-value)
                shape = 1 + r + r * r / 3
                alike[feature.parameter] += np.log(shape) - r
                slopes.append(r * r * (1 + r) / 3 / shape)
        total = int(rows.offsets[-1])
        self.log_product = np.zeros((total, total))
        self.additive = np.zeros((total, total))
        factors, weight_slopes = [], []
        weights = 1 / (1 + np.exp(-theta[len(slopes) : len(slopes) + count]))
        for p, weight in enumerate(weights):
            block, near = rows.block(p), np.exp(alike[p])
            c = 1 - weight + weight * near
            self.log_product[block, block] = np.log(c)
            self.additive[block, block] = c / count
            factors.append(weight * near / c)
            weight_slopes.append((near - 1) * weight * (1 - weight) / c)
        # d log C_p / d theta, a table over the values of each entry's parameter
        self.slopes = [slope * factors[f.parameter] for f, slope in zip(rows.features, slopes, strict=True)]
        self.slopes += weight_slopes
        self.share = float(1 / (1 + np.exp(-theta[-2])))
        self.nugget = float(np.exp(theta[-1]))

    @property
    def blocks(self) -> list[slice]:
        """The values that each of `slopes` speaks of."""
        parameters = [feature.parameter for feature in self._rows.features]
        return [self._rows.block(p) for p in [*parameters, *range(len(self._rows.sizes))]]

    def parts(self, one: NDArray[Any], other: NDArray[Any]) -> tuple[NDArray[Any], NDArray[Any]]:
        """Product and additive part between one-hot rows (n, M) and (m, M), each (n, m), in their precision."""
        product = (one @ self.log_product.astype(one.dtype)) @ other.T
        np.exp(product, out=product)
        return product, (one @ self.additive.astype(one.dtype)) @ other.T

    def between(self, one: NDArray[Any], other: NDArray[Any]) -> NDArray[Any]:
        """Covariance between one-hot rows, (n, m)."""
        product, additive = self.parts(one, other)
        product *= 1 - self.share
        additive *= self.share
        product += additive
        return product

    def from_row_to(self, row: int, hot: NDArray[np.float32]) -> NDArray[np.float32]:
        """Covariance of one row with one-hot rows (n, M), (n,): for many rows whose one-hot form is there already."""
        mine = self._rows.codes[row] + self._rows.offsets[:-1]
        words = np.stack([self.log_product[mine].sum(axis=0), self.additive[mine].sum(axis=0)], axis=1)
        logs, sums = (hot @ words.astype(np.float32)).T
        found: NDArray[np.float32] = np.float32(1 - self.share) * np.exp(logs) + np.float32(self.share) * sums
        return found

    def from_row(self, row: int, others: Ints | list[int]) -> Floats:
        """Covariance of one row with others, (n,), without one-hot rows."""
        here, codes = self._rows.codes[row], self._rows.codes[others]
        logs, sums = np.zeros(len(codes)), np.zeros(len(codes))
        for p, value in enumerate(here):
            block = self._rows.block(p)
            logs += self.log_product[block, block][value][codes[:, p]]
            sums += self.additive[block, block][value][codes[:, p]]
        found: Floats = (1 - self.share) * np.exp(logs) + self.share * sums
        return found
