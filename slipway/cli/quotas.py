"""Commands about how much each tenant may have."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from registry.errors import InvalidInput
from slipway.cli.common import HomeOption, JsonOption, TenantOption, connected, plain, show, table
from slipway.client import part

LimitOption = Annotated[str | None, typer.Option(metavar="NUMBER|none")]
TenantArgument = Annotated[str, typer.Argument(metavar="TENANT")]
COLUMNS = ("tenant", "sessions", "operations", "samples", "tokens a day", "context")


def list_quotas(
    tenant: TenantOption = None, home: HomeOption = None, as_json: JsonOption = False
) -> None:
    """Show what each tenant may have, and how much of it is in use."""
    with connected(home) as client:
        quotas = client.get("/quotas", tenant=tenant)
    rows = [
        (
            q["tenant"],
            f"{q['active_sessions']:,} of {limit(q['sessions'])}",
            f"{q['waiting_operations']:,} of {limit(q['operations'])}",
            limit(q["samples"]),
            f"{q['tokens_today']:,} of {limit(q['tokens_per_day'])}",
            limit(q["context"]),
        )
        for q in quotas
    ]
    show(quotas, as_json=as_json, otherwise=table(*COLUMNS, rows=rows, empty="No tenants."))


def set_quota(
    tenant: TenantArgument,
    sessions: LimitOption = None,
    operations: LimitOption = None,
    samples: LimitOption = None,
    tokens_per_day: LimitOption = None,
    context: LimitOption = None,
    home: HomeOption = None,
    as_json: JsonOption = False,
) -> None:
    """Set limits of a tenant; those not named stay as they are, and 'none' is no limit.

    Sessions are those active at once, operations the training operations that wait at once,
    samples the sequences sampled at once, and context the tokens of one datum or prompt.
    """
    given = {
        "sessions": sessions,
        "operations": operations,
        "samples": samples,
        "tokens_per_day": tokens_per_day,
        "context": context,
    }
    body = {name: number(name, text) for name, text in given.items() if text is not None}
    if not body:
        raise InvalidInput("name at least one limit, such as --sessions 4")
    with connected(home) as client:
        made = client.put(f"/quotas/{part(tenant)}", body)
    _tell(made, as_json=as_json)


def reset_quota(
    tenant: TenantArgument, home: HomeOption = None, as_json: JsonOption = False
) -> None:
    """Give a tenant the server's own limits again."""
    with connected(home) as client:
        made = client.delete(f"/quotas/{part(tenant)}")
    _tell(made, as_json=as_json)


def number(name: str, text: str) -> int | None:
    """A limit as it was typed. Raises: InvalidInput."""
    if text == "none":
        return None
    try:
        return int(text)
    except ValueError:
        option = name.replace("_", "-")
        raise InvalidInput(f"--{option} is {text!r}: expected a whole number, or none") from None


def limit(value: int | None) -> str:
    """A limit as a person reads it."""
    return "no limit" if value is None else f"{value:,}"


def _tell(made: dict[str, Any], *, as_json: bool) -> None:
    names = ("sessions", "operations", "samples", "tokens_per_day", "context")
    said = ", ".join(f"{name.replace('_', ' ')}: {limit(made[name])}" for name in names)
    text = plain(f"{made['tenant']}: {said}")
    show(made, as_json=as_json, otherwise=lambda console: console.print(text, soft_wrap=True))


def add_to(app: typer.Typer) -> None:
    """Hang the commands into the tree."""
    quotas = typer.Typer(help="What tenants may have.", no_args_is_help=True)
    quotas.command("list")(list_quotas)
    quotas.command("set")(set_quota)
    quotas.command("reset")(reset_quota)
    app.add_typer(quotas, name="quotas")
