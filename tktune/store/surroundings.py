"""Rows around the measurements: events to tell a person later, and problems that runtimes asked for."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping
from typing import Any

from sqlalchemy import Connection, insert, select

from tktune.store.engine import inserted_id, rows_of
from tktune.store.keys import device_from, problem_from, text_from
from tktune.store.models import EventModel, WantedModel
from tktune.store.rows import EventRow, WantedRow
from tktune.store.winners import all_winners


def add_event(
    connection: Connection,
    kind: str,
    sentence: str,
    detail: Mapping[str, Any] | None = None,
    trial_id: int | None = None,
) -> int:
    made = insert(EventModel).values(
        at=time.time(), kind=kind, sentence=sentence, detail=text_from(detail or {}), trial_id=trial_id
    )
    return inserted_id(connection.execute(made))


def events(connection: Connection, kind: str | None = None) -> list[EventRow]:
    """Events, oldest first."""
    model = EventModel
    chosen = select(model.id, model.at, model.kind, model.sentence, model.detail, model.trial_id)
    if kind is not None:
        chosen = chosen.where(model.kind == kind)
    rows = connection.execute(chosen.order_by(model.id))
    return [EventRow(*row[:4], json.loads(row[4]), row[5]) for row in rows]


def wanted(connection: Connection) -> list[WantedRow]:
    """Problems that were asked for and still have no exact winner, most asked first."""
    model = WantedModel
    rows = connection.execute(
        select(
            model.problem, model.device, model.policy_name, model.asked, model.first_seen, model.last_seen
        ).order_by(model.asked.desc(), model.id)
    ).all()
    served = {
        (w.problem.digest, w.device.digest, w.policy.name)
        for w in all_winners(lambda sql, values: rows_of(connection, sql, values))
    }
    found = [WantedRow(problem_from(row[0]), device_from(row[1]), *row[2:]) for row in rows]
    return [w for w in found if (w.problem.digest, w.device.digest, w.policy_name) not in served]
