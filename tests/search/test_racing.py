"""Who earns more measuring: margins, one-sided trimming, the paired race, and what two estimates of gain promise."""

from __future__ import annotations

import random

import pytest
from fakes import DEFAULT, World, of_kind, rows, study, tune_in

from tktune.core.errors import WordsError
from tktune.gang.trial import clearly_slower
from tktune.search.events import TrialDone
from tktune.search.racing import RaceMargin, trimmed
from tktune.search.stop_rule import GreaterGain, RecordGain
from tktune.store.results import Store


def test_only_slow_outliers_are_trimmed():
    draw = random.Random(1)
    us = [100 + draw.gauss(0, 1) for _ in range(15)]
    assert trimmed([*us, 300.0, 20.0]) == [*us, 20.0]
    assert trimmed([100.0] * 5 + [900.0]) == [100.0] * 5 + [900.0]  # without a spread nothing is said
    assert trimmed([5.0]) == [5.0]


def test_a_race_is_paired_so_that_what_first_launches_share_falls_on_both():
    rival = (200.0, 110.0, 100.0)  # the first launches of a cold machine
    assert not clearly_slower([202.0, 112.0, 102.0], 100.0, 1.05, rival)
    assert clearly_slower([230.0, 125.0, 115.0], 100.0, 1.05, rival)
    assert not clearly_slower([400.0, 104.0, 300.0], 100.0, 1.05, rival)  # one launch in time is enough
    assert clearly_slower([202.0, 112.0, 108.0], 100.0, 1.05)  # without a rival: against its time


def test_equal_configs_hardly_ever_lose_a_race():
    draw, lost = random.Random(2), 0
    margin = RaceMargin()
    for _ in range(20):
        margin.note([100 * (1 + draw.gauss(0, 0.02)) for _ in range(15)])
    for _ in range(4000):
        one, other = ([100 * (1 + draw.gauss(0, 0.02)) for _ in range(3)] for _ in range(2))
        lost += clearly_slower(one, 100.0, margin.value, other)
    assert lost <= 8


def test_a_measured_noise_floor_stands_where_launches_say_less():
    margin = RaceMargin()
    margin.note([100.0] * 15)
    assert margin.noise(16) == 0.0
    margin.floor(0.04, launches=4)
    assert margin.noise(16) == pytest.approx(0.02)


def test_the_default_is_measured_against_itself_at_the_start_and_what_it_says_is_a_band(url):
    quiet, noisy = World(noise=0.0), World(noise=0.2)
    tune_in(quiet, url, study(3))
    first = next(at for at, (config, _) in enumerate(quiet.timed) if config != DEFAULT)
    assert first == 2 + 12  # its trial, then two interleaved arms
    tune_in(noisy, url.replace("tktune.db", "noisy.db"), study(3))
    assert len(of_kind(noisy, TrialDone)) == 3


def test_the_greater_promise_counts_and_either_alone_does():
    record = RecordGain()
    both = GreaterGain(record, lambda trials: 0.003)
    assert both.gain(10) == 0.003
    for number in range(100):
        both.note(100.0 + number % 50)
    assert both.gain(20) == max(record.gain(20), 0.003)
    assert GreaterGain(RecordGain(), lambda trials: None).gain(5) is None


@pytest.mark.parametrize("sampler", ["model", "tpe", "random"])
def test_every_sampler_measures_a_small_space_whole_and_nothing_twice(url, sampler):
    world = World()
    result = tune_in(world, url, study(72, sampler=sampler))
    assert result.measured == 72 and len({row.config for row in rows(url)}) == len(rows(url)) == 72


def test_a_sampler_that_is_none_is_refused():
    from tktune.cli.run import sampler_name

    assert sampler_name("tpe") == "tpe"
    with pytest.raises(WordsError, match="model, tpe, random"):
        sampler_name("gp")


def test_what_was_stopped_in_its_midst_comes_right_after_the_default(url):
    world = World()

    def fate(config, command):
        if len(of_kind(world, TrialDone)) == 5:
            raise KeyboardInterrupt
        return "ok"

    world.fate = fate
    with pytest.raises(KeyboardInterrupt):
        tune_in(world, url, study(30))
    with Store.open(url) as store:
        (stopped,) = [row.config for row in store.trials(store.keys()[0]) if row.status == "abandoned"]
    again = World(published=world.published)
    tune_in(again, url, study(30))
    assert of_kind(again, TrialDone)[0].config == stopped
