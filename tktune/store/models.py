"""The tables as SQLAlchemy models. The migrations create them; a test keeps both in step. No queries here.

Portable between SQLite and PostgreSQL. JSON columns hold canonical JSON text; `*_at` are seconds since the epoch.
"""

from __future__ import annotations

from sqlalchemy import (
    BigInteger,
    CheckConstraint,
    Double,
    ForeignKey,
    Index,
    MetaData,
    String,
    Text,
    UniqueConstraint,
    text,
)
from sqlalchemy.orm import DeclarativeBase, Mapped, mapped_column

from tktune.store.rows import Role

DIGEST = String(64)


class Base(DeclarativeBase):
    metadata = MetaData(
        naming_convention={
            "ix": "ix_%(table_name)s_%(column_0_N_name)s",
            "uq": "uq_%(table_name)s_%(column_0_N_name)s",
            "ck": "ck_%(table_name)s_%(constraint_name)s",
            "fk": "fk_%(table_name)s_%(column_0_N_name)s",
            "pk": "pk_%(table_name)s",
        }
    )


class DeviceClassModel(Base):
    """A device class; `facts` are beside the key and no part of it. Measured links have rows of their own."""

    __tablename__ = "device_class"

    id: Mapped[int] = mapped_column(primary_key=True)
    digest: Mapped[str] = mapped_column(DIGEST, unique=True)
    key: Mapped[str] = mapped_column(Text)
    backend: Mapped[str] = mapped_column(Text)
    arch: Mapped[str] = mapped_column(Text)
    sm_count: Mapped[int]
    smem_optin_bytes: Mapped[int] = mapped_column(BigInteger)
    l2_bytes: Mapped[int] = mapped_column(BigInteger)
    interconnect: Mapped[str] = mapped_column(Text)
    registers_per_sm: Mapped[int] = mapped_column(BigInteger)
    remote_atomics: Mapped[bool]
    display_name: Mapped[str] = mapped_column(Text)
    facts: Mapped[str] = mapped_column(Text)


class ProblemModel(Base):
    """A problem. `shape_digest` covers every field except tokens and pad: what `near` problems share."""

    __tablename__ = "problem"
    __table_args__ = (Index(None, "shape_digest", "tokens"),)

    id: Mapped[int] = mapped_column(primary_key=True)
    digest: Mapped[str] = mapped_column(DIGEST, unique=True)
    shape_digest: Mapped[str] = mapped_column(DIGEST)
    key: Mapped[str] = mapped_column(Text)
    family: Mapped[str] = mapped_column(Text)
    hidden: Mapped[int]
    cols: Mapped[int]
    experts: Mapped[int]
    top_k: Mapped[int]
    tokens: Mapped[int]
    world: Mapped[int]
    dtype: Mapped[str] = mapped_column(Text)
    weight_layout: Mapped[str] = mapped_column(Text)
    routing: Mapped[str] = mapped_column(Text)
    pad: Mapped[int]
    ep_world: Mapped[int | None]
    ep_rank: Mapped[int | None]


class PolicyModel(Base):
    """A policy; several may share a name, and lookups ask by name."""

    __tablename__ = "policy"

    id: Mapped[int] = mapped_column(primary_key=True)
    digest: Mapped[str] = mapped_column(DIGEST, unique=True)
    key: Mapped[str] = mapped_column(Text)
    name: Mapped[str] = mapped_column(Text, index=True)
    launch_mode: Mapped[str] = mapped_column(Text)
    cache_state: Mapped[str] = mapped_column(Text)
    flush_bytes: Mapped[int] = mapped_column(BigInteger)
    iterations: Mapped[int]
    clocks: Mapped[str] = mapped_column(Text)


class ToolchainModel(Base):
    __tablename__ = "toolchain"

    id: Mapped[int] = mapped_column(primary_key=True)
    digest: Mapped[str] = mapped_column(DIGEST, unique=True)
    kind: Mapped[str] = mapped_column(Text)
    version: Mapped[str] = mapped_column(Text)
    detail: Mapped[str] = mapped_column(Text)


