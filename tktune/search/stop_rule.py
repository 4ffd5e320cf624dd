"""When to stop a search: once another minute of it is expected to gain less than the tie band. Pure arithmetic.

`RecordGain` estimates from the record of trials alone. A sampler with a model of its own can offer a better estimate:
anything with `note` and `gain` (`GainEstimate`) takes its place.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Protocol

LEAST_TRIALS = 60  # before these, silence says nothing
LEAST_S = 15.0  # nor before these seconds, in which a fast machine has seen one corner of its space
MINUTE_S = 60.0
_LOWEST = 5  # order statistics whose spacing says how fine the bottom of the space is
_MOST_BAND = 0.02  # however noisy single launches are, the finals tell larger gains apart


_SOON = 0.8  # of the least seconds and trials


def may_speak_soon(run_s: float, trials: int, best_at: int) -> bool:
    """Whether a search of `trials` in `run_s` seconds may be ended before long: the later half of its trials was no better than
    the best one, which was number `best_at`."""
    return run_s >= _SOON * LEAST_S and trials >= _SOON * LEAST_TRIALS and 2 * best_at <= trials


class GainEstimate(Protocol):
    """What further trials are expected to gain."""

    def note(self, time_us: float | None) -> None:
        """The next trial's time in microseconds, comparable with the others'; None when it failed."""
        ...

    def gain(self, trials: float) -> float | None:
        """The fraction by which the best time is expected to fall in `trials` more; None while it cannot tell."""
        ...


class RecordGain:
    """The expected gain from improvements seen so far, by doublings of the trials.

    Of n trials drawn alike, the best one is in the later half once in two, whatever the distribution: improvements
    belong to doublings, not to trials. The next doubling is taken to gain what the last one did, or one of the last
    three on average if that is more, plus, since silence is no proof, ln 2 improvements of the size by which the five
    best times are apart; m further trials are log2(1 + m/n) doublings. Where the best falls as a power of n, each
    doubling gains less than the one before, so this errs towards going on.

    >>> gain = RecordGain()
    >>> for number in range(200): gain.note(100.0 + number % 50)
    >>> 0 < gain.gain(20) < 0.01
    True
    """

    def __init__(self) -> None:
        self._best: list[float] = []  # after each trial; infinite before the first success
        self._times: list[float] = []

    def __len__(self) -> int:
        return len(self._best)

    def note(self, time_us: float | None) -> None:
        last = self._best[-1] if self._best else math.inf
        self._best.append(last if time_us is None else min(last, time_us))
        if time_us is not None:
            self._times.append(time_us)

    def gain(self, trials: float) -> float | None:
        count = len(self._best)
        if len(self._times) < 2 * _LOWEST or not math.isfinite(self._best[count // 2]):
            return None
        seen = self._gained_since(count // 2)
        early = max(count // 8, _LOWEST)
        if math.isfinite(self._best[early]):
            seen = max(seen, self._gained_since(early) / math.log2(count / early))
        lowest = sorted(self._times)[:_LOWEST]
        spacing = math.log(lowest[-1] / lowest[0]) / (_LOWEST - 1)
        a_doubling = seen + math.log(2) * spacing
        return -math.expm1(-a_doubling * math.log2(1 + max(0.0, trials) / count))

    def _gained_since(self, trial: int) -> float:
        return math.log(self._best[trial] / self._best[-1])


class GreaterGain:
    """The greater of what the record and a model (`of_model`, see `choosing.Chooser.gain`) promise.

    A model of few trials is sure of what it has not seen; the record alone does not know what is left. Only when neither
    promises anything is silence believed.
    """

    def __init__(self, record: RecordGain, of_model: Callable[[float], float | None]) -> None:
        self._record = record
        self._of_model = of_model

    def note(self, time_us: float | None) -> None:
        self._record.note(time_us)

    def gain(self, trials: float) -> float | None:
        known = [gain for gain in (self._record.gain(trials), self._of_model(trials)) if gain is not None]
        return max(known, default=None)


class StopRule:
    """Whether to go on. It never speaks before `LEAST_TRIALS` trials and `LEAST_S` seconds, and ties are at least those of `least_band`."""

    def __init__(self, estimate: GainEstimate | None = None, least_band: float = 0.01) -> None:
        self.estimate: GainEstimate = RecordGain() if estimate is None else estimate
        self._least_band = least_band
        self._noted = 0

    def note(self, time_us: float | None) -> None:
        self._noted += 1
        self.estimate.note(time_us)

    def verdict(self, noise: float, trial_s: float, left: int | None, left_s: float | None) -> str:
        """Why to stop, as the rest of a sentence; "" to go on.

        `noise`: by how much two equal configs differ; `trial_s`: what a trial takes, builds included; `left` trials and
        `left_s` seconds remain of the budget or the space (None: no limit).
        """
        if self._noted < LEAST_TRIALS or self._noted * trial_s < LEAST_S:
            return ""
        seconds = MINUTE_S if left_s is None else min(MINUTE_S, max(0.0, left_s))
        trials = seconds / trial_s if trial_s > 0 else math.inf
        trials = trials if left is None else min(trials, left)
        if not math.isfinite(trials):
            return ""
        gain = self.estimate.gain(trials)
        band = max(self._least_band, min(noise, _MOST_BAND))
        if gain is None or gain >= band:
            return ""
        return (
            f"another minute is expected to gain {gain:.1%}, less than the tie band of {band:.1%}; "
            "--no-stop-early goes on."
        )
