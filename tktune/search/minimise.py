"""A small bounded quasi-Newton minimiser, for a few dozen parameters and a few dozen steps; numpy only."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from tktune.search.coordinates import Floats

_MEMORY = 8
_ENOUGH = 1e-4  # Armijo's constant
_LEAST_GAIN = 1e-3


def minimise(
    value_and_slope: Callable[[Floats], tuple[float, Floats]],
    start: Floats,
    steps: int,
    *,
    lower: Floats,
    upper: Floats,
) -> Floats:
    """The best point found in at most `steps` steps; never worse than `start`.

    L-BFGS with backtracking, projected on the bounds (Nocedal and Wright, Numerical Optimization, algorithm 7.4).
    Stops when a step gains less than a thousandth, or when no step gains.
    """
    x = np.clip(start, lower, upper)
    value, slope = value_and_slope(x)
    pairs: list[tuple[Floats, Floats]] = []
    for _ in range(steps):
        held = ((x <= lower) & (slope > 0)) | ((x >= upper) & (slope < 0))
        direction = -_times_inverse_curvature(pairs, np.where(held, 0.0, slope))
        direction[held] = 0.0
        if float(direction @ slope) >= 0:
            pairs.clear()
            direction = np.where(held, 0.0, -slope)
        if not pairs:
            direction /= max(1.0, float(np.abs(direction).max()))
        direction = np.clip(direction, -1.5, 1.5)
        length = 1.0
        for _ in range(8):
            new = np.clip(x + length * direction, lower, upper)
            new_value, new_slope = value_and_slope(new)
            if new_value <= value + _ENOUGH * float(slope @ (new - x)):
                break
            length *= 0.3
        else:
            if not pairs:
                break
            pairs.clear()
            continue
        moved, turned = new - x, new_slope - slope
        if float(moved @ turned) > 1e-10:
            pairs = [*pairs[-_MEMORY + 1 :], (moved, turned)]
        gain = value - new_value
        x, value, slope = new, new_value, new_slope
        if gain < _LEAST_GAIN:
            break
    return x


def _times_inverse_curvature(pairs: list[tuple[Floats, Floats]], slope: Floats) -> Floats:
    """The two-loop recursion."""
    q = slope.copy()
    used = []
    for moved, turned in reversed(pairs):
        rho = 1 / float(moved @ turned)
        a = rho * float(moved @ q)
        q -= a * turned
        used.append((a, rho))
    if pairs:
        moved, turned = pairs[-1]
        q *= float(moved @ turned) / float(turned @ turned)
    for (moved, turned), (a, rho) in zip(pairs, reversed(used), strict=True):
        q += moved * (a - rho * float(turned @ q))
    return q
