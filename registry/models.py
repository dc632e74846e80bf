"""The tables of the registry: the system of record.

All ids are UUID strings, all times are timezone-aware UTC. JSON columns hold what no query
filters by. Other packages keep their own tables beside these in the same database
(``session_core/models.py``, ``serving/models.py``).
"""

from __future__ import annotations

from datetime import UTC, datetime
from enum import StrEnum
from typing import Any

from sqlalchemy import JSON, Column, DateTime, Index, TypeDecorator, UniqueConstraint
from sqlalchemy.engine import Dialect
from sqlmodel import Field, SQLModel


class UtcDateTime(TypeDecorator[datetime]):
    """A UTC time that comes back aware from SQLite too, which stores no zone."""

    impl = DateTime(timezone=True)
    cache_ok = True

    def process_bind_param(self, value: datetime | None, dialect: Dialect) -> datetime | None:
        """Refuse a time without a zone, which would mean another moment elsewhere."""
        del dialect
        if value is not None and value.tzinfo is None:
            raise ValueError(f"naive datetime {value!r}: times are aware UTC throughout")
        return value.astimezone(UTC) if value is not None else None

    def process_result_value(self, value: datetime | None, dialect: Dialect) -> datetime | None:
        """Give every time its zone back."""
        del dialect
        if value is None:
            return None
        return value.replace(tzinfo=UTC) if value.tzinfo is None else value.astimezone(UTC)


def utc_column(*, nullable: bool = False) -> Column[datetime]:
    """A column for a UTC time."""
    return Column(UtcDateTime(), nullable=nullable)


def json_column() -> Column[Any]:
    """A column for a JSON value that is never null."""
    return Column(JSON(), nullable=False)


class Kind(StrEnum):
    """What a version's files are."""

    CHECKPOINT = "checkpoint"  # adapter, optimizer, RNG, step: training resumes from it
    WEIGHTS = "weights"  # a PEFT adapter
    MERGED = "merged"  # a full Hugging Face model folder
    GGUF = "gguf"


class Origin(StrEnum):
    """Where a version came from."""

    SESSION = "session"
    MERGE = "merge"
    IMPORT = "import"


class Role(StrEnum):
    """How far an API key reaches."""

    ADMIN = "admin"  # the whole server: every tenant, quotas, prices
    MEMBER = "member"  # what belongs to its own tenant


class UsageKind(StrEnum):
    """What tokens were used for."""

    TRAIN = "train"
    PREFILL = "prefill"  # read without learning from them: prompts, and forward passes
    SAMPLE = "sample"


class Tenant(SQLModel, table=True):
    """Who owns groups, sessions and keys."""

    __tablename__ = "tenant"

    id: str = Field(primary_key=True)
    name: str = Field(unique=True)
    created_at: datetime = Field(sa_column=utc_column())


class ApiKey(SQLModel, table=True):
    """An API key; only its SHA-256 is kept (the key has 256 random bits of its own)."""

    __tablename__ = "api_key"

    id: str = Field(primary_key=True)
    tenant_id: str = Field(foreign_key="tenant.id", index=True)
    name: str
    # The text itself, and no database enumeration, which could not grow in a transaction.
    role: str = Role.MEMBER.value
    hint: str  # the last four characters, to tell keys apart in a list
    sha256: str = Field(unique=True)
    created_at: datetime = Field(sa_column=utc_column())
    revoked_at: datetime | None = Field(default=None, sa_column=utc_column(nullable=True))


class UsageRecord(SQLModel, table=True):
    """Tokens of one operation. ``operation`` is unique, so a replay bills nothing twice."""

    __tablename__ = "usage_record"
    __table_args__ = (Index("ix_usage_record_tenant_id_day", "tenant_id", "day"),)

    id: int | None = Field(default=None, primary_key=True)
    tenant_id: str = Field(foreign_key="tenant.id")
    key_id: str | None = Field(default=None, foreign_key="api_key.id")
    operation: str = Field(unique=True)
    kind: str  # a `UsageKind`
    session_id: str | None = Field(default=None, index=True)
    base_model: str | None = None
    tokens: int
    price: str | None = None  # of a million tokens, a decimal, as it was at the time
    day: str  # in UTC, "2026-01-31"
    created_at: datetime = Field(sa_column=utc_column())


class TokenPrice(SQLModel, table=True):
    """What a million tokens of a kind cost from now on; no base model is every one."""

    __tablename__ = "token_price"

    kind: str = Field(primary_key=True)
    base_model: str = Field(default="", primary_key=True)
    per_million: str | None = None  # a decimal
    set_at: datetime = Field(sa_column=utc_column())


class Group(SQLModel, table=True):
    """A model package group: a named line of versions."""

    __tablename__ = "package_group"
    __table_args__ = (UniqueConstraint("tenant_id", "name"),)

    id: str = Field(primary_key=True)
    tenant_id: str = Field(foreign_key="tenant.id", index=True)
    name: str
    next_number: int = 1
    created_at: datetime = Field(sa_column=utc_column())


