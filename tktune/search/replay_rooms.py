"""The rooms of a replay: a clock that only moves when something is charged, a cache, a gang and a family that answer
from a recording. No compiler, no device, no rank; `replay` puts them under the driver.
"""

from __future__ import annotations

import hashlib
import heapq
import itertools
import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

from tktune.build.artifact import Artifact, BuildOutcome
from tktune.build.toolchain import Toolchain
from tktune.core import status
from tktune.core.build_spec import BuildSpec
from tktune.core.canonical import digest
from tktune.core.config import Config
from tktune.core.device import DeviceClass
from tktune.core.errors import GangError
from tktune.core.problem import Problem
from tktune.core.roles import Role, RoleModel
from tktune.families.base import RankSeat, Workbench
from tktune.gang.gang import Outcome
from tktune.gang.limits import RENEW_AFTER_LOADS, renewal
from tktune.search.building import Builder, Finished
from tktune.search.events import Listener
from tktune.search.recording import RecordedBuild, RecordedSpace, RecordedTrial, Recording

DRIFT_S = 30.0
_RENEWAL = 20.0  # a load that took so many times the usual one had a fresh gang started in its midst
_LEAST_FACTOR = 0.5  # noise never makes a launch faster than this share of its time
_KILLED = "The recording passed here; the replay was asked to let some configs fail."


@dataclass
class VirtualClock:
    """Seconds that were charged. Called like `time.monotonic`."""

    now: float = 0.0

    def __call__(self) -> float:
        return self.now

    def charge(self, seconds: float) -> None:
        self.now += seconds

    def wait_until(self, moment: float) -> None:
        self.now = max(self.now, moment)


@dataclass(frozen=True)
class Disturbance:
    """How a replay differs from its recording, the same for the same seed.

    `noise`: the standard deviation of one launch, as a fraction. `failures`: the share of configs that fail although
    they passed (wrong, crashed, hung, or crashed once). `drift`: the fraction by which launches have become slower
    after `drift_s` charged seconds, evenly until then and for good.
    """

    noise: float = 0.0
    failures: float = 0.0
    drift: float = 0.0
    drift_s: float = DRIFT_S
    seed: int = 0

    def drifted(self, now: float) -> float:
        share = 1.0 if self.drift_s <= 0 else min(1.0, now / self.drift_s)
        return 1 + self.drift * share

    def fails(self, config: Config) -> str:
        """How `config` is made to end: a status, "once" (it crashes the first time), or "" when it is left alone."""
        draw = random.Random(f"failure {self.seed} {config.digest}")
        if draw.random() >= self.failures:
            return ""
        return draw.choice((status.WRONG, status.CRASHED, status.timeout("time"), "once"))

    def lets_pass(self, config: Config) -> bool:
        return self.fails(config) in ("", "once")


class ReplayFamily:
    """The pure half of a recorded kernel; it has no other."""

    def __init__(self, recording: Recording) -> None:
        self.name = recording.problem.family
        self._recording = recording

    def space(self, problem: Problem, device: DeviceClass) -> RecordedSpace:
        return self._recording.space()

    def roles(self, config: Config, problem: Problem, device: DeviceClass) -> RoleModel:
        return RoleModel((Role("recorded", 1),), 4, 2.0)  # what a rule refused says so in its recorded status

    def cost_us(self, config: Config, problem: Problem, device: DeviceClass) -> float:
        return self._recording.trials[config].model_us or 1.0

    def build_spec(self, build_part: Config, problem: Problem, device: DeviceClass) -> BuildSpec:
        kind = "cubin" if self._recording.toolchain[0] == "nvcc" else "shared"
        defines = {name: str(value) for name, value in build_part.items()}
        facts = dict(self._recording.builds[build_part].facts)
        name = f"{self.name} {build_part.digest}"
        return BuildSpec(name, kind, Path("recorded"), "recorded", defines, facts=facts)  # type: ignore[arg-type]

    def workbench(self, seat: RankSeat) -> Workbench:
        raise GangError("A recording has no ranks.", "Run the study without --replay.")


