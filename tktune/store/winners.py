"""Questions about winners, as portable SQL text over any `rows` function: the read path of lookups and reports.

Standard library only; SQLite's own module and SQLAlchemy both run these texts.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from fractions import Fraction
from typing import Any

from tktune.core.device import DeviceClass
from tktune.core.problem import Problem
from tktune.store.keys import config_from, device_from, policy_from, problem_from, shape_digest
from tktune.store.rows import ToolchainFacts, WinnerRow
from tktune.store.schema import Rows

NEAR_FACTOR = 4

_WINNERS = """
SELECT p.key, p.tokens, p.pad, d.key, d.display_name, y.key, t.kind, t.version, t.digest, t.detail,
       w.config, w.artifact_digest, w.time_us, w.samples, w.role, w.reason, w.session_id, w.verified_at
FROM winner w
JOIN problem p ON p.id = w.problem_id
JOIN device_class d ON d.id = w.device_class_id
JOIN policy y ON y.id = w.policy_id
JOIN toolchain t ON t.id = w.toolchain_id
"""

_NEWEST_FIRST = " ORDER BY w.verified_at DESC, w.id DESC"

_OF_SHAPE = (
    _WINNERS
    + """
WHERE p.shape_digest = :shape AND p.tokens BETWEEN :least AND :most AND d.digest = :device AND y.name = :policy
"""
    + _NEWEST_FIRST
)

# Wrong on this very problem, and not proved since by an artifact built anew.
_WRONG = """
SELECT DISTINCT w.config_digest
FROM trial w
JOIN problem p ON p.id = w.problem_id
JOIN device_class d ON d.id = w.device_class_id
WHERE p.digest = :problem AND d.digest = :device AND w.status = 'wrong'
  AND NOT EXISTS (
    SELECT 1 FROM trial n
    WHERE n.problem_id = w.problem_id AND n.device_class_id = w.device_class_id
      AND n.config_digest = w.config_digest AND n.artifact_digest <> w.artifact_digest
      AND n.status = 'ok' AND n.id > w.id)
"""


def winners_near(rows: Rows, problem: Problem, device: DeviceClass, policy_name: str) -> list[WinnerRow]:
    """Winners of the same shape on this device class, tokens within 4 ×, at any pad, the asked problem included.

    One row a problem: its newest verification over all toolchains and all policies of that name. Nearest tokens
    first (in log ratio, ties to the larger), then the fastest.
    """
    found = rows(
        _OF_SHAPE,
        {
            "shape": shape_digest(problem),
            "least": -(-problem.tokens // NEAR_FACTOR),
            "most": problem.tokens * NEAR_FACTOR,
            "device": device.digest,
            "policy": policy_name,
        },
    )
    newest: dict[tuple[int, int], WinnerRow] = {}
    for row in found:
        tokens, pad = row[1], row[2]
        if (tokens, pad) not in newest:
            newest[tokens, pad] = _winner(row, lambda row: problem.replace(tokens=row[1], pad=row[2]))
    return sorted(newest.values(), key=lambda w: (*distance(w.problem.tokens, problem.tokens), w.time_us))


def distance(tokens: int, asked: int) -> tuple[Fraction, int]:
    """Orders token counts by log ratio to the asked one, ties to the larger; exact, no logarithm needed."""
    return Fraction(max(tokens, asked), min(tokens, asked)), -tokens


def all_winners(rows: Rows) -> list[WinnerRow]:
    """Every row of the winner view, one a (problem, device class, toolchain, policy), newest first."""
    return [_winner(row, lambda row: problem_from(row[0])) for row in rows(_WINNERS + _NEWEST_FIRST, {})]


def wrong_configs(rows: Rows, problem: Problem, device: DeviceClass) -> set[str]:
    """Digests of configs found wrong on this problem and device class, and not proved since by a new artifact."""
    return {row[0] for row in rows(_WRONG, {"problem": problem.digest, "device": device.digest})}


def _winner(row: Sequence[Any], problem_of: Callable[[Sequence[Any]], Problem]) -> WinnerRow:
    return WinnerRow(
        problem=problem_of(row),
        device=device_from(row[3], row[4]),
        policy=policy_from(row[5]),
        toolchain=ToolchainFacts(row[6], row[7], row[8], json.loads(row[9])),
        config=config_from(row[10]),
        artifact_digest=row[11],
        time_us=row[12],
        samples=len(json.loads(row[13])),
        role=row[14],
        reason=row[15],
        session_id=row[16],
        verified_at=row[17],
    )
