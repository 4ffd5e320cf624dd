"""Reads the store into the facts of a report. Writes nothing, formats nothing."""

from __future__ import annotations

import shlex
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from datetime import UTC, datetime
from statistics import quantiles

from tktune import __version__
from tktune.core.config import Config, Value
from tktune.core.errors import TktuneError
from tktune.core.problem import Problem
from tktune.core.status import CENSORED, OK, is_final
from tktune.families.base import family
from tktune.moe.parts import is_layer
from tktune.report.model import (
    Attribution,
    Failure,
    ProblemReport,
    Report,
    SpacePicture,
    TimedConfig,
    Verified,
    importances,
    split_times,
)
from tktune.report.usage import run_time
from tktune.store.results import Store
from tktune.store.rows import STARTED, AttributionRow, KeyFacts, TrialRow, VerificationRow

TOP = 10

Pins = Mapping[str, Sequence[Value]]


def collect(
    store: Store,
    *,
    title: str,
    command: str = "",
    wanted: Callable[[KeyFacts], bool] = lambda facts: True,
    pins: Pins | None = None,
    order: Iterable[Problem] = (),
) -> Report:
    """The report of every key that `wanted` keeps; problems in `order` first, in that order.

    `command` is the one that makes the numbers again. `pins` limit the space as the study did. Raises
    `DatabaseError`.
    """
    facts = [facts for facts in map(store.key_facts, store.keys()) if wanted(facts)]
    place = {problem: number for number, problem in enumerate(order)}
    facts.sort(key=lambda fact: place.get(fact.problem, len(place)))
    return Report(
        title=title,
        problems=tuple(problem_report(store, fact, pins or {}) for fact in facts),
        made_at=moment(datetime.now(UTC).timestamp()),
        made_by=f"tktune {__version__}",
        database=store.shown,
        command=command or f"tktune report --db {shlex.quote(store.shown)}",
    )


def problem_report(store: Store, facts: KeyFacts, pins: Pins) -> ProblemReport:
    """Everything stored under one key."""
    trials = store.trials(facts.key)
    newest = newest_trials(trials)
    measured = [row for row in newest if row.status in (OK, CENSORED) and row.time_us is not None]
    timed = [_timed(row) for row in measured]
    ok = sorted(
        (row for row in measured if row.status == OK), key=lambda row: (row.time_us or 0, row.config.digest)
    )
    finalists = _last_session(store.verifications(facts.key))
    band, noise = _band(store, facts.problem, finalists)
    return ProblemReport(
        problem=facts.problem,
        device=facts.device,
        policy=facts.policy,
        toolchain=facts.toolchain.version,
        space=_space(facts, pins),
        statuses=tuple(sorted(Counter(row.status for row in newest).items())),
        builds=len({row.artifact_digest for row in newest if row.artifact_digest}),
        top=tuple(_with_samples(store, row) for row in ok[:TOP]),
        importances=importances(timed),
        splits=split_times(timed),
        failures=_failures(newest),
        finalists=tuple(_verified(row) for row in finalists),
        attribution=_attribution(store.attributions(facts.key), finalists),
        tie_band=band,
        noise=noise,
        first_at=moment(min(started_at(row) for row in trials)) if trials else "",
        last_at=moment(max(ended_at(row) for row in trials)) if trials else "",
        verified_at=moment(finalists[0].verified_at) if finalists else "",
        run_time=run_time(store, facts.key, facts.problem, trials),
    )


def newest_trials(trials: Sequence[TrialRow]) -> list[TrialRow]:
    """The trial that speaks for each config: its newest verdict, else its newest end; running ones left out."""
    found: dict[Config, TrialRow] = {}
    for row in sorted(trials, key=lambda row: row.id):
        if row.status == STARTED:
            continue
        if row.config not in found or is_final(row.status) or not is_final(found[row.config].status):
            found[row.config] = row
    return list(found.values())


def started_at(row: TrialRow) -> float:
    """When a trial was measured, on whatever host; an imported row carries its own time of day."""
    return float((row.detail or {}).get("imported", {}).get("started_at", row.started_at))


def ended_at(row: TrialRow) -> float:
    own = row.started_at if row.ended_at is None else row.ended_at
    return float((row.detail or {}).get("imported", {}).get("ended_at", own))


