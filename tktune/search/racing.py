"""Who earns more measuring: the margins by which a config or a build is clearly slower, and the order in which the launch
points of one build are swept. Nothing here measures.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from statistics import median, quantiles

from tktune.core.config import Config
from tktune.core.space import Space

# A config is clearly slower when its best first iteration is slower than the best config's median by the margin;
# a build whose first launch points are all slower by HOPELESS × the margin gets no more of them.
_LEAST_MARGIN, _MOST_MARGIN = 1.3, 2.0
_MARGIN_OF_SPREAD = 2.0
_SIGMA_OF_SPREAD = 0.7413  # a standard deviation, in interquartile ranges
_OF_MEDIAN = 1.2533  # the standard error of a median, in those of a mean
HOPELESS = 1.25
_POINTS_BEFORE_HOPELESS = 2
_FAILURES_BEFORE_CLOSED = 2


class RaceMargin:
    """By which factor a config must be slower to be clearly slower: at least 1.3, and more on a noisy machine.

    >>> margin = RaceMargin()
    >>> margin.note([100.0, 101.0, 150.0, 160.0])
    >>> margin.value > 1.3
    True
    """

    def __init__(self) -> None:
        self._spreads: list[float] = []

    def note(self, us: Sequence[float]) -> None:
        """The microseconds of one config's iterations; their quartiles tell how noisy the machine is."""
        if len(us) >= 4:
            low, _, high = quantiles(us, n=4)
            self._spreads.append((high - low) / median(us))

    @property
    def value(self) -> float:
        return min(max(_LEAST_MARGIN, 1 + _MARGIN_OF_SPREAD * self._spread), _MOST_MARGIN)

    @property
    def sigma(self) -> float:
        """The relative standard deviation of one launch, from the quartiles."""
        return _SIGMA_OF_SPREAD * self._spread

    def noise(self, iterations: int) -> float:
        """By how much the medians of two equal configs differ at most, nineteen times in twenty."""
        return 1.96 * math.sqrt(2 / iterations) * _OF_MEDIAN * self.sigma

    @property
    def _spread(self) -> float:
        return median(self._spreads) if self._spreads else 0.0


class LaunchSweep:
    """Hands out the launch points of one build: the one nearest to the default launch, the best launch of other
    builds, then steps around this build's best point, or while none passed the rest by the cost model.

    `points` are all feasible configs of the build. Points are handed out once; results come back by `tell`.
    """

    def __init__(
        self, space: Space, points: Sequence[Config], default: Config, cost_us: Mapping[Config, float]
    ) -> None:
        self._space = space
        self._left: dict[Config, None] = dict.fromkeys(points)
        self._launch = [p for p in space.parameters if p.kind == "launch"]
        self._cost = cost_us
        self._default = default
        self._handed = 0
        self.best: Config | None = None
        self.best_us: float | None = None
        self.told = 0
        self.failures = 0

    def __len__(self) -> int:
        """Points not handed out yet."""
        return len(self._left)

    def __contains__(self, config: Config) -> bool:
        """Whether this point is still to be had."""
        return config in self._left

    def drop(self, config: Config) -> None:
        """Never hand this point out (quarantined, or measured by an earlier run)."""
        self._left.pop(config, None)

    def tell(self, config: Config, time_us: float | None) -> None:
        """The time of a point in microseconds; None when it failed."""
        self.drop(config)
        self.told += 1
        if time_us is None:
            self.failures += 1
        elif self.best_us is None or time_us < self.best_us:
            self.best, self.best_us = config, time_us

    def closed(self) -> bool:
        """Whether the build itself seems broken: its points fail and none has passed."""
        return self.best is None and self.failures >= _FAILURES_BEFORE_CLOSED

    def hopeless(self, best_us: float | None, margin: float) -> bool:
        """Whether the build is so far behind `best_us` that its other launch points cannot win."""
        if best_us is None or self.best_us is None or self.told < _POINTS_BEFORE_HOPELESS:
            return False
        return self.best_us > best_us * HOPELESS * margin

    def next(self, like: Config | None) -> Config | None:
        """The next point, or None when all are out. `like` is the best config of any build so far."""
        if not self._left:
            return None
        if self.told == 0 and self._handed == 0:
            point = min(self._left, key=lambda c: self._apart(c, self._default))
        elif like is not None and self.told <= 1 and self._twin(like) is not None:
            point = self._twin(like) or next(iter(self._left))
        elif self.best is not None:
            best = self.best
            point = min(self._left, key=lambda c: (*self._apart(c, best), self._cost.get(c, 0.0)))
        else:
            point = min(self._left, key=lambda c: self._cost.get(c, 0.0))
        self._handed += 1
        self.drop(point)
        return point

    def _twin(self, like: Config) -> Config | None:
        """The point of this build that launches as `like` does, if it is still to be had."""
        launch = self._space.launch_part(like)
        return next((c for c in self._left if self._space.launch_part(c) == launch), None)

    def _apart(self, one: Config, other: Config) -> tuple[int, int]:
        """Launch parameters that differ, then steps along their listed values."""
        differ = steps = 0
        for p in self._launch:
            if one[p.name] != other[p.name]:
                differ += 1
                if one[p.name] in p.values and other[p.name] in p.values:
                    steps += abs(p.values.index(one[p.name]) - p.values.index(other[p.name]))
        return differ, steps


def model_seeds(
    builds: Mapping[Config, Sequence[Config]], cost_us: Mapping[Config, float], count: int
) -> list[Config]:
    """The `count` build parts whose best point the cost model likes most, best first."""
    estimate = {build: min(cost_us[point] for point in points) for build, points in builds.items()}
    return sorted(estimate, key=lambda build: (estimate[build], build.digest))[:count]
