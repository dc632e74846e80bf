"""The SDK's account routes: the caller's own key, what was used, and what is stored."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from typing import Annotated, Any

from fastapi import APIRouter, Query
from pydantic import AwareDatetime

from registry import Caller, HourView, InvalidInput, NotServed, UsageKind
from session_core.dialects.tinker.rest import Project, texts
from session_core.dialects.tinker.sessions import owner_of
from session_core.service import SessionService

LONGEST_WINDOW = timedelta(days=14)
GIGABYTE = 10**9
EVENTS: dict[UsageKind, dict[str, Any]] = {
    UsageKind.TRAIN: {"type": "training"},
    UsageKind.PREFILL: {"type": "sampling_prefill", "cached": False},
    UsageKind.SAMPLE: {"type": "sampling_sample"},
}
Moment = Annotated[AwareDatetime, Query()]


def add_routes(routes: APIRouter, service: SessionService) -> None:
    """Routes of the caller's own account."""
    _key(routes, service)
    _usage(routes, service)

    @routes.get("/audit")
    def audit(caller: Caller) -> None:
        del caller
        raise NotServed(
            "an audit log is not kept: who moved an alias, and when, is in the alias's history"
        )


def _key(routes: APIRouter, service: SessionService) -> None:
    tenants = service.registry.tenants

    @routes.get("/auth/apikey/me")
    def show_key(caller: Caller) -> dict[str, Any]:
        return {
            # The wire has numbers for ids; ours are 128 bits, written in hex.
            "key_id": int(caller.key_id.replace("-", ""), 16),
            "name": caller.key_name,
            "note": caller.role.value,
            "details": {
                "org_details": {"name": caller.tenant},
                "user_details": {"name": caller.key_name, "email": ""},
            },
        }

    @routes.delete("/auth/apikey/me", status_code=204)
    def end_key(caller: Caller) -> None:
        tenants.revoke(caller.tenant_id, caller.key_id, by=caller.role)


def _usage(routes: APIRouter, service: SessionService) -> None:
    usage, holdings = service.registry.usage, service.holdings

    @routes.get("/billing/usage/events")
    def events(caller: Caller, starting_on: Moment, ending_before: Moment) -> dict[str, Any]:
        start, end = _window(starting_on, ending_before, now=service.registry.clock())
        hours = usage.by_hour(caller.tenant_id, start=start, end=end)
        named = {hour.session_id for hour in hours if hour.session_id}
        sessions = holdings.described(caller.tenant_id, named)
        projects = {name: project for name, (_, project) in sessions.items()}
        return {
            "data": [_event(hour, caller.tenant_id, projects) for hour in hours],
            "sessions": {
                name: {"user_metadata": texts(metadata)} for name, (metadata, _) in sessions.items()
            },
            "cost_data_through": None,
        }

    @routes.get("/billing/usage/checkpoints/current")
    def stored(caller: Caller, project_id: Project = None) -> dict[str, Any]:
        rows = holdings.stored(caller.tenant_id, project_id=project_id)
        return {
            "effective_rate_usd_per_gigabyte_month": None,
            "data": [
                {
                    "project_id": row.project_id,
                    "org_user_urn": owner_of(caller.tenant_id),
                    "checkpoint_count": row.count,
                    "size_bytes": row.size_bytes,
                    "size_gigabytes": row.size_bytes / GIGABYTE,
                }
                for row in rows
            ],
        }


def _window(start: datetime, end: datetime, *, now: datetime) -> tuple[datetime, datetime]:
    start, end = start.astimezone(UTC), end.astimezone(UTC)
    for name, moment in (("starting_on", start), ("ending_before", end)):
        if moment != moment.replace(minute=0, second=0, microsecond=0):
            raise InvalidInput(f"{name} is {moment.isoformat()}: it must be a full hour (UTC)")
    if start > now:
        raise InvalidInput(f"starting_on is {start.isoformat()}, which is in the future")
    if not timedelta(0) < end - start <= LONGEST_WINDOW:
        raise InvalidInput("ending_before must be after starting_on, by 14 days at most")
    return start, end


def _event(hour: HourView, tenant_id: str, projects: dict[str, str]) -> dict[str, Any]:
    return {
        "bucket_start": hour.start.isoformat(),
        "bucket_end": (hour.start + timedelta(hours=1)).isoformat(),
        "base_model": hour.base_model,
        "user_id": owner_of(tenant_id),
        "session_id": hour.session_id,
        "project_id": projects.get(hour.session_id or ""),
        "estimated_cost_usd": hour.cost and float(hour.cost),
        "effective_rate_usd_per_million_tokens": hour.price and float(hour.price),
        "event_info": {**EVENTS[hour.kind], "token_count": hour.tokens},
    }
