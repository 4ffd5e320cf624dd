"""Where a run's wall time went, from the rows of a run whose clock the test sets."""

from __future__ import annotations

import time

import pytest
from stored_run import DIGEST, quickstart_problem

from tktune.core.device import device_class
from tktune.report.collect import collect
from tktune.report.forms import report_object
from tktune.report.markdown import markdown
from tktune.report.model import RunTime
from tktune.report.usage import usage_text
from tktune.search.account import ACCOUNT, Spent
from tktune.search.study import load_study
from tktune.store.results import Store
from tktune.store.rows import AttributionRow, VerificationRow

FIRST = "00" * 32  # the artifact of the first config
STAGES = {
    "loaded": 0.5,
    "gated": 1.0,
    "raced": 0.5,
    "timed": 1.0,
    "rechecked": 0.5,
}  # 3 s of work, 3.5 in all


class Run:
    """Writes what a run writes, at the times that the test says."""

    def __init__(self, store: Store, clock: list[float], run_id: str) -> None:
        self.store, self.clock, self.run_id = store, clock, run_id
        study, device = load_study("quickstart"), device_class("cpu")
        self.problem = quickstart_problem()
        space = study.space(self.problem, device)
        self.configs = list(space.feasible)[:8]
        toolchain = store.toolchain_id("g++", "g++ 12.2.0", "cd" * 32, {})
        self.key = store.key(self.problem, device, study.policy(device), toolchain)

    def built(self, number: int, at: float) -> None:
        self.clock[0] = at
        digest, part = f"{number:02}" * 32, self.configs[number]
        self.store.artifact_id(
            digest, "shared", "dispatch_gemm", part, {}, 1, 1.0, self.key.toolchain_id, DIGEST
        )

    def trial(self, number: int, begin: float, device: int | None = None) -> None:
        self.clock[0] = begin
        trial = self.store.start_trial(self.key, self.configs[number], f"{number:02}" * 32, self.run_id)
        self.clock[0] = begin + 3.5
        detail = {"seconds": STAGES} | ({} if device is None else {"device": device})
        self.store.finish_trial(trial, "ok", time_us=10.0, detail=detail)

    def search_ended(self, at: float, seconds: float) -> None:
        self.clock[0] = at
        self.store.event("search_ended", "done", {"run_id": self.run_id, "seconds": seconds})

    def finals(self, begin: float, verified: float, attributed: float) -> None:
        detail = {"run_id": self.run_id, "problem": self.problem.digest}
        self.clock[0] = begin
        self.store.event("verifying", "begins", detail)
        self.clock[0] = verified
        rows = [VerificationRow(self.configs[0], FIRST, "default", 10.0, (10.0,), True, "best")]
        self.store.add_verification(self.key, self.run_id, rows)
        self.store.event("verified", "best", {**detail, "session_id": self.run_id})
        self.clock[0] = attributed
        rows = [AttributionRow(self.configs[0], FIRST, "fused", None, 10.0, (10.0,))]
        self.store.add_attribution(self.key, self.run_id, rows)


@pytest.fixture
def clock(monkeypatch):
    now = [1000.0]
    monkeypatch.setattr(time, "time", lambda: now[0])
    return now


@pytest.fixture
def store(tmp_path):
    with Store.open(f"sqlite:///{tmp_path / 'usage.db'}") as opened:
        yield opened


def run_time_of(store: Store) -> RunTime | None:
    (problem,) = collect(store, title="usage").problems
    return problem.run_time


def test_a_runs_seconds_are_taken_apart(store, clock):
    run = Run(store, clock, "one")
    run.built(1, 900.0)  # by an earlier run
    run.built(0, 1004.0)
    run.trial(0, 1010.0)  # after its build the ranks took 6 s more to start
    run.trial(1, 1014.0)  # ends at 1017.5
    run.built(2, 1026.0)
    run.trial(2, 1026.5)
    run.search_ended(1030.0, 30.0)
    run.finals(1030.0, 1036.0, 1040.0)
    found = run_time_of(store)
    assert found is not None
    assert (found.wall_s, found.search_s, found.gangs) == (pytest.approx(40.0), pytest.approx(30.0), 1)
    assert (found.gating_s, found.timing_s, found.loading_s) == (4.5, 4.5, 1.5)
    assert found.finals_s == pytest.approx(10.0)
    assert found.busy_share == pytest.approx(19.0 / 40.0)
    assert found.waiting_s == pytest.approx(4.0 + 8.5)
    assert found.built_s == pytest.approx(27.5)
    assert found.busy_share_built == pytest.approx(19.0 / 27.5)