class LinkMeasurementModel(Base):
    """What the link and SMs of a device class were measured to do once; the newest row counts."""

    __tablename__ = "link_measurement"
    __table_args__ = (Index(None, "device_class_id", "measured_at"),)

    id: Mapped[int] = mapped_column(primary_key=True)
    device_class_id: Mapped[int] = mapped_column(ForeignKey("device_class.id"))
    toolchain_id: Mapped[int] = mapped_column(ForeignKey("toolchain.id"))
    driver: Mapped[str] = mapped_column(Text)
    host: Mapped[str] = mapped_column(Text)
    facts: Mapped[str] = mapped_column(Text)
    measured_at: Mapped[float] = mapped_column(Double)


class ArtifactModel(Base):
    """What is known of a built artifact. The code lives in the cache, never here."""

    __tablename__ = "artifact"

    id: Mapped[int] = mapped_column(primary_key=True)
    digest: Mapped[str] = mapped_column(DIGEST, unique=True)
    kind: Mapped[str] = mapped_column(Text)
    family: Mapped[str] = mapped_column(Text)
    build_part: Mapped[str] = mapped_column(Text)
    facts: Mapped[str] = mapped_column(Text)
    bytes: Mapped[int] = mapped_column(BigInteger)
    build_seconds: Mapped[float] = mapped_column(Double)
    sha256: Mapped[str] = mapped_column(DIGEST)
    toolchain_id: Mapped[int] = mapped_column(ForeignKey("toolchain.id"))
    created_at: Mapped[float] = mapped_column(Double)


class Keyed:
    """The four columns of a `TrialKey`."""

    problem_id: Mapped[int] = mapped_column(ForeignKey("problem.id"))
    device_class_id: Mapped[int] = mapped_column(ForeignKey("device_class.id"))
    policy_id: Mapped[int] = mapped_column(ForeignKey("policy.id"))
    toolchain_id: Mapped[int] = mapped_column(ForeignKey("toolchain.id"))


KEY = ("problem_id", "device_class_id", "policy_id", "toolchain_id")


class TrialModel(Keyed, Base):
    """One config asked, judged, measured. A row with status `started` stands from before the launch."""

    __tablename__ = "trial"
    __table_args__ = (
        UniqueConstraint(*KEY, "config_digest", "artifact_digest", "attempt", name="uq_trial_attempt"),
        Index("ix_trial_status", "status"),
        Index("ix_trial_config", "problem_id", "device_class_id", "config_digest"),
        CheckConstraint("(status = 'started') = (ended_at IS NULL)", name="ends_once"),
        CheckConstraint("status <> 'ok' OR time_us > 0", name="ok_has_a_time"),
    )

    id: Mapped[int] = mapped_column(primary_key=True)
    config_digest: Mapped[str] = mapped_column(DIGEST)
    config: Mapped[str] = mapped_column(Text)
    artifact_digest: Mapped[str] = mapped_column(DIGEST)
    attempt: Mapped[int]
    status: Mapped[str] = mapped_column(Text)
    time_us: Mapped[float | None] = mapped_column(Double)
    build_us: Mapped[float | None] = mapped_column(Double)
    gate_error: Mapped[float | None] = mapped_column(Double)
    clocks: Mapped[str | None] = mapped_column(Text)
    detail: Mapped[str | None] = mapped_column(Text)
    run_id: Mapped[str] = mapped_column(Text)
    driver_pid: Mapped[int] = mapped_column(BigInteger)
    driver_start_ticks: Mapped[int] = mapped_column(BigInteger)
    boot_id: Mapped[str] = mapped_column(Text)
    host: Mapped[str] = mapped_column(Text)
    started_at: Mapped[float] = mapped_column(Double)
    ended_at: Mapped[float | None] = mapped_column(Double)


