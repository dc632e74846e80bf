"""The HTTP routes of `serving` on the control plane, under /slipway/v1."""

from __future__ import annotations

from fastapi import APIRouter
from pydantic import BaseModel, ConfigDict, Field

from registry.auth import Caller
from registry.jobs import JobView
from serving.endpoints import Endpoints
from serving.models import EndpointView, ReplicaView


class DeployRequest(BaseModel):
    """What to serve, and under which name."""

    model_config = ConfigDict(extra="forbid")

    name: str = Field(description="The endpoint's name; made if it does not exist.")
    version: str = Field(description="GROUP@alias or GROUP/N; the version must be merged.")


def router(endpoints: Endpoints) -> APIRouter:
    """The routes. Every one is for a caller with a key, and shows that tenant's things only."""
    routes = APIRouter(prefix="/slipway/v1", tags=["serving"])

    @routes.post("/endpoints", status_code=202)
    async def deploy(caller: Caller, body: DeployRequest) -> JobView:
        """Serve a version as an endpoint; a job, whose result is the endpoint."""
        return await endpoints.deploy(caller.tenant_id, body.name, body.version)

    @routes.get("/endpoints")
    async def list_endpoints(caller: Caller) -> list[EndpointView]:
        """All endpoints, by name."""
        return await endpoints.list(caller.tenant_id)

    @routes.get("/endpoints/{name}")
    async def show(caller: Caller, name: str) -> EndpointView:
        """One endpoint."""
        return await endpoints.get(caller.tenant_id, name)

    @routes.delete("/endpoints/{name}")
    async def delete(caller: Caller, name: str) -> EndpointView:
        """Take an endpoint away, and stop its replica unless something else needs it."""
        return await endpoints.delete(caller.tenant_id, name)

    @routes.get("/replicas")
    async def list_replicas(caller: Caller) -> list[ReplicaView]:
        """Replicas, those that ended included, newest first."""
        return await endpoints.replicas(caller.tenant_id)

    return routes
