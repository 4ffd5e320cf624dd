"""What a row promises: its expected improvement, and rows worth knowing before there is a model."""

from __future__ import annotations

import numpy as np

from tktune.search.coordinates import FeasibleRows, Floats, Ints

_CANDIDATES = 256
_FAR = -4.0  # deviations from where the difference of two small numbers says nothing any more


def log_expected_improvement(mean: Floats, deviation: Floats, best: float) -> Floats:
    """log E[max(best - Y, 0)] for normal Y, right also far in the tail.

    Jones, Schonlau and Welch, Efficient Global Optimization, 1998, eq. 15, in logarithms (Ament et al., Unexpected
    Improvements to Expected Improvement, 2023).
    """
    z = (best - mean) / deviation
    density = np.exp(-0.5 * z * z) / np.sqrt(2 * np.pi)
    with np.errstate(all="ignore"):
        near = np.log(density + z * _normal_below(z, density))
        # density x (1 - z M(z)) with Mills' ratio M: 1/z^2 - 3/z^4 + ... (Abramowitz and Stegun 26.2.12)
        far = -0.5 * (z * z + np.log(2 * np.pi)) - 2 * np.log(np.abs(z)) - np.log1p(3 / (z * z))
    found: Floats = np.log(deviation) + np.where(z > _FAR, near, far)
    return found


def _normal_below(z: Floats, density: Floats) -> Floats:
    """The normal distribution function to 7.5e-8 (Abramowitz and Stegun 26.2.17)."""
    t = 1 / (1 + 0.2316419 * np.abs(z))
    series = t * (0.319381530 + t * (-0.356563782 + t * (1.781477937 + t * (-1.821255978 + t * 1.330274429))))
    return np.where(z > 0, 1 - density * series, density * series)


def spread_out(
    rows: FeasibleRows,
    left: Ints,
    taken: list[int],
    draw: np.random.Generator,
    log_odds: Floats | None = None,
) -> int:
    """A row of `left` that is far from those taken, among a few hundred; at first one in the middle.

    `log_odds` (left,) is added to the logarithm of its squared distance: unlikely rows must be the farther.
    """
    place = draw.choice(len(left), size=min(_CANDIDATES, (len(left) + 1) // 2), replace=False)
    points = rows.positions(left[place])
    if not taken:
        return int(left[place[np.argmin(np.abs(points - np.median(points, axis=0)).sum(axis=1))]])
    nearest = np.full(len(place), np.inf)
    for other in rows.positions(taken[-_CANDIDATES:]):
        nearest = np.minimum(nearest, ((points - other) ** 2).sum(axis=1))
    merit = np.log(nearest + 1e-9)
    if log_odds is not None:
        merit = merit + log_odds[place]
    return int(left[place[np.argmax(merit)]])
