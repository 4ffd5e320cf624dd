"""A replay is the driver over a recording: it charges what was recorded, fails as it was told to, and knows the truth."""

from __future__ import annotations

import dataclasses
import time
from pathlib import Path

import pytest
from fakes import BOTTOM, GPU
from recorded import FAILED, WRONG, large, recording

from tktune.core import status
from tktune.core.config import Config
from tktune.core.errors import GangError, WordsError
from tktune.families.base import RankSeat
from tktune.search.budget import StopSignal
from tktune.search.effort import PROFILES
from tktune.search.events import Event, Note, Tee, TrialDone
from tktune.search.recording import Recording
from tktune.search.replay import Replayed, on_recording, replay, study_of
from tktune.search.replay_rooms import (
    Disturbance,
    ReplayBuilder,
    ReplayCache,
    ReplayFamily,
    ReplayGang,
    VirtualClock,
)
from tktune.search.study import Study, load_study


def run(
    space: Recording, trials: int = 40, how: Disturbance | None = None, **changes: object
) -> tuple[Replayed, list[Event]]:
    given = {"trials": trials, "seconds": 1e6, "stop_early": False, **changes}
    study = dataclasses.replace(study_of(space, PROFILES["full"]), **given)  # type: ignore[arg-type]
    events: list[Event] = []
    return replay(space, study, disturbance=how, listener=Tee(events.append)), events


def done(events: list[Event]) -> list[TrialDone]:
    return [event for event in events if isinstance(event, TrialDone)]


def test_the_optimum_of_a_small_recording_is_found_and_known():
    ended, events = run(recording())
    assert ended.result.winner == BOTTOM == ended.optimum
    assert ended.gap == 0.0 and ended.winner_us == ended.optimum_us == pytest.approx(100.0)
    assert ended.default_us is not None and ended.default_us > 100
    assert all(
        event.time_us in (None, pytest.approx(recording().trials[event.config].time_us))
        for event in done(events)
    )


def test_no_second_passes_but_those_that_are_charged():
    began = time.monotonic()
    ended, _ = run(recording(build_s=1000.0), trials=72)
    assert time.monotonic() - began < 20
    assert ended.build_s == 12 * 1000.0
    assert ended.charged_s == pytest.approx(ended.build_s / 2 + ended.run_s, rel=0.01)  # two compilers


def test_a_whole_trial_is_charged_as_recorded():
    space = recording()
    clock = VirtualClock()
    gang, trial = ReplayGang(space, Disturbance(), clock), space.trials[BOTTOM]
    build = space.build_part(BOTTOM)
    gang.load(Path("x"), "", build)
    for _ in range(space.gates):
        gang.gate(BOTTOM, "uniform", 0)
    outcome = gang.time(BOTTOM, "fused", 0, space.iterations)
    assert outcome.worst_us == [trial.time_us] * 15
    assert clock.now == pytest.approx(trial.run_s)
    gang.load(Path("x"), "", build)  # held ready
    assert clock.now == pytest.approx(trial.run_s)
    assert gang.time(BOTTOM, "comm", 0, 3).status == "refused:recorded"


def test_seconds_of_the_budget_are_charged_seconds():
    ended, _ = run(recording(), trials=1000, seconds=10.0)
    assert "10 seconds" in ended.result.ended and ended.charged_s <= 14


def test_the_same_words_give_the_same_answer_and_another_seed_another():
    how = Disturbance(noise=0.02, failures=0.1, drift=0.1, seed=3)
    ones = [[(e.config, e.status, e.time_us) for e in done(run(large(), 60, how)[1])] for _ in range(2)]
    assert ones[0] == ones[1]
    other = [
        (e.config, e.status, e.time_us) for e in done(run(large(), 60, dataclasses.replace(how, seed=4))[1])
    ]
    assert other != ones[0]


def test_what_failed_fails_again():
    ended, events = run(recording(), trials=72)
    ends = {event.config: event.status for event in done(events)}
    assert ends[WRONG] == status.WRONG
    broken = {config: end for config, end in ends.items() if config.only(FAILED) == FAILED}
    assert set(broken.values()) == {status.BUILD_FAILED} and len(broken) == 1
    assert ended.result.winner == BOTTOM


def test_noise_moves_times_by_about_as_much_as_was_asked():
    _, events = run(large(), 100, Disturbance(noise=0.02, seed=1))
    truth = large().trials
    off = [e.time_us / truth[e.config].time_us - 1 for e in done(events) if e.status == status.OK]
    assert 0.0 < max(map(abs, off)) < 0.05
    assert abs(sum(off) / len(off)) < 0.01


