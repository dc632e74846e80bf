"""The first tables"""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0001"
down_revision = None


def upgrade() -> None:
    op.create_table(
        "outbox",
        sa.Column("id", sa.Integer(), nullable=False),
        sa.Column("event", sa.String(), nullable=False),
        sa.Column("payload", sa.JSON(), nullable=False),
        sa.Column("created_at", sa.DateTime(timezone=True), nullable=False),
        sa.Column("done_at", sa.DateTime(timezone=True), nullable=True),
        sa.PrimaryKeyConstraint("id"),
    )
    op.create_table(
        "tenant",
        sa.Column("id", sa.String(), nullable=False),
        sa.Column("name", sa.String(), nullable=False),
        sa.Column("created_at", sa.DateTime(timezone=True), nullable=False),
        sa.PrimaryKeyConstraint("id"),
        sa.UniqueConstraint("name"),
    )
    op.create_table(
        "api_key",
        sa.Column("id", sa.String(), nullable=False),
        sa.Column("tenant_id", sa.String(), nullable=False),
        sa.Column("name", sa.String(), nullable=False),
        sa.Column("hint", sa.String(), nullable=False),
        sa.Column("sha256", sa.String(), nullable=False),
        sa.Column("created_at", sa.DateTime(timezone=True), nullable=False),
        sa.Column("revoked_at", sa.DateTime(timezone=True), nullable=True),
        sa.ForeignKeyConstraint(["tenant_id"], ["tenant.id"]),
        sa.PrimaryKeyConstraint("id"),
        sa.UniqueConstraint("sha256"),
    )
    op.create_index("ix_api_key_tenant_id", "api_key", ["tenant_id"], unique=False)

    op.create_table(
        "package_group",
        sa.Column("id", sa.String(), nullable=False),
        sa.Column("tenant_id", sa.String(), nullable=False),
        sa.Column("name", sa.String(), nullable=False),
        sa.Column("next_number", sa.Integer(), nullable=False),
        sa.Column("created_at", sa.DateTime(timezone=True), nullable=False),
        sa.ForeignKeyConstraint(["tenant_id"], ["tenant.id"]),
        sa.PrimaryKeyConstraint("id"),
        sa.UniqueConstraint("tenant_id", "name"),
    )
    op.create_index("ix_package_group_tenant_id", "package_group", ["tenant_id"], unique=False)

    op.create_table(
        "suite",
        sa.Column("id", sa.String(), nullable=False),
        sa.Column("tenant_id", sa.String(), nullable=False),
        sa.Column("name", sa.String(), nullable=False),
        sa.Column("digest", sa.String(), nullable=False),
        sa.Column("items", sa.Integer(), nullable=False),
        sa.Column("created_at", sa.DateTime(timezone=True), nullable=False),
        sa.ForeignKeyConstraint(["tenant_id"], ["tenant.id"]),
        sa.PrimaryKeyConstraint("id"),
        sa.UniqueConstraint("tenant_id", "digest"),
    )
    op.create_index("ix_suite_name", "suite", ["name"], unique=False)
    op.create_index("ix_suite_tenant_id", "suite", ["tenant_id"], unique=False)

    op.create_table(
        "alias_policy",
        sa.Column("id", sa.String(), nullable=False),
        sa.Column("group_id", sa.String(), nullable=False),
        sa.Column("alias", sa.String(), nullable=False),
        sa.Column("gate", sa.Boolean(), nullable=False),
        sa.ForeignKeyConstraint(["group_id"], ["package_group.id"]),
        sa.PrimaryKeyConstraint("id"),
        sa.UniqueConstraint("group_id", "alias"),
    )
    op.create_index("ix_alias_policy_group_id", "alias_policy", ["group_id"], unique=False)

    op.create_table(
        "package_version",
        sa.Column("id", sa.String(), nullable=False),
        sa.Column("group_id", sa.String(), nullable=False),
        sa.Column("number", sa.Integer(), nullable=False),
        sa.Column(
            "kind", sa.Enum("CHECKPOINT", "WEIGHTS", "MERGED", "GGUF", name="kind"), nullable=False
        ),
        sa.Column("origin", sa.Enum("SESSION", "MERGE", "IMPORT", name="origin"), nullable=False),
        sa.Column("digest", sa.String(), nullable=False),
        sa.Column("size_bytes", sa.Integer(), nullable=False),
        sa.Column("files", sa.JSON(), nullable=False),
        sa.Column("base_model", sa.String(), nullable=False),
        sa.Column("base_digest", sa.String(), nullable=False),
        sa.Column("lora", sa.JSON(), nullable=False),
        sa.Column("provenance", sa.JSON(), nullable=False),
        sa.Column("user_metadata", sa.JSON(), nullable=False),
        sa.Column("source_key", sa.String(), nullable=True),
        sa.Column("created_at", sa.DateTime(timezone=True), nullable=False),
        sa.ForeignKeyConstraint(["group_id"], ["package_group.id"]),
        sa.PrimaryKeyConstraint("id"),
        sa.UniqueConstraint("group_id", "number"),
        sa.UniqueConstraint("source_key"),
    )
    op.create_index("ix_package_version_digest", "package_version", ["digest"], unique=False)
    op.create_index("ix_package_version_group_id", "package_version", ["group_id"], unique=False)

    op.create_table(
        "training_session",
        sa.Column("id", sa.String(), nullable=False),
        sa.Column("tenant_id", sa.String(), nullable=False),
        sa.Column("key_id", sa.String(), nullable=True),
        sa.Column(
            "status",
            sa.Enum("ACTIVE", "FINISHED", "STOPPED", "EXPIRED", name="sessionstatus"),
            nullable=False,
        ),
        sa.Column("user_metadata", sa.JSON(), nullable=False),
        sa.Column("tags", sa.JSON(), nullable=False),
        sa.Column("sdk_version", sa.String(), nullable=True),
        sa.Column("display_name", sa.String(), nullable=True),
        sa.Column("created_at", sa.DateTime(timezone=True), nullable=False),
        sa.Column("heartbeat_at", sa.DateTime(timezone=True), nullable=False),
        sa.ForeignKeyConstraint(["key_id"], ["api_key.id"]),
        sa.ForeignKeyConstraint(["tenant_id"], ["tenant.id"]),
        sa.PrimaryKeyConstraint("id"),
    )
    op.create_index(
        "ix_training_session_tenant_id", "training_session", ["tenant_id"], unique=False
    )

    op.create_table(
        "usage_record",
        sa.Column("id", sa.Integer(), nullable=False),
        sa.Column("tenant_id", sa.String(), nullable=False),
        sa.Column("key_id", sa.String(), nullable=True),
        sa.Column("operation", sa.String(), nullable=False),
        sa.Column("kind", sa.String(), nullable=False),
        sa.Column("session_id", sa.String(), nullable=True),
        sa.Column("tokens", sa.Integer(), nullable=False),
        sa.Column("created_at", sa.DateTime(timezone=True), nullable=False),
        sa.ForeignKeyConstraint(["key_id"], ["api_key.id"]),
        sa.ForeignKeyConstraint(["tenant_id"], ["tenant.id"]),
        sa.PrimaryKeyConstraint("id"),
        sa.UniqueConstraint("operation"),
    )
    op.create_index("ix_usage_record_session_id", "usage_record", ["session_id"], unique=False)
    op.create_index("ix_usage_record_tenant_id", "usage_record", ["tenant_id"], unique=False)

    op.create_table(
        "alias",
        sa.Column("id", sa.String(), nullable=False),
        sa.Column("group_id", sa.String(), nullable=False),
        sa.Column("name", sa.String(), nullable=False),
        sa.Column("version_id", sa.String(), nullable=False),
        sa.Column("moved_at", sa.DateTime(timezone=True), nullable=False),
        sa.ForeignKeyConstraint(["group_id"], ["package_group.id"]),
        sa.ForeignKeyConstraint(["version_id"], ["package_version.id"]),
        sa.PrimaryKeyConstraint("id"),
        sa.UniqueConstraint("group_id", "name"),
    )
    op.create_index("ix_alias_group_id", "alias", ["group_id"], unique=False)

    op.create_table(
        "eval_run",
        sa.Column("id", sa.String(), nullable=False),
        sa.Column("tenant_id", sa.String(), nullable=False),
        sa.Column("version_id", sa.String(), nullable=False),
        sa.Column("version_digest", sa.String(), nullable=False),
        sa.Column("suite_name", sa.String(), nullable=False),
        sa.Column("suite_digest", sa.String(), nullable=False),
        sa.Column("engine", sa.JSON(), nullable=False),
        sa.Column("engine_fingerprint", sa.String(), nullable=False),
        sa.Column("counts", sa.JSON(), nullable=False),
        sa.Column("items", sa.Integer(), nullable=False),
        sa.Column("correct", sa.Integer(), nullable=False),
        sa.Column("evidence_digest", sa.String(), nullable=False),
        sa.Column("created_at", sa.DateTime(timezone=True), nullable=False),
        sa.ForeignKeyConstraint(["tenant_id"], ["tenant.id"]),
        sa.ForeignKeyConstraint(["version_id"], ["package_version.id"]),
        sa.PrimaryKeyConstraint("id"),
    )
    op.create_index("ix_eval_run_tenant_id", "eval_run", ["tenant_id"], unique=False)
    op.create_index("ix_eval_run_version_id", "eval_run", ["version_id"], unique=False)

    op.create_table(
        "package_version_parent",
        sa.Column("child_id", sa.String(), nullable=False),
        sa.Column("parent_id", sa.String(), nullable=False),
        sa.ForeignKeyConstraint(["child_id"], ["package_version.id"]),
        sa.ForeignKeyConstraint(["parent_id"], ["package_version.id"]),
        sa.PrimaryKeyConstraint("child_id", "parent_id"),
    )
    op.create_index(
        "ix_package_version_parent_parent_id", "package_version_parent", ["parent_id"], unique=False
    )

    op.create_table(
        "replica",
        sa.Column("id", sa.String(), nullable=False),
        sa.Column("tenant_id", sa.String(), nullable=False),
        sa.Column("version_id", sa.String(), nullable=False),
        sa.Column("version", sa.String(), nullable=False),
        sa.Column("digest", sa.String(), nullable=False),
        sa.Column("model", sa.String(), nullable=False),
        sa.Column(
            "status",
            sa.Enum("STARTING", "READY", "STOPPED", "FAILED", name="replicastatus"),
            nullable=False,
        ),
        sa.Column("engine", sa.JSON(), nullable=False),
        sa.Column("engine_fingerprint", sa.String(), nullable=False),
        sa.Column("url", sa.String(), nullable=True),
        sa.Column("processes", sa.JSON(), nullable=False),
        sa.Column("error", sa.String(), nullable=True),
        sa.Column("started_at", sa.DateTime(timezone=True), nullable=False),
        sa.Column("ready_at", sa.DateTime(timezone=True), nullable=True),
        sa.Column("ended_at", sa.DateTime(timezone=True), nullable=True),
        sa.ForeignKeyConstraint(["tenant_id"], ["tenant.id"]),
        sa.ForeignKeyConstraint(["version_id"], ["package_version.id"]),
        sa.PrimaryKeyConstraint("id"),
    )
    op.create_index("ix_replica_digest", "replica", ["digest"], unique=False)
    op.create_index("ix_replica_tenant_id", "replica", ["tenant_id"], unique=False)
    op.create_index("ix_replica_version_id", "replica", ["version_id"], unique=False)

    op.create_table(
        "sampler",
        sa.Column("id", sa.String(), nullable=False),
        sa.Column("session_id", sa.String(), nullable=False),
        sa.Column("tenant_id", sa.String(), nullable=False),
        sa.Column("base_model", sa.String(), nullable=False),
        sa.Column("model_path", sa.String(), nullable=True),
        sa.Column("version_id", sa.String(), nullable=True),
        sa.Column("snapshot", sa.String(), nullable=True),
        sa.Column("created_at", sa.DateTime(timezone=True), nullable=False),
        sa.ForeignKeyConstraint(["session_id"], ["training_session.id"]),
        sa.ForeignKeyConstraint(["tenant_id"], ["tenant.id"]),
        sa.ForeignKeyConstraint(["version_id"], ["package_version.id"]),
        sa.PrimaryKeyConstraint("id"),
    )
    op.create_index("ix_sampler_session_id", "sampler", ["session_id"], unique=False)
    op.create_index("ix_sampler_tenant_id", "sampler", ["tenant_id"], unique=False)

    op.create_table(
        "training_run",
        sa.Column("id", sa.String(), nullable=False),
        sa.Column("session_id", sa.String(), nullable=False),
        sa.Column("tenant_id", sa.String(), nullable=False),
        sa.Column("base_model", sa.String(), nullable=False),
        sa.Column("parent_version_id", sa.String(), nullable=True),
        sa.Column("lora", sa.JSON(), nullable=False),
        sa.Column("user_metadata", sa.JSON(), nullable=False),
        sa.Column("corrupted", sa.String(), nullable=True),
        sa.Column("created_at", sa.DateTime(timezone=True), nullable=False),
        sa.ForeignKeyConstraint(["parent_version_id"], ["package_version.id"]),
        sa.ForeignKeyConstraint(["session_id"], ["training_session.id"]),
        sa.ForeignKeyConstraint(["tenant_id"], ["tenant.id"]),
        sa.PrimaryKeyConstraint("id"),
    )
    op.create_index("ix_training_run_session_id", "training_run", ["session_id"], unique=False)
    op.create_index("ix_training_run_tenant_id", "training_run", ["tenant_id"], unique=False)

    op.create_table(
        "endpoint",
        sa.Column("id", sa.String(), nullable=False),
        sa.Column("tenant_id", sa.String(), nullable=False),
        sa.Column("name", sa.String(), nullable=False),
        sa.Column("reference", sa.String(), nullable=False),
        sa.Column(
            "status",
            sa.Enum("STARTING", "READY", "UPDATING", "FAILED", name="endpointstatus"),
            nullable=False,
        ),
        sa.Column("version_id", sa.String(), nullable=False),
        sa.Column("version", sa.String(), nullable=False),
        sa.Column("digest", sa.String(), nullable=False),
        sa.Column("replica_id", sa.String(), nullable=True),
        sa.Column("error", sa.String(), nullable=True),
        sa.Column("created_at", sa.DateTime(timezone=True), nullable=False),
        sa.Column("updated_at", sa.DateTime(timezone=True), nullable=False),
        sa.ForeignKeyConstraint(["replica_id"], ["replica.id"]),
        sa.ForeignKeyConstraint(["tenant_id"], ["tenant.id"]),
        sa.ForeignKeyConstraint(["version_id"], ["package_version.id"]),
        sa.PrimaryKeyConstraint("id"),
        sa.UniqueConstraint("tenant_id", "name"),
    )
    op.create_index("ix_endpoint_tenant_id", "endpoint", ["tenant_id"], unique=False)
    op.create_index("ix_endpoint_version_id", "endpoint", ["version_id"], unique=False)

    op.create_table(
        "gate_run",
        sa.Column("id", sa.String(), nullable=False),
        sa.Column("tenant_id", sa.String(), nullable=False),
        sa.Column("candidate_version_id", sa.String(), nullable=False),
        sa.Column("candidate_digest", sa.String(), nullable=False),
        sa.Column("baseline_version_id", sa.String(), nullable=False),
        sa.Column("candidate_run_id", sa.String(), nullable=False),
        sa.Column("baseline_run_id", sa.String(), nullable=False),
        sa.Column("suite_name", sa.String(), nullable=False),
        sa.Column("suite_digest", sa.String(), nullable=False),
        sa.Column("verdict", sa.String(), nullable=False),
        sa.Column("reason", sa.String(), nullable=False),
        sa.Column("statistics", sa.JSON(), nullable=False),
        sa.Column("created_at", sa.DateTime(timezone=True), nullable=False),
        sa.ForeignKeyConstraint(["baseline_run_id"], ["eval_run.id"]),
        sa.ForeignKeyConstraint(["baseline_version_id"], ["package_version.id"]),
        sa.ForeignKeyConstraint(["candidate_run_id"], ["eval_run.id"]),
        sa.ForeignKeyConstraint(["candidate_version_id"], ["package_version.id"]),
        sa.ForeignKeyConstraint(["tenant_id"], ["tenant.id"]),
        sa.PrimaryKeyConstraint("id"),
    )
    op.create_index("ix_gate_run_candidate_digest", "gate_run", ["candidate_digest"], unique=False)
    op.create_index(
        "ix_gate_run_candidate_version_id", "gate_run", ["candidate_version_id"], unique=False
    )
    op.create_index("ix_gate_run_tenant_id", "gate_run", ["tenant_id"], unique=False)

    op.create_table(
        "saved_path",
        sa.Column("path", sa.String(), nullable=False),
        sa.Column("run_id", sa.String(), nullable=False),
        sa.Column("tenant_id", sa.String(), nullable=False),
        sa.Column("version_id", sa.String(), nullable=False),
        sa.Column("created_at", sa.DateTime(timezone=True), nullable=False),
        sa.ForeignKeyConstraint(["run_id"], ["training_run.id"]),
        sa.ForeignKeyConstraint(["tenant_id"], ["tenant.id"]),
        sa.ForeignKeyConstraint(["version_id"], ["package_version.id"]),
        sa.PrimaryKeyConstraint("path"),
    )
    op.create_index("ix_saved_path_run_id", "saved_path", ["run_id"], unique=False)
    op.create_index("ix_saved_path_tenant_id", "saved_path", ["tenant_id"], unique=False)

    op.create_table(
        "training_operation",
        sa.Column("id", sa.String(), nullable=False),
        sa.Column("run_id", sa.String(), nullable=False),
        sa.Column("tenant_id", sa.String(), nullable=False),
        sa.Column("key_id", sa.String(), nullable=True),
        sa.Column("seq", sa.Integer(), nullable=False),
        sa.Column("kind", sa.String(), nullable=False),
        sa.Column("payload", sa.LargeBinary(), nullable=False),
        sa.Column(
            "status", sa.Enum("QUEUED", "DONE", "FAILED", name="operationstatus"), nullable=False
        ),
        sa.Column("deaths", sa.Integer(), nullable=False),
        sa.Column("result", sa.LargeBinary(), nullable=True),
        sa.Column("error", sa.String(), nullable=True),
        sa.Column("category", sa.String(), nullable=True),
        sa.Column("created_at", sa.DateTime(timezone=True), nullable=False),
        sa.Column("done_at", sa.DateTime(timezone=True), nullable=True),
        sa.ForeignKeyConstraint(["key_id"], ["api_key.id"]),
        sa.ForeignKeyConstraint(["run_id"], ["training_run.id"]),
        sa.ForeignKeyConstraint(["tenant_id"], ["tenant.id"]),
        sa.PrimaryKeyConstraint("id"),
        sa.UniqueConstraint("run_id", "seq"),
    )
    op.create_index("ix_training_operation_run_id", "training_operation", ["run_id"], unique=False)
    op.create_index("ix_training_operation_status", "training_operation", ["status"], unique=False)

    op.create_table(
        "alias_move",
        sa.Column("id", sa.Integer(), nullable=False),
        sa.Column("alias_id", sa.String(), nullable=False),
        sa.Column("from_version_id", sa.String(), nullable=True),
        sa.Column("to_version_id", sa.String(), nullable=False),
        sa.Column("gate_id", sa.String(), nullable=True),
        sa.Column("override_reason", sa.String(), nullable=True),
        sa.Column("moved_by", sa.String(), nullable=False),
        sa.Column("moved_at", sa.DateTime(timezone=True), nullable=False),
        sa.ForeignKeyConstraint(["alias_id"], ["alias.id"]),
        sa.ForeignKeyConstraint(["from_version_id"], ["package_version.id"]),
        sa.ForeignKeyConstraint(["gate_id"], ["gate_run.id"]),
        sa.ForeignKeyConstraint(["to_version_id"], ["package_version.id"]),
        sa.PrimaryKeyConstraint("id"),
    )
    op.create_index("ix_alias_move_alias_id", "alias_move", ["alias_id"], unique=False)


def downgrade() -> None:
    op.drop_table("alias_move")
    op.drop_table("training_operation")
    op.drop_table("saved_path")
    op.drop_table("gate_run")
    op.drop_table("endpoint")
    op.drop_table("training_run")
    op.drop_table("sampler")
    op.drop_table("replica")
    op.drop_table("package_version_parent")
    op.drop_table("eval_run")
    op.drop_table("alias")
    op.drop_table("usage_record")
    op.drop_table("training_session")
    op.drop_table("package_version")
    op.drop_table("alias_policy")
    op.drop_table("suite")
    op.drop_table("package_group")
    op.drop_table("api_key")
    op.drop_table("tenant")
    op.drop_table("outbox")
