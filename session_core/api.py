"""Sessions and quotas over HTTP, below ``/slipway/v1``."""

from __future__ import annotations

from asyncio import to_thread
from collections.abc import Sequence
from datetime import datetime
from typing import Any

from fastapi import APIRouter
from pydantic import BaseModel

from registry import Admin, Body, Caller
from session_core.models import SessionStatus, TrainingSession
from session_core.quota_records import QuotaView
from session_core.service import SessionService


class SessionView(BaseModel):
    """A session and its runs."""

    id: str
    status: SessionStatus
    display_name: str | None
    user_metadata: dict[str, Any]
    sdk_version: str | None
    runs: list[str]
    created_at: datetime
    heartbeat_at: datetime


class SetQuota(Body):
    """Limits of a tenant; null is no limit, and what is left out stays as it is."""

    sessions: int | None = None
    operations: int | None = None
    samples: int | None = None
    tokens_per_day: int | None = None
    context: int | None = None


def router(service: SessionService) -> APIRouter:
    """The routes of one service.

    ``tenant``, a name, is an administrator's way to another tenant than their own.
    """
    routes = APIRouter(prefix="/slipway/v1")
    _sessions(routes, service)
    _quotas(routes, service)
    return routes


def _sessions(routes: APIRouter, service: SessionService) -> None:
    operations, tenants = service.operations, service.registry.tenants

    def view(session: TrainingSession) -> SessionView:
        runs = [run.id for run in operations.runs(session_id=session.id)]
        fields = session.model_dump(include=set(SessionView.model_fields))
        return SessionView(**fields, runs=runs)

    @routes.get("/sessions")
    def list_sessions(
        caller: Caller, status: SessionStatus | None = None, tenant: str | None = None
    ) -> Sequence[SessionView]:
        tenant_id = tenants.reached(caller, tenant)
        return [view(session) for session in operations.sessions(tenant_id, status=status)]

    @routes.get("/sessions/{session_id}")
    def show_session(caller: Caller, session_id: str, tenant: str | None = None) -> SessionView:
        return view(operations.session(tenants.reached(caller, tenant), session_id))

    @routes.post("/sessions/{session_id}/stop")
    async def stop_session(
        caller: Caller, session_id: str, tenant: str | None = None
    ) -> SessionView:
        tenant_id = await to_thread(tenants.reached, caller, tenant)
        await service.end_session(tenant_id, session_id, SessionStatus.STOPPED)
        session = await to_thread(operations.session, tenant_id, session_id)
        return await to_thread(view, session)


def _quotas(routes: APIRouter, service: SessionService) -> None:
    quotas, tenants = service.quotas, service.registry.tenants

    @routes.get("/quotas")
    def list_quotas(caller: Caller, tenant: str | None = None) -> list[QuotaView]:
        if caller.is_admin and tenant is None:
            return quotas.list()
        return quotas.list(tenants.reached(caller, tenant))

    @routes.put("/quotas/{tenant}")
    def set_quota(_: Admin, tenant: str, body: SetQuota) -> QuotaView:
        return quotas.set(tenants.named(tenant), body.model_dump(exclude_unset=True))

    @routes.delete("/quotas/{tenant}")
    def reset_quota(_: Admin, tenant: str) -> QuotaView:
        return quotas.reset(tenants.named(tenant))
