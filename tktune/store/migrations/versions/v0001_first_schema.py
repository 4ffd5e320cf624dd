"""Schema 0001: every table, and `winner` as a view. Never edited after release; later changes are later versions."""

from __future__ import annotations

from typing import Any

import sqlalchemy as sa
from alembic import op

revision = "0001"
down_revision = None
branch_labels = None
depends_on = None

KEY = ("problem_id", "device_class_id", "policy_id", "toolchain_id")

# A chosen finalist stands while a trial under the same key proved this very artifact, and no trial of the same
# problem and device class, under whatever policy or toolchain, found it wrong.
STANDING = """
CREATE VIEW standing AS
SELECT v.id, v.problem_id, v.device_class_id, v.policy_id, v.toolchain_id, v.session_id, v.config_digest, v.config,
       v.artifact_digest, v.role, v.time_us, v.samples, v.reason, v.verified_at
FROM verification v
WHERE v.chosen
  AND EXISTS (
    SELECT 1 FROM trial t
    WHERE t.problem_id = v.problem_id AND t.device_class_id = v.device_class_id AND t.policy_id = v.policy_id
      AND t.toolchain_id = v.toolchain_id AND t.config_digest = v.config_digest
      AND t.artifact_digest = v.artifact_digest AND t.status = 'ok')
  AND NOT EXISTS (
    SELECT 1 FROM trial w
    WHERE w.problem_id = v.problem_id AND w.device_class_id = v.device_class_id
      AND w.config_digest = v.config_digest AND w.artifact_digest = v.artifact_digest AND w.status = 'wrong')
"""

# The winner of (problem, device class, toolchain, policy): the newest verification that stands, never the luckiest.
WINNER = """
CREATE VIEW winner AS
SELECT s.id, s.problem_id, s.device_class_id, s.policy_id, s.toolchain_id, s.session_id, s.config_digest, s.config,
       s.artifact_digest, s.role, s.time_us, s.samples, s.reason, s.verified_at
FROM standing s
WHERE NOT EXISTS (
    SELECT 1 FROM standing n
    WHERE n.problem_id = s.problem_id AND n.device_class_id = s.device_class_id AND n.policy_id = s.policy_id
      AND n.toolchain_id = s.toolchain_id
      AND (n.verified_at > s.verified_at OR (n.verified_at = s.verified_at AND n.id > s.id)))
"""


def words(*names: str) -> list[sa.Column[Any]]:
    return [sa.Column(name, sa.Text(), nullable=False) for name in names]


def digests(*names: str) -> list[sa.Column[Any]]:
    return [sa.Column(name, sa.String(64), nullable=False) for name in names]


def numbers(*names: str) -> list[sa.Column[Any]]:
    return [sa.Column(name, sa.Integer(), nullable=False) for name in names]


def wide_numbers(*names: str) -> list[sa.Column[Any]]:
    return [sa.Column(name, sa.BigInteger(), nullable=False) for name in names]


def reals(*names: str) -> list[sa.Column[Any]]:
    return [sa.Column(name, sa.Double(), nullable=False) for name in names]


def identity(table: str) -> list[sa.Column[Any] | sa.PrimaryKeyConstraint]:
    return [
        sa.Column("id", sa.Integer(), nullable=False),
        sa.PrimaryKeyConstraint("id", name=f"pk_{table}"),
    ]


def reference(table: str, column: str) -> sa.ForeignKeyConstraint:
    target = column.removesuffix("_id")
    return sa.ForeignKeyConstraint([column], [f"{target}.id"], name=f"fk_{table}_{column}")


def keyed(table: str) -> list[sa.Column[Any] | sa.ForeignKeyConstraint]:
    return [*numbers(*KEY), *(reference(table, column) for column in KEY)]


def upgrade() -> None:
    create_subjects()
    create_measurements()
    create_surroundings()
    op.execute(STANDING)
    op.execute(WINNER)


