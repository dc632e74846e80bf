"""The HTTP routes of `merge`, below /slipway/v1."""

from __future__ import annotations

from typing import Literal

from fastapi import APIRouter
from pydantic import BaseModel, ConfigDict, Field

from merge.service import MergeService
from registry.auth import Caller
from registry.jobs import JobView


class MergeRequest(BaseModel):
    """What to merge."""

    model_config = ConfigDict(extra="forbid")

    version: str = Field(description="GROUP/N, GROUP@alias or an id, of an adapter.")
    dtype: Literal["float32", "bfloat16", "float16"] | None = Field(
        default=None, description="To store the result in; by default what the base is in."
    )


def router(service: MergeService) -> APIRouter:
    """The routes; each is for a caller with a key, on that tenant's versions only."""
    routes = APIRouter(prefix="/slipway/v1", tags=["merges"])

    # Jobs start on the event loop, so this is no plain function.
    @routes.post("/merges", status_code=202)
    async def start_merge(caller: Caller, body: MergeRequest) -> JobView:
        """Merge an adapter into its base; a job, whose result is the merged version."""
        return service.start(caller.tenant_id, body.version, dtype=body.dtype)

    return routes
