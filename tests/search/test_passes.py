"""Several passes over one space as one recording: medians, corrected for each pass's pace."""

from __future__ import annotations

import dataclasses
import random
from statistics import median

import pytest
from recorded import large, recording

from tktune.core import status
from tktune.core.errors import WordsError
from tktune.search.passes import lead, paces, spread, typical
from tktune.search.recording import Recording


def measured(pace: float, seed: int, noise: float = 0.0) -> Recording:
    """The recording as a pass that ran slower by `pace`, each time off by up to `noise`."""
    draw = random.Random(seed)
    trials = {
        config: dataclasses.replace(
            trial, time_us=trial.time_us and trial.time_us * pace * (1 + noise * draw.uniform(-1, 1))
        )
        for config, trial in recording().trials.items()
    }
    return dataclasses.replace(recording(), trials=trials)


def test_passes_of_different_pace_give_the_times_of_the_middle_pace():
    passes = [measured(pace, 0) for pace in (1.0, 1.3, 0.9, 1.1, 1.05)]
    assert paces(passes) == pytest.approx([pace / 1.05 for pace in (1.0, 1.3, 0.9, 1.1, 1.05)])
    whole = typical(passes)
    for config, trial in recording().trials.items():
        found = whole.trials[config]
        assert found.status == trial.status
        assert found.time_us == (pytest.approx(1.05 * trial.time_us) if trial.timed else trial.time_us)
    assert spread(passes) == pytest.approx(0.0, abs=1e-9)


def test_one_lucky_sample_does_not_become_the_optimum():
    passes = [measured(1.0, seed, noise=0.01) for seed in range(5)]
    truth = recording().optimum
    slow = max((t for t in recording().trials.values() if t.timed), key=lambda t: t.time_us)
    lucky = dict(passes[2].trials)
    lucky[slow.config] = dataclasses.replace(lucky[slow.config], time_us=truth.time_us / 2)
    passes[2] = dataclasses.replace(passes[2], trials=lucky)
    assert passes[2].optimum.config == slow.config
    whole = typical(passes)
    assert whole.trials[slow.config].time_us == pytest.approx(slow.time_us, rel=0.02)
    assert whole.optimum.time_us == pytest.approx(truth.time_us, rel=0.02)
    assert 0 < spread(passes) < 0.01


def test_the_median_is_of_the_passes_that_timed_a_config_and_most_passes_say_whether_it_runs():
    passes = [measured(1.0, seed, noise=0.05) for seed in range(5)]
    config = next(c for c, trial in recording().trials.items() if trial.timed)

    def failing(count: int) -> list[Recording]:
        found = list(passes)
        for at in range(count):
            ended = dataclasses.replace(found[at].trials[config], status=status.CRASHED, time_us=None)
            found[at] = dataclasses.replace(found[at], trials={**found[at].trials, config: ended})
        return found

    pace = paces(failing(2))
    times = [one.trials[config].time_us / slow for one, slow in zip(passes[2:], pace[2:], strict=True)]
    assert typical(failing(2)).trials[config].time_us == pytest.approx(median(times))
    assert typical(failing(3)).trials[config].status == status.CRASHED


def test_the_lead_is_that_of_the_fastest_over_the_second():
    by, config = lead(recording())
    times = sorted(t.time_us for t in recording().trials.values() if t.timed)
    assert by == pytest.approx(times[1] / times[0] - 1)
    assert recording().trials[config].time_us == times[1]


def test_passes_of_different_spaces_are_refused():
    with pytest.raises(WordsError, match="not of the same space"):
        typical([recording(), large()])
    with pytest.raises(WordsError, match="There is no pass"):
        typical([])
