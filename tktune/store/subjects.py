"""Rows of what is measured and under what: problems, device classes, policies, toolchains, artifacts. Core SQL only."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping
from typing import Any

from sqlalchemy import Connection, func, insert, select, update

from tktune.core.canonical import canonical_json
from tktune.core.config import Config
from tktune.core.device import DeviceClass
from tktune.core.policy import Policy
from tktune.core.problem import Problem
from tktune.store.engine import inserted_id
from tktune.store.keys import config_from, device_from, policy_from, problem_from, shape_digest
from tktune.store.models import (
    ArtifactModel,
    DeviceClassModel,
    PolicyModel,
    ProblemModel,
    ToolchainModel,
)
from tktune.store.rows import ArtifactRow, KeyFacts, ToolchainFacts, TrialKey

Named = type[ProblemModel | DeviceClassModel | PolicyModel | ToolchainModel]


_PROBLEM_COLUMNS = frozenset(column.name for column in ProblemModel.__table__.columns)


def problem_values(problem: Problem) -> dict[str, Any]:
    """A row's values. A field without a column of its own (finish) is in the key alone."""
    return {
        **{name: value for name, value in problem.key.items() if name in _PROBLEM_COLUMNS},
        "digest": problem.digest,
        "shape_digest": shape_digest(problem),
        "key": canonical_json(problem.key),
    }


def device_values(device: DeviceClass) -> dict[str, Any]:
    return {
        **device.key,
        "digest": device.digest,
        "key": canonical_json(device.key),
        "display_name": device.display_name,
        "facts": "{}",
    }


def policy_values(policy: Policy) -> dict[str, Any]:
    columns = ("name", "launch_mode", "cache_state", "flush_bytes", "iterations", "clocks")
    return {
        **{name: policy.key[name] for name in columns},
        "digest": policy.digest,
        "key": canonical_json(policy.key),
    }


def toolchain_values(kind: str, version: str, digest: str, detail: Mapping[str, Any]) -> dict[str, Any]:
    return {"kind": kind, "version": version, "digest": digest, "detail": canonical_json(dict(detail))}


def find(connection: Connection, model: Named, digest: str) -> int | None:
    return connection.execute(select(model.id).where(model.digest == digest)).scalar_one_or_none()


def found_or_made(connection: Connection, model: Named, values: Mapping[str, Any]) -> int:
    """The row with this digest, made when it is missing. Inside a write transaction, so nobody comes between."""
    known = find(connection, model, values["digest"])
    if known is not None:
        return known
    return inserted_id(connection.execute(insert(model).values(**values)))


def keep_artifact(connection: Connection, digest: str, values: Mapping[str, Any]) -> int:
    """Insert an artifact's facts, or bring them up to date after it was built anew."""
    known = connection.execute(
        select(ArtifactModel.id).where(ArtifactModel.digest == digest)
    ).scalar_one_or_none()
    if known is None:
        made = insert(ArtifactModel).values(digest=digest, created_at=time.time(), **values)
        return inserted_id(connection.execute(made))
    connection.execute(update(ArtifactModel).where(ArtifactModel.id == known).values(**values))
    return known


def artifact_values(
    kind: str,
    family: str,
    build_part: Config,
    facts: Mapping[str, Any],
    bytes: int,
    build_seconds: float,
    toolchain_id: int,
    sha256: str,
) -> dict[str, Any]:
    return {
        "kind": kind,
        "family": family,
        "build_part": build_part.json,
        "facts": canonical_json(dict(facts)),
        "bytes": bytes,
        "build_seconds": build_seconds,
        "toolchain_id": toolchain_id,
        "sha256": sha256,
    }


def artifact(connection: Connection, digest: str) -> ArtifactRow | None:
    row = connection.execute(
        select(
            ArtifactModel.digest,
            ArtifactModel.kind,
            ArtifactModel.family,
            ArtifactModel.build_part,
            ArtifactModel.facts,
            ArtifactModel.bytes,
            ArtifactModel.build_seconds,
            ArtifactModel.toolchain_id,
            ArtifactModel.sha256,
            ArtifactModel.created_at,
        ).where(ArtifactModel.digest == digest)
    ).one_or_none()
    if row is None:
        return None
    return ArtifactRow(
        digest=row.digest,
        kind=row.kind,
        family=row.family,
        build_part=config_from(row.build_part),
        facts=json.loads(row.facts),
        bytes=row.bytes,
        build_seconds=row.build_seconds,
        toolchain_id=row.toolchain_id,
        sha256=row.sha256,
        created_at=row.created_at,
    )


def keys_in_use(connection: Connection, model: Any) -> list[TrialKey]:
    """The keys under which `model` (trials, say) has rows, in the order they first came."""
    columns = (model.problem_id, model.device_class_id, model.policy_id, model.toolchain_id)
    chosen = select(*columns).group_by(*columns).order_by(func.min(model.id))
    return [TrialKey(*row) for row in connection.execute(chosen)]


def key_facts(connection: Connection, key: TrialKey) -> KeyFacts:
    """A key spelt out. The key must come from this database."""
    problem = connection.execute(
        select(ProblemModel.key).where(ProblemModel.id == key.problem_id)
    ).scalar_one()
    device = connection.execute(
        select(DeviceClassModel.key, DeviceClassModel.display_name).where(
            DeviceClassModel.id == key.device_class_id
        )
    ).one()
    policy = connection.execute(select(PolicyModel.key).where(PolicyModel.id == key.policy_id)).scalar_one()
    toolchain = connection.execute(
        select(
            ToolchainModel.kind, ToolchainModel.version, ToolchainModel.digest, ToolchainModel.detail
        ).where(ToolchainModel.id == key.toolchain_id)
    ).one()
    return KeyFacts(
        key,
        problem_from(problem),
        device_from(device[0], device[1]),
        policy_from(policy),
        ToolchainFacts(toolchain[0], toolchain[1], toolchain[2], json.loads(toolchain[3])),
    )


def note_device_facts(connection: Connection, device_class_id: int, facts: Mapping[str, Any]) -> None:
    """Merge measured facts into those beside a device class."""
    model = DeviceClassModel
    known = connection.execute(select(model.facts).where(model.id == device_class_id)).scalar_one()
    merged = canonical_json({**json.loads(known), **facts})
    connection.execute(update(model).where(model.id == device_class_id).values(facts=merged))


def device_facts(connection: Connection, digest: str) -> dict[str, Any]:
    found = connection.execute(
        select(DeviceClassModel.facts).where(DeviceClassModel.digest == digest)
    ).scalar_one_or_none()
    return {} if found is None else dict(json.loads(found))
