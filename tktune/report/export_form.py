"""The published form of an export (docs/export.md): what is in the file, and nothing of how it is made or read.

Unknown and missing fields are refused, so that a file of another version is never half understood.
"""

from __future__ import annotations

from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, FiniteFloat, PositiveFloat, PositiveInt

FORMAT: Literal["tktune-export"] = "tktune-export"
VERSION: Literal[1] = 1

Digest = str


class Form(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)


class ExportedToolchain(Form):
    """A compiler. `detail` holds its resolved flags."""

    kind: str
    version: str
    digest: Digest = Field(pattern="^[0-9a-f]{64}$")
    detail: dict[str, Any]


class ExportedArtifact(Form):
    """What is known of a built artifact; the code itself is never exported."""

    digest: Digest
    kind: str
    family: str
    build_part: dict[str, int | str]
    facts: dict[str, Any]
    bytes: int = Field(ge=0)
    build_seconds: float = Field(ge=0)
    sha256: str


class ExportedSample(Form):
    """One timed iteration. `rank` -1: the slowest rank; `routing_seed` -1: not told."""

    routing_seed: int
    iteration: int
    rank: int
    time_us: PositiveFloat


class ExportedTrial(Form):
    """One config asked, judged, measured. Times of day are seconds since the epoch."""

    config: dict[str, int | str]
    artifact_digest: Digest
    attempt: PositiveInt
    status: str
    time_us: PositiveFloat | None
    build_us: FiniteFloat | None
    gate_error: FiniteFloat | None
    clocks: dict[str, Any] | None
    detail: dict[str, Any] | None
    run_id: str
    started_at: FiniteFloat
    ended_at: FiniteFloat
    samples: list[ExportedSample]


class ExportedVerification(Form):
    """One finalist of a verification session; `samples` are microseconds of the slowest rank, in order."""

    session_id: str
    verified_at: FiniteFloat
    config: dict[str, int | str]
    artifact_digest: Digest
    role: Literal["default", "finalist", "previous"]
    time_us: PositiveFloat
    samples: list[PositiveFloat]
    chosen: bool
    reason: str


class ExportedAttribution(Form):
    """One mode of the winner, alone. `split` is the num_comm_sms it ran with."""

    session_id: str
    measured_at: FiniteFloat
    config: dict[str, int | str]
    artifact_digest: Digest
    mode: str
    split: int | None
    time_us: PositiveFloat
    samples: list[PositiveFloat]


class ExportedKey(Form):
    """Everything measured of one problem on one device class under one policy and toolchain."""

    problem: dict[str, int | str]
    device: dict[str, int | str | bool]
    policy: dict[str, Any]
    toolchain: ExportedToolchain
    artifacts: list[ExportedArtifact]
    trials: list[ExportedTrial]
    verifications: list[ExportedVerification]
    attributions: list[ExportedAttribution]


class Export(Form):
    """The whole file."""

    format: Literal["tktune-export"]
    version: Literal[1]
    made_by: str
    made_at: str
    keys: list[ExportedKey]


CSV_COLUMNS = (
    "family",
    "hidden",
    "cols",
    "experts",
    "top_k",
    "tokens",
    "world",
    "dtype",
    "weight_layout",
    "routing",
    "pad",
    "ep_world",
    "ep_rank",
    "finish",
    "backend",
    "arch",
    "sm_count",
    "interconnect",
    "device_digest",
    "policy",
    "policy_digest",
    "toolchain",
    "toolchain_digest",
    "config",
    "artifact_digest",
    "attempt",
    "status",
    "time_us",
    "samples",
    "gate_error",
    "verified_us",
    "role",
    "winner",
    "started_at",
    "ended_at",
)