def create_subjects() -> None:
    op.create_table(
        "device_class",
        *identity("device_class"),
        *digests("digest"),
        *words("key", "backend", "arch"),
        *numbers("sm_count"),
        *wide_numbers("smem_optin_bytes", "l2_bytes"),
        *words("interconnect"),
        *wide_numbers("registers_per_sm"),
        sa.Column("remote_atomics", sa.Boolean(), nullable=False),
        *words("display_name", "facts"),
        sa.UniqueConstraint("digest", name="uq_device_class_digest"),
    )
    op.create_table(
        "problem",
        *identity("problem"),
        *digests("digest", "shape_digest"),
        *words("key", "family"),
        *numbers("hidden", "cols", "experts", "top_k", "tokens", "world"),
        *words("dtype", "weight_layout", "routing"),
        *numbers("pad"),
        sa.Column("ep_world", sa.Integer(), nullable=True),
        sa.Column("ep_rank", sa.Integer(), nullable=True),
        sa.UniqueConstraint("digest", name="uq_problem_digest"),
    )
    op.create_index("ix_problem_shape_digest_tokens", "problem", ["shape_digest", "tokens"])
    op.create_table(
        "policy",
        *identity("policy"),
        *digests("digest"),
        *words("key", "name", "launch_mode", "cache_state"),
        *wide_numbers("flush_bytes"),
        *numbers("iterations"),
        *words("clocks"),
        sa.UniqueConstraint("digest", name="uq_policy_digest"),
    )
    op.create_index("ix_policy_name", "policy", ["name"])
    op.create_table(
        "toolchain",
        *identity("toolchain"),
        *digests("digest"),
        *words("kind", "version", "detail"),
        sa.UniqueConstraint("digest", name="uq_toolchain_digest"),
    )
    op.create_table(
        "artifact",
        *identity("artifact"),
        *digests("digest"),
        *words("kind", "family", "build_part", "facts"),
        *wide_numbers("bytes"),
        *reals("build_seconds"),
        *digests("sha256"),
        *numbers("toolchain_id"),
        *reals("created_at"),
        reference("artifact", "toolchain_id"),
        sa.UniqueConstraint("digest", name="uq_artifact_digest"),
    )


def create_measurements() -> None:
    op.create_table(
        "trial",
        *identity("trial"),
        *digests("config_digest"),
        *words("config"),
        *digests("artifact_digest"),
        *numbers("attempt"),
        *words("status"),
        sa.Column("time_us", sa.Double(), nullable=True),
        sa.Column("build_us", sa.Double(), nullable=True),
        sa.Column("gate_error", sa.Double(), nullable=True),
        sa.Column("clocks", sa.Text(), nullable=True),
        sa.Column("detail", sa.Text(), nullable=True),
        *words("run_id"),
        *wide_numbers("driver_pid", "driver_start_ticks"),
        *words("boot_id", "host"),
        *reals("started_at"),
        sa.Column("ended_at", sa.Double(), nullable=True),
        *keyed("trial"),
        sa.CheckConstraint("(status = 'started') = (ended_at IS NULL)", name=op.f("ck_trial_ends_once")),
        sa.CheckConstraint("status <> 'ok' OR time_us > 0", name=op.f("ck_trial_ok_has_a_time")),
        sa.UniqueConstraint(*KEY, "config_digest", "artifact_digest", "attempt", name="uq_trial_attempt"),
    )
    op.create_index("ix_trial_config", "trial", ["problem_id", "device_class_id", "config_digest"])
    op.create_index("ix_trial_status", "trial", ["status"])
    op.create_table(
        "sample",
        *numbers("trial_id"),
        *wide_numbers("routing_seed"),
        *numbers("iteration", "rank"),
        *reals("time_us"),
        reference("sample", "trial_id"),
        sa.PrimaryKeyConstraint("trial_id", "routing_seed", "iteration", "rank", name="pk_sample"),
    )
    op.create_table(
        "verification",
        *identity("verification"),
        *words("session_id"),
        *digests("config_digest"),
        *words("config"),
        *digests("artifact_digest"),
        *words("role"),
        *reals("time_us"),
        *words("samples"),
        sa.Column("chosen", sa.Boolean(), nullable=False),
        *words("reason"),
        *reals("verified_at"),
        *keyed("verification"),
        sa.UniqueConstraint(
            *KEY, "session_id", "config_digest", "artifact_digest", name="uq_verification_finalist"
        ),
    )
    op.create_index(
        "uq_verification_chosen",
        "verification",
        [*KEY, "session_id"],
        unique=True,
        sqlite_where=sa.text("chosen"),
        postgresql_where=sa.text("chosen"),
    )
    op.create_table(
        "attribution",
        *identity("attribution"),
        *words("session_id"),
        *digests("config_digest"),
        *words("config"),
        *digests("artifact_digest"),
        *words("mode"),
        *numbers("split"),
        *reals("time_us"),
        *words("samples"),
        *reals("measured_at"),
        *keyed("attribution"),
        sa.UniqueConstraint(
            *KEY,
            "session_id",
            "config_digest",
            "artifact_digest",
            "mode",
            "split",
            name="uq_attribution_mode",
        ),
    )


def create_surroundings() -> None:
    op.create_table(
        "wanted",
        *identity("wanted"),
        *digests("problem_digest", "device_digest"),
        *words("policy_name", "problem", "device"),
        *numbers("asked"),
        *reals("first_seen", "last_seen"),
        sa.UniqueConstraint(
            "problem_digest",
            "device_digest",
            "policy_name",
            name="uq_wanted_problem_digest_device_digest_policy_name",
        ),
    )
    op.create_table(
        "event",
        *identity("event"),
        *reals("at"),
        *words("kind", "sentence", "detail"),
        sa.Column("trial_id", sa.Integer(), nullable=True),
        reference("event", "trial_id"),
    )
