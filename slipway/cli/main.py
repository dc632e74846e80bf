"""The command tree, and the commands about the server itself."""

from __future__ import annotations

import shlex
import sys
from typing import Annotated, Literal

import typer

from registry.errors import SlipwayError
from slipway.cli import evidence, serving, tenancy, versions
from slipway.cli.common import HomeOption, JsonOption, connected, facts, home_of, show
from slipway.settings import Settings

app = typer.Typer(
    help="Train, register, merge, prove, promote and serve language models on your own machines.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    add_completion=False,
)
for group in (versions, evidence, serving, tenancy):
    group.add_to(app)


@app.command()
def up(
    host: Annotated[str, typer.Option(help="Address to listen on.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(help="The control plane's port.")] = 8000,
    gateway_port: Annotated[int, typer.Option(help="The OpenAI gateway's port.")] = 8001,
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

    given = {"home": home, "base_model": base_model, "device": device}
    settings = Settings(**{name: value for name, value in given.items() if value is not None})  # type: ignore[arg-type]

    def say(line: str) -> None:
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
    found = home_of(home)
    address = found.running()
    with connected(home) as client:
        known = {
            "url": address.url,
            "gateway_url": address.gateway_url,
            "pid": address.pid,
            "home": str(found.folder),
            "groups": client.get("/groups"),
            "sessions": [s for s in client.get("/sessions") if s["status"] == "active"],
            "endpoints": client.get("/endpoints"),
        }
    groups = ", ".join(f"{g['name']} ({g['versions']})" for g in known["groups"])
    endpoints = ", ".join(f"{e['name']} ({e['status']})" for e in known["endpoints"])
    pairs = [
        ("Control plane", f"{address.url} (process {address.pid})"),
        ("Gateway", f"{address.gateway_url}/v1"),
        ("Home", str(found.folder)),
        ("Groups", groups or "none yet"),
        ("Active sessions", str(len(known["sessions"]))),
        ("Endpoints", endpoints or "none yet"),
    ]
    show(known, as_json=as_json, otherwise=facts(pairs))
