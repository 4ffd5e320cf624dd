"""What things cost in seconds, learnt as they come: a build by its parameters, a load, a trial. Pure arithmetic."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from statistics import fmean, median

import numpy as np
from numpy.typing import NDArray

from tktune.core.config import Config, Value

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]

_UNKNOWN_BUILD_S = 5.0  # before any compile was seen; one batch later this says nothing any more
_UNKNOWN_TRIAL_S = 0.5
_DOUBT = 1.0  # compiles by which a value's own mean is drawn towards that of all
_SWEEPS = 3  # of backfitting; more change nothing that matters
_RECENT = 50  # trials whose seconds count


class BuildSeconds:
    """The seconds of a compile as a product of one factor a parameter value, shrunk towards 1 where little was seen.

    Additive in log seconds, fitted by backfitting (Hastie and Tibshirani, Generalized Additive Models, 1990).

    >>> seconds = BuildSeconds()
    >>> for stages in (1, 2, 3): seconds.note(Config(STAGES=stages, TILE=64), 10.0 * stages)
    >>> seconds.of(Config(STAGES=3, TILE=64)) > seconds.of(Config(STAGES=1, TILE=64))
    True
    """

    def __init__(self) -> None:
        self._seen: dict[Config, float] = {}
        self._number: dict[tuple[str, Value], int] = {}  # of each parameter value
        self._effects: Floats = np.zeros(0)  # of each, in log seconds
        self._codes: list[list[int]] = []  # of the values of each build seen
        self._middle = math.log(_UNKNOWN_BUILD_S)
        self._fitted = 0

    def __len__(self) -> int:
        return len(self._seen)

    def note(self, build: Config, seconds: float) -> None:
        """A compile took `seconds`, whether or not it gave an artifact."""
        if seconds > 0:
            if build not in self._seen:
                self._codes.append(self._coded(build))
            self._seen[build] = seconds

    def of(self, build: Config) -> float:
        """Expected seconds of a compile."""
        return float(self.of_coded(self.coded([build]))[0])

    def coded(self, builds: Sequence[Config]) -> Ints:
        """(builds, parameters): what `of_coded` takes, for builds that are asked for often."""
        return np.array([self._coded(build) for build in builds], np.int64).reshape(len(builds), -1)

    def of_coded(self, codes: Ints) -> Floats:
        """(builds,): expected seconds of a compile of each."""
        self._fit()
        seconds: Floats = np.exp(self._middle + self._effects[codes].sum(axis=1))
        return seconds

    def _coded(self, build: Config) -> list[int]:
        return [self._number.setdefault(item, len(self._number)) for item in build.items()]

    def _fit(self) -> None:
        if len(self._effects) < len(self._number):
            self._effects = np.concatenate([self._effects, np.zeros(len(self._number) - len(self._effects))])
        if len(self._seen) == self._fitted:
            return
        self._fitted = len(self._seen)
        logs = np.log(list(self._seen.values()))
        self._middle = float(logs.mean())
        effects = np.zeros(len(self._number))
        having: dict[int, list[int]] = defaultdict(list)
        for build, codes in enumerate(self._codes):
            for code in codes:
                having[code].append(build)
        members = [(code, np.array(builds)) for code, builds in having.items()]
        left = logs - self._middle  # what all effects together leave unexplained
        for _ in range(_SWEEPS):
            for code, builds in members:
                before = effects[code]
                effects[code] = (left[builds].sum() + before * len(builds)) / (len(builds) + _DOUBT)
                left[builds] -= effects[code] - before
        self._effects = effects


class Costs:
    """Seconds of builds, loads and trials. `jobs` compilers share the wall time of a batch."""

    def __init__(self, jobs: int, known_build_s: Mapping[Config, float] | None = None) -> None:
        self.jobs = max(1, jobs)
        self.builds = BuildSeconds()
        for build, seconds in (known_build_s or {}).items():
            self.builds.note(build, seconds)
        self._loads: list[float] = []
        self._trials: list[float] = []

    def note_load(self, seconds: float) -> None:
        """Opening another artifact than the one that was loaded took this long."""
        self._loads = [*self._loads, seconds][-_RECENT:]

    def note_trial(self, seconds: float) -> None:
        """A trial took this long without its load."""
        self._trials = [*self._trials, seconds][-_RECENT:]

    @property
    def load_s(self) -> float:
        return median(self._loads) if self._loads else 0.0

    @property
    def trial_s(self) -> float:
        return fmean(self._trials) if self._trials else _UNKNOWN_TRIAL_S

    def build_share_s(self, build: Config) -> float:
        """What one build of a full batch adds to the wall time."""
        return self.builds.of(build) / self.jobs

    def batch_s(self, builds: Iterable[Config]) -> float:
        """About how long a batch takes."""
        each = [self.builds.of(build) for build in builds]
        return max([sum(each) / self.jobs, *each], default=0.0)


def trial_price_s(trials_left: int | None, seconds_left: float | None, trial_s: float) -> float:
    """Seconds that a trial costs beyond its own, because trials are the scarcer part of the budget.

    Where the trials left would be used up long before the seconds left, each of them stands for its share of those.
    """
    if not trials_left or seconds_left is None or seconds_left <= 0:
        return 0.0
    return max(0.0, seconds_left / trials_left - trial_s)
