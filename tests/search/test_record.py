"""Recording a space: every config once and whole, resumable, refused when it is too large, and good to replay."""

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
    rows,
    study,
    true_us,
)

from tktune.core import status
from tktune.core.config import Config
from tktune.core.errors import WordsError
from tktune.search.budget import StopSignal
from tktune.search.effort import PROFILES
from tktune.search.events import Finished, Tee, TrialDone
from tktune.search.record import record
from tktune.search.recording import Recording
from tktune.search.recording_form import read_recording, write_recording
from tktune.search.replay import replay, study_of
from tktune.search.results import Rooms

CRASHES = Config(TILE=16, STAGES=3, num_comm_sms=1, order="slot")


def fate(config: Config, command: str) -> str:
    if config == CRASHES:
        return status.CRASHED
    return status.WRONG if command == "gate" and config == BOTTOM else status.OK


def recorded(world: World, url: str, stop: StopSignal | None = None, **changes: object) -> Recording | None:
    rooms = Rooms(
        make_gang=lambda problem, device, policy: FakeGang(world, problem, device, policy),  # type: ignore[arg-type,return-value]
        family=lambda name: FakeFamily(model_us=true_us),
        clock=lambda: world.now,
    )
    most = changes.pop("most", 8000)
    return record(
        study(**changes), url, FakeCache(world), listener=Tee(world.events.append),  # type: ignore[arg-type]
        stop=stop, rooms=rooms, device=CPU, most=most,
    )  # fmt: skip


def test_every_config_is_measured_in_full_and_none_is_raced(url):
    world = World(truth=lambda config: 1000.0 if config["TILE"] == 16 else true_us(config))
    found = recorded(world, url)
    assert found is not None and len(found.trials) == 72 and len(found.builds) == 12
    assert {trial.status for trial in found.trials.values()} == {status.OK}
    assert all(trial.samples is not None and trial.samples.count == 15 for trial in found.trials.values())
    assert of_kind(world, TrialDone)[0].config == DEFAULT
    assert "every feasible config" in of_kind(world, Finished)[0].reason
    assert found.trials[BOTTOM].time_us == pytest.approx(100.0)
    assert found.trials[BOTTOM].model_us == pytest.approx(100.0)


def test_failures_are_recorded_as_they_were(url):
    world = World(fate=fate, fails_to_build=lambda spec: spec.defines == {"TILE": "128", "STAGES": "1"})
    found = recorded(world, url)
    assert found is not None
    ends = {config: trial.status for config, trial in found.trials.items() if trial.status != status.OK}
    broken = Config(TILE=128, STAGES=1)
    assert ends.pop(BOTTOM) == status.WRONG and ends.pop(CRASHES) == status.CRASHED
    assert set(ends.values()) == {status.BUILD_FAILED} and len(ends) == 6
    assert found.builds[broken].status == status.BUILD_FAILED and found.builds[broken].build_s == 2.0
    assert sum(row.config == CRASHES for row in rows(url)) == 2


def test_an_interrupted_recording_goes_on(url):
    world, stop = World(), StopSignal()

    def listen(event: object) -> None:
        if isinstance(event, TrialDone) and event.number == 20:
            stop.request()

    rooms = Rooms(
        make_gang=lambda problem, device, policy: FakeGang(world, problem, device, policy),  # type: ignore[arg-type,return-value]
        family=lambda name: FakeFamily(),
        clock=lambda: world.now,
    )
    assert (
        record(study(), url, FakeCache(world), listener=Tee(listen), stop=stop, rooms=rooms, device=CPU)
        is None
    )  # type: ignore[arg-type]
    assert len(rows(url)) == 20
    again = World(published=world.published)
    found = recorded(again, url)
    assert found is not None and len(found.trials) == 72 and len(of_kind(again, TrialDone)) == 52
    assert {build.build_s for build in found.builds.values()} == {2.0}
    third = World(published=world.published)
    assert recorded(third, url) is not None and not third.timed


def test_what_is_too_large_or_several_problems_is_refused_before_anything_is_built(url):
    world = World()
    with pytest.raises(WordsError, match=r"72 feasible configs, and a recording takes at most 50.*--pin"):
        recorded(world, url, most=50)
    with pytest.raises(WordsError, match="2 problems"):
        recorded(world, url, problems=(PROBLEM, PROBLEM.replace(tokens=32)))
    assert not world.compiled
    found = recorded(world, url, most=50, pins={"STAGES": (2,)})
    assert found is not None and len(found.trials) == 24


def test_a_recording_is_replayed_to_the_same_winner(url, tmp_path):
    found = recorded(World(fate=fate), url)
    assert found is not None
    write_recording(found, tmp_path / "a.json.xz")
    again = read_recording(tmp_path / "a.json.xz")
    ended = replay(again, study_of(again, PROFILES["full"]))
    assert ended.result.winner == again.optimum.config != BOTTOM and ended.gap == 0.0
