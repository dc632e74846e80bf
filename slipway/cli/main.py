"""The command tree, and the commands about the server itself."""

from __future__ import annotations

import shlex
import sys
from contextlib import suppress
from typing import Annotated, Literal

import typer

from registry.errors import SlipwayError
from slipway.cli import evidence, metering, quotas, serving, sessions, tenancy, versions
from slipway.cli.common import HomeOption, JsonOption, connected, facts, home_of, show
from slipway.settings import Settings

app = typer.Typer(
    help="Train, register, merge, prove, promote and serve language models on your own machines.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    add_completion=False,
)
for group in (versions, evidence, serving, tenancy, sessions, quotas, metering):
    group.add_to(app)


@app.command()
def up(
    host: Annotated[str, typer.Option(help="Address to listen on.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=1, max=65535, help="The control plane's port.")] = 8000,
    gateway_port: Annotated[
        int, typer.Option(min=1, max=65535, help="The OpenAI gateway's port.")
    ] = 8001,
    base_model: Annotated[
        str | None, typer.Option(help="Hub id or folder of the base model.")
    ] = None,
    home: HomeOption = None,
    device: Annotated[
        Literal["cpu", "cuda"] | None, typer.Option(help="What to train and serve on.")
    ] = None,
) -> None:
    """Start the server and keep it running until Ctrl-C."""
    # Imported here, so that the other commands need not wait for a server's imports.
    from slipway.server import Listen, serve

    settings = Settings.read(home=home, base_model=base_model, device=device)

    def say(line: str) -> None:
        # A terminal that was closed is no reason to stop any less cleanly.
        with suppress(OSError):
            typer.echo(line)
            sys.stdout.flush()

    serve(settings, Listen(host=host, port=port, gateway_port=gateway_port), say)


@app.command()
def env(home: HomeOption = None, as_json: JsonOption = False) -> None:
    """Print shell exports for the running server: eval "$(slipway env)"."""
    found = home_of(home)
    address, key = found.running(), found.key()
    if key is None:
        raise SlipwayError(f"no API key in {found.folder}")
    exports = {
        "TINKER_BASE_URL": address.url,
        "TINKER_API_KEY": key,
        "OPENAI_BASE_URL": f"{address.gateway_url}/v1",
        "OPENAI_API_KEY": key,
        "SLIPWAY_URL": address.url,
        "SLIPWAY_API_KEY": key,
    }
    # Plain echo: a shell reads this, and colours or folded lines would break it.
    lines = "\n".join(f"export {name}={shlex.quote(value)}" for name, value in exports.items())
    show(exports, as_json=as_json, otherwise=lambda _: typer.echo(lines))


@app.command()
def status(home: HomeOption = None, as_json: JsonOption = False) -> None:
    """Show whether the server runs, and what is in it."""
    with connected(home) as client:
        found = home_of(home)
        # The server in use may be another than this home's, or on another machine.
        local = found.address()
        here = local if local is not None and local.url == client.url else None
        known = {
            "url": client.url,
            "gateway_url": here.gateway_url if here else None,
            "pid": here.pid if here else None,
            "home": str(found.folder) if here else None,
            "groups": client.get("/groups"),
            "sessions": [s for s in client.get("/sessions") if s["status"] == "active"],
            "endpoints": client.get("/endpoints"),
        }
    groups = ", ".join(f"{g['name']} ({g['versions']})" for g in known["groups"])
    endpoints = ", ".join(f"{e['name']} ({e['status']})" for e in known["endpoints"])
    where = [("Control plane", client.url)]
    if here:
        where = [
            ("Control plane", f"{here.url} (process {here.pid})"),
            ("Gateway", f"{here.gateway_url}/v1"),
            ("Home", str(found.folder)),
        ]
    pairs = [
        *where,
        ("Groups", groups or "none yet"),
        ("Active sessions", str(len(known["sessions"]))),
        ("Endpoints", endpoints or "none yet"),
    ]
    show(known, as_json=as_json, otherwise=facts(pairs))
