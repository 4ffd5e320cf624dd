"""The A/A noise floor: how far two measurements of one and the same config lie apart on this machine, now."""

from __future__ import annotations

import statistics
from dataclasses import dataclass

from tktune.core.config import Config
from tktune.core.errors import GangError
from tktune.gang.gang import Gang

# A difference of two like measurements stays within 1.96 σ nineteen times in twenty, and the median of its size is
# 0.6745 σ. The median is used for σ because one disturbed comparison must not widen every tie band.
BAND_OVER_MEDIAN = 1.96 / 0.6745


@dataclass(frozen=True)
class NoiseFloor:
    """`relative`: nineteen of twenty A/A comparisons differ by less (0.02 is 2 %).

    `differences`: |median A − median B| ÷ the smaller, one a comparison. `samples`: (comparison, half 0 or 1,
    slowest rank's microseconds).
    """

    relative: float
    differences: tuple[float, ...]
    samples: tuple[tuple[int, int, float], ...]


def noise_floor(
    gang: Gang,
    config: Config,
    *,
    seed: int = 0,
    comparisons: int = 7,
    rounds: int = 4,
    iterations: int = 2,
) -> NoiseFloor:
    """Measure the loaded `config` against itself, as finalists are measured: in interleaved rounds.

    A comparison has two halves of `rounds` × `iterations` launches each, taken in turns, first A B, then B A,
    so that a drift falls on both. Raises `GangError` when a launch fails.
    """
    differences: list[float] = []
    samples: list[tuple[int, int, float]] = []
    for comparison in range(comparisons):
        halves: tuple[list[float], list[float]] = ([], [])
        for turn in range(rounds):
            for half in (0, 1) if turn % 2 == 0 else (1, 0):
                outcome = gang.time(config, "fused", seed, iterations)
                if not outcome.ok:
                    raise GangError(
                        f"The noise floor could not be measured. {outcome.sentence}", "Run it once more."
                    )
                halves[half].extend(outcome.worst_us)
                samples += [(comparison, half, us) for us in outcome.worst_us]
        differences.append(relative_difference(*halves))
    relative = BAND_OVER_MEDIAN * statistics.median(differences)
    return NoiseFloor(relative, tuple(differences), tuple(samples))


def relative_difference(one_us: list[float], other_us: list[float]) -> float:
    """|median − median| ÷ the smaller median."""
    one, other = statistics.median(one_us), statistics.median(other_us)
    return abs(one - other) / min(one, other)
