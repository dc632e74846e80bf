"""The HTTP routes of `evals`, below /slipway/v1. Stored evidence is read in `registry.api`."""

from __future__ import annotations

from typing import Annotated, Any

from fastapi import APIRouter, Body
from pydantic import BaseModel, ConfigDict, Field

from evals.gates import DEFAULT_ALPHA
from evals.service import EvalService
from registry.auth import Caller
from registry.jobs import JobView
from registry.views import GateRunView, SuiteView

# A suite brings all its items at once.
LARGER = {"/slipway/v1/suites": 64 * 2**20}


class _Request(BaseModel):
    model_config = ConfigDict(extra="forbid")


class EvalRequest(_Request):
    """What to measure."""

    version: str = Field(description="GROUP/N, GROUP@alias or an id; it must be merged.")
    suite: str = Field(description="A suite's name (its newest) or digest.")
    keep: bool = Field(default=False, description="Leave the replica running, to deploy it.")


class GateRequest(_Request):
    """What to decide."""

    candidate: str = Field(description="The version that is to be shown better.")
    baseline: str = Field(description="The version it is compared with.")
    suite: str = Field(description="A suite's name (its newest) or digest.")
    alpha: float = Field(default=DEFAULT_ALPHA, description="Between 0 and 0.5.")


def router(service: EvalService) -> APIRouter:
    """The routes; each is for a caller with a key, on that tenant's versions only."""
    routes = APIRouter(prefix="/slipway/v1", tags=["evals"])

    @routes.post("/suites", status_code=201)
    def add_suite(caller: Caller, spec: Annotated[dict[str, Any], Body()]) -> SuiteView:
        """Check a suite and freeze it under its digest."""
        return service.add_suite(caller.tenant_id, spec)

    # Jobs start on the event loop, so this one is no plain function.
    @routes.post("/evals", status_code=202)
    async def start_run(caller: Caller, body: EvalRequest) -> JobView:
        """Run a suite on a version; a job, whose result is the stored run."""
        return service.start_run(caller.tenant_id, body.version, body.suite, keep=body.keep)

    @routes.post("/gates", status_code=201)
    def start_gate(caller: Caller, body: GateRequest) -> GateRunView:
        """Decide from stored runs whether the candidate is better; keeps the verdict."""
        return service.start_gate(
            caller.tenant_id, body.candidate, body.baseline, body.suite, alpha=body.alpha
        )

    return routes
