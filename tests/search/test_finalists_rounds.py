"""When verification goes on beyond its usual rounds: while the noise hides which of the fastest configs is faster."""

from __future__ import annotations

import pytest

from tktune.search.finalists import Arm, _undecided


def arm(us: float, end: str = "ok") -> Arm:
    return Arm(None, median_us=[us] * 5, best_us=[us / 2] * 5, end=end)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("noise", "times", "goes_on"),
    [
        (0.005, (100.0, 100.4, 130.0), False),  # the band is the least one
        (0.015, (100.0, 101.3, 130.0), True),  # 1.3 % apart, hidden by the noise
        (0.015, (100.0, 100.5, 130.0), True),  # equal so far: it takes less noise to say so
        (0.015, (100.0, 103.0, 130.0), False),  # told apart already
        (0.015, (100.0,), False),
        (0.03, (100.0, 130.0), True),  # too noisy for anything
        (0.0, (100.0, 100.0), False),
    ],
)
def test_more_rounds_are_worth_it_only_where_they_may_tell_configs_apart(noise, times, goes_on):
    arms = [arm(us) for us in times]
    assert _undecided(arms, noise, False) is goes_on
    assert _undecided(arms, noise, True) is goes_on


def test_arms_that_failed_and_an_empty_field_do_not_count():
    assert not _undecided([arm(100.0), arm(101.3, end="wrong")], 0.015, False)
    assert not _undecided([arm(100.0, end="wrong")], 0.015, False)
