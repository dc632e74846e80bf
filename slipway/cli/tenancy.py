"""Commands about who uses the server: tenants and keys."""

from __future__ import annotations

from typing import Annotated

import typer

from registry.models import Role
from slipway.cli.common import (
    HomeOption,
    JsonOption,
    TenantOption,
    connected,
    plain,
    show,
    table,
    when,
)
from slipway.client import part


def create_tenant(
    name: Annotated[str, typer.Argument(help="Lower-case letters, digits, '.', '_' and '-'.")],
    home: HomeOption = None,
    as_json: JsonOption = False,
) -> None:
    """Make a tenant, which sees nothing of the others; it has no key yet."""
    with connected(home) as client:
        made = client.post("/tenants", {"name": name})
    text = f"{name} is made; `slipway keys create NAME --tenant {name}` makes a key to it"
    show(made, as_json=as_json, otherwise=lambda console: console.print(plain(text)))


def list_tenants(home: HomeOption = None, as_json: JsonOption = False) -> None:
    """List tenants."""
    with connected(home) as client:
        tenants = client.get("/tenants")
    rows = [(t["name"], str(t["keys"]), when(t["created_at"])) for t in tenants]
    columns = ("tenant", "keys in force", "made (UTC)")
    show(tenants, as_json=as_json, otherwise=table(*columns, rows=rows, empty="No tenants."))


def create_key(
    name: Annotated[str, typer.Argument(help="To tell it from others.")],
    role: Annotated[
        Role, typer.Option(help="An administrator's key reaches the whole server.")
    ] = Role.MEMBER,
    tenant: TenantOption = None,
    home: HomeOption = None,
    as_json: JsonOption = False,
) -> None:
    """Make an API key; it is shown this once only."""
    with connected(home) as client:
        made = client.post("/keys", {"name": name, "role": role.value}, tenant=tenant)
    # Plain echo: a key that is folded at the terminal's edge cannot be copied.
    show(made, as_json=as_json, otherwise=lambda _: typer.echo(made["secret"]))


def list_keys(
    tenant: TenantOption = None, home: HomeOption = None, as_json: JsonOption = False
) -> None:
    """List API keys, without the keys."""
    with connected(home) as client:
        keys = client.get("/keys", tenant=tenant)
    rows = [
        (
            k["id"],
            k["name"],
            k["role"],
            f"…{k['hint']}",
            when(k["created_at"]),
            when(k["revoked_at"]) if k["revoked_at"] else "",
        )
        for k in keys
    ]
    columns = ("id", "name", "role", "ends in", "made (UTC)", "revoked (UTC)")
    show(keys, as_json=as_json, otherwise=table(*columns, rows=rows, empty="No keys."))


def revoke_key(
    key_id: Annotated[str, typer.Argument(metavar="ID")],
    tenant: TenantOption = None,
    home: HomeOption = None,
    as_json: JsonOption = False,
) -> None:
    """End an API key."""
    with connected(home) as client:
        key = client.delete(f"/keys/{part(key_id)}", tenant=tenant)
    text = plain(f"{key['name']} is ended")
    show(key, as_json=as_json, otherwise=lambda console: console.print(text))


def add_to(app: typer.Typer) -> None:
    """Hang the commands into the tree."""
    tenants = typer.Typer(help="Tenants.", no_args_is_help=True)
    tenants.command("create")(create_tenant)
    tenants.command("list")(list_tenants)
    app.add_typer(tenants, name="tenants")
    keys = typer.Typer(help="API keys.", no_args_is_help=True)
    keys.command("create")(create_key)
    keys.command("list")(list_keys)
    keys.command("revoke")(revoke_key)
    app.add_typer(keys, name="keys")
