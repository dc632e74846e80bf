"""Saved paths that expire and exports, projects, how sessions finished, copies of clients"""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0003"
down_revision = "0002"


def upgrade() -> None:
    with op.batch_alter_table("training_session") as table:
        table.add_column(sa.Column("project_id", sa.String(), nullable=True))
        table.add_column(sa.Column("finish_reason", sa.String(), nullable=True))
        table.add_column(sa.Column("finish_detail", sa.String(), nullable=True))
    with op.batch_alter_table("training_run") as table:
        table.add_column(sa.Column("copy_of", sa.String(), nullable=True))
    with op.batch_alter_table("sampler") as table:
        table.add_column(sa.Column("clients", sa.Integer(), nullable=False, server_default="0"))
    with op.batch_alter_table("saved_path") as table:
        table.add_column(sa.Column("kind", sa.String(), nullable=False, server_default="weights"))
        table.add_column(sa.Column("folder", sa.String(), nullable=True))
        table.add_column(
            sa.Column("size_bytes", sa.BigInteger(), nullable=False, server_default="0")
        )
        table.add_column(sa.Column("expires_at", sa.DateTime(timezone=True), nullable=True))
        table.add_column(sa.Column("removed_at", sa.DateTime(timezone=True), nullable=True))
        table.alter_column("version_id", existing_type=sa.String(), nullable=True)
    op.execute(
        "UPDATE saved_path SET kind = 'sampler_weights' WHERE path LIKE '%/sampler_weights/%'"
    )
    op.execute(
        "UPDATE saved_path SET size_bytes = (SELECT size_bytes FROM package_version "
        "WHERE package_version.id = saved_path.version_id)"
    )


def downgrade() -> None:
    # An export has no version, which the older table demands.
    op.execute("DELETE FROM saved_path WHERE version_id IS NULL")
    with op.batch_alter_table("saved_path") as table:
        table.alter_column("version_id", existing_type=sa.String(), nullable=False)
        for column in ("removed_at", "expires_at", "size_bytes", "folder", "kind"):
            table.drop_column(column)
    with op.batch_alter_table("sampler") as table:
        table.drop_column("clients")
    with op.batch_alter_table("training_run") as table:
        table.drop_column("copy_of")
    with op.batch_alter_table("training_session") as table:
        for column in ("finish_detail", "finish_reason", "project_id"):
            table.drop_column(column)