class Version(SQLModel, table=True):
    """A model package version. The row exists only if all its bytes are durable."""

    __tablename__ = "package_version"
    __table_args__ = (UniqueConstraint("group_id", "number"),)

    id: str = Field(primary_key=True)
    group_id: str = Field(foreign_key="package_group.id", index=True)
    number: int
    kind: Kind
    origin: Origin
    digest: str = Field(index=True)  # "sha256:<hex>" of the manifest
    size_bytes: int
    files: list[dict[str, Any]] = Field(sa_column=json_column())  # path, size, sha256
    base_model: str
    base_digest: str
    lora: dict[str, Any] = Field(sa_column=json_column())
    provenance: dict[str, Any] = Field(sa_column=json_column())
    user_metadata: dict[str, Any] = Field(sa_column=json_column())
    source_key: str | None = Field(default=None, unique=True)  # makes registering idempotent
    created_at: datetime = Field(sa_column=utc_column())


class VersionParent(SQLModel, table=True):
    """An edge of the lineage graph."""

    __tablename__ = "package_version_parent"

    child_id: str = Field(foreign_key="package_version.id", primary_key=True)
    parent_id: str = Field(foreign_key="package_version.id", primary_key=True, index=True)


class Policy(SQLModel, table=True):
    """What an alias of a group demands before it may move."""

    __tablename__ = "alias_policy"
    __table_args__ = (UniqueConstraint("group_id", "alias"),)

    id: str = Field(primary_key=True)
    group_id: str = Field(foreign_key="package_group.id", index=True)
    alias: str
    gate: bool  # a passing gate run of this version's digest


class Alias(SQLModel, table=True):
    """A movable name for one version of a group."""

    __tablename__ = "alias"
    __table_args__ = (UniqueConstraint("group_id", "name"),)

    id: str = Field(primary_key=True)
    group_id: str = Field(foreign_key="package_group.id", index=True)
    name: str
    version_id: str = Field(foreign_key="package_version.id")
    moved_at: datetime = Field(sa_column=utc_column())


class AliasMove(SQLModel, table=True):
    """One line of an alias's append-only history."""

    __tablename__ = "alias_move"

    id: int | None = Field(default=None, primary_key=True)
    alias_id: str = Field(foreign_key="alias.id", index=True)
    from_version_id: str | None = Field(default=None, foreign_key="package_version.id")
    to_version_id: str = Field(foreign_key="package_version.id")
    gate_id: str | None = Field(default=None, foreign_key="gate_run.id")
    override_reason: str | None = None
    moved_by: str  # the name of the API key
    moved_at: datetime = Field(sa_column=utc_column())


class Suite(SQLModel, table=True):
    """A frozen held-out set with its template, decoding and grader; the spec is a blob."""

    __tablename__ = "suite"
    __table_args__ = (UniqueConstraint("tenant_id", "digest"),)

    id: str = Field(primary_key=True)
    tenant_id: str = Field(foreign_key="tenant.id", index=True)
    name: str = Field(index=True)
    digest: str
    items: int
    created_at: datetime = Field(sa_column=utc_column())


class EvalRun(SQLModel, table=True):
    """Evidence: one suite run on one version. Per-item results are a blob."""

    __tablename__ = "eval_run"

    id: str = Field(primary_key=True)
    tenant_id: str = Field(foreign_key="tenant.id", index=True)
    version_id: str = Field(foreign_key="package_version.id", index=True)
    version_digest: str
    suite_name: str
    suite_digest: str
    engine: dict[str, Any] = Field(sa_column=json_column())  # name, version, dtype, replica ...
    engine_fingerprint: str
    counts: dict[str, Any] = Field(sa_column=json_column())  # items per outcome class
    items: int
    correct: int
    evidence_digest: str  # blob of per-item JSON lines
    created_at: datetime = Field(sa_column=utc_column())


class GateRun(SQLModel, table=True):
    """A verdict on a candidate against a baseline on the same items."""

    __tablename__ = "gate_run"

    id: str = Field(primary_key=True)
    tenant_id: str = Field(foreign_key="tenant.id", index=True)
    candidate_version_id: str = Field(foreign_key="package_version.id", index=True)
    candidate_digest: str = Field(index=True)
    baseline_version_id: str = Field(foreign_key="package_version.id")
    candidate_run_id: str = Field(foreign_key="eval_run.id")
    baseline_run_id: str = Field(foreign_key="eval_run.id")
    suite_name: str
    suite_digest: str
    verdict: str  # "pass", "fail" or "inconclusive"
    reason: str
    statistics: dict[str, Any] = Field(sa_column=json_column())
    created_at: datetime = Field(sa_column=utc_column())


class Outbox(SQLModel, table=True):
    """Events written in the transaction they tell of, for mirrors to drain."""

    __tablename__ = "outbox"

    id: int | None = Field(default=None, primary_key=True)
    event: str  # "version.registered" or "alias.moved"
    payload: dict[str, Any] = Field(sa_column=json_column())
    created_at: datetime = Field(sa_column=utc_column())
    done_at: datetime | None = Field(default=None, sa_column=utc_column(nullable=True))
