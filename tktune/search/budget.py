"""What a run may still spend, and the signal that asks it to stop; both only answer questions."""

from __future__ import annotations

import contextlib
import signal
import time
from collections.abc import Callable, Iterator
from statistics import fmean
from types import FrameType

# The share of the seconds kept for finalists and attribution: at most, and at least.
_RESERVE_MOST = 0.25
_RESERVE_LEAST = 0.05


class StopSignal:
    """A request to stop early. The driver finishes the current trial, then still verifies finalists.

    >>> stop = StopSignal()
    >>> stop.request()
    >>> stop.requested
    True
    """

    def __init__(self) -> None:
        self.requested = False

    def request(self) -> None:
        self.requested = True

    @contextlib.contextmanager
    def on_signals(self) -> Iterator[StopSignal]:
        """While inside: the first SIGINT or SIGTERM requests a stop, the next raises KeyboardInterrupt.

        Main thread only (ValueError elsewhere).
        """

        def heard(number: int, frame: FrameType | None) -> None:
            if self.requested:
                raise KeyboardInterrupt
            self.request()

        before = {number: signal.signal(number, heard) for number in (signal.SIGINT, signal.SIGTERM)}
        try:
            yield self
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)


class Budget:
    """Distinct configs and seconds for one problem, both counted as totals over all runs of the same key.

    `trials` and `seconds` None mean no limit; `spent_trials` and `spent_s` are what earlier runs used. A slice of
    the seconds is kept for finalists and attribution: `finals_trials` × the mean seconds of a trial so far, held
    between 5 % and 25 % of the whole.
    """

    def __init__(
        self,
        trials: int | None,
        seconds: float | None,
        *,
        spent_trials: int = 0,
        spent_s: float = 0.0,
        finals_trials: float = 0.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.trials = trials
        self.seconds = seconds
        self.used = spent_trials
        self._spent_s = spent_s
        self._clock = clock
        self._start = clock()
        self._finals_trials = finals_trials
        self._trial_s: list[float] = []

    def note_trial(self, seconds: float) -> None:
        """What one trial took, for the estimate of the finals."""
        self._trial_s.append(seconds)

    @property
    def finals_s(self) -> float:
        """Estimated seconds of finalists and attribution; 0 while nothing was measured."""
        return self._finals_trials * fmean(self._trial_s) if self._trial_s else 0.0

    @property
    def run_s(self) -> float:
        """Seconds since this run took up the problem."""
        return self._clock() - self._start

    @property
    def spent_s(self) -> float:
        return self._spent_s + self.run_s

    @property
    def trials_left(self) -> int | None:
        return None if self.trials is None else max(0, self.trials - self.used)

    @property
    def reserve_s(self) -> float:
        if self.seconds is None:
            return 0.0
        return min(max(self.finals_s, _RESERVE_LEAST * self.seconds), _RESERVE_MOST * self.seconds)

    @property
    def search_left_s(self) -> float | None:
        """Seconds left for searching; None without a limit."""
        return None if self.seconds is None else self.seconds - self.reserve_s - self.spent_s

    @property
    def left_s(self) -> float | None:
        """Seconds left including the reserve; None without a limit."""
        return None if self.seconds is None else self.seconds - self.spent_s

    @property
    def search_over(self) -> bool:
        if self.trials_left == 0:
            return True
        left = self.search_left_s
        return left is not None and left <= 0

    @property
    def search_share(self) -> float:
        """The share of the search that is used up, 0 to 1, by trials or by seconds, whichever is further."""
        share = 0.0
        if self.trials:
            share = self.used / self.trials
        if self.seconds is not None:
            whole = self.seconds - self.reserve_s
            share = max(share, self.spent_s / whole if whole > 0 else 1.0)
        return min(share, 1.0)
