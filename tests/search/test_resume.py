"""Running a study again: a finished one costs nothing, an unfinished one continues, changed sources start over."""

from __future__ import annotations

import pytest
from fakes import (
    BOTTOM,
    CPU,
    DEFAULT,
    PROBLEM,
    FakeCache,
    FakeFamily,
    FakeGang,
    World,
    of_kind,
    study,
    true_us,
    tune_in,
)

from tktune.core import status
from tktune.core.config import Config
from tktune.search.driver import tune
from tktune.search.events import BuildDone, FinalistRound, Note, Resumed, TrialDone, WinnerChosen
from tktune.search.results import Rooms
from tktune.search.resume import recall
from tktune.store.results import Store
from tktune.store.rows import STARTED, TrialRow


def row(number: int, config: Config, end: str, *, digest: str = "d", run_id: str = "r") -> TrialRow:
    ended_at = None if end == STARTED else number + 0.5
    return TrialRow(number, config, digest, 1, end, 1.0, 0, run_id, number, ended_at, None, None, None, None)


def test_a_finished_study_builds_measures_and_verifies_nothing(url):
    first = tune_in(World(noise=0.01), url, study(30))
    world = World(noise=0.01, seed=9)
    again = tune_in(world, url, study(30))
    assert not world.compiled and not world.timed and not world.gated and world.loads == 0
    assert not of_kind(world, BuildDone) and not of_kind(world, FinalistRound)
    (resumed,) = of_kind(world, Resumed)
    assert (resumed.measured, resumed.left, resumed.wanted) == (30, 0, 30)
    assert (again.winner, again.time_us, again.default_us) == (first.winner, first.time_us, first.default_us)
    assert again.attribution == first.attribution and not again.verified and first.verified
    assert of_kind(world, WinnerChosen)[0].reason == first.reason


def test_a_larger_budget_continues_where_the_last_one_ended(url):
    first = World()
    tune_in(first, url, study(10))
    world = World(published=first.published)
    result = tune_in(world, url, study(25))
    before = {event.config for event in of_kind(first, TrialDone)}
    new = {event.config for event in of_kind(world, TrialDone)}
    assert not before & new and len(new) == 15
    assert (result.resumed, result.measured, result.verified) == (10, 15, True)


def test_seconds_count_over_all_runs(url):
    tune_in(World(), url, study(1000, seconds=40.0))
    world = World()
    again = tune_in(world, url, study(1000, seconds=40.0))
    assert again.measured == 0 and not world.timed
    more = tune_in(World(), url, study(1000, seconds=80.0))
    assert more.measured > 0


def test_changed_sources_start_over(url):
    tune_in(World(), url, study(12))
    world = World(version="2")
    result = tune_in(world, url, study(12))
    assert result.resumed == 0 and result.measured == 12
    assert of_kind(world, TrialDone)[0].config == DEFAULT


def test_the_previous_winner_is_always_a_finalist(url):
    truth = {BOTTOM: 50.0}
    tune_in(World(truth=lambda c: truth.get(c, true_us(c))), url, study(100))
    world = World(version="2")  # a kernel that makes the old winner an ordinary config
    tune_in(world, url, study(6))
    with Store.open(url) as store:
        sessions = store.verifications(store.keys()[0])
    last = [one for one in sessions if one.session_id == sessions[-1].session_id]
    assert {one.role for one in last} >= {"default", "previous"}
    assert next(one.config for one in last if one.role == "previous") == BOTTOM


def test_a_verification_that_was_cut_short_is_told_and_made_again(url):
    def killed(event: object) -> None:
        if isinstance(event, FinalistRound):
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        tune_in(World(), url, study(8), listen=killed)
    world = World()
    result = tune_in(world, url, study(8))
    (told,) = [note.sentence for note in of_kind(world, Note) if "while it verified" in note.sentence]
    assert str(result.default) in told and result.verified
    after = World()
    tune_in(after, url, study(8))
    assert not [note for note in of_kind(after, Note) if "while it verified" in note.sentence]


