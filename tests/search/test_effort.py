"""How much a run does: profiles, who overrides whom, and configs to start from."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from fakes import BOTTOM, DEFAULT, PROBLEM, FakeFamily, World, of_kind, study, tune_in

from tktune.core.device import device_class
from tktune.core.errors import StudyError, WordsError
from tktune.search.effort import PROFILES, effort
from tktune.search.events import FinalistRound, TrialDone
from tktune.search.start import config_words, start_configs
from tktune.search.study import load_study

STUDY = """\
name = "s"
family = "dispatch_gemm"
[problem]
hidden = 64
cols = 64
experts = 4
top_k = 2
tokens = 32
world = 2
[search]
"""


def loaded(tmp_path: Path, keys: str = "", asked: str | None = None):
    path = tmp_path / "s.toml"
    path.write_text(STUDY + keys)
    return load_study(path, asked)


def test_without_a_word_the_effort_is_full(tmp_path):
    found, full = loaded(tmp_path), PROFILES["full"]
    assert (found.trials, found.seconds, found.finalists, found.rounds, found.stop_early) == (
        full.trials, full.seconds, full.finalists, full.rounds, True,
    )  # fmt: skip


def test_keys_of_a_study_override_its_own_effort(tmp_path):
    found = loaded(tmp_path, 'effort = "quick"\ntrials = 7\nstop_early = false\n')
    assert (found.trials, found.seconds, found.stop_early) == (7, PROFILES["quick"].seconds, False)


def test_the_effort_of_the_command_line_overrides_the_study(tmp_path):
    found = loaded(tmp_path, "trials = 7\nseconds = 9\nfinalists = 2\nrounds = 4\n", "exhaustive")
    every = PROFILES["exhaustive"]
    assert (found.trials, found.seconds, found.finalists, found.rounds) == (
        every.trials, every.seconds, every.finalists, every.rounds,
    )  # fmt: skip


def test_efforts_share_one_policy_so_that_one_continues_the_other(tmp_path):
    device = device_class("sm_90a")
    policies = {loaded(tmp_path, asked=name).policy(device) for name in PROFILES}
    assert len(policies) == 1


def test_efforts_grow():
    quick, full, every = (PROFILES[name] for name in ("quick", "full", "exhaustive"))
    for key in ("trials", "seconds", "finalists", "rounds"):
        assert getattr(quick, key) < getattr(full, key) < getattr(every, key)
    assert not every.stop_early


def test_an_effort_that_is_none_is_refused(tmp_path):
    with pytest.raises(WordsError, match="quick, full, exhaustive"):
        effort("lazy")
    with pytest.raises(WordsError, match="no effort"):
        loaded(tmp_path, asked="lazy")
    with pytest.raises(StudyError, match="effort"):
        loaded(tmp_path, 'effort = "lazy"\n')


def test_rounds_are_those_of_the_study(url):
    world = World()
    tune_in(world, url, study(5, rounds=4))
    assert [event.number for event in of_kind(world, FinalistRound)] == [1, 2, 3, 4]


# Starts.


def test_a_start_is_tried_right_after_the_default(url):
    world = World()
    tune_in(world, url, study(12, start_from=(str(BOTTOM), json.dumps({"TILE": 128}))))
    first = [event.config for event in of_kind(world, TrialDone)][:3]
    assert first == [DEFAULT, BOTTOM, DEFAULT.replace(TILE=128)]


def test_a_start_costs_the_budget_nothing_extra_and_is_not_measured_twice(url):
    world = World()
    result = tune_in(world, url, study(20, start_from=(str(DEFAULT), str(BOTTOM), str(BOTTOM))))
    configs = [event.config for event in of_kind(world, TrialDone)]
    assert result.measured == 20 and len(set(configs)) == 20
    again = tune_in(World(published=world.published), url, study(24, start_from=(str(BOTTOM),)))
    assert again.measured == 4 and again.winner == BOTTOM


def test_a_start_within_a_budget_of_two_is_the_second(url):
    world = World()
    tune_in(world, url, study(2, start_from=(str(BOTTOM),)))
    assert [event.config for event in of_kind(world, TrialDone)] == [DEFAULT, BOTTOM]


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("TILE=17", "TILE cannot be 17"),
        ("TILLE=64", "Did you mean TILE"),
        ("TILE", "is not PARAM=VALUE"),
        ("TILE=16 TILE=32", "each once"),
        ("", "is empty"),
        ('"', "cannot be read"),
        ("{", "not JSON"),
        ('{"TILE": 1.5}', "neither a whole number"),
        ("TILE=128", "allowed: it is forbidden"),
    ],
)
def test_a_start_that_cannot_be_is_refused_before_anything_is_measured(url, text, said):
    world = World()
    family = FakeFamily(forbidden=lambda config: config["TILE"] == 128)
    with pytest.raises(WordsError, match=said):
        tune_in(world, url, study(5, start_from=(text,)), family=family)
    assert not world.events


def test_what_a_start_leaves_out_is_as_in_the_default():
    space = FakeFamily().space(PROBLEM, device_class("sm_90a"))
    assert start_configs(space, ["order=token", "{}"]) == [DEFAULT.replace(order="token"), DEFAULT]
    assert config_words('TILE=32 "order=slot"') == {"TILE": 32, "order": "slot"}
