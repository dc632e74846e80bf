"""Quotas, and what operations hold of them"""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0005"
down_revision = "0004"


def upgrade() -> None:
    op.create_table(
        "tenant_quota",
        sa.Column("tenant_id", sa.String(), sa.ForeignKey("tenant.id"), nullable=False),
        sa.Column("limits", sa.JSON(), nullable=False),
        sa.Column("set_at", sa.DateTime(timezone=True), nullable=False),
        sa.PrimaryKeyConstraint("tenant_id"),
    )
    with op.batch_alter_table("training_operation") as table:
        table.add_column(sa.Column("digest", sa.String(), nullable=False, server_default=""))
        table.add_column(sa.Column("tokens", sa.Integer(), nullable=False, server_default="0"))
        table.create_index("ix_training_operation_tenant_id_status", ["tenant_id", "status"])
    with op.batch_alter_table("training_operation") as table:
        table.alter_column("digest", existing_type=sa.String(), server_default=None)
        table.alter_column("tokens", existing_type=sa.Integer(), server_default=None)


def downgrade() -> None:
    with op.batch_alter_table("training_operation") as table:
        table.drop_index("ix_training_operation_tenant_id_status")
        table.drop_column("tokens")
        table.drop_column("digest")
    op.drop_table("tenant_quota")
