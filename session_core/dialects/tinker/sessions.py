"""The SDK's REST client: sessions, and how they ended."""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter

from registry import Caller, NotServed
from session_core.dialects.tinker import bodies
from session_core.dialects.tinker.rest import Limit, Offset, texts
from session_core.listing import NO_PROJECT, ListedSession, Search
from session_core.models import SessionStatus, TrainingSession
from session_core.service import SessionService


def add_routes(routes: APIRouter, service: SessionService) -> None:
    """Routes of sessions."""
    operations, listing = service.operations, service.listing

    @routes.post("/sessions/search")
    def search(caller: Caller, body: bodies.SearchSessions) -> dict[str, Any]:
        if body.owner.type == "user" and owner_of(caller.tenant_id) not in body.owner.owner_urns:
            return {"sessions": [], "next_cursor": None}
        rows, more = listing.search(
            caller.tenant_id, _search(body), limit=body.limit, now=service.registry.clock()
        )
        cursor = None
        if more:
            last = rows[-1].session
            cursor = {
                "last_created_at": last.created_at.isoformat(),
                "last_session_id": last.id,
            }
        return {"sessions": [summary(row) for row in rows], "next_cursor": cursor}

    @routes.get("/sessions")
    def list_sessions(caller: Caller, limit: Limit = 20, offset: Offset = 0) -> dict[str, Any]:
        return {"sessions": listing.session_ids(caller.tenant_id, limit=limit, offset=offset)}

    @routes.get("/sessions/{session_id}")
    def show_session(caller: Caller, session_id: str) -> dict[str, Any]:
        session = operations.session(caller.tenant_id, session_id)
        return {
            "training_run_ids": [run.id for run in operations.runs(session_id=session_id)],
            "sampler_ids": [sampler.id for sampler in operations.samplers(session_id)],
            "user_metadata": texts(session.user_metadata),
            "display_name": session.display_name,
        }

    @routes.put("/sessions/{session_id}/project", status_code=204)
    def assign_project(caller: Caller, session_id: str, body: bodies.AssignProject) -> None:
        listing.assign_project(caller.tenant_id, session_id, body.project_id)

    @routes.get("/sessions/{session_id}/trace_export")
    def export_trace(caller: Caller, session_id: str) -> None:
        session = operations.session(caller.tenant_id, session_id)
        raise NotServed(f"a trace of session {session.id} cannot be had: none is recorded here")

    @routes.post("/sessions/{session_id}/finish")
    async def finish(
        caller: Caller, session_id: str, body: bodies.FinishSession | None = None
    ) -> dict[str, str]:
        body = body or bodies.FinishSession()
        await service.end_session(
            caller.tenant_id,
            session_id,
            SessionStatus.FINISHED,
            reason=body.reason.type,
            detail=body.detail,
        )
        return {}


def owner_of(tenant_id: str) -> str:
    """The name the wire has for a tenant."""
    return f"slipway:tenant:{tenant_id}"


def status_of(session: TrainingSession) -> dict[str, Any] | None:
    """A session's status; None for one whose client fell silent."""
    if session.status is SessionStatus.ACTIVE:
        return {"type": "active"}
    if session.status is SessionStatus.FINISHED:
        reason = {"type": session.finish_reason or "success"}
        return {"type": "client_finished", "reason": reason, "detail": session.finish_detail}
    if session.status is SessionStatus.STOPPED:
        return {"type": "cancelled", "detail": session.finish_detail}
    return None


def summary(listed: ListedSession) -> dict[str, Any]:
    """A session found."""
    session = listed.session
    return {
        "session_id": session.id,
        "created_at": session.created_at.isoformat(),
        "owner": owner_of(session.tenant_id),
        "project_id": session.project_id or NO_PROJECT,
        "status": status_of(session),
        "checkpoints_count": listed.saves,
        "display_name": session.display_name,
        "user_metadata": texts(session.user_metadata),
        "checkpoint_storage_bytes": listed.saved_bytes,
    }


def _search(body: bodies.SearchSessions) -> Search:
    statuses: list[SessionStatus] | None = None
    finished: list[str] | None = None
    for wanted in body.statuses or ():
        statuses = statuses or []
        if wanted.type == "active":
            statuses.append(SessionStatus.ACTIVE)
        elif wanted.type == "cancelled":
            statuses.append(SessionStatus.STOPPED)
        elif wanted.type == "client_finished" and wanted.reasons is None:
            statuses.append(SessionStatus.FINISHED)
        elif wanted.type == "client_finished":
            finished = [*(finished or []), *(wanted.reasons or [])]
        # No session is failed by one of its requests here, so "failed" finds none.
    return Search(
        session_id=body.session_id,
        display_name=body.display_name,
        project_ids=body.project_ids,
        user_metadata=body.user_metadata,
        statuses=statuses,
        finished=finished,
        after=body.cursor.after() if body.cursor is not None else None,
    )