def test_a_missing_attribution_is_made_good(url):
    world = World(fate=lambda config, command: status.OK)

    def interrupted(event: object) -> None:
        if isinstance(event, WinnerChosen):
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        tune_in(world, url, study(8), listen=interrupted)
    again = World(published=world.published)
    result = tune_in(again, url, study(8))
    assert result.attribution is not None and not result.verified
    assert not of_kind(again, FinalistRound)


def test_a_missing_verification_is_made_good(url):
    world = World()

    def interrupted(event: object) -> None:
        if isinstance(event, FinalistRound):
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        tune_in(world, url, study(8), listen=interrupted)
    again = World(published=world.published)
    result = tune_in(again, url, study(8))
    assert result.verified and result.measured == 0 and not again.compiled


def test_an_interrupted_trial_is_abandoned_and_measured_again(url):
    world = World()

    def fate(config: Config, command: str) -> str:
        if len(world.gated) == 7:
            raise KeyboardInterrupt
        return status.OK

    world.fate = fate
    with pytest.raises(KeyboardInterrupt):
        tune_in(world, url, study(8))
    tune_in(World(), url, study(8))
    with Store.open(url) as store:
        stored = store.trials(store.keys()[0])
    abandoned = [one for one in stored if one.status == status.ABANDONED]
    assert len(abandoned) == 1
    assert [one.status for one in stored if one.config == abandoned[0].config][-1] in ("ok", "censored")


def test_pins_limit_what_is_recalled_and_asked(url):
    tune_in(World(), url, study(30))
    world = World()
    result = tune_in(world, url, study(100, pins={"TILE": (64,)}))
    assert all(event.config["TILE"] == 64 for event in of_kind(world, TrialDone))
    assert result.resumed + result.measured == 18


def test_problems_of_a_study_have_their_own_budgets(url):
    world = World()
    rooms = Rooms(
        make_gang=lambda p, d, y, **_: FakeGang(world, p, d, y),
        family=lambda name: FakeFamily(),
        clock=lambda: world.now,
    )
    problems = (PROBLEM, PROBLEM.replace(tokens=64))
    results = tune(study(7, problems=problems), url, FakeCache(world), rooms=rooms, device=CPU)
    assert [result.measured for result in results] == [7, 7]


def test_rows_are_recalled_for_what_they_mean_today():
    one, two, three, four = (Config(A=a) for a in range(4))
    known = recall(
        [
            row(1, one, "ok"),
            row(2, two, "crashed"),
            row(3, two, "lost"),
            row(4, three, "timeout:gate"),
            row(5, three, "abandoned"),
            row(6, four, "ok", digest="old"),
            row(7, one, STARTED),
            row(8, Config(A=9), "ok"),
        ],
        {one, two, three, four},
        lambda config: "d",
        {},
    )
    assert set(known.final) == {one} and known.quarantined == {two} and known.ends == {two: 2, three: 1}
    assert known.vanished == set()
    killed = recall([row(1, one, "lost"), row(2, one, "lost")], {one}, lambda config: "d", {})
    assert killed.quarantined == killed.vanished == {one}
    assert known.closed == {one, two} and known.spent_s == 4.5 and known.last_ended_at == 5.5


def test_seconds_of_a_run_that_ended_in_order_come_from_its_own_account():
    one, two = Config(A=1), Config(A=2)
    rows = [row(1, one, "ok", run_id="a"), row(10, two, "ok", run_id="b")]
    assert recall(rows, {one, two}, lambda config: "d", {"a": 30.0}).spent_s == 30.5


def test_a_config_lost_twice_is_not_issued_and_says_nothing_of_its_build(url):
    first = World()
    tune_in(first, url, study(1))
    lost = [DEFAULT.replace(order="token"), DEFAULT.replace(num_comm_sms=2)]
    with Store.open(url) as store:
        (key,) = store.keys()
        digest = store.trials(key)[0].artifact_digest
        for config in lost * 2:
            store.record_trial(key, config, digest, status.LOST)
    world = World(published=first.published)
    result = tune_in(world, url, study(72))
    issued = {event.config for event in of_kind(world, TrialDone)}
    assert not issued & set(lost) and result.resumed == 1
    assert len(issued) == 72 - 3
    assert of_kind(world, Resumed)[0].quarantined == 2
