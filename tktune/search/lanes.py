"""Lanes: gangs side by side, each measuring one config at a time whole on devices of its own.

One lane works on the driver's own thread; several have a thread each, since ranks die with the thread that started
them. The driver alone decides, writes rows and tells events; a lane measures and says what it saw.
"""

from __future__ import annotations

import contextlib
import queue
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from tktune.core.config import Config
from tktune.core.errors import GangError
from tktune.gang.gang import Gang, Outcome
from tktune.gang.trial import TrialResult
from tktune.search.building import Bell
from tktune.search.drift import DriftWatch
from tktune.search.place import BuildPlace


@dataclass(frozen=True)
class Job:
    """One thing to do in a lane. `work(lane)` does it on the lane's thread and touches the lane alone.

    `trial_id` is the row that is open for it; None when it only learns of the machine, and has no result.
    """

    config: Config
    place: BuildPlace
    trial_id: int | None
    work: Callable[[Lane], TrialResult | None]


@dataclass(frozen=True)
class Ended:
    """What became of a job: its result, the error that left the lane without a gang, or both. `seconds`: what it took."""

    job: Job
    result: TrialResult | None
    error: GangError | None
    seconds: float


@dataclass
class Lane:
    """A gang and what is known of the devices it sits on.

    `first` is the device index of its first rank. `loaded` is the build its ranks hold ready, `load_s` what loading
    took in the last trial (0: it was loaded). `joined`: its times can be compared with those of the first lane. `said`
    collects what it has to tell (kind, sentence, facts) until the driver's thread does.
    """

    number: int
    gang: Gang
    seed: int
    clock: Callable[[], float]
    first: int = 0
    watch: DriftWatch = field(init=False)
    said: list[tuple[str, str, dict[str, Any]]] = field(default_factory=list)
    loaded: Config | None = None
    load_s: float = 0.0
    joined: bool = False
    busy: Job | None = None
    out: bool = False  # its gang cannot be had any more

    def __post_init__(self) -> None:
        self.watch = DriftWatch(self.gang, self.seed, lambda *told: self.said.append(told))

    @property
    def idle(self) -> bool:
        return self.busy is None and not self.out

    def tell(self) -> list[tuple[str, str, dict[str, Any]]]:
        """What was said since the last call."""
        said, self.said = self.said, []
        return said

    def do(self, job: Job, *, restart: bool) -> Ended:
        """Do it, on the calling thread. With `restart` a gang that died is replaced at once, so that it lives when the
        next row is opened."""
        began = self.clock()
        result, error = None, None
        try:
            result = job.work(self)
            self.loaded = job.place.build
            if not self.gang.loaded:
                self.loaded = None
                if restart:
                    self.gang.start()
        except GangError as failed:
            error, self.loaded = failed, None
        return Ended(job, result, error, self.clock() - began)

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
    """All lanes of one problem. With one, `submit` measures before it returns; with more, it returns at once."""

    def __init__(self, lanes: Sequence[Lane], bell: Bell) -> None:
        self.all = list(lanes)
        self._bell = bell
        self._ended: queue.SimpleQueue[tuple[Lane, Ended]] = queue.SimpleQueue()
        self._threads = [_LaneThread(lane, self._put) for lane in lanes] if len(lanes) > 1 else []

    def __enter__(self) -> Lanes:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def idle(self) -> list[Lane]:
        return [lane for lane in self.all if lane.idle]

    @property
    def busy(self) -> list[Lane]:
        return [lane for lane in self.all if lane.busy is not None]

    @property
    def lasting(self) -> list[Lane]:
        return [lane for lane in self.all if not lane.out]

    def start(self, lane: Lane) -> None:
        """Have the lane's gang before a row says that it measures. Raises `GangError` on the only lane."""
        if not self._threads:
            lane.gang.start()

    def submit(self, lane: Lane, job: Job) -> None:
        lane.busy = job
        if self._threads:
            self._threads[lane.number].jobs.put(job)
        else:
            self._put(lane, lane.do(job, restart=False))

    def ended(self) -> list[tuple[Lane, Ended]]:
        """The jobs that have ended since the last call; their lanes are idle again."""
        found: list[tuple[Lane, Ended]] = []
        while not self._ended.empty():
            lane, ended = self._ended.get()
            lane.busy = None
            lane.out = ended.error is not None
            found.append((lane, ended))
        return found

    def close(self) -> None:
        """End the lanes' threads; ranks that still work are killed. The driver's own thread may use the gangs after."""
        for thread in self._threads:
            thread.close()
        self._threads = []

    def _put(self, lane: Lane, ended: Ended) -> None:
        self._ended.put((lane, ended))
        self._bell.ring()


class _LaneThread:
    """The thread in which a lane's gang lives and dies."""

    def __init__(self, lane: Lane, put: Callable[[Lane, Ended], None]) -> None:
        self.lane = lane
        self.jobs: queue.SimpleQueue[Job | None] = queue.SimpleQueue()
        self._put = put
        self._thread = threading.Thread(target=self._run, name=f"tktune-lane-{lane.number}", daemon=True)
        self._thread.start()

    def close(self) -> None:
        self.jobs.put(None)
        if self.lane.busy is not None:
            self.lane.gang.interrupt()
        self._thread.join()

    def _run(self) -> None:
        with contextlib.suppress(GangError):  # the first job says so again
            self.lane.gang.start()
        while (job := self.jobs.get()) is not None:
            self._put(self.lane, self.lane.do(job, restart=True))
        self.lane.gang.close()
