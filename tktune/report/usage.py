"""Where the wall time of a run went: how much of it ranks gated or timed, and what the rest was. Reads rows, writes
nothing.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Mapping, Sequence
from typing import Any

from tktune.core.problem import Problem
from tktune.report.model import RunTime
from tktune.report.text import seconds_text
from tktune.search.account import ACCOUNT, Spent
from tktune.store.results import Store
from tktune.store.rows import AttributionRow, EventRow, TrialKey, TrialRow

_CLOCKS_APART_S = 0.5  # a search counts its seconds by another clock than that of events
_GATED, _TIMED = ("gated", "rechecked"), ("raced", "timed")  # stages of a trial (`detail["seconds"]`)


def run_time(store: Store, key: TrialKey, problem: Problem, trials: Sequence[TrialRow]) -> RunTime | None:
    """The last run that searched under this key; None when no run of this database did (imported rows).

    What a gang does beside trials (watching for drift, the noise of the default) counts as rest.
    """
    ended = store.events("search_ended")
    for run_id in dict.fromkeys(row.run_id for row in sorted(trials, key=lambda row: row.id, reverse=True)):
        own = [row for row in trials if row.run_id == run_id]
        search = _search_of(ended, run_id, own)
        if search is not None:
            spent = _spent(store, run_id, problem.digest)
            if spent is not None:
                return _accounted(spent, float(search.detail["seconds"]))
            begin = search.at - float(search.detail["seconds"])
            finals_s = _finals_s(
                store.events(), store.attributions(key), run_id, problem.digest, after=search.at
            )
            return _sum(own, begin, search.at, finals_s, _waiting_s(own, begin, search.at, store))
    return None


def _spent(store: Store, run_id: str, problem: str) -> Spent | None:
    """The account that the run kept of this problem."""
    for event in store.events(ACCOUNT):
        if event.detail.get("run_id") == run_id and event.detail.get("problem") == problem:
            return Spent.of_facts(event.detail)
    return None


def _accounted(spent: Spent, search_s: float) -> RunTime:
    return RunTime(
        wall_s=spent.wall_s,
        search_s=search_s,
        gating_s=spent.seconds.get("gating", 0.0),
        timing_s=spent.seconds.get("timing", 0.0),
        loading_s=spent.seconds.get("loading", 0.0),
        finals_s=0.0,
        waiting_s=spent.waiting_s,
        gangs=spent.gangs,
        spent=spent,
    )


def _search_of(ended: Sequence[EventRow], run_id: str, trials: Sequence[TrialRow]) -> EventRow | None:
    """The end of the search that made these trials: one run searches for several problems, one after the other."""
    first = min(row.started_at for row in trials)
    for event in ended:
        if event.detail.get("run_id") != run_id:
            continue
        if event.at - float(event.detail["seconds"]) - _CLOCKS_APART_S <= first <= event.at:
            return event
    return None


def _finals_s(
    events: Sequence[EventRow],
    attributions: Sequence[AttributionRow],
    run_id: str,
    problem: str,
    after: float,
) -> tuple[float, float]:
    """Seconds of verifying finalists and taking the winner's time apart, and when the last of it ended."""
    verifying_s, end, since = 0.0, after, None
    for event in events:
        detail = event.detail
        if detail.get("run_id") != run_id or detail.get("problem") != problem or event.at < after:
            continue
        if event.kind == "verifying":
            since = event.at
        elif event.kind == "verified" and since is not None:
            verifying_s, end, since = verifying_s + event.at - since, event.at, None
    measured = [row.measured_at for row in attributions if row.session_id == run_id]
    if measured and max(measured) > end:
        verifying_s, end = verifying_s + max(measured) - end, max(measured)
    return verifying_s, end


def _waiting_s(trials: Sequence[TrialRow], begin: float, search_end: float, store: Store) -> float:
    """Seconds in which a gang did nothing until the artifact of its next trial was there, summed over gangs."""
    built: dict[str, float] = {}
    for digest in {row.artifact_digest for row in trials if row.artifact_digest}:
        artifact = store.artifact(digest)
        if artifact is not None:
            built[digest] = artifact.created_at
    free: dict[Any, float] = {}
    waited_s = 0.0
    for row in sorted(trials, key=lambda row: row.started_at):
        if row.started_at > search_end:
            break
        gang = (row.detail or {}).get("device")
        since = free.get(gang, begin)
        there = built.get(row.artifact_digest, since)
        waited_s += max(0.0, min(there, row.started_at) - since)
        free[gang] = row.started_at if row.ended_at is None else row.ended_at
    return waited_s


def _sum(
    trials: Sequence[TrialRow],
    begin: float,
    search_end: float,
    finals: tuple[float, float],
    waiting_s: float,
) -> RunTime:
    details = [row.detail or {} for row in trials]
    stages: list[Mapping[str, Any]] = [detail.get("seconds", {}) for detail in details]
    finals_s, end = finals

    def total(names: Sequence[str]) -> float:
        return sum(float(stage.get(name, 0.0)) for stage in stages for name in names)

    return RunTime(
        wall_s=end - begin,
        search_s=search_end - begin,
        gating_s=total(_GATED),
        timing_s=total(_TIMED),
        loading_s=total(("loaded",)),
        finals_s=finals_s,
        waiting_s=waiting_s,
        gangs=max(1, len({detail["device"] for detail in details if "device" in detail})),
    )


def usage_text(runs: Sequence[RunTime]) -> str:
    """One sentence on the runs of one or several problems."""
    accounts = [run.spent for run in runs if run.spent is not None]
    if len(accounts) == len(runs):
        return functools.reduce(operator.add, accounts).sentence
    wall_s, busy_s = sum(run.wall_s for run in runs), sum(run.busy_s / run.gangs for run in runs)
    free_s = sum(run.built_s for run in runs)
    said = f"Ranks gated or timed for {busy_s / wall_s:.0%} of {seconds_text(wall_s)}"
    if wall_s - free_s < 0.5:
        return f"{said}."
    return f"{said}, and for {busy_s / free_s:.0%} of the {seconds_text(free_s)} in which they did not wait for builds."
