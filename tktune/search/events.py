"""What happens while a study is tuned, as facts for whoever listens; nothing here prints or decides."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from tktune.core.config import Config
from tktune.core.device import DeviceClass
from tktune.core.feasible import WaterfallRow
from tktune.core.problem import Problem


@dataclass(frozen=True)
class SpaceReady:
    """The feasible set of a problem is known, and what each constraint removed from `total` configs."""

    problem: Problem
    device: DeviceClass
    total: int
    feasible: int
    builds: int
    waterfall: tuple[WaterfallRow, ...]
    default: Config


@dataclass(frozen=True)
class Resumed:
    """Final rows of earlier runs were found; `left` configs remain of the budget's `wanted` (None: no limit)."""

    measured: int
    wanted: int | None
    quarantined: int
    lost: int
    left: int | None


@dataclass(frozen=True)
class BuildStarted:
    """A batch of artifacts is being built; those already in the cache are not counted."""

    builds: tuple[Config, ...]


@dataclass(frozen=True)
class BuildDone:
    """One artifact is there (`cached`: it already was), or failed with a sentence."""

    build: Config
    digest: str
    seconds: float
    cached: bool
    sentence: str = ""


@dataclass(frozen=True)
class TrialStarted:
    """A `started` row was committed and the gang is about to run this config."""

    config: Config
    number: int
    wanted: int | None


@dataclass(frozen=True)
class TrialDone:
    """One trial ended and its row is committed. `best_us` is the stored time of the best so far, this one included,
    divided by the drift of its trial."""

    config: Config
    status: str
    time_us: float | None
    best_us: float | None
    best: Config | None
    number: int
    wanted: int | None
    sentence: str = ""


@dataclass(frozen=True)
class FinalistRound:
    """One interleaved round over all finalists is done; the medians so far, in microseconds."""

    number: int
    of: int
    medians_us: tuple[tuple[Config, float], ...]


@dataclass(frozen=True)
class WinnerChosen:
    """The verified winner of a problem, why, and the default beside it (None: the default did not finish).

    `band` is the tie band as a fraction; None when the winner stands from an earlier run.
    """

    problem: Problem
    config: Config
    time_us: float
    default: Config
    default_us: float | None
    band: float | None
    reason: str


@dataclass(frozen=True)
class Note:
    """One sentence that a person should read."""

    sentence: str


@dataclass(frozen=True)
class Finished:
    """The problem is done for this run: distinct configs measured and artifacts built by it, and why it ended."""

    problem: Problem
    measured: int
    builds: int
    seconds: float
    reason: str


Event = (
    SpaceReady
    | Resumed
    | BuildStarted
    | BuildDone
    | TrialStarted
    | TrialDone
    | FinalistRound
    | WinnerChosen
    | Note
    | Finished
)


class Listener(Protocol):
    """Whoever wants to know. Called on the driver's own thread, in order."""

    def on_event(self, event: Event) -> None: ...


class Silent:
    """A listener that does nothing."""

    def on_event(self, event: Event) -> None:
        return None


class Tee:
    """A listener that passes events on to a function (tests, logs)."""

    def __init__(self, function: Callable[[Event], None]) -> None:
        self._function = function

    def on_event(self, event: Event) -> None:
        self._function(event)
