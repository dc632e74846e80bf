"""The tables of `serving`, and what of them is shown.

They live in the registry's database. A replica row outlives its process: it is the record of
what was started, with the pids that a later server must end if this one is killed.
"""

from __future__ import annotations

from datetime import datetime
from enum import StrEnum
from typing import Any

from pydantic import BaseModel, ConfigDict
from sqlalchemy import UniqueConstraint
from sqlmodel import Field, SQLModel

from registry.models import json_column, utc_column


class ReplicaStatus(StrEnum):
    """Where a replica is in its life."""

    STARTING = "starting"
    READY = "ready"  # it has produced tokens
    STOPPED = "stopped"
    FAILED = "failed"  # it did not start, or died; `error` says why


class EndpointStatus(StrEnum):
    """What an endpoint can do now."""

    STARTING = "starting"  # no version serves yet
    READY = "ready"
    UPDATING = "updating"  # serves one version while another is being started
    FAILED = "failed"  # nothing serves; `error` says why


class Replica(SQLModel, table=True):
    """One inference server process."""

    __tablename__ = "replica"

    id: str = Field(primary_key=True)
    tenant_id: str = Field(foreign_key="tenant.id", index=True)
    version_id: str = Field(foreign_key="package_version.id", index=True)
    version: str  # "group/7"
    digest: str = Field(index=True)
    model: str  # the name inside the engine
    status: ReplicaStatus
    engine: dict[str, Any] = Field(sa_column=json_column())
    engine_fingerprint: str
    url: str | None = None
    processes: list[list[float]] = Field(sa_column=json_column())  # [pid, created], leader first
    error: str | None = None
    started_at: datetime = Field(sa_column=utc_column())
    ready_at: datetime | None = Field(default=None, sa_column=utc_column(nullable=True))
    ended_at: datetime | None = Field(default=None, sa_column=utc_column(nullable=True))


class Endpoint(SQLModel, table=True):
    """A stable name that clients call, and the version behind it."""

    __tablename__ = "endpoint"
    __table_args__ = (UniqueConstraint("tenant_id", "name"),)

    id: str = Field(primary_key=True)
    tenant_id: str = Field(foreign_key="tenant.id", index=True)
    name: str
    reference: str  # as deployed: "group/7" or "group@production"
    status: EndpointStatus
    # The version and the replica that serve, or are to serve when none does yet.
    version_id: str = Field(foreign_key="package_version.id", index=True)
    version: str
    digest: str
    replica_id: str | None = Field(default=None, foreign_key="replica.id")
    error: str | None = None  # why the last deployment failed, even if an older one serves
    created_at: datetime = Field(sa_column=utc_column())
    updated_at: datetime = Field(sa_column=utc_column())


class ReplicaView(BaseModel):
    """A replica as clients see it."""

    model_config = ConfigDict(frozen=True, from_attributes=True)

    id: str
    version: str
    digest: str
    model: str
    status: ReplicaStatus
    engine: dict[str, Any]
    engine_fingerprint: str
    error: str | None
    started_at: datetime
    ready_at: datetime | None
    ended_at: datetime | None


class EndpointView(BaseModel):
    """An endpoint as clients see it."""

    model_config = ConfigDict(frozen=True, from_attributes=True)

    name: str
    """The name to give as `model`."""
    reference: str
    status: EndpointStatus
    version: str
    digest: str
    replica_id: str | None
    engine_fingerprint: str | None = None
    error: str | None
    created_at: datetime
    updated_at: datetime
