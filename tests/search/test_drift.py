"""An anchor tells drift from noise: it speaks when the machine changed, keeps raw times, and is silent otherwise."""

from __future__ import annotations

import pytest
from fakes import DEFAULT, World, of_kind, rows, study, true_us, tune_in

from tktune.core import status
from tktune.core.config import Config
from tktune.search.drift import DRIFT, EVERY_TRIALS
from tktune.search.events import Note, TrialDone
from tktune.store.results import Store


def notes(world: World) -> list[str]:
    return [note.sentence for note in of_kind(world, Note) if "µs at first" in note.sentence]


class Drifting(World):
    """A world that is `slower` by this fraction from its `after`-th trial on."""

    slower, after = 0.2, 25

    def sample_us(self, config: Config, mode: str) -> float:
        ended = len(of_kind(self, TrialDone))
        return super().sample_us(config, mode) * (1 + self.slower if ended >= self.after else 1)


def test_a_step_is_told_once_and_marks_what_comes_later(url):
    world = Drifting(noise=0.01)
    result = tune_in(world, url, study(72))
    (said,) = notes(world)
    assert said.startswith("The default takes") and "stored as measured" in said
    marked = [(row.detail or {}).get(DRIFT) for row in rows(url)]
    first = next(at for at, drift in enumerate(marked) if drift is not None)
    assert Drifting.after < first <= Drifting.after + EVERY_TRIALS + 1
    assert all(drift == pytest.approx(1.2, rel=0.02) for drift in marked[first:])
    for row in rows(url)[first:]:
        if row.status == status.OK:
            assert row.time_us == pytest.approx(1.2 * true_us(row.config), rel=0.03)  # raw
    assert result.winner is not None and true_us(result.winner) <= 105
    with Store.open(url) as store:
        (event,) = store.events(DRIFT)
    assert event.detail["factor"] == pytest.approx(1.2, rel=0.02) and len(event.detail["samples_us"]) == 10


def test_what_was_measured_before_the_drift_does_not_win_by_that(url):
    """Every config is equally fast; after the drift later ones seem slower, and none of them loses its race by that."""
    world = Drifting(truth=lambda config: 100.0, noise=0.002)
    world.slower, world.after = 0.9, 10
    tune_in(world, url, study(72))
    done = of_kind(world, TrialDone)
    at = EVERY_TRIALS + 2
    assert {event.status for event in done[10:20]} == {status.CENSORED}
    assert {event.status for event in done[at:]} == {status.OK}
    assert all(event.best_us == pytest.approx(100, rel=0.02) for event in done[at:])


def test_a_drift_that_goes_back_is_told_too(url):
    class There(Drifting):
        def sample_us(self, config: Config, mode: str) -> float:
            ended = len(of_kind(self, TrialDone))
            return World.sample_us(self, config, mode) * (1.2 if 10 <= ended < 45 else 1)

    world = There(noise=0.005)
    tune_in(world, url, study(72))
    said = notes(world)
    assert len(said) == 2 and "as at the start" in said[1]
    assert DRIFT not in (rows(url)[-1].detail or {})


@pytest.mark.parametrize("noise", [0.0, 0.02, 0.3])
@pytest.mark.parametrize("seed", range(3))
def test_noise_is_no_drift(url, noise, seed):
    world = World(noise=noise, seed=seed)
    tune_in(world, url, study(72))
    assert not notes(world)
    assert all(DRIFT not in (row.detail or {}) for row in rows(url))


def test_a_resumed_run_knows_what_was_scaled(url):
    world = Drifting(truth=lambda config: 100.0, noise=0.002)
    tune_in(world, url, study(60))
    again = World(truth=lambda config: 100.0, noise=0.002, published=world.published)
    tune_in(again, url, study(62))
    best = of_kind(again, TrialDone)[-1].best_us
    assert best == pytest.approx(100.0, rel=0.01)


def test_an_anchor_that_fails_gives_way_to_another(url):
    world = World()

    def fate(config: Config, command: str) -> str:
        looked = len(of_kind(world, TrialDone)) >= EVERY_TRIALS
        return status.CRASHED if config == DEFAULT and command == "time" and looked else status.OK

    world.fate = fate
    result = tune_in(world, url, study(60))
    told = [note.sentence for note in of_kind(world, Note) if "another config is watched" in note.sentence]
    assert len(told) == 1 and result.winner not in (None, DEFAULT)
    with Store.open(url) as store:
        assert store.events(DRIFT)[0].detail["status"] == status.CRASHED


def test_the_anchor_is_looked_at_after_a_minute_too(url):
    world = World(trial_s=40.0)
    before = World(trial_s=0.1)
    tune_in(world, url, study(10))
    tune_in(before, url.replace("tktune.db", "other.db"), study(10))
    assert len(world.timed) > len(before.timed)
