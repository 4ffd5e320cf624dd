"""The choice among finalists: ties go to the default, and noise never buys a config that is slower than it."""

from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tktune.core.config import Config
from tktune.search.judging import choose, measured_noise, paired_ratio, steadier, tie_band

DEFAULT = Config(A=0)


def measure(
    truth: dict[Config, float], noise: float, seed: int, rounds: int = 12
) -> dict[Config, list[float]]:
    """Rounds with a drift that all share and noise of their own."""
    draw = random.Random(seed)
    drifts = [1 + 0.1 * draw.random() for _ in range(rounds)]
    return {c: [us * drift * (1 + noise * draw.random()) for drift in drifts] for c, us in truth.items()}


def test_a_clear_winner_wins():
    rounds = measure({DEFAULT: 100.0, Config(A=1): 80.0, Config(A=2): 95.0}, 0.01, 0)
    verdict = choose(rounds, DEFAULT, {}, 0.01)
    assert verdict.config == Config(A=1)
    assert verdict.reason.startswith("1.25 × as fast") and "faster in 12 of 12" in verdict.reason


@pytest.mark.parametrize("seed", range(20))
def test_inside_the_band_the_default_wins(seed):
    rounds = measure({DEFAULT: 100.0, Config(A=1): 99.8}, 0.002, seed)
    verdict = choose(rounds, DEFAULT, {}, 0.01)
    assert verdict.config == DEFAULT


def test_inside_the_band_fewer_resources_win_then_the_digest():
    light, heavy, other = Config(A=1), Config(A=2), Config(A=3)
    rounds = {DEFAULT: [100.0] * 5, light: [80.2] * 5, heavy: [80.0] * 5, other: [80.1] * 5}
    resources = {light: (100, 0, 2), heavy: (900, 0, 1), other: (100, 0, 3)}
    assert choose(rounds, DEFAULT, resources, 0.01).config == light
    same = dict.fromkeys(rounds, (1, 1, 1))
    expected = min((light, heavy, other), key=lambda config: config.digest)
    assert choose(rounds, DEFAULT, same, 0.01).config == expected
    assert "3 finalists are within" in choose(rounds, DEFAULT, same, 0.01).reason


def test_without_a_default_the_fastest_wins():
    rounds = {Config(A=1): [5.0] * 3, Config(A=2): [4.0] * 3}
    assert choose(rounds, DEFAULT, {}, 0.01).config == Config(A=2)
    assert choose(rounds, None, {}, 0.01).config == Config(A=2)


def test_nothing_measured_is_refused():
    with pytest.raises(ValueError, match="no config"):
        choose({}, DEFAULT, {}, 0.01)


@given(
    times=st.lists(st.floats(50, 200), min_size=1, max_size=6),
    default_us=st.floats(50, 200),
    noise=st.floats(0, 0.3),
    seed=st.integers(0, 10_000),
)
@settings(max_examples=200, deadline=None)
def test_the_winner_is_never_slower_than_the_default_beyond_the_band(times, default_us, noise, seed):
    truth = {DEFAULT: default_us} | {Config(A=1 + i): us for i, us in enumerate(times)}
    rounds = measure(truth, noise, seed)
    again = measure({DEFAULT: default_us}, noise, seed + 1)[DEFAULT]
    band = tie_band(measured_noise(rounds[DEFAULT], again))
    chosen = choose(rounds, DEFAULT, {}, band).config
    assert paired_ratio(rounds[chosen], rounds[DEFAULT]) <= 1 + band


def test_a_drift_that_all_share_cancels():
    rounds = measure({DEFAULT: 100.0, Config(A=1): 90.0}, 0.0, 3)
    assert paired_ratio(rounds[Config(A=1)], rounds[DEFAULT]) == pytest.approx(0.9)


def test_noise_of_equal_arms_is_zero_and_grows_with_scatter():
    assert measured_noise([1.0, 2.0, 3.0], [1.0, 2.0, 3.0]) == 0
    draw = random.Random(0)
    quiet = [[100 + draw.random() for _ in range(12)] for _ in range(2)]
    loud = [[100 + 40 * draw.random() for _ in range(12)] for _ in range(2)]
    assert 0 < measured_noise(*quiet) < 0.01 < measured_noise(*loud)
    assert measured_noise([110.0], [100.0]) == pytest.approx(0.1)
    assert tie_band(0.0) == 0.01 and tie_band(0.05) == 0.05


def test_medians_judge_unless_interference_makes_them_noisier_than_the_best_launches():
    calm = ([100.0, 101.0, 100.5, 100.2], [100.1, 100.9, 100.4, 100.3])
    disturbed = ([100.0, 400.0, 100.0, 400.0], [400.0, 100.0, 100.0, 100.0])
    assert steadier(calm, disturbed) == (measured_noise(*calm), False)
    assert steadier(disturbed, calm) == (measured_noise(*calm), True)
    assert steadier(disturbed, disturbed) == (measured_noise(*disturbed), False)
