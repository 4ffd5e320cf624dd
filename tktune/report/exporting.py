"""Reads the store into the published export form, as JSON or as CSV. Writes nothing to the store."""

from __future__ import annotations

import csv
import io
from collections.abc import Callable
from datetime import UTC, datetime
from typing import Any

from tktune import __version__
from tktune.core.config import Config
from tktune.report.collect import ended_at, started_at
from tktune.report.export_form import (
    CSV_COLUMNS,
    FORMAT,
    VERSION,
    Export,
    ExportedArtifact,
    ExportedAttribution,
    ExportedKey,
    ExportedSample,
    ExportedToolchain,
    ExportedTrial,
    ExportedVerification,
)
from tktune.store.results import Store
from tktune.store.rows import STARTED, KeyFacts, TrialRow, VerificationRow

Wanted = Callable[[KeyFacts], bool]


def export_of(store: Store, wanted: Wanted = lambda facts: True) -> Export:
    """Everything stored under the keys that `wanted` keeps; trials that still run are left out."""
    facts = map(store.key_facts, store.keys())
    return Export(
        format=FORMAT,
        version=VERSION,
        made_by=f"tktune {__version__}",
        made_at=datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ"),
        keys=[_key(store, fact) for fact in facts if wanted(fact)],
    )


def export_csv(store: Store, wanted: Wanted = lambda facts: True) -> str:
    """One row a trial, with the columns of `CSV_COLUMNS`; empty where there is nothing."""
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(CSV_COLUMNS)
    for facts in map(store.key_facts, store.keys()):
        if not wanted(facts):
            continue
        winners = {(w.config, w.artifact_digest) for w in store.winners() if _same_key(w, facts)}
        verified = {(row.config, row.artifact_digest): row for row in store.verifications(facts.key)}
        for trial in store.trials(facts.key):
            if trial.status != STARTED:
                place = (trial.config, trial.artifact_digest)
                row = _csv_row(facts, trial, verified.get(place), trial.status == "ok" and place in winners)
                writer.writerow(["" if row[name] is None else row[name] for name in CSV_COLUMNS])
    return text.getvalue()


def _same_key(winner: Any, facts: KeyFacts) -> bool:
    return bool(
        winner.problem == facts.problem
        and winner.device == facts.device
        and winner.policy == facts.policy
        and winner.toolchain.digest == facts.toolchain.digest
    )


def _csv_row(
    facts: KeyFacts, trial: TrialRow, verified: VerificationRow | None, winner: bool
) -> dict[str, Any]:
    problem, device = facts.problem, facts.device
    return {
        **{name: getattr(problem, name) for name in CSV_COLUMNS[:14]},
        "backend": device.backend,
        "arch": device.arch,
        "sm_count": device.sm_count,
        "interconnect": device.interconnect,
        "device_digest": device.digest,
        "policy": facts.policy.name,
        "policy_digest": facts.policy.digest,
        "toolchain": facts.toolchain.version,
        "toolchain_digest": facts.toolchain.digest,
        "config": trial.config.json,
        "artifact_digest": trial.artifact_digest,
        "attempt": trial.attempt,
        "status": trial.status,
        "time_us": trial.time_us,
        "samples": trial.samples,
        "gate_error": trial.gate_error,
        "verified_us": verified.time_us if verified else None,
        "role": verified.role if verified else None,
        "winner": int(winner),
        "started_at": started_at(trial),
        "ended_at": ended_at(trial),
    }


def _key(store: Store, facts: KeyFacts) -> ExportedKey:
    trials = [trial for trial in store.trials(facts.key) if trial.status != STARTED]
    digests = dict.fromkeys(trial.artifact_digest for trial in trials if trial.artifact_digest)
    toolchain = facts.toolchain
    return ExportedKey(
        problem=facts.problem.key,
        device={**facts.device.key, "display_name": facts.device.display_name},
        policy={**facts.policy.key, "routing_seeds": list(facts.policy.routing_seeds)},
        toolchain=ExportedToolchain(
            kind=toolchain.kind,
            version=toolchain.version,
            digest=toolchain.digest,
            detail=dict(toolchain.detail),
        ),
        artifacts=[found for digest in digests if (found := _artifact(store, digest)) is not None],
        trials=[_trial(store, trial) for trial in trials],
        verifications=[
            ExportedVerification(
                session_id=row.session_id,
                verified_at=row.verified_at,
                config=_plain(row.config),
                artifact_digest=row.artifact_digest,
                role=row.role,
                time_us=row.time_us,
                samples=list(row.samples),
                chosen=row.chosen,
                reason=row.reason,
            )
            for row in store.verifications(facts.key)
        ],
        attributions=[
            ExportedAttribution(
                session_id=row.session_id,
                measured_at=row.measured_at,
                config=_plain(row.config),
                artifact_digest=row.artifact_digest,
                mode=row.mode,
                split=row.split,
                time_us=row.time_us,
                samples=list(row.samples),
            )
            for row in store.attributions(facts.key)
        ],
    )


def _artifact(store: Store, digest: str) -> ExportedArtifact | None:
    row = store.artifact(digest)
    if row is None:
        return None
    return ExportedArtifact(
        digest=row.digest,
        kind=row.kind,
        family=row.family,
        build_part=_plain(row.build_part),
        facts=dict(row.facts),
        bytes=row.bytes,
        build_seconds=row.build_seconds,
        sha256=row.sha256,
    )


def _trial(store: Store, trial: TrialRow) -> ExportedTrial:
    detail = {name: value for name, value in (trial.detail or {}).items() if name != "imported"}
    return ExportedTrial(
        config=_plain(trial.config),
        artifact_digest=trial.artifact_digest,
        attempt=trial.attempt,
        status=trial.status,
        time_us=trial.time_us,
        build_us=trial.build_us,
        gate_error=trial.gate_error,
        clocks=None if trial.clocks is None else dict(trial.clocks),
        detail=detail or None,
        run_id=trial.run_id,
        started_at=started_at(trial),
        ended_at=ended_at(trial),
        samples=[
            ExportedSample(routing_seed=s.routing_seed, iteration=s.iteration, rank=s.rank, time_us=s.time_us)
            for s in store.samples(trial.id)
        ],
    )


def _plain(config: Config) -> dict[str, int | str]:
    return dict(config)