class ReplayCache:
    """Artifacts that are names. It stands where the driver expects an artifact cache; `root` is a scratch folder."""

    def __init__(self, recording: Recording, root: Path) -> None:
        self.root = root
        self._recording = recording
        self._builds: dict[str, RecordedBuild] = {b.build.digest: b for b in recording.builds.values()}
        self._known: set[str] = set()
        self.build_s = 0.0

    def toolchain(self, spec: BuildSpec) -> Toolchain:
        kind, version, flags = self._recording.toolchain
        return Toolchain(kind, Path("recorded"), version, flags)  # type: ignore[arg-type]

    def digest(self, spec: BuildSpec) -> str:
        return digest([spec.name, self._recording.toolchain[1]])

    def holds(self, digest: str) -> bool:
        return digest in self._known

    def build(self, specs: Sequence[BuildSpec]) -> list[BuildOutcome]:
        """The recorded outcome of each; nothing is charged here (`ReplayBuilder` knows when who waits)."""
        return [self._outcome(spec) for spec in specs]

    def _outcome(self, spec: BuildSpec) -> BuildOutcome:
        recorded, name = self._builds[spec.name.split()[-1]], self.digest(spec)
        cached = name in self._known
        self._known.add(name)
        seconds = 0.0 if cached else recorded.build_s
        self.build_s += seconds
        if not recorded.ok:
            rejected = recorded.status == status.refused("compiler")
            return BuildOutcome(
                spec,
                name,
                None,
                seconds,
                cached=cached,
                error_sentence=recorded.sentence or "It did not build when it was recorded.",
                rejected=rejected,
            )
        sha256 = hashlib.sha256(name.encode()).hexdigest()
        artifact = Artifact(
            name, self.root / name, sha256, 1, dict(recorded.facts), "recorded", "recorded", recorded.build_s
        )
        return BuildOutcome(spec, name, artifact, seconds, cached=cached)


class ReplayBuilder(Builder):
    """Builds at once and charges when somebody waits: an artifact is ready when its compiler would have been, each
    taking the next one when it is free, and only the rest of the wait is charged."""

    def __init__(
        self, cache: Any, listener: Listener, *, ahead: bool, clock: VirtualClock, jobs: int
    ) -> None:
        super().__init__(cache, listener, ahead=ahead)
        self.clock = clock
        self.jobs = max(1, jobs)
        self._free_at = [0.0] * self.jobs
        self._ready: list[tuple[float, int, BuildOutcome]] = []
        self._order = itertools.count()

    def wait(self) -> None:
        if self._ready:
            self.clock.wait_until(self._ready[0][0])

    def cancel(self) -> None:
        self._ready.clear()
        self._free_at = [self.clock.now] * self.jobs
        super().cancel()

    def _begin(self, specs: list[BuildSpec]) -> None:
        for outcome in self.cache.build(specs):
            at = self.clock.now
            if not outcome.cached:
                at = max(at, heapq.heappop(self._free_at)) + outcome.seconds
                heapq.heappush(self._free_at, at)
            heapq.heappush(self._ready, (at, next(self._order), outcome))

    def _told(self) -> list[Finished]:
        found: list[Finished] = []
        while self._ready and self._ready[0][0] <= self.clock.now:
            found += self._match(heapq.heappop(self._ready)[2])
        return found


