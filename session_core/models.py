"""The tables of training sessions, beside the registry's in the same database."""

from __future__ import annotations

from datetime import datetime
from enum import StrEnum
from typing import Any

from sqlalchemy import BigInteger, Column, Index, LargeBinary, UniqueConstraint
from sqlmodel import Field, SQLModel

from registry.models import json_column, utc_column


class SessionStatus(StrEnum):
    """Where a session is in its life; only an active one takes new operations."""

    ACTIVE = "active"
    FINISHED = "finished"  # by its client
    STOPPED = "stopped"  # by hand
    EXPIRED = "expired"  # its client fell silent


class OperationStatus(StrEnum):
    """Where an operation is: it waits (or runs), or its result is known."""

    QUEUED = "queued"
    DONE = "done"
    FAILED = "failed"


class TrainingSession(SQLModel, table=True):
    """A client's session: it holds runs and samplers until it ends."""

    __tablename__ = "training_session"

    id: str = Field(primary_key=True)
    tenant_id: str = Field(foreign_key="tenant.id", index=True)
    key_id: str | None = Field(default=None, foreign_key="api_key.id")
    status: SessionStatus = SessionStatus.ACTIVE
    user_metadata: dict[str, Any] = Field(sa_column=json_column())
    tags: list[str] = Field(sa_column=json_column())
    sdk_version: str | None = None
    display_name: str | None = None
    project_id: str | None = None  # a label of the client's own
    finish_reason: str | None = None  # "success", "errored" or "interrupted", as its client said
    finish_detail: str | None = None
    created_at: datetime = Field(sa_column=utc_column())
    heartbeat_at: datetime = Field(sa_column=utc_column())


class TrainingRun(SQLModel, table=True):
    """One LoRA being trained in a session; ``id`` is ``<session>:train:<n>``."""

    __tablename__ = "training_run"

    id: str = Field(primary_key=True)
    session_id: str = Field(foreign_key="training_session.id", index=True)
    tenant_id: str = Field(foreign_key="tenant.id", index=True)
    base_model: str
    parent_version_id: str | None = Field(default=None, foreign_key="package_version.id")
    lora: dict[str, Any] = Field(sa_column=json_column())  # known once it was created
    user_metadata: dict[str, Any] = Field(sa_column=json_column())
    corrupted: str | None = None  # why it takes no more operations
    copy_of: str | None = None  # the path it holds a copy of; such a run is never trained
    created_at: datetime = Field(sa_column=utc_column())


class TenantQuota(SQLModel, table=True):
    """The limits a tenant has of its own; see `session_core.quotas.Quota`."""

    __tablename__ = "tenant_quota"

    tenant_id: str = Field(foreign_key="tenant.id", primary_key=True)
    limits: dict[str, Any] = Field(sa_column=json_column())  # by name; null: no limit
    set_at: datetime = Field(sa_column=utc_column())


class LoggedOperation(SQLModel, table=True):
    """An operation of a run: reorder buffer, idempotency table and result store in one."""

    __tablename__ = "training_operation"
    __table_args__ = (
        UniqueConstraint("run_id", "seq"),
        Index("ix_training_operation_tenant_id_status", "tenant_id", "status"),
    )

    id: str = Field(primary_key=True)  # the request id the client polls with
    run_id: str = Field(foreign_key="training_run.id", index=True)
    tenant_id: str = Field(foreign_key="tenant.id")
    key_id: str | None = Field(default=None, foreign_key="api_key.id")
    seq: int
    kind: str
    payload: bytes = Field(sa_column=Column(LargeBinary(), nullable=False))
    digest: str = ""  # SHA-256 of what was asked for, to tell a retry from another request
    tokens: int = 0  # that it is billed for, if it succeeds
    status: OperationStatus = Field(default=OperationStatus.QUEUED, index=True)
    deaths: int = 0  # how often the engine died over it
    result: bytes | None = Field(default=None, sa_column=Column(LargeBinary(), nullable=True))
    error: str | None = None  # why it failed; or, while it waits, why it will
    category: str | None = None  # "user" or "server"
    created_at: datetime = Field(sa_column=utc_column())
    done_at: datetime | None = Field(default=None, sa_column=utc_column(nullable=True))


class Sampler(SQLModel, table=True):
    """What can be sampled from: the base, a version, or a session's unnamed snapshot."""

    __tablename__ = "sampler"

    id: str = Field(primary_key=True)  # "<session>:sample:<n>"
    session_id: str = Field(foreign_key="training_session.id", index=True)
    tenant_id: str = Field(foreign_key="tenant.id", index=True)
    base_model: str
    model_path: str | None = None
    version_id: str | None = Field(default=None, foreign_key="package_version.id")
    snapshot: str | None = None  # folder below sessions/, of an unnamed snapshot
    clients: int = 0  # how many copies of its client were given a number
    created_at: datetime = Field(sa_column=utc_column())


class SavedPath(SQLModel, table=True):
    """A ``tinker://`` path and what it names: a version, or an export, which is none.

    The row stays when the path names nothing any more, to say why it does not.
    """

    __tablename__ = "saved_path"

    path: str = Field(primary_key=True)
    run_id: str = Field(foreign_key="training_run.id", index=True)
    tenant_id: str = Field(foreign_key="tenant.id", index=True)
    kind: str  # the path's middle: "weights", "sampler_weights" or "external_weights"
    version_id: str | None = Field(default=None, foreign_key="package_version.id")
    folder: str | None = None  # below sessions/, of an export
    size_bytes: int = Field(sa_column=Column(BigInteger(), nullable=False))
    created_at: datetime = Field(sa_column=utc_column())
    expires_at: datetime | None = Field(default=None, sa_column=utc_column(nullable=True))
    removed_at: datetime | None = Field(default=None, sa_column=utc_column(nullable=True))
