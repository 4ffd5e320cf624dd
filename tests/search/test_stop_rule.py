"""When to stop: the estimate falls with silence, does not fall for a lull, and errs towards going on."""

from __future__ import annotations

import dataclasses
import random

import pytest
from fakes import DEFAULT, FakeFamily, World, study, tune_in
from recorded import large

from tktune.search.effort import PROFILES
from tktune.search.replay import replay, study_of
from tktune.search.replay_rooms import Disturbance
from tktune.search.stop_rule import LEAST_S, LEAST_TRIALS, RecordGain, StopRule, may_speak_soon


def after(times: list[float | None]) -> RecordGain:
    gain = RecordGain()
    for one in times:
        gain.note(one)
    return gain


def test_nothing_is_said_before_something_passed():
    assert RecordGain().gain(10) is None
    assert after([None] * 100).gain(10) is None
    assert after([None] * 60 + [100.0] * 5).gain(10) is None


def test_silence_lowers_the_expected_gain():
    draw = random.Random(1)
    start = [100 / (1 + 0.02 * at) for at in range(50)]
    gains = [
        after([*start, *(draw.uniform(60, 90) for _ in range(quiet))]).gain(20) for quiet in (0, 50, 200, 800)
    ]
    assert gains == sorted(gains, reverse=True) and gains[0] > 0.05 and gains[-1] < 0.01


def test_more_trials_are_expected_to_gain_more_and_never_all():
    gain = after([100 / (1 + 0.02 * at) for at in range(50)])
    assert 0 == gain.gain(0) < gain.gain(10) < gain.gain(100) < gain.gain(1e9) < 1


def test_a_flat_space_is_worth_no_minute():
    assert after([100.0] * 100).gain(60) == 0.0


@pytest.mark.parametrize("shape", [1.0, 2.0, 4.0])
def test_on_random_draws_it_promises_no_less_than_comes(shape):
    """Lower tails of three shapes: the mean promise at 100 trials against the mean gain of 50 more."""
    promised = came = 0.0
    for seed in range(200):
        draw = random.Random(seed)
        times = [1 + draw.random() ** (1 / shape) for _ in range(150)]
        promised += after(times[:100]).gain(50)
        came += 1 - min(times) / min(times[:100])
    assert came <= promised <= 5 * came


class Fixed:
    """An estimate that says what it was made to say."""

    def __init__(self, gain: float | None) -> None:
        self.said, self.asked = gain, []

    def note(self, time_us: float | None) -> None:
        return None

    def gain(self, trials: float) -> float | None:
        self.asked.append(trials)
        return self.said


def ruled(gain: float | None, noted: int = LEAST_TRIALS) -> StopRule:
    rule = StopRule(Fixed(gain))
    for _ in range(noted):
        rule.note(1.0)
    return rule


def test_another_estimate_can_take_its_place():
    rule = ruled(0.002)
    assert rule.verdict(0.0, trial_s=2.0, left=None, left_s=None) == (
        "another minute is expected to gain 0.2%, less than the tie band of 1.0%; --no-stop-early goes on."
    )
    assert rule.estimate.asked == [30.0]
    assert ruled(0.02).verdict(0.0, 2.0, None, None) == ""
    assert "1.2%, less than the tie band of 1.5%" in ruled(0.012).verdict(0.015, 2.0, None, None)
    # A noisy start: its noise hid a config 11 % faster when it was taken as it was.
    assert "1.5%, less than the tie band of 2.0%" in ruled(0.015).verdict(0.05, 2.0, None, None)
    assert ruled(0.036).verdict(0.05, 2.0, None, None) == ""
    assert ruled(0.2).verdict(0.5, 2.0, None, None) == ""  # noise is no reason to leave 20 % lying
    assert ruled(None).verdict(0.0, 2.0, None, None) == ""
    assert ruled(0.0, LEAST_TRIALS - 1).verdict(0.0, 2.0, None, None) == ""
    assert ruled(0.0, 100).verdict(0.0, 0.9 * LEAST_S / 100, None, None) == ""
    assert ruled(0.0, 100).verdict(0.0, 1.1 * LEAST_S / 100, None, None)


def test_the_minute_ends_where_the_budget_or_the_space_does():
    rule = ruled(0.0, 200)
    rule.verdict(0.0, 0.1, 40, None)
    rule.verdict(0.0, 0.1, 4000, 10.0)
    rule.verdict(0.0, 0.1, 4000, None)
    assert rule.estimate.asked == [40, 100.0, 600.0]
    assert rule.verdict(0.0, 0.0, None, None) == ""


def test_a_search_that_found_all_there_is_stops_and_says_so(url):
    launch = {"num_comm_sms": (1, 2, 3), "order": ("slot", "token"), "more": tuple(range(12))}
    family = FakeFamily(launch=launch, default=DEFAULT.replace(more=0))
    world = World()
    result = tune_in(world, url, study(800, stop_early=True), family=family)
    assert LEAST_TRIALS <= result.measured < 400
    assert result.ended.startswith("another minute is expected to gain")
    again = tune_in(World(published=world.published), url, study(800, stop_early=True), family=family)
    assert again.measured == 0 and again.ended.startswith("another minute") and again.winner == result.winner
    whole = tune_in(World(published=world.published), url, study(1000), family=family)
    assert whole.ended == "every feasible config is measured."


def test_a_small_budget_is_never_cut(url):
    result = tune_in(World(), url, study(LEAST_TRIALS - 1, stop_early=True))
    assert result.measured == LEAST_TRIALS - 1


@pytest.mark.parametrize("seed", range(4))
def test_replays_that_stop_early_lose_little(seed):
    space, how = large(build_s=0.5), Disturbance(noise=0.01, seed=seed)
    plan = dataclasses.replace(study_of(space, PROFILES["full"], seed), trials=1500, seconds=1e6)
    early = replay(space, plan, disturbance=how)
    assert early.result.ended.startswith("another minute") and early.result.measured < 800
    assert early.gap < 0.05


def test_a_search_may_end_soon_once_it_stands_still_shortly_before_the_rule_may_speak():
    assert not may_speak_soon(0.5 * LEAST_S, 10 * LEAST_TRIALS, 0)
    assert not may_speak_soon(10 * LEAST_S, LEAST_TRIALS // 2, 0)
    assert not may_speak_soon(LEAST_S, LEAST_TRIALS, LEAST_TRIALS - 5)  # it got better just now
    assert may_speak_soon(0.9 * LEAST_S, LEAST_TRIALS, 12)
