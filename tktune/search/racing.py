"""Who earns more measuring: by what margin a config is clearly slower, from how noisy launches are. Nothing here measures."""

from __future__ import annotations

import math
from collections.abc import Sequence
from statistics import median, quantiles

# A config is clearly slower when each of its first launches is slower than the best config's launch of the same
# number by the margin. Three launches of an equal config are all that slow once in ten thousand times.
_LEAST_MARGIN, _MOST_MARGIN = 1.05, 2.0
_MARGIN_OF_SPREAD = 2.0
_SIGMA_OF_SPREAD = 0.7413  # a standard deviation, in interquartile ranges
_OF_MEDIAN = 1.2533  # the standard error of a median, in those of a mean
# Modified z-scores beyond this are outliers (Iglewicz and Hoaglin, How to Detect and Handle Outliers, 1993).
_OUTLYING = 3.5
_MAD_OF_SIGMA = 0.6745


def trimmed(us: Sequence[float]) -> list[float]:
    """Without outliers on the slow side: interference only ever makes a launch slower.

    >>> trimmed([100.0, 101.0, 99.0, 100.0, 400.0])
    [100.0, 101.0, 99.0, 100.0]
    """
    middle = median(us)
    spread = median(abs(one - middle) for one in us)
    if spread <= 0:
        return list(us)
    return [one for one in us if _MAD_OF_SIGMA * (one - middle) / spread <= _OUTLYING]


class RaceMargin:
    """By which factor a config must be slower to be clearly slower: at least 1.05, and more on a noisy machine.

    >>> margin = RaceMargin()
    >>> margin.note([100.0, 101.0, 150.0, 160.0])
    >>> margin.value > 1.05
    True
    """

    def __init__(self) -> None:
        self._spreads: list[float] = []
        self._floor = 0.0

    def floor(self, relative: float, launches: int) -> None:
        """The measured A/A noise: medians of `launches` launches of one config differ by up to `relative`."""
        self._floor = relative * math.sqrt(launches)

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
        """By how much the medians of two equal configs differ at most, nineteen times in twenty.

        The larger of what one trial's launches say of each other and what the A/A comparison measured.
        """
        launches = 1.96 * math.sqrt(2 / iterations) * _OF_MEDIAN * self.sigma
        return max(launches, self._floor / math.sqrt(iterations))

    @property
    def _spread(self) -> float:
        return median(self._spreads) if self._spreads else 0.0
