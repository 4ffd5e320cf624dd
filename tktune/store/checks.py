"""Whether a database is sound: SQLite's own checks, and invariants recomputed without the views and constraints."""

from __future__ import annotations

from collections import defaultdict
from typing import Any

from sqlalchemy import Connection, func, select, text

from tktune.core.status import OK, WRONG, is_final
from tktune.store.keys import config_from, device_from, policy_from, problem_from, shape_digest
from tktune.store.models import (
    ArtifactModel,
    AttributionModel,
    Base,
    DeviceClassModel,
    EventModel,
    PolicyModel,
    ProblemModel,
    SampleModel,
    ToolchainModel,
    TrialModel,
    VerificationModel,
    WantedModel,
)


def faults(connection: Connection) -> list[str]:
    """One sentence for each thing that is not as it must be; empty when all is well."""
    found = [*_file(connection)]
    if not found:
        found += [
            *_orphans(connection),
            *_spelling(connection),
            *_attempts(connection),
            *_winners(connection),
        ]
    return found


def _file(connection: Connection) -> list[str]:
    if connection.dialect.name != "sqlite":
        return []
    told = [row[0] for row in connection.exec_driver_sql("PRAGMA integrity_check")]
    return [f"The file is damaged: {line}." for line in told if line != "ok"]


def _orphans(connection: Connection) -> list[str]:
    """Rows that point to nothing; looked for by hand, for a file may have been edited with foreign keys off."""
    found = []
    for table in Base.metadata.sorted_tables:
        for key in table.foreign_keys:
            target = key.column.table
            missing = connection.execute(
                select(func.count())
                .select_from(table.outerjoin(target, key.parent == key.column))
                .where(key.parent.is_not(None), key.column.is_(None))
            ).scalar_one()
            if missing:
                found.append(f"{missing} rows of {table.name} point to a {target.name} that is not there.")
    return found


def _spelling(connection: Connection) -> list[str]:
    """Digests must be those of the facts beside them."""
    found = []
    model = ProblemModel
    for row_id, key, digest_, shape in connection.execute(
        select(model.id, model.key, model.digest, model.shape_digest)
    ):
        problem = problem_from(key)
        if (problem.digest, shape_digest(problem)) != (digest_, shape):
            found.append(f"Problem {row_id} has a digest that is not its own.")
    device = DeviceClassModel
    for row_id, key, digest_ in connection.execute(select(device.id, device.key, device.digest)):
        if device_from(key).digest != digest_:
            found.append(f"Device class {row_id} has a digest that is not its own.")
    policy = PolicyModel
    for row_id, key, digest_ in connection.execute(select(policy.id, policy.key, policy.digest)):
        if policy_from(key).digest != digest_:
            found.append(f"Policy {row_id} has a digest that is not its own.")
    for table in (TrialModel, VerificationModel, AttributionModel):
        for config, digest_ in connection.execute(select(table.config, table.config_digest).distinct()):
            if config_from(config).digest != digest_:
                found.append(
                    f"The config {config} of {table.__tablename__} has a digest that is not its own."
                )
    return found


def _attempts(connection: Connection) -> list[str]:
    """Attempts count from 1 without gaps, and nothing follows a verdict but a `wrong` that overrules it."""
    found = []
    for rows in _trials(connection).values():
        if [row.attempt for row in rows] != list(range(1, len(rows) + 1)):
            found.append(f"The attempts of trial {rows[0].id} do not count from 1.")
        verdicts = [row.status for row in rows if is_final(row.status)]
        if verdicts[1:] not in ([], [WRONG]) or (verdicts and not is_final(rows[-1].status)):
            found.append(f"Trial {rows[-1].id} was measured again after a verdict.")
    return found


def _winners(connection: Connection) -> list[str]:
    """The view against a plain recomputation from the rows."""
    proved: set[Any] = set()
    refuted: set[Any] = set()
    for identity, rows in _trials(connection).items():
        problem, device, _, _, config, artifact = identity
        proved.update(identity for row in rows if row.status == OK)
        refuted.update((problem, device, config, artifact) for row in rows if row.status == WRONG)
    model = VerificationModel
    expected: dict[Any, int] = {}
    for row in connection.execute(
        select(
            model.id,
            model.problem_id,
            model.device_class_id,
            model.policy_id,
            model.toolchain_id,
            model.config_digest,
            model.artifact_digest,
        )
        .where(model.chosen)
        .order_by(model.verified_at, model.id)
    ):
        key, config, artifact = tuple(row[1:5]), row[5], row[6]
        if (*key, config, artifact) not in proved:
            found_id = row[0]
            return [f"Verification {found_id} chose a config that no trial proved."]
        if (row[1], row[2], config, artifact) not in refuted:
            expected[key] = row[0]
    view = connection.execute(
        text("SELECT problem_id, device_class_id, policy_id, toolchain_id, id FROM winner")
    ).all()
    if sorted((tuple(row[:4]), row[4]) for row in view) != sorted(expected.items()):
        return ["The winner view disagrees with the verifications and trials it is made of."]
    return []


def _trials(connection: Connection) -> dict[Any, list[Any]]:
    model = TrialModel
    grouped: dict[Any, list[Any]] = defaultdict(list)
    for row in connection.execute(
        select(
            model.problem_id,
            model.device_class_id,
            model.policy_id,
            model.toolchain_id,
            model.config_digest,
            model.artifact_digest,
            model.attempt,
            model.status,
            model.id,
        ).order_by(model.attempt)
    ):
        grouped[tuple(row[:6])].append(row)
    return grouped


def counts(connection: Connection) -> dict[str, Any]:
    """How many rows there are, trials also by status, and the bytes on disk."""
    grouped = select(TrialModel.status, func.count()).group_by(TrialModel.status).order_by(TrialModel.status)
    by_status = {row[0]: row[1] for row in connection.execute(grouped)}
    sessions = select(VerificationModel.session_id).distinct().subquery()
    return {
        "trials": sum(by_status.values()),
        "statuses": by_status,
        "samples": _count(connection, SampleModel),
        "problems": _count(connection, ProblemModel),
        "device_classes": _count(connection, DeviceClassModel),
        "policies": _count(connection, PolicyModel),
        "toolchains": _count(connection, ToolchainModel),
        "artifacts": _count(connection, ArtifactModel),
        "sessions": connection.execute(select(func.count()).select_from(sessions)).scalar_one(),
        "winners": connection.execute(text("SELECT count(*) FROM winner")).scalar_one(),
        "attributions": _count(connection, AttributionModel),
        "wanted": _count(connection, WantedModel),
        "events": _count(connection, EventModel),
        "bytes": _bytes(connection),
    }


def _count(connection: Connection, model: type[Base]) -> int:
    return connection.execute(select(func.count()).select_from(model)).scalar_one()


def _bytes(connection: Connection) -> int:
    if connection.dialect.name == "sqlite":
        pages = connection.exec_driver_sql("PRAGMA page_count").scalar_one()
        return int(pages * connection.exec_driver_sql("PRAGMA page_size").scalar_one())
    return int(connection.exec_driver_sql("SELECT pg_database_size(current_database())").scalar_one())
