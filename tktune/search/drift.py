"""Whether the machine itself has changed: an anchor config is measured again now and then, and later times are compared
by what it says. What is stored is always what was measured; the factor stands beside it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from statistics import median
from typing import Any

from tktune.core.config import Config
from tktune.gang.gang import Gang, Outcome
from tktune.search.judging import LEAST_BAND
from tktune.search.place import BuildPlace

EVERY_TRIALS = 20
EVERY_S = 60.0
DRIFT = "drift"  # the key in a trial's detail, and the kind of event
_LAUNCHES = 5
_LOOKS_TO_ADOPT = 3
_SIGMAS = 3.0
_OF_MEDIAN = 1.2533  # the standard error of a median, in those of a mean
_OF_QUARTILES = 0.7413  # a standard deviation, in interquartile ranges
_STEPS_KEPT = 8

Tell = Callable[[str, str, dict[str, Any]], None]


class DriftWatch:
    """Watches one anchor: the default where it passed, else the first config that did.

    `factor` is by how much launches are slower now than when the anchor was first measured (1.0 until the anchor moves
    beyond its noise band in two looks that follow each other); `moved`: that it did since. `tell` gets the kind of event, a
    sentence and its facts.
    """

    def __init__(self, gang: Gang, seed: int, tell: Tell) -> None:
        self._gang = gang
        self._seed = seed
        self._tell = tell
        self._place: BuildPlace | None = None
        self._config: Config | None = None
        self._is_default = False
        self._base_us: list[float] = []
        self._steps: list[float] = []
        self._last: float | None = None
        self._trials = 0
        self._looked_at = 0.0
        self.factor = 1.0
        self.moved = False
        self.looks = 0

    def passed(
        self, config: Config, place: BuildPlace, us: Sequence[float], *, is_default: bool, now_s: float
    ) -> None:
        """A config was measured (`us`: its launches). The first one, and later the default, becomes the anchor."""
        if not us or (self._config is not None and (self._is_default or not is_default)):
            return
        self._config, self._place, self._is_default = config, place, is_default
        self._base_us = [one / self.factor for one in us]
        self._steps, self._last, self._trials, self._looked_at = [], None, 0, now_s

    def adopt(self, config: Config, place: BuildPlace, base_us: Sequence[float], now_s: float) -> bool:
        """Watch the anchor of another device, on which it took `base_us`; from now on `factor` says how much slower
        this one is. False when the anchor could not be measured here."""
        self._config, self._place, self._is_default = config, place, True
        self._base_us = list(base_us)
        self._steps, self._last, self._trials, self._looked_at = [], None, 0, now_s
        us = [
            one for _ in range(_LOOKS_TO_ADOPT) for one in (self._measure() if self._config else None) or ()
        ]
        if self._config is None or not us:
            return False
        self.factor = self._ratio(us)
        self._last = math.log(self.factor)
        return True

    def ended(self) -> None:
        """A trial ended."""
        self._trials += 1

    def due(self, now_s: float) -> bool:
        """Whether the anchor should be looked at, and can be."""
        if self._config is None or self._place is None or self._place.artifact is None or not self._trials:
            return False
        return self._trials >= EVERY_TRIALS or now_s - self._looked_at >= EVERY_S

    def look(self, sigma: float, now_s: float) -> None:
        """Measure the anchor again. `sigma`: the relative standard deviation of one launch on this machine."""
        self._trials, self._looked_at = 0, now_s
        us = self._measure()
        if us is None:
            return
        band, ratio = self._band(sigma, len(us)), self._ratio(us)
        self._step(ratio)
        if abs(math.log(ratio / self.factor)) <= math.log1p(band):
            return
        again = self._measure()  # a burst of interference passes, a drift stays
        if again is None:
            return
        second = self._ratio(again)
        same_side = (ratio > self.factor) == (second > self.factor)
        if not same_side or abs(math.log(second / self.factor)) <= math.log1p(band):
            return
        ratio = self._ratio([*us, *again])
        before, self.factor, self.moved = self.factor, ratio, True
        self._last = math.log(ratio)
        self._say(before, band, [*us, *again])

    def _measure(self) -> list[float] | None:
        assert self._config is not None and self._place is not None and self._place.artifact is not None
        artifact = self._place.artifact
        outcome = self._gang.load(artifact.path, artifact.sha256, self._place.build)
        if outcome.ok:
            outcome = self._gang.time(self._config, "fused", self._seed, _LAUNCHES)
        self.looks += 1
        if outcome.ok and outcome.worst_us:
            return outcome.worst_us
        self._lost(outcome)
        return None

    def _lost(self, outcome: Outcome) -> None:
        self._tell(
            DRIFT,
            f"{self._config} passed before and ended as {outcome.status} when drift was looked for; "
            "another config is watched from now on.",
            {"config": dict(self._config or {}), "status": outcome.status, "sentence": outcome.sentence},
        )
        self._config = self._place = None
        self._is_default = False

    def _ratio(self, us: Sequence[float]) -> float:
        return median(us) / median(self._base_us)

    def _band(self, sigma: float, count: int) -> float:
        """Beyond what the anchor's own noise explains: of its launches, and of one look against the next."""
        error = _OF_MEDIAN * sigma * math.sqrt(1 / len(self._base_us) + 1 / count)
        if len(self._steps) >= 4:
            middle = median(self._steps)
            spread = median(abs(step - middle) for step in self._steps)
            error = max(error, 2 * _OF_QUARTILES * spread)
        return max(LEAST_BAND, _SIGMAS * error)

    def _step(self, ratio: float) -> None:
        """How far two looks that follow each other lie apart; a steady drift adds the same to each."""
        if self._last is not None:
            self._steps = [*self._steps, math.log(ratio) - self._last][-_STEPS_KEPT:]
        self._last = math.log(ratio)

    def _say(self, before: float, band: float, us: list[float]) -> None:
        who = "The default" if self._is_default else f"{self._config}"
        first, now = median(self._base_us), median(us)
        back = abs(self.factor - 1) <= LEAST_BAND
        after = (
            "that is as at the start, so times are compared as they are."
            if back
            else f"from now on times are compared after division by {self.factor:.3f}, and stored as measured."
        )
        if back:
            self.factor = 1.0
        self._tell(
            DRIFT,
            f"{who} takes {_microseconds(now)} now and took {_microseconds(first)} at first; it moved by "
            f"{now / (first * before) - 1:+.1%}, beyond its noise of {band:.1%}: {after}",
            {
                "config": dict(self._config or {}),
                "factor": self.factor,
                "before": before,
                "band": band,
                "first_us": first,
                "samples_us": us,
            },
        )


def _microseconds(us: float) -> str:
    return f"{us:.0f} µs" if us >= 1000 else f"{us:.4g} µs"
