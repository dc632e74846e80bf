"""The registry over HTTP, below ``/slipway/v1``."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any

from fastapi import APIRouter, Query
from pydantic import BaseModel

from registry import administration
from registry.aliases import ANYWHERE
from registry.auth import Caller
from registry.bodies import Body
from registry.jobs import Jobs, JobView
from registry.models import Kind
from registry.registry import Registry
from registry.views import (
    AliasMoveView,
    AliasView,
    EvalRunView,
    GateRunView,
    GroupView,
    LineageView,
    Page,
    SuiteView,
    VersionView,
)

PREFIX = "/slipway/v1"


class MoveAlias(Body):
    """Point an alias at a version."""

    version: str
    """``GROUP/NUMBER`` or a version id."""
    expected: str | None = None
    """Id of the version it must point at now; null: it must not exist yet. Left out: any."""
    override_reason: str | None = None


class Verified(BaseModel):
    """What re-hashing a version found; no problems means it is intact."""

    reference: str
    problems: list[str]


def router(registry: Registry, jobs: Jobs) -> APIRouter:
    """The routes of one registry."""
    routes = APIRouter(prefix=PREFIX)
    _packages(routes, registry)
    _aliases(routes, registry)
    _evidence(routes, registry)
    administration.add_routes(routes, registry)
    _jobs(routes, jobs)
    return routes


def _packages(routes: APIRouter, registry: Registry) -> None:
    @routes.get("/groups")
    def list_groups(caller: Caller) -> Sequence[GroupView]:
        return registry.versions.groups(caller.tenant_id)

    @routes.get("/versions")
    def list_versions(
        caller: Caller,
        group: str | None = None,
        kind: Kind | None = None,
        limit: Annotated[int, Query(ge=1, le=200)] = 50,
        cursor: str | None = None,
    ) -> Page[VersionView]:
        return registry.versions.list(
            caller.tenant_id, group=group, kind=kind, limit=limit, cursor=cursor
        )

    @routes.get("/resolve")
    def resolve(caller: Caller, reference: str) -> VersionView:
        return registry.versions.get(caller.tenant_id, reference)

    @routes.get("/versions/{group}/{number}")
    def show_version(caller: Caller, group: str, number: int) -> VersionView:
        return registry.versions.get(caller.tenant_id, f"{group}/{number}")

    @routes.get("/versions/{group}/{number}/lineage")
    def show_lineage(caller: Caller, group: str, number: int) -> LineageView:
        return registry.versions.lineage(caller.tenant_id, f"{group}/{number}")

    @routes.post("/versions/{group}/{number}/verify")
    def verify_version(caller: Caller, group: str, number: int) -> Verified:
        version = registry.versions.get(caller.tenant_id, f"{group}/{number}")
        return Verified(reference=version.reference, problems=registry.store.verify(version.digest))


def _aliases(routes: APIRouter, registry: Registry) -> None:
    @routes.get("/aliases")
    def list_aliases(caller: Caller, group: str | None = None) -> Sequence[AliasView]:
        return registry.aliases.list(caller.tenant_id, group=group)

    @routes.put("/groups/{group}/aliases/{alias}")
    def move_alias(caller: Caller, group: str, alias: str, body: MoveAlias) -> AliasMoveView:
        return registry.aliases.move(
            caller.tenant_id,
            group,
            alias,
            body.version,
            moved_by=caller.key_name,
            # A field that was left out and one that is null mean different things here.
            expected=body.expected if "expected" in body.model_fields_set else ANYWHERE,
            override_reason=body.override_reason,
        )

    @routes.get("/groups/{group}/aliases/{alias}/history")
    def alias_history(caller: Caller, group: str, alias: str) -> Sequence[AliasMoveView]:
        return registry.aliases.history(caller.tenant_id, group, alias)

    @routes.post("/groups/{group}/aliases/{alias}/rollback")
    def roll_alias_back(caller: Caller, group: str, alias: str) -> AliasMoveView:
        return registry.aliases.rollback(caller.tenant_id, group, alias, moved_by=caller.key_name)


def _evidence(routes: APIRouter, registry: Registry) -> None:
    evidence = registry.evidence

    def version_id(tenant_id: str, reference: str | None) -> str | None:
        return registry.versions.get(tenant_id, reference).id if reference else None

    @routes.get("/suites")
    def list_suites(caller: Caller) -> list[SuiteView]:
        return evidence.suites(caller.tenant_id)

    @routes.get("/suites/{name_or_digest}")
    def show_suite(caller: Caller, name_or_digest: str) -> dict[str, Any]:
        view, spec = evidence.suite(caller.tenant_id, name_or_digest)
        return {**view.model_dump(mode="json"), "spec": spec}

    @routes.get("/evals")
    def list_runs(
        caller: Caller, version: str | None = None, suite: str | None = None
    ) -> list[EvalRunView]:
        digest = evidence.suite(caller.tenant_id, suite)[0].digest if suite else None
        return evidence.runs(
            caller.tenant_id,
            version_id=version_id(caller.tenant_id, version),
            suite_digest=digest,
        )

    @routes.get("/evals/{run_id}")
    def show_run(caller: Caller, run_id: str) -> EvalRunView:
        return evidence.run(caller.tenant_id, run_id)

    @routes.get("/evals/{run_id}/items")
    def show_items(caller: Caller, run_id: str) -> list[dict[str, Any]]:
        return evidence.items(evidence.run(caller.tenant_id, run_id))

    @routes.get("/gates")
    def list_gates(caller: Caller, version: str | None = None) -> list[GateRunView]:
        return evidence.gates(caller.tenant_id, version_id=version_id(caller.tenant_id, version))

    @routes.get("/gates/{gate_id}")
    def show_gate(caller: Caller, gate_id: str) -> GateRunView:
        return evidence.gate(caller.tenant_id, gate_id)


def _jobs(routes: APIRouter, jobs: Jobs) -> None:
    @routes.get("/jobs")
    async def list_jobs(caller: Caller) -> list[JobView]:
        return jobs.list(caller.tenant_id)

    @routes.get("/jobs/{job_id}")
    async def show_job(
        caller: Caller, job_id: str, wait: Annotated[float, Query(ge=0, le=30)] = 0
    ) -> JobView:
        if wait:
            return await jobs.wait(caller.tenant_id, job_id, wait)
        return jobs.get(caller.tenant_id, job_id)

    @routes.delete("/jobs/{job_id}")
    async def cancel_job(caller: Caller, job_id: str) -> JobView:
        return await jobs.cancel(caller.tenant_id, job_id)