class SampleModel(Base):
    """One timed iteration of a trial; rank -1 is the slowest rank, routing_seed -1 is not told."""

    __tablename__ = "sample"

    trial_id: Mapped[int] = mapped_column(ForeignKey("trial.id"), primary_key=True)
    routing_seed: Mapped[int] = mapped_column(BigInteger, primary_key=True)
    iteration: Mapped[int] = mapped_column(primary_key=True)
    rank: Mapped[int] = mapped_column(primary_key=True)
    time_us: Mapped[float] = mapped_column(Double)


class VerificationModel(Keyed, Base):
    """One finalist of a verification session; at most one row of a session is chosen."""

    __tablename__ = "verification"
    __table_args__ = (
        UniqueConstraint(
            *KEY, "session_id", "config_digest", "artifact_digest", name="uq_verification_finalist"
        ),
        Index(
            "uq_verification_chosen",
            *KEY,
            "session_id",
            unique=True,
            sqlite_where=text("chosen"),
            postgresql_where=text("chosen"),
        ),
    )

    id: Mapped[int] = mapped_column(primary_key=True)
    session_id: Mapped[str] = mapped_column(Text)
    config_digest: Mapped[str] = mapped_column(DIGEST)
    config: Mapped[str] = mapped_column(Text)
    artifact_digest: Mapped[str] = mapped_column(DIGEST)
    role: Mapped[Role] = mapped_column(Text)
    time_us: Mapped[float] = mapped_column(Double)
    samples: Mapped[str] = mapped_column(Text)
    chosen: Mapped[bool]
    reason: Mapped[str] = mapped_column(Text)
    verified_at: Mapped[float] = mapped_column(Double)


class AttributionModel(Keyed, Base):
    """One mode of one config in a session; split -1 is no split."""

    __tablename__ = "attribution"
    __table_args__ = (
        UniqueConstraint(
            *KEY,
            "session_id",
            "config_digest",
            "artifact_digest",
            "mode",
            "split",
            name="uq_attribution_mode",
        ),
    )

    id: Mapped[int] = mapped_column(primary_key=True)
    session_id: Mapped[str] = mapped_column(Text)
    config_digest: Mapped[str] = mapped_column(DIGEST)
    config: Mapped[str] = mapped_column(Text)
    artifact_digest: Mapped[str] = mapped_column(DIGEST)
    mode: Mapped[str] = mapped_column(Text)
    split: Mapped[int]
    time_us: Mapped[float] = mapped_column(Double)
    samples: Mapped[str] = mapped_column(Text)
    measured_at: Mapped[float] = mapped_column(Double)


class WantedModel(Base):
    """A problem a runtime asked for. It names its problem by value: a lookup writes this row and no other."""

    __tablename__ = "wanted"
    __table_args__ = (UniqueConstraint("problem_digest", "device_digest", "policy_name"),)

    id: Mapped[int] = mapped_column(primary_key=True)
    problem_digest: Mapped[str] = mapped_column(DIGEST)
    device_digest: Mapped[str] = mapped_column(DIGEST)
    policy_name: Mapped[str] = mapped_column(Text)
    problem: Mapped[str] = mapped_column(Text)
    device: Mapped[str] = mapped_column(Text)
    asked: Mapped[int]
    first_seen: Mapped[float] = mapped_column(Double)
    last_seen: Mapped[float] = mapped_column(Double)


class EventModel(Base):
    __tablename__ = "event"

    id: Mapped[int] = mapped_column(primary_key=True)
    at: Mapped[float] = mapped_column(Double)
    kind: Mapped[str] = mapped_column(Text)
    sentence: Mapped[str] = mapped_column(Text)
    detail: Mapped[str] = mapped_column(Text)
    trial_id: Mapped[int | None] = mapped_column(ForeignKey("trial.id"))
