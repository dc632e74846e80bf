"""Roles of API keys"""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0002"
down_revision = "0001"


def upgrade() -> None:
    with op.batch_alter_table("api_key") as table:
        table.add_column(sa.Column("role", sa.String(), nullable=False, server_default="member"))
    # Until now a server had one tenant, and whoever had a key of it could do everything.
    op.execute(
        "UPDATE api_key SET role = 'admin' "
        "WHERE tenant_id IN (SELECT id FROM tenant WHERE name = 'default')"
    )
    with op.batch_alter_table("api_key") as table:
        table.alter_column("role", server_default=None)


def downgrade() -> None:
    with op.batch_alter_table("api_key") as table:
        table.drop_column("role")
