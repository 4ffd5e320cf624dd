"""A driver that decides, prepares and starts ranks while others are measured: with real ranks, whose device is only said to
be a GPU. No promise of the driver that waits is broken."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from fakes import rows as rows_of
from overlap_family import DEADLY
from toy_driver import PROBLEM as TOY
from toy_driver import on

from tktune.build.cache import ArtifactCache
from tktune.core import status
from tktune.core.config import Config
from tktune.gang.gang import Gang
from tktune.gang.trial import TrialResult, measure_trial
from tktune.search.account import ACCOUNT, Spent
from tktune.search.budget import StopSignal
from tktune.search.driver import tune
from tktune.search.events import Event, Tee, TrialDone, TrialStarted
from tktune.search.results import Rooms, TuneResult
from tktune.search.study import Study
from tktune.store.results import Store
from tktune.store.rows import STARTED

FAMILY = "overlap_family:FAMILY"
ONE = TOY.replace(family=FAMILY)
TWO = ONE.replace(tokens=32)
BEST = Config(TILE=64, num_comm_sms=1)
DEPTH = 3


def open_configs(url: str) -> list[Config]:
    """Of the rows that say `started` now, as another process sees them."""
    with Store.open(url, mode="ro") as store:
        keys = store.keys()
        return [row.config for key in keys for row in store.trials(key) if row.status == STARTED]


pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("ranks_find_the_family")]


@pytest.fixture
def ranks_find_the_family(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(Path(__file__).parent))


def run(
    url: str,
    folder: Path,
    listen: Callable[[Event], None] = lambda event: None,
    *,
    problems=(ONE,),
    trials: int = 100,
    measure: Callable[..., TrialResult] = measure_trial,
    stop: StopSignal | None = None,
    made: list[Gang] | None = None,
) -> list[TuneResult]:
    def make_gang(*words: Any, **options: Any) -> Gang:
        gang = Gang(*words, **options)
        if made is not None:
            made.append(gang)
        return gang

    study = Study("overlap", FAMILY, "cpu", tuple(problems), trials, 600.0, 0, 2)
    rooms = Rooms(make_gang=make_gang, measure=measure, seats=lambda problem, device: [(0, 1)])
    cache = ArtifactCache(folder / "cache")
    return tune(study, url, cache, listener=Tee(listen), rooms=rooms, stop=stop, device=on("cuda"))


def test_the_row_of_every_trial_is_committed_before_its_first_command_and_more_than_one_is_ready(
    url, tmp_path
):
    run(url, tmp_path, trials=1)  # makes the database
    seen: list[int] = []
    missing: list[Config] = []

    def measure(gang: Gang, config: Config, *words: Any) -> TrialResult:
        open_rows = open_configs(url)
        seen.append(len(open_rows))
        if config not in open_rows:
            missing.append(config)
        return measure_trial(gang, config, *words)

    (result,) = run(url, tmp_path, measure=measure)
    assert not missing
    assert max(seen) == DEPTH and seen.count(1) < len(seen) / 2  # the driver is ahead most of the time
    assert result.winner is not None and result.winner.only(BEST) == BEST
    final = Counter(row.config for row in rows_of(url) if status.is_final(row.status))
    assert set(final.values()) == {1} and STARTED not in {row.status for row in rows_of(url)}


def test_ranks_stay_for_the_next_problem_and_each_is_judged_by_its_own_numbers(url, tmp_path):
    made: list[Gang] = []
    results = run(url, tmp_path, problems=(ONE, TWO), trials=12, made=made)
    (gang,) = made
    assert gang.respawns == 0 and not gang.pids
    pids = set()
    with Store.open(url) as store:
        assert store.check() == []
        keys = store.keys()
        for key in keys:
            tokens = store.key_facts(key).problem.tokens
            for row in store.trials(key):
                facts = (row.detail or {}).get("facts")
                if facts is None:
                    continue
                pids.add(facts["pid"])
                assert facts["tokens"] == tokens
        (first, second) = [Spent.of_facts(event.detail) for event in store.events(ACCOUNT)]
    assert len(pids) == 1
    assert [result.problem for result in results] == [ONE, TWO]
    assert all(result.winner is not None and result.verified for result in results)
    for spent in (first, second):
        assert sum(spent.seconds.values()) == pytest.approx(spent.wall_s, rel=1e-3)
        assert spent.seconds["gating"] > 0 and spent.seconds["timing"] > 0
    assert second.seconds["starting"] < first.seconds["starting"] / 2


def test_a_config_that_killed_its_ranks_runs_alone_the_second_time(url, tmp_path, monkeypatch):
    monkeypatch.setenv("OVERLAP_DEADLY", "1")
    beside: list[list[Config]] = []

    def measure(gang: Gang, config: Config, *words: Any) -> TrialResult:
        if config == DEADLY:
            beside.append(open_configs(url))
        return measure_trial(gang, config, *words)

    (result,) = run(url, tmp_path, measure=measure)
    assert len(beside) == 2
    assert beside[1] == [DEADLY]
    ends = Counter((row.config, row.status) for row in rows_of(url))
    assert ends[DEADLY, status.CRASHED] == 2
    assert 6 * 12 - 10 <= result.measured < 6 * 12 - 10 + DEPTH  # all but those of a wrong build


def test_a_stop_ends_what_is_ready_verifies_and_leaves_no_open_row(url, tmp_path):
    stop = StopSignal()

    def listen(event: Event) -> None:
        if isinstance(event, TrialDone) and event.number == 8:
            stop.request()

    (result,) = run(url, tmp_path, listen, stop=stop)
    assert result.stopped and 8 <= result.measured <= 8 + DEPTH and result.winner is not None
    assert STARTED not in {row.status for row in rows_of(url)}


def test_an_interrupt_in_the_midst_leaves_no_rank_and_no_open_row_and_loses_nothing(url, tmp_path):
    made: list[Gang] = []
    told: list[Config] = []

    def listen(event: Event) -> None:
        if isinstance(event, TrialDone):
            told.append(event.config)
            if event.number == 8:
                raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run(url, tmp_path, listen, made=made)
    assert not made[0].pids
    stored = rows_of(url)
    assert STARTED not in {row.status for row in stored}
    assert {row.config for row in stored if status.is_final(row.status)} == set(told)
    events: list[Event] = []
    (result,) = run(url, tmp_path, events.append)
    assert result.resumed == 8 and result.winner is not None
    again = [event.config for event in events if isinstance(event, TrialStarted)]
    assert not set(again) & set(told)
    abandoned = [row.config for row in stored if row.status == status.ABANDONED]
    assert set(again[: len(abandoned)]) == set(abandoned)


def test_an_error_of_a_job_that_is_no_end_of_its_gang_reaches_the_caller(url, tmp_path):
    def measure(gang: Gang, config: Config, *words: Any) -> TrialResult:
        if len(rows_of(url)) > 5:
            raise ZeroDivisionError("a mistake of ours")
        return measure_trial(gang, config, *words)

    made: list[Gang] = []
    with pytest.raises(ZeroDivisionError, match="a mistake of ours"):
        run(url, tmp_path, measure=measure, made=made)
    assert not made[0].pids and STARTED not in {row.status for row in rows_of(url)}


def test_without_any_gang_the_run_ends_with_its_sentence_and_no_open_row(url, tmp_path, monkeypatch):
    monkeypatch.setenv("OVERLAP_ABSENT", "1")
    with pytest.raises(Exception, match="could not start"):
        run(url, tmp_path)
    assert {row.status for row in rows_of(url)} <= {status.ABANDONED}
