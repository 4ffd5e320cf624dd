"""The rooms of a replay: a clock that only moves when something is charged, a cache, a gang and a family that answer
from a recording. No compiler, no device, no rank; `replay` puts them under the driver.
"""

from __future__ import annotations

import hashlib
import heapq
import random
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from pathlib import Path
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
from tktune.search.building import Batch, Builder
from tktune.search.events import BuildStarted, Listener
from tktune.search.recording import RecordedBuild, RecordedSpace, RecordedTrial, Recording

DRIFT_S = 30.0
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

    def build(
        self,
        specs: Sequence[BuildSpec],
        jobs: int | None = None,
        on_done: Callable[[BuildOutcome], None] | None = None,
    ) -> list[BuildOutcome]:
        """The recorded outcome of each; nothing is charged here (`ReplayBuilder` knows when who waits)."""
        outcomes = [self._outcome(spec) for spec in specs]
        if on_done is not None:
            for outcome in outcomes:
                on_done(outcome)
        return outcomes

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
    """Builds at once and charges when somebody waits: ahead of measuring, a batch is ready when its compilers would
    have been, and only the rest of the wait is charged."""

    def __init__(
        self, cache: Any, listener: Listener, *, ahead: bool, clock: VirtualClock, jobs: int
    ) -> None:
        super().__init__(cache, listener, ahead=ahead)
        self.clock = clock
        self._jobs = jobs
        self._free_at = 0.0
        self.ready_at: dict[int, float] = {}

    def start(self, specs: Mapping[Config, BuildSpec]) -> Batch:
        batch = ReplayBatch(specs, self)
        if self.ahead:
            batch.begin()
        return batch

    def submit(self, batch: Batch) -> Future[list[BuildOutcome]]:
        self._listener.on_event(BuildStarted(tuple(batch.specs)))
        outcomes = self.cache.build(list(batch.specs.values()), on_done=batch.done.put)
        begin = max(self.clock.now, self._free_at)
        self._free_at = begin + makespan_s([outcome.seconds for outcome in outcomes], self._jobs)
        self.ready_at[id(batch)] = self._free_at
        future: Future[list[BuildOutcome]] = Future()
        future.set_result(outcomes)
        return future


class ReplayBatch(Batch):
    """A batch whose waiting is charged to the virtual clock."""

    def __init__(self, specs: Mapping[Config, BuildSpec], builder: ReplayBuilder) -> None:
        super().__init__(specs, builder)
        self._replay = builder

    def wait(self) -> dict[Config, BuildOutcome]:
        self.begin()
        self._replay.clock.wait_until(self._replay.ready_at.pop(id(self), 0.0))
        return super().wait()


def makespan_s(seconds: Sequence[float], jobs: int) -> float:
    """How long compiles take that `jobs` compilers share, each taking the next one when it is free."""
    free_at = [0.0] * max(1, jobs)
    for one in seconds:
        heapq.heappush(free_at, heapq.heappop(free_at) + one)
    return max(free_at)


@dataclass
class ReplayGang:
    """A gang of as many equal ranks as the problem has: it answers from the recording and charges what it recorded."""

    recording: Recording
    disturbance: Disturbance
    clock: VirtualClock
    respawns: int = 0
    survived: int = 0
    run_s: float = 0.0
    _loaded: Config | None = None
    _crashed: set[Config] = field(default_factory=set)

    def __post_init__(self) -> None:
        self.problem, self.device = self.recording.problem, self.recording.device
        self._random = random.Random(self.disturbance.seed)
        self._load_s: dict[Config, float] = {}
        for trial in self.recording.trials.values():
            build = self.recording.build_part(trial.config)
            self._load_s[build] = max(self._load_s.get(build, 0.0), trial.load_s)

    def __enter__(self) -> ReplayGang:
        return self

    def __exit__(self, *_: object) -> None:
        return None

    def start(self) -> None:
        return None

    def load(self, artifact: Path, sha256: str, build_part: Config) -> Outcome:
        if build_part != self._loaded:
            self._charge(self._load_s[build_part])
            self._loaded = build_part
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
            self._loaded = None
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


def _body(passed: bool) -> dict[str, Any]:
    return {"passed": passed, "worst_error": 0.0 if passed else 1.0, "tolerance": 0.0, "sentence": ""}


def true_us(recording: Recording, config: Config) -> float | None:
    """What the recording says of `config`, without noise or drift; None when it was not timed."""
    trial: RecordedTrial | None = recording.trials.get(config)
    return None if trial is None or not trial.timed else trial.time_us
