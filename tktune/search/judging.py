"""Paired statistics over interleaved rounds and the choice inside the tie band; pure arithmetic, no measuring."""

from __future__ import annotations

import math
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import median

from tktune.core.config import Config

LEAST_BAND = 0.01  # ratios closer than this are ties whatever the noise (design: Judging)
NOISY = 0.05  # A/A noise of medians above which the best launches may judge instead
_RESAMPLES = 1000


@dataclass(frozen=True)
class Verdict:
    """The chosen config, its median in microseconds, and why. `ratios` are paired medians over the fastest one."""

    config: Config
    time_us: float
    band: float
    reason: str
    ratios: Mapping[Config, float]


def paired_ratio(ones: Sequence[float], others: Sequence[float]) -> float:
    """exp(median of log(one ÷ other)) over rounds measured side by side; both in the same unit, same length."""
    return math.exp(median(math.log(a / b) for a, b in zip(ones, others, strict=True)))


def measured_noise(ones: Sequence[float], again: Sequence[float], seed: int = 0) -> float:
    """A/A noise: how far the paired ratio of one config against itself strays from 1.

    The 95th percentile of |median of log ratios| over bootstrap resamples of the rounds, as a fraction. Needs at
    least one round; with fewer than three it is the largest deviation seen.
    """
    logs = [math.log(a / b) for a, b in zip(ones, again, strict=True)]
    if len(logs) < 3:
        return math.expm1(max(abs(value) for value in logs))
    draw = random.Random(seed)
    strays = sorted(abs(median(draw.choices(logs, k=len(logs)))) for _ in range(_RESAMPLES))
    return math.expm1(strays[int(0.95 * _RESAMPLES)])


def steadier(
    medians: tuple[Sequence[float], Sequence[float]], bests: tuple[Sequence[float], Sequence[float]]
) -> tuple[float, bool]:
    """The A/A noise that judges, and whether it is that of the best launches of each round.

    Medians judge. Where two equal arms' medians are noisy, the statistic with the smaller noise does: interference
    only ever makes a launch slower, so on a disturbed machine that is the best launch.
    """
    of_medians = measured_noise(*medians)
    if of_medians <= NOISY:
        return of_medians, False
    of_bests = measured_noise(*bests)
    return (of_bests, True) if of_bests < of_medians else (of_medians, False)


def tie_band(noise: float) -> float:
    """The fraction inside which two configs count as equal: the larger of 1 % and the measured noise."""
    return max(LEAST_BAND, noise)


def choose(
    rounds: Mapping[Config, Sequence[float]],
    default: Config | None,
    resources: Mapping[Config, tuple[int, ...]],
    band: float,
) -> Verdict:
    """The winner among configs measured in the same rounds (`rounds[c][i]`: median of round i, microseconds).

    Inside the tie band a fixed order decides: default, then fewer resources, then digest. Whoever is chosen is
    never slower than the default beyond the band. Raises ValueError when `rounds` is empty.
    """
    if not rounds:
        raise ValueError("no config was measured")

    def rank(config: Config) -> tuple[bool, tuple[int, ...], str]:
        return config != default, resources.get(config, ()), config.digest

    medians = {config: median(times) for config, times in rounds.items()}
    best = min(medians, key=lambda config: (medians[config], rank(config)))
    ratios = {config: paired_ratio(times, rounds[best]) for config, times in rounds.items()}
    tied = [config for config, ratio in ratios.items() if ratio <= 1 + band]
    base = None if default is None else rounds.get(default)
    versus = {} if base is None else {config: paired_ratio(rounds[config], base) for config in tied}
    if base is not None and default not in tied:
        tied = [config for config in tied if versus[config] <= 1] or [best]
    chosen = min(tied, key=rank)
    if default is not None and versus.get(chosen, 1.0) > 1 + band:
        chosen = default
    reason = _reason(chosen, best, default, rounds, ratios, versus, len(tied), band)
    return Verdict(chosen, medians[chosen], band, reason, ratios)


def _reason(
    chosen: Config,
    best: Config,
    default: Config | None,
    rounds: Mapping[Config, Sequence[float]],
    ratios: Mapping[Config, float],
    versus: Mapping[Config, float],
    tied: int,
    band: float,
) -> str:
    count = len(rounds[chosen])
    width = f"the tie band of {band:.1%}"
    if chosen == default:
        if best == default:
            return f"the default is the fastest of {len(rounds)} finalists in {count} rounds"
        return f"the default is within {width} of the fastest ({ratios[chosen] - 1:+.1%}), and ties go to it"
    gain = ""
    if default in rounds and default is not None:
        faster = sum(a < b for a, b in zip(rounds[chosen], rounds[default], strict=True))
        gain = f"{1 / versus[chosen]:.2f} × as fast as the default in the median round, faster in {faster} of {count}"
    reason = gain or f"the fastest of {len(rounds)} finalists in {count} rounds"
    if tied > 1:
        reason += f"; {tied} finalists are within {width}, and it takes the fewest resources of them"
    return reason
