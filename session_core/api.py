"""Sessions over HTTP, below ``/slipway/v1``."""

from __future__ import annotations

from asyncio import to_thread
from collections.abc import Sequence
from datetime import datetime
from typing import Any

from fastapi import APIRouter
from pydantic import BaseModel

from registry import Caller
from session_core.models import SessionStatus, TrainingSession
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


def router(service: SessionService) -> APIRouter:
    """The routes of one service."""
    routes = APIRouter(prefix="/slipway/v1")
    operations = service.operations

    def view(session: TrainingSession) -> SessionView:
        runs = [run.id for run in operations.runs(session_id=session.id)]
        fields = session.model_dump(include=set(SessionView.model_fields))
        return SessionView(**fields, runs=runs)

    @routes.get("/sessions")
    def list_sessions(caller: Caller) -> Sequence[SessionView]:
        return [view(session) for session in operations.sessions(caller.tenant_id)]

    @routes.get("/sessions/{session_id}")
    def show_session(caller: Caller, session_id: str) -> SessionView:
        return view(operations.session(caller.tenant_id, session_id))

    @routes.post("/sessions/{session_id}/stop")
    async def stop_session(caller: Caller, session_id: str) -> SessionView:
        await service.end_session(caller, session_id, SessionStatus.STOPPED)
        return view(await to_thread(operations.session, caller.tenant_id, session_id))

    return routes
