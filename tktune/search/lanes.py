"""Lanes: gangs side by side, each measuring one config at a time whole on devices of its own.

A lane works in the thread of its gang, or in the driver's own where it has none. The driver alone decides, writes rows and
tells events; a lane measures and says what it saw.
"""

from __future__ import annotations

import functools
import queue
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any

from tktune.core.config import Config
from tktune.core.errors import GangError
from tktune.gang.gang import Gang, Outcome
from tktune.gang.noise import NoiseFloor
from tktune.gang.trial import TrialResult
from tktune.search.building import Bell
from tktune.search.drift import DriftWatch
from tktune.search.gangs import GangThread
from tktune.search.place import BuildPlace

Said = tuple[str, str, dict[str, Any]]


@dataclass(frozen=True)
class Job:
    """One thing to do in a lane. `work(lane)` does it on the lane's thread and touches the lane alone.

    `trial_id` is the row that is open for it; None when it only learns of the machine.
    """

    config: Config
    place: BuildPlace
    trial_id: int | None
    work: Callable[[Lane], TrialResult | NoiseFloor | None]


@dataclass(frozen=True)
class Ended:
    """What became of a job: its result, the error that left the lane without a gang, or both.

    `seconds`: what it took, `load_s` of them to load its artifact (0: it was loaded). `drift`: how much slower the lane's
    devices were then. `said`: what is to be told (kind, sentence, facts).
    """

    job: Job
    result: TrialResult | NoiseFloor | None
    error: GangError | None
    seconds: float
    load_s: float = 0.0
    drift: float = 1.0
    said: Sequence[Said] = ()


@dataclass
class Lane:
    """A gang and what is known of the devices it sits on.

    `first` is the device index of its first rank. `flight` are the jobs it was given and that were not heard of again:
    the first is under way, those behind it, up to `depth` in all, are ready to begin at once. `joined`: its times can be
    compared with those of the first lane. `mark` hears that a job begins, and "" when it ends.
    """

    number: int
    gang: Gang
    seed: int
    clock: Callable[[], float]
    first: int = 0
    thread: GangThread | None = None
    depth: int = 1
    mark: Callable[[str], None] = lambda doing: None
    watch: DriftWatch = field(init=False)
    said: list[Said] = field(default_factory=list)  # the thread's, until a job ends
    loaded: Config | None = None  # the build that the ranks hold ready after the last job
    load_s: float = 0.0
    joined: bool = False
    flight: list[Job] = field(default_factory=list)
    starting: bool = False  # its thread is not through with what it was given before: the start of the ranks
    out: bool = False  # its gang cannot be had any more

    def __post_init__(self) -> None:
        self.watch = DriftWatch(self.gang, self.seed, lambda *told: self.said.append(told))

    @property
    def room(self) -> bool:
        """Whether it can be given another job."""
        return len(self.flight) < self.depth and not self.out and not self.starting

    @property
    def will_hold(self) -> Config | None:
        """The build that its ranks hold ready once everything it was given is done."""
        return self.flight[-1].place.build if self.flight else self.loaded

    def do(self, job: Job, restart: Callable[[], bool]) -> Ended:
        """Do it, on the calling thread. Where `restart` says so a gang that died is replaced at once, so that it lives
        when the next row is opened."""
        self.mark("job")
        began = self.clock()
        result, error, self.load_s = None, None, 0.0
        try:
            result = job.work(self)
            self.loaded = job.place.build
            if not self.gang.loaded:
                self.loaded = None
                if restart():
                    self.gang.start()
        except GangError as failed:
            error, self.loaded = failed, None
        said, self.said = self.said, []
        seconds = self.clock() - began
        self.mark("")
        return Ended(job, result, error, seconds, self.load_s, self.watch.factor, said)

    def marking(self, build: Config) -> Callable[[str, Outcome], None]:
        """A listener of a trial of `build` that begins now; it notes in `load_s` what loading took."""
        began, held = self.clock(), self.loaded == build
        self.load_s = 0.0

        def heard(stage: str, outcome: Outcome) -> None:
            if stage == "loaded" and not held:
                self.load_s = self.clock() - began

        return heard

    def say_offset(self, config: Config) -> None:
        """Tell how this lane's devices compare with those of the first lane, by a config measured on both."""
        factor = self.watch.factor
        self.said.append(
            (
                "offset",
                f"Device {self.first} takes {factor - 1:+.1%} for {config} against the first device: its times are "
                f"compared after division by {factor:.3f}, and stored as measured.",
                {"device": self.first, "factor": factor, "config": dict(config)},
            )
        )


class Lanes:
    """All lanes of one problem. A lane without a thread measures before `submit` returns; the others are at it meanwhile."""

    def __init__(self, lanes: Sequence[Lane], bell: Bell) -> None:
        self.all = list(lanes)
        self._bell = bell
        self._closing = False
        self._given: list[Future[None]] = []
        self._ended: queue.SimpleQueue[tuple[Lane, Ended]] = queue.SimpleQueue()
        for lane in lanes:
            if lane.thread is not None:
                lane.starting = True
                lane.thread.submit(functools.partial(self._started, lane))

    def __enter__(self) -> Lanes:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def free(self) -> list[Lane]:
        """Lanes that can be given a job, those that have nothing to do first."""
        return sorted((lane for lane in self.all if lane.room), key=lambda lane: len(lane.flight))

    @property
    def busy(self) -> list[Lane]:
        return [lane for lane in self.all if lane.flight]

    @property
    def starting(self) -> bool:
        """Whether ranks that will work are not there yet."""
        return any(lane.starting for lane in self.all)

    @property
    def flight(self) -> list[Job]:
        """Every job that was given and not heard of again."""
        return [job for lane in self.all for job in lane.flight]

    @property
    def lasting(self) -> list[Lane]:
        return [lane for lane in self.all if not lane.out]

    def start(self, lane: Lane) -> None:
        """Have the lane's gang before a row says that it measures. Raises `GangError` where the lane has no thread."""
        if lane.thread is None:
            lane.gang.start()

    def submit(self, lane: Lane, job: Job) -> None:
        lane.flight.append(job)
        if lane.thread is None:
            self._put(lane, lane.do(job, lambda: False))
        else:
            given = lane.thread.submit(functools.partial(self._in_thread, lane, job))
            given.add_done_callback(lambda _: self._bell.ring())
            self._given.append(given)

    def ended(self) -> list[tuple[Lane, Ended]]:
        """The jobs that have ended since the last call, in the order in which a lane was given them. Raises what a job
        raised beyond the end of its gang."""
        done = [given for given in self._given if given.done()]
        self._given = [given for given in self._given if given not in done]
        for given in done:
            given.result()
        found: list[tuple[Lane, Ended]] = []
        while not self._ended.empty():
            lane, ended = self._ended.get()
            lane.flight.pop(0)
            lane.out |= ended.error is not None
            found.append((lane, ended))
        return found

    def close(self) -> None:
        """End what lanes are at; ranks that still work are killed. Their gangs may be used from any thread afterwards."""
        self._closing = True
        for lane in self.all:
            if lane.thread is None:
                continue
            if lane.flight or lane.starting:
                lane.gang.interrupt()
            lane.thread.settle()

    def _started(self, lane: Lane) -> None:
        lane.starting = False
        self._bell.ring()

    def _in_thread(self, lane: Lane, job: Job) -> None:
        if not self._closing:
            self._put(lane, lane.do(job, lambda: not self._closing))

    def _put(self, lane: Lane, ended: Ended) -> None:
        self._ended.put((lane, ended))
        self._bell.ring()
