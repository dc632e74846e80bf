"""Commands about endpoints."""

from __future__ import annotations

from typing import Annotated

import typer

from slipway.cli.common import (
    HomeOption,
    JsonOption,
    WaitOption,
    connected,
    finish,
    short,
    show,
    table,
    when,
)
from slipway.client import part


def deploy(
    version: Annotated[str, typer.Argument(help="GROUP@ALIAS or GROUP/NUMBER, merged.")],
    name: Annotated[str, typer.Option(help="The endpoint's name; clients give it as `model`.")],
    wait: WaitOption = True,
    home: HomeOption = None,
    as_json: JsonOption = False,
) -> None:
    """Serve a version; done once tokens come out of it."""
    with connected(home) as client:
        job = client.post("/endpoints", {"name": name, "version": version})
        made = finish(client, job, wait=wait)
    text = f"[bold]{name}[/] serves {made['version']}" if wait else f"Job {made['id']} started"
    show(made, as_json=as_json, otherwise=lambda console: console.print(text, highlight=False))


def list_endpoints(home: HomeOption = None, as_json: JsonOption = False) -> None:
    """List endpoints and what they serve."""
    with connected(home) as client:
        items = client.get("/endpoints")
    rows = [
        (
            e["name"],
            e["status"],
            e["version"],
            short(e["digest"]),
            when(e["updated_at"]),
            e["error"] or "",
        )
        for e in items
    ]
    columns = ("endpoint", "status", "version", "digest", "changed (UTC)", "error")
    show(items, as_json=as_json, otherwise=table(*columns, rows=rows, empty="No endpoints yet."))


def delete_endpoint(
    name: Annotated[str, typer.Argument()], home: HomeOption = None, as_json: JsonOption = False
) -> None:
    """Take an endpoint away."""
    with connected(home) as client:
        gone = client.delete(f"/endpoints/{part(name)}")
    show(gone, as_json=as_json, otherwise=lambda console: console.print(f"{name} is gone"))


def add_to(app: typer.Typer) -> None:
    """Hang the commands into the tree."""
    app.command()(deploy)
    endpoints = typer.Typer(help="OpenAI-compatible endpoints.", invoke_without_command=True)

    @endpoints.callback()
    def bare(context: typer.Context, home: HomeOption = None, as_json: JsonOption = False) -> None:
        """OpenAI-compatible endpoints; without a command, list them."""
        if context.invoked_subcommand is None:
            list_endpoints(home=home, as_json=as_json)

    endpoints.command("list")(list_endpoints)
    endpoints.command("delete")(delete_endpoint)
    app.add_typer(endpoints, name="endpoints")
