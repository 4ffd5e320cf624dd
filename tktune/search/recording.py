"""A recorded space as facts: what every config of it came to, what building and running it cost, and its truth.

Nothing here reads files, measures or replays: `recording_form` is the file, `replay_rooms` the stand-in for a device.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from statistics import quantiles
from typing import Any

from tktune.core import status
from tktune.core.config import Config, Value
from tktune.core.device import DeviceClass
from tktune.core.errors import WordsError
from tktune.core.feasible import FeasibleSet, WaterfallRow
from tktune.core.policy import Policy
from tktune.core.problem import Problem
from tktune.core.space import Constraint, Parameter, Space


@dataclass(frozen=True)
class RecordedBuild:
    """One artifact: what its compile took, how it ended, and what is known of it (`facts`: registers, bytes …)."""

    build: Config
    build_s: float
    status: str = status.OK
    sentence: str = ""
    facts: Mapping[str, int] = field(default_factory=dict)

    @property
    def ok(self) -> bool:
        return self.status == status.OK


@dataclass(frozen=True)
class SampleSummary:
    """The slowest rank's launches of one trial in microseconds: how many, least, quartiles, most."""

    count: int
    least_us: float
    low_us: float
    high_us: float
    most_us: float


@dataclass(frozen=True)
class RecordedTrial:
    """One config: how its trial ended, its median in microseconds (None without one), and where its seconds went.

    `run_s` is the whole trial without the build; `load_s`, `gate_s` and `time_s` are parts of it. `model_us` is what
    the family's cost model said of it, None where it has none.
    """

    config: Config
    status: str
    time_us: float | None
    run_s: float
    load_s: float = 0.0
    gate_s: float = 0.0
    time_s: float = 0.0
    samples: SampleSummary | None = None
    model_us: float | None = None
    sentence: str = ""

    @property
    def timed(self) -> bool:
        """Whether a replay can time it: it passed, or was only stopped early."""
        return self.status in (status.OK, status.CENSORED) and self.time_us is not None


@dataclass(frozen=True)
class Recording:
    """Everything measured of one space, whole: one trial for each feasible config.

    `iterations` and `gates` are how many launches and gates a whole trial had; `build_jobs` how many compilers ran at
    once. `toolchain` is (kind, version, flags).
    """

    name: str
    problem: Problem
    device: DeviceClass
    policy: Policy
    toolchain: tuple[str, str, tuple[str, ...]]
    parameters: tuple[Parameter, ...]
    default: Config
    builds: Mapping[Config, RecordedBuild]
    trials: Mapping[Config, RecordedTrial]
    iterations: int
    gates: int
    build_jobs: int = 1

    def __post_init__(self) -> None:
        values = {p.name: frozenset(p.values) for p in self.parameters}
        for config in self.trials:
            if set(config) != set(values) or any(config[name] not in values[name] for name in config):
                raise WordsError(f"The recording's config {config} does not fit its parameters.", _MEND)
            if self.build_part(config) not in self.builds:
                raise WordsError(f"The recording lacks the build of {config}.", _MEND)
        if not any(trial.timed for trial in self.trials.values()):
            raise WordsError("The recording has no config that was timed.", "Record a space that runs.")
        if self.default not in self.trials:
            raise WordsError(f"The recording lacks its default {self.default}.", _MEND)

    @cached_property
    def build_names(self) -> tuple[str, ...]:
        return tuple(p.name for p in self.parameters if p.kind == "build")

    def build_part(self, config: Config) -> Config:
        return config.only(self.build_names)

    @cached_property
    def optimum(self) -> RecordedTrial:
        """The fastest config that was timed; the first of equals."""
        timed = [trial for trial in self.trials.values() if trial.timed]
        return min(timed, key=lambda trial: (trial.time_us or 0.0, trial.config.digest))

    def space(self) -> RecordedSpace:
        return RecordedSpace(self, self.parameters, ())


_MEND = "Record it anew; a recording is not made to be edited."


class RecordedSpace(Space):
    """The space of a recording: feasible is what was recorded, so nothing is enumerated twice."""

    def __init__(self, recording: Recording, parameters: Sequence[Parameter], pinned: Sequence[str]) -> None:
        self.recording = recording

        def missing(config: Config, problem: Problem, device: DeviceClass) -> str | None:
            return None if config in recording.trials else "it is not in the recording"

        recorded = Constraint("recorded", "the recording has it", missing)
        super().__init__(
            recording.problem, recording.device, parameters, [recorded], recording.default, None, pinned
        )

    def restrict(self, pins: Mapping[str, Sequence[Value]]) -> RecordedSpace:
        narrowed = super().restrict(pins)
        return RecordedSpace(self.recording, narrowed.parameters, narrowed.pinned)

    def enumerate(self) -> FeasibleSet:
        allowed = {p.name: frozenset(p.values) for p in self.parameters}
        kept = [
            config
            for config in self.recording.trials
            if not self.pinned or all(config[name] in values for name, values in allowed.items())
        ]
        removed = self.size - len(kept)
        row = WaterfallRow("recorded", "the recording has it", removed, len(kept), "")
        return FeasibleSet(tuple(kept), self.size, (row,))


class NamedProblem(Problem):
    """A problem that stands for someone else's kernel: it is shown by a name, and its shapes mean nothing."""

    def __str__(self) -> str:
        return self.family


def plain_facts(facts: Mapping[str, Any]) -> dict[str, int]:
    """The whole numbers among what is known of an artifact: all that ties and reports need."""
    return {
        name: value for name, value in facts.items() if isinstance(value, int) and not isinstance(value, bool)
    }


def summary_of(us: Sequence[float]) -> SampleSummary | None:
    """The summary of a trial's launches, None when there were none."""
    if not us:
        return None
    low, _, high = quantiles(us, n=4, method="inclusive") if len(us) > 1 else (us[0],) * 3
    return SampleSummary(len(us), min(us), low, high, max(us))
