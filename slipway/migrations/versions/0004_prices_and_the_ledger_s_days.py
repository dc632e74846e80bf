"""Prices, and the ledger's days"""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0004"
down_revision = "0003"


def upgrade() -> None:
    op.create_table(
        "token_price",
        sa.Column("kind", sa.String(), nullable=False),
        sa.Column("base_model", sa.String(), nullable=False),
        sa.Column("per_million", sa.String(), nullable=True),
        sa.Column("set_at", sa.DateTime(timezone=True), nullable=False),
        sa.PrimaryKeyConstraint("kind", "base_model"),
    )
    with op.batch_alter_table("usage_record") as table:
        table.add_column(sa.Column("base_model", sa.String(), nullable=True))
        table.add_column(sa.Column("price", sa.String(), nullable=True))
        table.add_column(sa.Column("day", sa.String(), nullable=False, server_default=""))
    if op.get_bind().dialect.name == "postgresql":
        op.execute(
            "UPDATE usage_record SET day = to_char(created_at AT TIME ZONE 'UTC', 'YYYY-MM-DD')"
        )
    else:
        op.execute("UPDATE usage_record SET day = substr(created_at, 1, 10)")
    with op.batch_alter_table("usage_record") as table:
        table.alter_column("day", existing_type=sa.String(), server_default=None)
        table.drop_index("ix_usage_record_tenant_id")
        table.create_index("ix_usage_record_tenant_id_day", ["tenant_id", "day"])


def downgrade() -> None:
    with op.batch_alter_table("usage_record") as table:
        table.drop_index("ix_usage_record_tenant_id_day")
        table.create_index("ix_usage_record_tenant_id", ["tenant_id"])
        for column in ("day", "price", "base_model"):
            table.drop_column(column)
    op.drop_table("token_price")