def test_made_failures_are_no_candidates_and_the_optimum_knows():
    how = Disturbance(failures=0.4, seed=2)
    ended, events = run(large(), 150, how)
    ends = {event.status for event in done(events)}
    assert {status.WRONG, status.CRASHED, status.timeout("time")} <= ends
    assert how.lets_pass(ended.optimum) and ended.result.winner is not None
    assert how.lets_pass(ended.result.winner)
    once = [config for config in large().trials if how.fails(config) == "once"]
    crashed = [e.config for e in done(events) if e.status == status.CRASHED]
    again = [
        e.config for e in done(events) if e.status in (status.OK, status.CENSORED) and e.config in crashed
    ]
    assert set(again) <= set(once)


def test_a_drift_that_is_watched_does_not_choose_the_winner():
    """Launches get 20 % slower in the first minute: what was measured early must not win by that."""
    how = Disturbance(drift=0.2, drift_s=20.0, noise=0.005)
    ended, events = run(large(build_s=0.5), 200, how)
    notes = [
        event.sentence
        for event in events
        if isinstance(event, Note) and "stored as measured" in event.sentence
    ]
    assert notes and "The default takes" in notes[0]
    assert ended.gap is not None and ended.gap < 0.05


def test_pins_bound_the_optimum_and_the_winner():
    ended, _ = run(recording(), pins={"order": ("slot",), "STAGES": (2,)})
    assert ended.result.winner is not None and ended.gap == 0.0
    assert {ended.optimum["order"], ended.result.winner["order"]} == {"slot"}
    with pytest.raises(WordsError, match="STAGES cannot be 9"):
        run(recording(), pins={"STAGES": (9,)})


def test_a_study_lends_its_budget_to_a_recording():
    space = recording()
    study = on_recording(load_study("quickstart"), space)
    assert study.problems == (space.problem,) and study.trials == 60
    assert study.policy(space.device) == space.policy


def test_on_a_gpu_builds_overlap_with_measuring():
    space = recording(device=GPU)
    ended, _ = run(space, trials=72)
    apart, _ = run(recording(), trials=72)
    assert ended.charged_s < apart.charged_s
    assert ended.build_s == apart.build_s == 24.0


def test_an_artifact_is_ready_when_its_compiler_would_have_been():
    space, clock = recording(device=GPU), VirtualClock()
    family, cache = ReplayFamily(space), ReplayCache(space, Path("/nowhere"))
    parts = [part for part in space.builds if part != FAILED][:3]
    specs = {part: family.build_spec(part, space.problem, space.device) for part in parts}
    builder = ReplayBuilder(cache, Tee(lambda event: None), ahead=True, clock=clock, jobs=2)
    builder.order(specs)
    assert builder.finished() == [] and builder.room == 0
    clock.charge(3.0)  # measuring meanwhile
    assert [build for build, _ in builder.finished()] == parts[:2]
    builder.wait()
    ((last, outcome),) = builder.finished()
    assert last == parts[2] and outcome.seconds == 2.0
    assert clock.now == 4.0  # three compiles of 2 s for two compilers
    assert all(outcome.cached for outcome in builder.build(specs).values()) and clock.now == 4.0


def test_a_cancelled_order_frees_its_compilers_and_never_comes():
    space, clock = recording(device=GPU), VirtualClock()
    family, cache = ReplayFamily(space), ReplayCache(space, Path("/nowhere"))
    specs = {p: family.build_spec(p, space.problem, space.device) for p in space.builds if p != FAILED}
    builder = ReplayBuilder(cache, Tee(lambda event: None), ahead=True, clock=clock, jobs=2)
    builder.order(specs)
    builder.cancel()
    assert builder.under_way == 0 and builder.finished() == [] and builder.room == 2


def test_a_recording_has_no_ranks():
    seat = RankSeat(recording().problem, GPU, recording().policy, 0, 2, (), 0)
    with pytest.raises(GangError, match="no ranks"):
        ReplayFamily(recording()).workbench(seat)


def test_a_stopped_replay_still_verifies():
    space, stop = recording(), StopSignal()

    def listen(event: Event) -> None:
        if isinstance(event, TrialDone) and event.number == 5:
            stop.request()

    ended = replay(space, study_of(space, PROFILES["full"]), listener=Tee(listen), stop=stop)
    assert ended.result.stopped and ended.result.measured == 5 and ended.result.winner is not None


@pytest.mark.parametrize("seed", range(3))
def test_independent_replays_with_noise_end_close_to_each_other(seed):
    ended, _ = run(large(build_s=0.5), 200, Disturbance(noise=0.02, seed=seed), seed=seed)
    assert ended.gap is not None and ended.gap < 0.06
    assert isinstance(ended.result.winner, Config) and isinstance(study_of(large(), PROFILES["quick"]), Study)
