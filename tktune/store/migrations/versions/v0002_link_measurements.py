"""Schema 0002: what the link of a device class was measured to do, one row a measurement."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0002"
down_revision = "0001"
branch_labels = None
depends_on = None


def upgrade() -> None:
    table = "link_measurement"
    op.create_table(
        table,
        sa.Column("id", sa.Integer(), nullable=False),
        sa.Column("device_class_id", sa.Integer(), nullable=False),
        sa.Column("toolchain_id", sa.Integer(), nullable=False),
        sa.Column("driver", sa.Text(), nullable=False),
        sa.Column("host", sa.Text(), nullable=False),
        sa.Column("facts", sa.Text(), nullable=False),
        sa.Column("measured_at", sa.Double(), nullable=False),
        sa.PrimaryKeyConstraint("id", name=f"pk_{table}"),
        sa.ForeignKeyConstraint(["device_class_id"], ["device_class.id"], name=f"fk_{table}_device_class_id"),
        sa.ForeignKeyConstraint(["toolchain_id"], ["toolchain.id"], name=f"fk_{table}_toolchain_id"),
    )
    op.create_index(f"ix_{table}_device_class_id_measured_at", table, ["device_class_id", "measured_at"])