def moment(seconds: float) -> str:
    """Seconds since the epoch as a UTC time of day that people read."""
    return datetime.fromtimestamp(seconds, UTC).strftime("%Y-%m-%d %H:%M:%S UTC")


def _timed(row: TrialRow) -> TimedConfig:
    assert row.time_us is not None
    return TimedConfig(row.config, row.time_us, row.samples, None, row.artifact_digest, row.status)


def _with_samples(store: Store, row: TrialRow) -> TimedConfig:
    """With quartiles of the slowest rank's samples."""
    worst: dict[tuple[int, int], float] = {}
    for sample in store.samples(row.id):
        place = (sample.routing_seed, sample.iteration)
        worst[place] = max(sample.time_us, worst.get(place, 0.0))
    times = list(worst.values())
    quartiles = None
    if len(times) >= 4:
        low, _, high = quantiles(times, n=4)
        quartiles = (low, high)
    assert row.time_us is not None
    return TimedConfig(row.config, row.time_us, len(times), quartiles, row.artifact_digest, row.status)


def _last_session(rows: Sequence[VerificationRow]) -> list[VerificationRow]:
    """The finalists of the newest session that chose a winner, else of the newest one; fastest first."""
    chosen = [row.session_id for row in rows if row.chosen] or [row.session_id for row in rows]
    last = chosen[-1] if chosen else ""
    return sorted((row for row in rows if row.session_id == last), key=lambda row: row.time_us)


def _failures(rows: Sequence[TrialRow]) -> tuple[Failure, ...]:
    """One example for each status that is neither ok nor censored, the most frequent first."""
    failed = [row for row in rows if row.status not in (OK, CENSORED)]
    found = []
    for status, count in Counter(row.status for row in failed).most_common():
        row = next(row for row in failed if row.status == status)
        found.append(Failure(status, count, row.config, str((row.detail or {}).get("sentence", ""))))
    return tuple(found)


def _verified(row: VerificationRow) -> Verified:
    return Verified(row.role, row.config, row.time_us, len(row.samples), row.chosen, row.reason)


def _band(
    store: Store, problem: Problem, finalists: Sequence[VerificationRow]
) -> tuple[float | None, float | None]:
    """The tie band and the A/A noise of the session, as its event tells; imported sessions have none."""
    for event in reversed(store.events("verified")):
        detail = event.detail
        if finalists and (detail.get("session_id"), detail.get("problem")) == (
            finalists[0].session_id,
            problem.digest,
        ):
            return detail.get("band"), detail.get("noise")
    return None, None


def _attribution(rows: Sequence[AttributionRow], finalists: Sequence[VerificationRow]) -> Attribution | None:
    """The newest attribution of the winner, or None when its time was not taken apart."""
    winner = next((row for row in finalists if row.chosen), None)
    if winner is None:
        return None
    its = [r for r in rows if (r.config, r.artifact_digest) == (winner.config, winner.artifact_digest)]
    its = [row for row in its if row.session_id == its[-1].session_id]
    if not its:
        return None
    split = winner.config.get("num_comm_sms")
    comm = {row.split: row.time_us for row in its if row.mode == "comm"}
    alone = {row.mode: row.time_us for row in its if row.mode != "comm"}
    best = min(comm, key=lambda count: (comm[count], count or 0)) if comm else None
    return Attribution(
        fused_us=alone.get("fused"),
        comp_us=alone.get("comp"),
        comm_us=comm.get(split) if isinstance(split, int) else None,
        comm_best_us=comm[best] if comm else None,
        comm_best_split=best,
        serial_us=alone.get("serial"),
        peer_us=alone.get("peer"),
    )


def _space(facts: KeyFacts, pins: Pins) -> SpacePicture | None:
    """The space as this version of tktune sees it; None when the family or its pins are not known here, and for a layer:
    what was searched of its space hung on its kernels' winners."""
    if is_layer(facts.problem):
        return None
    try:
        space = family(facts.problem.family).space(facts.problem, facts.device)
        found = (space.restrict(pins) if pins else space).count()
    except TktuneError:
        return None
    return SpacePicture(found.total, found.feasible, found.waterfall)