@dataclass
class ReplayGang:
    """A gang of as many equal ranks as the problem has: it answers from the recording and charges what it recorded."""

    recording: Recording
    disturbance: Disturbance
    clock: VirtualClock
    respawns: int = 0
    survived: int = 0
    run_s: float = 0.0
    loaded: Config | None = None
    _crashed: set[Config] = field(default_factory=set)

    def __post_init__(self) -> None:
        self.problem, self.device = self.recording.problem, self.recording.device
        self._random = random.Random(self.disturbance.seed)
        self._load_s, self._renewal_s = _loads(self.recording)
        self._held: set[Config] = set()  # loaded since the last renewal

    def __enter__(self) -> ReplayGang:
        return self

    def __exit__(self, *_: object) -> None:
        return None

    def start(self) -> None:
        return None

    def close(self) -> None:
        return None

    def load(self, artifact: Path, sha256: str, build_part: Config) -> Outcome:
        if build_part != self.loaded:
            self._charge(self._load_s[build_part])
            if build_part not in self._held and len(self._held) >= renewal(self.device):
                self._charge(self._renewal_s)
                self._held.clear()
            self._held.add(build_part)
            self.loaded = build_part
        return Outcome(status.OK, replies=self._replies({"facts": {}}))

    def gate(self, config: Config, routing: str, seed: int) -> Outcome:
        trial, end = self.recording.trials[config], self._end(config)
        if end is None:
            self._charge(trial.gate_s / self.recording.gates)
            return Outcome(status.OK, replies=self._replies(_body(True)))
        ended, sentence = end
        self._charge(trial.gate_s / self.recording.gates if trial.timed else trial.run_s)
        if ended == status.WRONG:
            return Outcome(ended, sentence, self._replies(_body(False)))
        if status.ends_the_gang(ended):
            self.respawns += 1
            self.loaded = None
        return Outcome(ended, sentence, [None] * self.problem.world, gang_lives=False)

    def time(self, config: Config, mode: str, seed: int, iterations: int) -> Outcome:
        trial = self.recording.trials[config]
        if mode != "fused" or trial.time_us is None:
            return Outcome(status.refused("recorded"), "The recording has only whole launches.", [])
        us = []
        for _ in range(iterations):
            drifted = trial.time_us * self.disturbance.drifted(self.clock.now)
            factor = max(_LEAST_FACTOR, 1 + self.disturbance.noise * self._random.gauss(0, 1))
            us.append(drifted * (factor if self.disturbance.noise else 1.0))
            self._charge(trial.time_s / self.recording.iterations * us[-1] / trial.time_us)
        return Outcome(status.OK, replies=self._replies({"us": us}), worst_us=us)

    def _end(self, config: Config) -> tuple[str, str] | None:
        """How a config that does not pass ends, and why."""
        trial = self.recording.trials[config]
        if not trial.timed:
            return trial.status, trial.sentence or f"It ended as {trial.status} when it was recorded."
        made = self.disturbance.fails(config)
        if made == "once":
            made = "" if config in self._crashed else status.CRASHED
            self._crashed.add(config)
        return (made, _KILLED) if made else None

    def _charge(self, seconds: float) -> None:
        self.run_s += seconds
        self.clock.charge(seconds)

    def _replies(self, body: dict[str, Any]) -> list[dict[str, Any] | None]:
        return [body for _ in range(self.problem.world)]


def _loads(recording: Recording) -> tuple[dict[Config, float], float]:
    """Seconds of loading each build, and of a gang's renewal, which falls on whichever load happens to be due for it."""
    load_s: dict[Config, float] = {}
    for trial in recording.trials.values():
        build = recording.build_part(trial.config)
        load_s[build] = max(load_s.get(build, 0.0), trial.load_s)
    usual_s = median(load_s.values())
    renewals = [one for one in load_s.values() if one > max(1.0, _RENEWAL * usual_s)]
    if len(renewals) > len(load_s) // (RENEW_AFTER_LOADS // 2) + 1:
        return load_s, 0.0  # loads are just that dear here
    for build, seconds in load_s.items():
        if seconds in renewals:
            load_s[build] = usual_s
    return load_s, median(renewals) if renewals else 0.0


def _body(passed: bool) -> dict[str, Any]:
    return {"passed": passed, "worst_error": 0.0 if passed else 1.0, "tolerance": 0.0, "sentence": ""}


def true_us(recording: Recording, config: Config) -> float | None:
    """What the recording says of `config`, without noise or drift; None when it was not timed."""
    trial: RecordedTrial | None = recording.trials.get(config)
    return None if trial is None or not trial.timed else trial.time_us
