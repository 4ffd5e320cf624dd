"""Rows of verification sessions and of attributions: what makes a winner, and where its time goes.

Functions over one open transaction; `results.Store` gives each its own.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from sqlalchemy import Connection, func, insert, select

from tktune.core.canonical import canonical_json
from tktune.core.status import OK, WRONG
from tktune.store.keys import config_from
from tktune.store.models import AttributionModel, TrialModel, VerificationModel
from tktune.store.rows import AttributionRow, TrialKey, VerificationRow
from tktune.store.trials import under

NO_SPLIT = -1
# Sessions keep their order even when the clock steps back.
_SMALLEST_STEP_S = 0.001


def add_verification(
    connection: Connection, key: TrialKey, session_id: str, rows: Sequence[VerificationRow], now: float
) -> None:
    """Insert one session. Raises ValueError when several rows are chosen, or one that no trial proved."""
    chosen = [row for row in rows if row.chosen]
    if len(chosen) > 1:
        raise ValueError(f"session {session_id} chooses {len(chosen)} winners")
    for row in chosen:
        _check_proved(connection, key, row)
    model = VerificationModel
    newest = connection.execute(select(func.max(model.verified_at)).where(*under(model, key))).scalar_one()
    verified_at = now if newest is None else max(now, newest + _SMALLEST_STEP_S)
    connection.execute(
        insert(model),
        [
            {
                **_columns(key, session_id, row),
                "role": row.role,
                "chosen": row.chosen,
                "reason": row.reason,
                "verified_at": verified_at,
            }
            for row in rows
        ],
    )


def add_attribution(
    connection: Connection, key: TrialKey, session_id: str, rows: Sequence[AttributionRow], now: float
) -> None:
    """Insert what one session measured of one or more configs, a row per mode and split."""
    connection.execute(
        insert(AttributionModel),
        [
            {
                **_columns(key, session_id, row),
                "mode": row.mode,
                "split": NO_SPLIT if row.split is None else row.split,
                "measured_at": now,
            }
            for row in rows
        ],
    )


def verifications(connection: Connection, key: TrialKey) -> list[VerificationRow]:
    """Every finalist of every session under `key`: sessions in order, rows as they were given."""
    model = VerificationModel
    rows = connection.execute(
        select(
            model.config,
            model.artifact_digest,
            model.role,
            model.time_us,
            model.samples,
            model.chosen,
            model.reason,
            model.session_id,
            model.verified_at,
        )
        .where(*under(model, key))
        .order_by(model.verified_at, model.id)
    )
    return [
        VerificationRow(
            config_from(row[0]), row[1], row[2], row[3], tuple(json.loads(row[4])), bool(row[5]), *row[6:]
        )
        for row in rows
    ]


def attributions(connection: Connection, key: TrialKey) -> list[AttributionRow]:
    """Every attribution under `key`, sessions in order."""
    model = AttributionModel
    rows = connection.execute(
        select(
            model.config,
            model.artifact_digest,
            model.mode,
            model.split,
            model.time_us,
            model.samples,
            model.session_id,
            model.measured_at,
        )
        .where(*under(model, key))
        .order_by(model.measured_at, model.id)
    )
    return [
        AttributionRow(
            config_from(row[0]),
            row[1],
            row[2],
            None if row[3] == NO_SPLIT else row[3],
            row[4],
            tuple(json.loads(row[5])),
            *row[6:],
        )
        for row in rows
    ]


def _columns(key: TrialKey, session_id: str, row: VerificationRow | AttributionRow) -> dict[str, Any]:
    return {
        "problem_id": key.problem_id,
        "device_class_id": key.device_class_id,
        "policy_id": key.policy_id,
        "toolchain_id": key.toolchain_id,
        "session_id": session_id,
        "config_digest": row.config.digest,
        "config": row.config.json,
        "artifact_digest": row.artifact_digest,
        "time_us": row.time_us,
        "samples": canonical_json(list(row.samples)),
    }


def _check_proved(connection: Connection, key: TrialKey, row: VerificationRow) -> None:
    model = TrialModel
    same = (model.config_digest == row.config.digest, model.artifact_digest == row.artifact_digest)
    proved = select(model.id).where(*under(model, key), *same, model.status == OK).limit(1)
    refuted = (
        select(model.id)
        .where(
            model.problem_id == key.problem_id,
            model.device_class_id == key.device_class_id,
            *same,
            model.status == WRONG,
        )
        .limit(1)
    )
    if connection.execute(proved).first() is None or connection.execute(refuted).first() is not None:
        raise ValueError(f"the config {row.config} has no ok trial under this key, so it cannot be chosen")
