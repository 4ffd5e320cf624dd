"""What a lookup answers: a config, where it comes from, and why, in sentences. No database here."""

from __future__ import annotations

import dataclasses
import time
from dataclasses import dataclass, field
from typing import Any, Literal

from tktune.core.config import Config
from tktune.core.device import DeviceClass
from tktune.core.problem import Problem
from tktune.store.rows import WinnerRow

Provenance = Literal["exact", "near", "default"]


@dataclass(frozen=True)
class Choice:
    """The config to run and where it comes from.

    `provenance`: "exact" (the verified winner of this very problem), "near" (the winner of a problem that differs
    in tokens alone, within 4 ×), "default" (nothing was measured). `problem` is the asked one with the chosen pad.
    `time_us` is the verified median of the slowest rank, microseconds, on `measured_on` (the near problem, for
    "near"); both are None for "default". `artifact_digest` is None for "default".
    """

    config: Config
    provenance: Provenance
    time_us: float | None
    problem: Problem
    device: DeviceClass
    artifact_digest: str | None
    measured_on: Problem | None = None
    reasons: tuple[str, ...] = field(default=(), repr=False)

    def explain(self) -> str:
        """Why this config, how it was measured, and what would make it exact: a few sentences."""
        return " ".join(self.reasons)

    def as_record(self) -> dict[str, Any]:
        """The choice in JSON values, as one rank sends it to the others."""
        return {
            "config": dict(self.config),
            "provenance": self.provenance,
            "time_us": self.time_us,
            "problem": self.problem.key,
            "device": dataclasses.asdict(self.device),
            "artifact_digest": self.artifact_digest,
            "measured_on": self.measured_on and self.measured_on.key,
            "reasons": list(self.reasons),
        }

    @classmethod
    def from_record(cls, record: dict[str, Any]) -> Choice:
        measured_on = record["measured_on"]
        return cls(
            config=Config(record["config"]),
            provenance=record["provenance"],
            time_us=record["time_us"],
            problem=Problem(**record["problem"]),
            device=DeviceClass(**record["device"]),
            artifact_digest=record["artifact_digest"],
            measured_on=measured_on and Problem(**measured_on),
            reasons=tuple(record["reasons"]),
        )


def exact_choice(row: WinnerRow, device: DeviceClass) -> Choice:
    reasons = (
        f"This is the verified winner of exactly this problem ({row.problem}) on {device}.",
        *measured(row),
    )
    return Choice(
        row.config, "exact", row.time_us, row.problem, device, row.artifact_digest, row.problem, reasons
    )


def near_choice(row: WinnerRow, asked: Problem, device: DeviceClass, left_out: tuple[str, ...]) -> Choice:
    reasons = (
        f"This exact problem ({asked}) has no verified winner on {device}; this is the winner of the same shape at "
        f"{row.problem.tokens} tokens, the nearest within 4 times the {asked.tokens} asked for, and its constraints "
        "hold here too.",
        *measured(row),
        *left_out,
        make_exact(asked),
    )
    return Choice(row.config, "near", row.time_us, asked, device, row.artifact_digest, row.problem, reasons)


def default_choice(
    config: Config, asked: Problem, device: DeviceClass, because: str, left_out: tuple[str, ...]
) -> Choice:
    reasons = (
        f"This is the default config of {asked.family} for {asked} on {device}; it was not measured here.",
        because,
        *left_out,
        make_exact(asked),
    )
    return Choice(config, "default", None, asked, device, None, None, reasons)


def measured(row: WinnerRow) -> tuple[str, ...]:
    """How a winner was measured, and why it was chosen."""
    day = time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime(row.verified_at))
    policy, toolchain = row.policy, row.toolchain
    first_line = toolchain.version.splitlines()[0] if toolchain.version else ""
    how = (
        f"It took {row.time_us:.1f} µs, the median of {row.samples} samples of the slowest rank, in interleaved rounds "
        f"on {day}, under the policy {policy.name} ({policy.launch_mode} launch, {policy.cache_state} cache), built "
        f"with {first_line or toolchain.kind}."
    )
    return (how, f"It was chosen because: {row.reason.rstrip('.')}.") if row.reason else (how,)


def make_exact(asked: Problem) -> str:
    return (
        f"To make it exact, put tokens = {asked.tokens} (pad {asked.pad}) of this shape in a study and run: "
        "tktune run STUDY."
    )
