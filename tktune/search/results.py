"""What a run gives back for one problem, and the rooms below that a run works with."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from tktune.core.config import Config
from tktune.core.device import DeviceClass
from tktune.core.policy import Policy
from tktune.core.problem import Problem
from tktune.families.base import Family, family
from tktune.gang.gang import Gang
from tktune.gang.trial import TrialResult, measure_trial
from tktune.search.attribution import Attribution
from tktune.search.building import Builder
from tktune.search.sampler import SamplerMaker
from tktune.search.seats import seats_of


@dataclass(frozen=True)
class Rooms:
    """The rooms below that a run works with; replaced in tests and by other samplers or executors.

    `make_gang(problem, device, policy, device_indices=…)` is called for each of `seats(problem, device)`: the device
    indices of gangs that may measure side by side. `make_sampler` stands in for the study's sampler (None: that). With
    `overlap` ranks start, and the driver decides and prepares, while others are measured, on backends where that
    disturbs no timing; False where a clock is virtual.
    """

    make_gang: Callable[..., Gang] = Gang
    measure: Callable[..., TrialResult] = measure_trial
    make_sampler: SamplerMaker | None = None
    make_builder: Callable[..., Builder] = Builder
    family: Callable[[str], Family] = family
    clock: Callable[[], float] = time.monotonic
    seats: Callable[[Problem, DeviceClass], Sequence[tuple[int, ...]]] = seats_of
    overlap: bool = True


@dataclass(frozen=True)
class TuneResult:
    """What a run came to for one problem.

    `winner` is None when no config finished; `sentence` then says why and the way out. Times are medians of the
    last verification, in microseconds. `resumed` counts configs that earlier runs had measured, `measured` and
    `builds` what this run did; `ended` says why the search ended. `verified`: finalists were measured by this run.
    """

    problem: Problem
    device: DeviceClass
    policy: Policy
    winner: Config | None
    time_us: float | None
    default: Config
    default_us: float | None
    reason: str
    resumed: int
    measured: int
    builds: int
    seconds: float
    stopped: bool
    ended: str
    verified: bool = False
    attribution: Attribution | None = None
    sentence: str = ""

    @property
    def speedup(self) -> float | None:
        """Default time ÷ winner time, both of the same interleaved rounds."""
        return self.default_us / self.time_us if self.default_us and self.time_us else None