def test_gangs_side_by_side_share_the_wall_time(store, clock):
    run = Run(store, clock, "one")
    run.built(1, 1000.25)
    run.trial(0, 1000.0, device=0)
    run.trial(1, 1000.5, device=1)
    run.search_ended(1004.0, 4.0)
    found = run_time_of(store)
    assert found is not None and found.gangs == 2
    assert found.busy_share == pytest.approx(6.0 / 8.0)
    assert found.waiting_s == pytest.approx(0.25)
    assert found.busy_share_built == pytest.approx(6.0 / 7.75)


def test_the_last_run_speaks_and_a_run_before_it_does_not(store, clock):
    first = Run(store, clock, "one")
    first.trial(0, 1000.0)
    first.search_ended(1010.0, 10.0)
    second = Run(store, clock, "two")
    second.trial(1, 2000.0)
    second.search_ended(2004.0, 4.0)
    found = run_time_of(store)
    assert found is not None and found.wall_s == pytest.approx(4.0)
    assert found.busy_share == pytest.approx(0.75)


def test_the_searches_of_one_run_are_told_apart_by_when_they_were(store, clock):
    run = Run(store, clock, "one")
    run.search_ended(1100.0, 90.0)  # of the problem before
    run.trial(0, 1105.0)
    run.search_ended(1110.0, 8.0)
    run.search_ended(1300.0, 100.0)  # of the one after
    found = run_time_of(store)
    assert found is not None and found.wall_s == pytest.approx(8.0)


def test_trials_without_a_search_have_no_run(store, clock):
    Run(store, clock, "imported").trial(0, 1000.0)
    assert run_time_of(store) is None


def test_it_is_shown_in_every_form(store, clock):
    run = Run(store, clock, "one")
    run.trial(0, 1000.0)
    run.search_ended(1004.0, 4.0)
    report = collect(store, title="usage")
    assert (
        "ranks gated or timed for 75% of 4 s, and for 75% of the 4 s without waiting for builds"
        in markdown(report)
    )
    assert report_object(report)["problems"][0]["run_time"]["busy_share"] == pytest.approx(0.75)
    two = [
        RunTime(100.0, 80.0, 20.0, 30.0, 5.0, 20.0, waiting_s=20.0),
        RunTime(300.0, 250.0, 100.0, 100.0, 5.0, 50.0, waiting_s=20.0, gangs=2),
    ]
    assert usage_text(two) == (
        "Ranks gated or timed for 49% of 6 min 40 s, and for 53% of the 6 min 10 s in which they did not wait for builds."
    )
    assert usage_text([RunTime(100.0, 80.0, 20.0, 30.0, 5.0, 20.0)]) == (
        "Ranks gated or timed for 70% of 1 min 40 s."
    )


def test_the_account_that_a_run_kept_speaks_for_it(store, clock):
    run = Run(store, clock, "one")
    run.trial(0, 1000.0)
    seconds = {
        "gating": 2.0,
        "timing": 3.0,
        "starting": 1.0,
        "waiting for builds": 2.0,
        "loading": 0.01,
        "other": 1.99,
    }
    spent = Spent(10.0, 1, seconds)
    store.event(
        ACCOUNT, spent.sentence, {"run_id": "two", "problem": run.problem.digest, **Spent(1.0, 1).facts()}
    )
    store.event(ACCOUNT, spent.sentence, {"run_id": "one", "problem": "another", **Spent(1.0, 1).facts()})
    store.event(ACCOUNT, spent.sentence, {"run_id": "one", "problem": run.problem.digest, **spent.facts()})
    run.search_ended(1004.0, 4.0)
    found = run_time_of(store)
    assert found is not None and found.spent == spent
    assert (found.wall_s, found.search_s) == (10.0, 4.0)
    assert found.busy_share == pytest.approx(0.5) and found.busy_share_built == pytest.approx(5 / 8)
    said = (
        "anks gated or timed for 5.0 of 10.0 s (50%, 62% of what did not wait for builds); waiting for builds 2.0 s, "
        "other 2.0 s, starting 1.0 s"
    )
    assert f"r{said}" in markdown(collect(store, title="usage"))
    assert usage_text([found]) == f"R{said}."
    twice = usage_text([found, found])
    assert twice.startswith("Ranks gated or timed for 10.0 of 20.0 s (50%")
