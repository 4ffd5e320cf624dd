"""What is known while a study is tuned: counts, best so far, what is going on, time left. Prints nothing."""

from __future__ import annotations

import time
from collections import Counter, deque
from collections.abc import Callable

from tktune.core.config import Config
from tktune.core.problem import Problem
from tktune.search import events
from tktune.search.events import Event

RECENT = 8


class Progress:
    """The state of a run as the events told it so far.

    `problems` counts all of the study; `seconds` is the time budget of one problem (None: no limit).
    """

    def __init__(
        self, problems: int, seconds: float | None = None, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.problems = problems
        self.seconds = seconds
        self._clock = clock
        self._started = clock()
        self.problem_number = 0
        self.notice = ""
        self._reset(None)

    def _reset(self, problem: Problem | None) -> None:
        self.problem = problem
        self.feasible = self.total = self.builds = 0
        self.statuses: Counter[str] = Counter()
        self.default: Config | None = None
        self.default_us: float | None = None
        self.best: Config | None = None
        self.best_us: float | None = None
        self.number = 0
        self.wanted: int | None = None
        self.resumed = 0
        self.doing = "starting"
        self.building = self.built = 0
        self.recent: deque[events.TrialDone] = deque(maxlen=RECENT)
        self._problem_started = self._clock()
        self._first_trial: tuple[float, int] | None = None

    def on_event(self, event: Event) -> None:
        match event:
            case events.SpaceReady():
                self._reset(event.problem)
                self.problem_number += 1
                self.feasible, self.total, self.builds = event.feasible, event.total, event.builds
                self.default = event.default
            case events.Resumed():
                self.resumed = event.measured
                self.wanted = event.wanted
            case events.BuildStarted():
                self.building, self.built = len(event.builds), 0
                self.doing = f"building: 0 of {self.building}"
            case events.BuildDone():
                self.built += 1
                self.doing = f"building: {self.built} of {max(self.building, self.built)}"
            case events.TrialStarted():
                self.wanted = event.wanted
                self.doing = "measuring"
                if self._first_trial is None:
                    self._first_trial = (self._clock(), event.number)
            case events.TrialDone():
                self._trial_done(event)
            case events.FinalistRound():
                self.doing = f"finalists: round {event.number} of {event.of}"
            case events.WinnerChosen():
                self.best, self.best_us, self.default_us = event.config, event.time_us, event.default_us
                self.doing = "winner chosen"
            case events.Finished():
                self.doing = "finished"
            case _:
                pass

    def _trial_done(self, event: events.TrialDone) -> None:
        self.statuses[event.status] += 1
        self.number, self.wanted = event.number, event.wanted
        self.best, self.best_us = event.best, event.best_us
        if event.config == self.default and event.status == "ok":
            self.default_us = event.time_us
        self.recent.append(event)

    @property
    def elapsed_s(self) -> float:
        return self._clock() - self._started

    @property
    def left_s(self) -> float | None:
        """Seconds until this problem's budget ends, by trials at the pace so far or by the clock; None: unknown."""
        guesses = []
        if self.seconds is not None:
            guesses.append(max(0.0, self.seconds - (self._clock() - self._problem_started)))
        if self.wanted is not None and self._first_trial is not None and self.number > self._first_trial[1]:
            started, first = self._first_trial
            pace = (self._clock() - started) / (self.number - first + 1)
            guesses.append(max(0, self.wanted - self.number) * pace)
        return min(guesses) if guesses else None

    @property
    def gain(self) -> float | None:
        """Default time ÷ best time so far."""
        if self.default_us is None or not self.best_us:
            return None
        return self.default_us / self.best_us
