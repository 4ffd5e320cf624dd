"""What a run may spend: trials and seconds over all runs, a reserve for finalists, and the stop signal."""

from __future__ import annotations

import os
import signal

import pytest

from tktune.search.budget import Budget, StopSignal


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def test_trials_of_earlier_runs_count():
    budget = Budget(10, None, spent_trials=9)
    assert budget.trials_left == 1 and not budget.search_over
    budget.used += 1
    assert budget.search_over and budget.search_share == 1


def test_seconds_of_earlier_runs_count_and_a_slice_is_reserved():
    clock = Clock()
    budget = Budget(None, 100.0, spent_s=50.0, clock=clock)
    assert budget.reserve_s == 5.0
    clock.now += 44
    assert not budget.search_over
    clock.now += 2
    assert budget.search_over and budget.left_s == 4.0 and budget.run_s == 46.0


def test_the_reserve_follows_the_estimate_up_to_a_quarter():
    budget = Budget(None, 100.0, finals_trials=10, clock=Clock())
    assert budget.reserve_s == 5.0
    budget.note_trial(1.0)
    budget.note_trial(1.4)
    assert budget.reserve_s == pytest.approx(12.0)
    budget.note_trial(50.0)
    assert budget.reserve_s == 25.0


def test_without_limits_nothing_is_ever_over():
    budget = Budget(None, None)
    assert not budget.search_over and budget.search_share == 0
    assert budget.left_s is None and budget.search_left_s is None and budget.reserve_s == 0


def test_the_first_signal_asks_and_the_second_interrupts():
    stop = StopSignal()
    before = signal.getsignal(signal.SIGINT)
    with stop.on_signals():
        os.kill(os.getpid(), signal.SIGINT)
        assert stop.requested
        with pytest.raises(KeyboardInterrupt):
            os.kill(os.getpid(), signal.SIGTERM)
    assert signal.getsignal(signal.SIGINT) is before
