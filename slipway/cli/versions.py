"""Commands about versions: list, show, merge, promote."""

from __future__ import annotations

from typing import Annotated, Any, Literal

import typer

from registry.errors import InvalidInput
from slipway.cli.common import (
    HomeOption,
    JsonOption,
    WaitOption,
    connected,
    facts,
    finish,
    short,
    show,
    size,
    table,
    when,
)
from slipway.client import Client, part

Reference = Annotated[str, typer.Argument(metavar="VERSION", help="GROUP/NUMBER or GROUP@ALIAS.")]


def resolve(client: Client, reference: str) -> dict[str, Any]:
    """The version behind a reference."""
    return dict(client.get("/resolve", reference=reference))


def list_packages(
    group: Annotated[str | None, typer.Option(help="Only this group's.")] = None,
    kind: Annotated[
        Literal["checkpoint", "weights", "merged", "gguf"] | None, typer.Option(help="Only these.")
    ] = None,
    limit: Annotated[int, typer.Option(min=1, max=200, help="How many, newest first.")] = 50,
    home: HomeOption = None,
    as_json: JsonOption = False,
) -> None:
    """List versions, newest first."""
    with connected(home) as client:
        items = client.get("/versions", group=group, kind=kind, limit=limit)["items"]
    rows = [
        (
            v["reference"],
            v["kind"],
            short(v["digest"]),
            size(v["size_bytes"]),
            str(v["provenance"].get("step") or ""),
            ", ".join(v["aliases"]),
            when(v["created_at"]),
        )
        for v in items
    ]
    columns = ("version", "kind", "digest", "size", "step", "aliases", "made (UTC)")
    show(items, as_json=as_json, otherwise=table(*columns, rows=rows, empty="No versions yet."))


def show_package(version: Reference, home: HomeOption = None, as_json: JsonOption = False) -> None:
    """Show everything known of a version."""
    with connected(home) as client:
        found = resolve(client, version)
        path = f"/versions/{found['group']}/{found['number']}/lineage"
        ancestors = {v["id"]: v["reference"] for v in client.get(path)["ancestors"]}
    known = found["provenance"]
    pairs = [
        ("Version", found["reference"]),
        ("Kind", f"{found['kind']}, from {found['origin']}"),
        ("Digest", found["digest"]),
        ("Size", size(found["size_bytes"])),
        ("Base model", f"{found['base_model']} ({short(found['base_digest'])})"),
        ("Parents", ", ".join(ancestors.get(p, p) for p in found["parents"]) or "none"),
        ("Aliases", ", ".join(found["aliases"]) or "none"),
        ("Made", f"{when(found['created_at'])} UTC"),
        *((f"LoRA {name}", str(value)) for name, value in found["lora"].items()),
        *((name, str(v)) for name, v in known.items() if not isinstance(v, dict | list)),
        *((f"metadata {name}", str(value)) for name, value in found["user_metadata"].items()),
        *((file["path"], f"{size(file['size'])}  {file['sha256']}") for file in found["files"]),
    ]
    show(found, as_json=as_json, otherwise=facts(pairs))


def merge(
    version: Reference,
    dtype: Annotated[
        Literal["float32", "bfloat16", "float16"] | None,
        typer.Option(help="To store the result in [default: the base's]"),
    ] = None,
    wait: WaitOption = True,
    home: HomeOption = None,
    as_json: JsonOption = False,
) -> None:
    """Fuse an adapter into its base: a new version, ready to be served."""
    with connected(home) as client:
        job = client.post("/merges", {"version": version, "dtype": dtype})
        made = finish(client, job, wait=wait)
    done = f"Merged into [bold]{made.get('reference', made['id'])}[/]"
    text = done if wait else f"Job {made['id']} started"
    show(made, as_json=as_json, otherwise=lambda console: console.print(text, highlight=False))


