"""What every command needs: its options, its connection, its tables."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table
from rich.text import Text

from slipway.client import Client
from slipway.home import Home
from slipway.settings import Settings

HomeOption = Annotated[
    Path | None,
    typer.Option("--home", help="The server's home folder [default: $SLIPWAY_HOME or ~/.slipway]"),
]
JsonOption = Annotated[bool, typer.Option("--json", help="Print JSON and nothing else.")]
TenantOption = Annotated[
    str | None, typer.Option("--tenant", help="Another tenant; for administrators.")
]
WaitOption = Annotated[
    bool, typer.Option("--wait/--no-wait", help="Wait until it is done, or only start it.")
]

DIGEST_SHOWN = 12


def home_of(folder: Path | None) -> Home:
    """The home an option or the environment names."""
    return Home(folder or Settings.read().home)


@contextmanager
def connected(folder: Path | None) -> Iterator[Client]:
    """A client of the server in use: of the home that was named, if one was."""
    client = Client.of(home_of(folder), named=folder is not None)
    try:
        yield client
    finally:
        client.close()


def show(value: Any, *, as_json: bool, otherwise: Callable[[Console], None]) -> None:
    """Print JSON, or whatever a person would rather read."""
    if as_json:
        sys.stdout.write(json.dumps(value, indent=2) + "\n")
    else:
        otherwise(Console())


def table(*columns: str, rows: Sequence[Sequence[str]], empty: str) -> Callable[[Console], None]:
    """A printer of a table, or of a word that there is nothing to put in it."""

    def write(console: Console) -> None:
        if not rows:
            console.print(empty)
            return
        made = Table(box=None, header_style="bold", pad_edge=False, padding=(0, 3, 0, 0))
        # The first column names the row: cut short, it could not be typed again.
        for number, column in enumerate(columns):
            made.add_column(column, no_wrap=number == 0, overflow="fold")
        for row in rows:
            made.add_row(*map(plain, row))
        console.print(made)

    return write


def facts(pairs: Sequence[tuple[str, str]]) -> Callable[[Console], None]:
    """A printer of names and values, one a line."""

    def write(console: Console) -> None:
        width = max(len(name) for name, _ in pairs)
        for name, value in pairs:
            line = plain(f"{name:<{width}}")
            line.stylize("bold")
            console.print(line.append(f"  {plain(value)}", style="not bold"), soft_wrap=True)

    return write


def plain(text: str) -> Text:
    """Text as it is: brackets are no markup, and nothing in it can steer a terminal."""
    return Text(
        "".join(
            char if char.isprintable() or char == "\n" else "\N{REPLACEMENT CHARACTER}"
            for char in text
        )
    )


def short(digest: str) -> str:
    """The beginning of a digest."""
    return digest.removeprefix("sha256:")[:DIGEST_SHOWN]


def size(count: int) -> str:
    """Bytes as a person says them."""
    amount = float(count)
    for unit in ("B", "kB", "MB", "GB"):
        if amount < 1000:
            return f"{amount:.0f} {unit}" if unit == "B" else f"{amount:.1f} {unit}"
        amount /= 1000
    return f"{amount:.1f} TB"


def when(text: str) -> str:
    """A time of the wire, to the second, in UTC."""
    return text[:19].replace("T", " ")


def finish(client: Client, job: dict[str, Any], *, wait: bool) -> Any:
    """A job's result, watched with a bar on standard error; the job itself without waiting.

    Ctrl-C cancels the job: what it has begun is taken back by the server.
    """
    if not wait:
        return job
    columns = (
        TextColumn("{task.description}", markup=False),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
    )
    console = Console(stderr=True)
    hidden = not console.is_terminal
    with Progress(*columns, console=console, transient=True, disable=hidden) as progress:
        bar = progress.add_task(job["kind"], total=None)

        def moved(now: dict[str, Any]) -> None:
            text = now["message"] or now["kind"]
            progress.update(
                bar, description=text, completed=now["done"], total=now["total"] or None
            )

        try:
            return client.finish(job, moved)
        except KeyboardInterrupt:
            client.delete(f"/jobs/{job['id']}")
            raise
