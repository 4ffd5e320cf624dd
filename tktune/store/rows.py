"""What the store takes and gives: frozen facts, one a kind of row. No SQL and nothing heavy at import.

Times of day are seconds since the epoch (UTC); durations are in the unit their name ends with.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from tktune.core.config import Config
from tktune.core.device import DeviceClass
from tktune.core.policy import Policy
from tktune.core.problem import Problem

STARTED = "started"  # not an end: the row stands before the launch, until the trial ends or is reaped
Role = Literal["default", "finalist", "previous"]
SLOWEST_RANK = -1
SEED_NOT_TOLD = -1


@dataclass(frozen=True)
class TrialKey:
    """Under what a measurement is filed: row ids of its problem, device class, policy and toolchain."""

    problem_id: int
    device_class_id: int
    policy_id: int
    toolchain_id: int


@dataclass(frozen=True)
class ToolchainFacts:
    """A compiler as the store knows it."""

    kind: str
    version: str
    digest: str
    detail: Mapping[str, Any] = field(default_factory=dict, compare=False)


@dataclass(frozen=True)
class KeyFacts:
    """A key, spelt out."""

    key: TrialKey
    problem: Problem
    device: DeviceClass
    policy: Policy
    toolchain: ToolchainFacts


@dataclass(frozen=True)
class ArtifactRow:
    """A built artifact. The code itself lives in the cache, never here."""

    digest: str
    kind: str
    family: str
    build_part: Config
    facts: Mapping[str, Any]
    bytes: int
    build_seconds: float
    toolchain_id: int
    sha256: str
    created_at: float


@dataclass(frozen=True)
class Sample:
    """One timed iteration. `rank` -1: the slowest rank of the iteration; `routing_seed` -1: not told."""

    routing_seed: int
    iteration: int
    rank: int
    time_us: float


@dataclass(frozen=True)
class TrialRow:
    """One trial. `samples` counts its stored samples; `attempt` counts from 1 per (key, config, artifact)."""

    id: int
    config: Config
    artifact_digest: str
    attempt: int
    status: str
    time_us: float | None
    samples: int
    run_id: str
    started_at: float
    ended_at: float | None
    build_us: float | None
    gate_error: float | None
    clocks: Mapping[str, Any] | None
    detail: Mapping[str, Any] | None


@dataclass(frozen=True)
class VerificationRow:
    """One finalist of a verification session. `samples` are microseconds of the slowest rank, in order."""

    config: Config
    artifact_digest: str
    role: Role
    time_us: float
    samples: tuple[float, ...]
    chosen: bool
    reason: str
    session_id: str = ""
    verified_at: float = 0.0


@dataclass(frozen=True)
class AttributionRow:
    """One mode of one config in a session. `split` is the num_comm_sms it ran with, None where it has none."""

    config: Config
    artifact_digest: str
    mode: str
    split: int | None
    time_us: float
    samples: tuple[float, ...]
    session_id: str = ""
    measured_at: float = 0.0


@dataclass(frozen=True)
class WinnerRow:
    """A verified winner with everything that a lookup or a report says of it. `samples` counts them."""

    problem: Problem
    device: DeviceClass
    policy: Policy
    toolchain: ToolchainFacts
    config: Config
    artifact_digest: str
    time_us: float
    samples: int
    role: str
    reason: str
    session_id: str
    verified_at: float


@dataclass(frozen=True)
class WantedRow:
    """A problem that runtimes asked for `asked` times and that has no exact winner."""

    problem: Problem
    device: DeviceClass
    policy_name: str
    asked: int
    first_seen: float
    last_seen: float


@dataclass(frozen=True)
class EventRow:
    """Something worth telling a person later."""

    id: int
    at: float
    kind: str
    sentence: str
    detail: Mapping[str, Any]
    trial_id: int | None