def promote(
    version: Reference,
    alias: Annotated[str, typer.Option(help="The alias to move.")] = "production",
    override: Annotated[
        str | None, typer.Option(metavar="REASON", help="Move it although the policy is not met.")
    ] = None,
    home: HomeOption = None,
    as_json: JsonOption = False,
) -> None:
    """Point an alias at a version, if the group's policy lets it."""
    with connected(home) as client:
        found = resolve(client, version)
        # Read, then moved only if it has not moved since: two who promote at once both learn.
        now = {a["alias"]: a["version_id"] for a in client.get("/aliases", group=found["group"])}
        body: dict[str, Any] = {"version": found["id"], "expected": now.get(alias)}
        if override is not None:
            body["override_reason"] = override
        move = client.put(f"/groups/{found['group']}/aliases/{part(alias)}", body)
    text = f"{move['group']}@{alias} -> [bold]{move['to_reference']}[/]"
    if move["from_reference"]:
        text += f" (was {move['from_reference']})"
    show(move, as_json=as_json, otherwise=lambda console: console.print(text, highlight=False))


def list_aliases(
    group: Annotated[str | None, typer.Option(help="Only this group's.")] = None,
    home: HomeOption = None,
    as_json: JsonOption = False,
) -> None:
    """List aliases and where they point."""
    with connected(home) as client:
        items = client.get("/aliases", group=group)
    rows = [
        (f"{a['group']}@{a['alias']}", a["reference"], short(a["digest"]), when(a["moved_at"]))
        for a in items
    ]
    columns = ("alias", "version", "digest", "moved (UTC)")
    show(items, as_json=as_json, otherwise=table(*columns, rows=rows, empty="No aliases yet."))


def alias_path(alias: str) -> str:
    """The route of an alias. Raises: InvalidInput: if it is not GROUP@ALIAS."""
    group, at, name = alias.partition("@")
    if not (group and at and name):
        raise InvalidInput(f"{alias!r} is no alias: expected GROUP@ALIAS, as in sums@production")
    return f"/groups/{part(group)}/aliases/{part(name)}"


def alias_history(
    alias: Annotated[str, typer.Argument(metavar="GROUP@ALIAS")],
    home: HomeOption = None,
    as_json: JsonOption = False,
) -> None:
    """Show every move of an alias, newest first."""
    path = alias_path(alias)
    with connected(home) as client:
        moves = client.get(f"{path}/history")
    rows = [
        (
            when(m["moved_at"]),
            m["from_reference"] or "",
            m["to_reference"],
            m["moved_by"],
            f"override: {m['override_reason']}" if m["override_reason"] else (m["gate_id"] or ""),
        )
        for m in moves
    ]
    columns = ("moved (UTC)", "from", "to", "by", "evidence")
    show(moves, as_json=as_json, otherwise=table(*columns, rows=rows, empty="It never moved."))


def alias_rollback(
    alias: Annotated[str, typer.Argument(metavar="GROUP@ALIAS")],
    home: HomeOption = None,
    as_json: JsonOption = False,
) -> None:
    """Point an alias back at the version before."""
    path = alias_path(alias)
    with connected(home) as client:
        move = client.post(f"{path}/rollback")
    text = f"{alias} -> [bold]{move['to_reference']}[/] (was {move['from_reference']})"
    show(move, as_json=as_json, otherwise=lambda console: console.print(text, highlight=False))


def add_to(app: typer.Typer) -> None:
    """Hang the commands into the tree."""
    packages = typer.Typer(help="Versions of model packages.", no_args_is_help=True)
    packages.command("list")(list_packages)
    packages.command("show")(show_package)
    app.add_typer(packages, name="packages")
    aliases = typer.Typer(help="Names that point at versions.", no_args_is_help=True)
    aliases.command("list")(list_aliases)
    aliases.command("history")(alias_history)
    aliases.command("rollback")(alias_rollback)
    app.add_typer(aliases, name="alias")
    app.command()(merge)
    app.command()(promote)
