"""Rows of measured links: what `tktune doctor` found of a device class, when, under which driver and toolchain."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from sqlalchemy import Connection, insert, select

from tktune.core.canonical import canonical_json
from tktune.store.engine import inserted_id
from tktune.store.models import DeviceClassModel, LinkMeasurementModel, ToolchainModel


@dataclass(frozen=True)
class LinkRow:
    """One measurement. `facts` are plain JSON in a form of their writer's; `measured_at` seconds since the epoch."""

    facts: Mapping[str, Any]
    driver: str
    toolchain: str
    host: str
    measured_at: float


def add_link(
    connection: Connection,
    device_class_id: int,
    toolchain_id: int,
    facts: Mapping[str, Any],
    driver: str,
    host: str,
    measured_at: float,
) -> int:
    made = insert(LinkMeasurementModel).values(
        device_class_id=device_class_id,
        toolchain_id=toolchain_id,
        driver=driver,
        host=host,
        facts=canonical_json(dict(facts)),
        measured_at=measured_at,
    )
    return inserted_id(connection.execute(made))


def links(connection: Connection, device_digest: str) -> list[LinkRow]:
    """Every measurement of a device class, newest first."""
    model = LinkMeasurementModel
    rows = connection.execute(
        select(model.facts, model.driver, ToolchainModel.version, model.host, model.measured_at)
        .join(DeviceClassModel, DeviceClassModel.id == model.device_class_id)
        .join(ToolchainModel, ToolchainModel.id == model.toolchain_id)
        .where(DeviceClassModel.digest == device_digest)
        .order_by(model.measured_at.desc(), model.id.desc())
    )
    return [LinkRow(json.loads(row[0]), *row[1:]) for row in rows]
