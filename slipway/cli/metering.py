"""Commands about tokens: what was used, and what it costs."""

from __future__ import annotations

from datetime import datetime
from decimal import Decimal, InvalidOperation
from typing import Annotated, Any, Literal

import typer

from registry.errors import InvalidInput
from registry.models import UsageKind
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

NO_PRICE = "-"


def usage(
    by: Annotated[
        Literal["kind", "day", "session", "key"], typer.Option(help="What to add up by.")
    ] = "kind",
    since: Annotated[
        datetime | None, typer.Option(formats=["%Y-%m-%d"], help="The first day (UTC).")
    ] = None,
    tenant: TenantOption = None,
    home: HomeOption = None,
    as_json: JsonOption = False,
) -> None:
    """Show tokens used and what they cost."""
    first = since.date().isoformat() if since else None
    with connected(home) as client:
        totals = client.get("/usage", by=by, since=first, tenant=tenant)
    rows: list[tuple[str, ...]] = [
        (
            u["name"] or u["group"] or "",
            u["kind"],
            f"{u['tokens']:,}",
            f"{u['operations']:,}",
            money(u["cost"]),
        )
        for u in totals
    ]
    columns: tuple[str, ...] = (by, "used for", "tokens", "operations", "cost")
    if by == "kind":
        rows = [row[1:] for row in rows]
        columns = columns[1:]
    show(totals, as_json=as_json, otherwise=table(*columns, rows=rows, empty="Nothing used yet."))


def show_prices(home: HomeOption = None, as_json: JsonOption = False) -> None:
    """List prices; each is of a million tokens."""
    with connected(home) as client:
        prices = client.get("/prices")
    rows = [
        (p["kind"], p["base_model"] or "every other", money(p["per_million"]), when(p["set_at"]))
        for p in prices
    ]
    columns = ("used for", "base model", "a million tokens", "since (UTC)")
    show(prices, as_json=as_json, otherwise=table(*columns, rows=rows, empty="No prices."))


def set_price(
    kind: Annotated[UsageKind, typer.Argument(help="What the tokens are used for.")],
    price: Annotated[str, typer.Argument(help="Of a million tokens, or 'none'.")],
    base_model: Annotated[
        str | None, typer.Option(help="For this base model alone, not for every one.")
    ] = None,
    home: HomeOption = None,
    as_json: JsonOption = False,
) -> None:
    """Set a price; it holds for what runs from now on."""
    body: dict[str, Any] = {"kind": kind.value, "per_million": None, "base_model": base_model}
    if price != "none":
        try:
            body["per_million"] = str(Decimal(price))
        except InvalidOperation:
            raise InvalidInput(f"{price!r} is no price: expected a number, or none") from None
    with connected(home) as client:
        made = client.put("/prices", body)
    text = f"a million tokens of {kind.value}: {money(made['per_million'])}"
    show(made, as_json=as_json, otherwise=lambda console: console.print(plain(text)))


def money(amount: str | None) -> str:
    """An amount as it is, without zeros nobody needs."""
    if amount is None:
        return NO_PRICE
    digits = f"{Decimal(amount):f}"
    return digits.rstrip("0").rstrip(".") if "." in digits else digits


def add_to(app: typer.Typer) -> None:
    """Hang the commands into the tree."""
    app.command()(usage)
    prices = typer.Typer(help="What tokens cost.", no_args_is_help=True)
    prices.command("show")(show_prices)
    prices.command("set")(set_price)
    app.add_typer(prices, name="prices")
