"""The `wanted` row: the one thing a lookup writes. Standard library only; never waits."""

from __future__ import annotations

import sqlite3
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tktune.core.canonical import canonical_json
from tktune.core.device import DeviceClass
from tktune.core.problem import Problem
from tktune.store.location import connect_sqlite

WANT_TIMEOUT_S = 0.05

UPSERT_WANTED = """
INSERT INTO wanted (problem_digest, device_digest, policy_name, problem, device, asked, first_seen, last_seen)
VALUES (:problem_digest, :device_digest, :policy_name, :problem, :device, 1, :now, :now)
ON CONFLICT (problem_digest, device_digest, policy_name)
DO UPDATE SET asked = wanted.asked + 1, last_seen = excluded.last_seen
"""


def want_in_file(path: Path, problem: Problem, device: DeviceClass, policy_name: str) -> bool:
    """Count a wanted problem in an SQLite file; False, at once, when it is busy or not writable."""
    try:
        connection = connect_sqlite(path, "rw", WANT_TIMEOUT_S)
    except sqlite3.Error:
        return False
    try:
        # One statement is one transaction. A wanted row lost to a power cut is asked for again.
        connection.execute("PRAGMA synchronous=NORMAL")
        connection.execute(UPSERT_WANTED, wanted_parameters(problem, device, policy_name, time.time()))
    except sqlite3.Error:
        return False
    finally:
        connection.close()
    return True


def wanted_parameters(
    problem: Problem, device: DeviceClass, policy_name: str, now: float
) -> Mapping[str, Any]:
    """The parameters of `UPSERT_WANTED`."""
    facts = {**device.key, "display_name": device.display_name}
    return {
        "problem_digest": problem.digest,
        "device_digest": device.digest,
        "policy_name": policy_name,
        "problem": canonical_json(problem.key),
        "device": canonical_json(facts),
        "now": now,
    }
