"""Gangs side by side, with real ranks: both work at once, a slower device is compared fairly, a dying one hurts nobody."""

from __future__ import annotations

import os
import subprocess
from collections import Counter
from pathlib import Path

import pytest
from fakes import CPU, GPU, PROBLEM
from fakes import rows as rows_of
from lane_family import DEADLY, SLOWER
from toy_driver import DEVICE
from toy_driver import PROBLEM as TOY

from tktune.build.cache import ArtifactCache
from tktune.core import status
from tktune.core.config import Config
from tktune.search.budget import StopSignal
from tktune.search.driver import tune
from tktune.search.events import Event, Note, Tee, TrialDone, WinnerChosen
from tktune.search.results import Rooms, TuneResult
from tktune.search.seats import seats_of
from tktune.search.study import Study
from tktune.store.results import Store
from tktune.store.rows import STARTED, TrialRow

LANES = TOY.replace(family="lane_family:FAMILY")
BEST = Config(TILE=64, num_comm_sms=1)  # its back-offs are within a tie band


@pytest.fixture
def ranks_find_the_family(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(Path(__file__).parent))


def run(
    url: str, folder: Path, listen=lambda event: None, stop: StopSignal | None = None, trials: int = 100
) -> tuple[TuneResult, list[Event]]:
    events: list[Event] = []

    def heard(event: Event) -> None:
        events.append(event)
        listen(event)

    study = Study("lanes", LANES.family, "cpu", (LANES,), trials, 600.0, 0, 2)
    rooms = Rooms(seats=lambda problem, device: [(0, 1), (2, 3)])
    (result,) = tune(
        study,
        url,
        ArtifactCache(folder / "cache"),
        listener=Tee(heard),
        stop=stop,
        rooms=rooms,
        device=DEVICE,
    )
    return result, events


def device(row: TrialRow) -> int:
    return (row.detail or {})["device"]


def overlapping(rows: list[TrialRow]) -> int:
    """Trials of the second device that ran while one of the first did."""
    spans = [(row.started_at, row.ended_at or row.started_at) for row in rows if device(row) == 0]
    return sum(
        any(begin < (row.ended_at or 0) and row.started_at < end for begin, end in spans)
        for row in rows
        if device(row) == 2
    )


@pytest.mark.slow
@pytest.mark.usefixtures("ranks_find_the_family")
def test_two_gangs_measure_side_by_side_and_one_that_dies_hurts_nobody(url, tmp_path):
    result, events = run(url, tmp_path)
    stored = rows_of(url)
    assert result.winner is not None and result.winner.only(BEST) == BEST
    measured = [row for row in stored if row.status in (status.OK, status.CENSORED)]
    assert Counter(map(device, measured)).keys() == {0, 2}
    assert overlapping(measured) > 10
    final = Counter(row.config for row in stored if status.is_final(row.status))
    assert set(final.values()) == {1}
    assert (
        len([c for c in final if c["TILE"] != 48]) == 4 * 12
    )  # all but those of the deadly build and a wrong one
    crashed = [row for row in stored if row.status == status.CRASHED]
    assert crashed and {row.config["TILE"] for row in crashed} == {DEADLY}
    assert not [row for row in stored if row.status == STARTED]
    done = [event for event in events if isinstance(event, TrialDone)]
    assert len(done) == len(stored)


@pytest.mark.slow
@pytest.mark.usefixtures("ranks_find_the_family")
def test_a_slower_device_is_compared_after_its_offset_and_stored_as_measured(url, tmp_path):
    _, events = run(url, tmp_path)
    with Store.open(url) as store:
        (event,) = store.events("offset")
    assert event.detail["device"] == 2 and event.detail["factor"] == pytest.approx(SLOWER, rel=0.02)
    assert any("compared after division" in e.sentence for e in events if isinstance(e, Note))
    for row in rows_of(url):
        if row.status == status.OK:
            slower = SLOWER if device(row) == 2 else 1.0
            us = 100.0 + abs(row.config.number("TILE") - 64) + 5 * row.config.number("num_comm_sms")
            assert row.time_us == pytest.approx((us + row.config.number("backoff")) * slower, rel=0.012)
    best = [event.best_us for event in events if isinstance(event, TrialDone)][-1]
    assert best == pytest.approx(106.0, rel=0.025)
    (chosen,) = [event for event in events if isinstance(event, WinnerChosen)]
    assert chosen.time_us == pytest.approx(106.5, rel=0.02)  # finals are of the first device alone


@pytest.mark.slow
@pytest.mark.usefixtures("ranks_find_the_family")
def test_a_stop_lets_both_gangs_end_their_trials_and_still_verifies(url, tmp_path):
    stop = StopSignal()

    def listen(event: Event) -> None:
        if isinstance(event, TrialDone) and event.number == 8:
            stop.request()

    result, _ = run(url, tmp_path, listen, stop)
    assert result.stopped and 8 <= result.measured <= 9 and result.winner is not None
    assert STARTED not in {row.status for row in rows_of(url)}


@pytest.mark.slow
@pytest.mark.usefixtures("ranks_find_the_family")
def test_an_interrupt_leaves_no_rank_and_no_open_row(url, tmp_path):
    def listen(event: Event) -> None:
        if isinstance(event, TrialDone) and event.number == 8:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run(url, tmp_path, listen)
    ends = Counter(row.status for row in rows_of(url))
    assert STARTED not in ends and sum(ends.values()) >= 8
    listed = subprocess.run(
        ["ps", "-o", "pid,args", "--ppid", str(os.getpid())], capture_output=True, text=True
    )
    assert "tktune.gang.rank" not in listed.stdout
    result, _ = run(url, tmp_path, trials=72)
    assert result.winner is not None and result.winner.only(BEST) == BEST and result.resumed >= 7


def test_on_the_cpu_there_is_one_gang_and_elsewhere_no_more_than_devices_of_the_class(monkeypatch):
    assert seats_of(PROBLEM, CPU) == [(0, 1)]
    other = CPU
    here = [GPU, GPU, other, GPU, GPU, GPU]
    monkeypatch.setattr("tktune.core.device_cuda.cuda_device_classes", lambda: here)
    assert seats_of(PROBLEM, GPU) == [(0, 1), (3, 4)]
    assert seats_of(PROBLEM.replace(world=1), GPU) == [(0,), (1,), (3,), (4,), (5,)]
    assert seats_of(PROBLEM.replace(world=8, experts=8), GPU) == [tuple(range(8))]
