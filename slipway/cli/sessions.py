"""Commands about what runs: sessions and jobs."""

from __future__ import annotations

from typing import Annotated

import typer

from slipway.cli.common import (
    HomeOption,
    JsonOption,
    TenantOption,
    connected,
    show,
    table,
    when,
)
from slipway.client import part


def list_sessions(
    active: Annotated[bool, typer.Option("--active", help="Only those that are active.")] = False,
    tenant: TenantOption = None,
    home: HomeOption = None,
    as_json: JsonOption = False,
) -> None:
    """List training sessions, newest first."""
    with connected(home) as client:
        sessions = client.get("/sessions", status="active" if active else None, tenant=tenant)
    rows = [(s["id"], s["status"], str(len(s["runs"])), when(s["heartbeat_at"])) for s in sessions]
    columns = ("session", "status", "runs", "last heard of (UTC)")
    empty = "No active sessions." if active else "No sessions yet."
    show(sessions, as_json=as_json, otherwise=table(*columns, rows=rows, empty=empty))


def stop_session(
    session_id: Annotated[str, typer.Argument(metavar="SESSION")],
    tenant: TenantOption = None,
    home: HomeOption = None,
    as_json: JsonOption = False,
) -> None:
    """Stop a session; stopping it again is fine."""
    with connected(home) as client:
        session = client.post(f"/sessions/{part(session_id)}/stop", tenant=tenant)
    text = f"{session_id} is {session['status']}"
    show(session, as_json=as_json, otherwise=lambda console: console.print(text, highlight=False))


def jobs(home: HomeOption = None, as_json: JsonOption = False) -> None:
    """List jobs since the server's start, newest first."""
    with connected(home) as client:
        items = client.get("/jobs")
    rows = [
        (j["id"], j["kind"], j["status"], when(j["created_at"]), j["error"] or j["message"])
        for j in items
    ]
    columns = ("job", "kind", "status", "started (UTC)", "message")
    show(items, as_json=as_json, otherwise=table(*columns, rows=rows, empty="No jobs."))


def add_to(app: typer.Typer) -> None:
    """Hang the commands into the tree."""
    sessions = typer.Typer(help="Training sessions.", no_args_is_help=True)
    sessions.command("list")(list_sessions)
    sessions.command("stop")(stop_session)
    app.add_typer(sessions, name="sessions")
    app.command()(jobs)
