"""Commands about evidence: suites, evaluation runs, gates."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from registry.errors import InvalidInput
from slipway.cli.common import (
    HomeOption,
    JsonOption,
    WaitOption,
    connected,
    facts,
    finish,
    plain,
    short,
    show,
    table,
    when,
)
from slipway.client import part

SuiteOption = Annotated[str, typer.Option(help="A suite's name (its newest) or digest.")]
# `gate run` says by its exit code that the gate was not passed.
NOT_PASSED = 3
ANSWER_SHOWN = 60


def add_suite(
    file: Annotated[Path, typer.Argument(help="A suite as JSON.")],
    home: HomeOption = None,
    as_json: JsonOption = False,
) -> None:
    """Check a suite and freeze it under its digest."""
    try:
        spec = json.loads(file.read_text())
    except OSError as error:
        raise InvalidInput(f"{file} cannot be read: {error.strerror}") from None
    except ValueError as error:
        raise InvalidInput(f"{file} is no JSON: {error}") from None
    with connected(home) as client:
        suite = client.post("/suites", spec)
    text = f"{suite['name']}: {suite['items']} items, frozen as {suite['digest']}"
    show(suite, as_json=as_json, otherwise=lambda console: console.print(plain(text)))


def list_suites(home: HomeOption = None, as_json: JsonOption = False) -> None:
    """List suites, newest first."""
    with connected(home) as client:
        suites = client.get("/suites")
    rows = [(s["name"], str(s["items"]), short(s["digest"]), when(s["created_at"])) for s in suites]
    columns = ("suite", "items", "digest", "added (UTC)")
    show(suites, as_json=as_json, otherwise=table(*columns, rows=rows, empty="No suites yet."))


def with_interval(run: dict[str, Any]) -> dict[str, Any]:
    """A run with its Wilson interval, which is computed and not stored."""
    # scipy takes a second to import: only those who look at a run wait for it.
    from evals.statistics import wilson

    interval = wilson(run["correct"], run["items"])
    return {**run, "interval": [interval.low, interval.high]}


def describe_run(run: dict[str, Any]) -> list[tuple[str, str]]:
    """What a person wants to know of a run."""
    low, high = run["interval"]
    outcomes = ", ".join(f"{name} {count}" for name, count in run["counts"].items() if count)
    return [
        ("Run", run["id"]),
        ("Version", f"{run['reference']} ({short(run['version_digest'])})"),
        ("Suite", f"{run['suite_name']} ({short(run['suite_digest'])})"),
        ("Accuracy", f"{run['correct'] / run['items']:.1%} ({run['correct']} of {run['items']})"),
        ("Wilson 95 %", f"{low:.1%} to {high:.1%}"),
        ("Outcomes", outcomes),
        ("Engine", f"{run['engine'].get('name')} ({run['engine_fingerprint']})"),
    ]


def run_eval(
    version: Annotated[str, typer.Argument(help="GROUP/NUMBER or GROUP@ALIAS, merged.")],
    suite: SuiteOption,
    keep: Annotated[bool, typer.Option("--keep", help="Leave the replica up, to deploy.")] = False,
    wait: WaitOption = True,
    home: HomeOption = None,
    as_json: JsonOption = False,
) -> None:
    """Run a suite on a version and keep the evidence."""
    body = {"version": version, "suite": suite, "keep": keep}
    with connected(home) as client:
        result = finish(client, client.post("/evals", body), wait=wait)
    if not wait:
        show(result, as_json=as_json, otherwise=facts([("Job", result["id"])]))
        return
    run = with_interval(result)
    show(run, as_json=as_json, otherwise=facts(describe_run(run)))


def show_eval(
    run_id: Annotated[str, typer.Argument(metavar="RUN")],
    items: Annotated[bool, typer.Option("--items", help="Show every item's answer.")] = False,
    home: HomeOption = None,
    as_json: JsonOption = False,
) -> None:
    """Show an evaluation run."""
    with connected(home) as client:
        if items:
            records = client.get(f"/evals/{part(run_id)}/items")
            rows = [
                (r["id"], r["outcome"], r["answer"], r["raw"][:ANSWER_SHOWN].replace("\n", " "))
                for r in records
            ]
            columns = ("item", "outcome", "answer", "said")
            show(records, as_json=as_json, otherwise=table(*columns, rows=rows, empty="No items."))
            return
        run = with_interval(client.get(f"/evals/{part(run_id)}"))
    show(run, as_json=as_json, otherwise=facts(describe_run(run)))


def print_gate(gate: dict[str, Any], console: Console) -> None:
    """A gate as a table: both sides, the pairs that differ, and the verdict."""
    numbers = gate["statistics"]
    both = Table("", "version", "correct", "accuracy", "Wilson 95 %", box=None, pad_edge=False)
    for side in ("candidate", "baseline"):
        interval = numbers[f"{side}_interval"]
        low, high = (interval["low"], interval["high"]) if isinstance(interval, dict) else interval
        both.add_row(
            side,
            gate[side],
            f"{numbers[f'{side}_correct']} of {numbers['n']}",
            f"{numbers[f'{side}_accuracy']:.1%}",
            f"{low:.1%} to {high:.1%}",
        )
    console.print(f"[bold]Gate {gate['id']}[/] on {escape(gate['suite_name'])}", highlight=False)
    console.print(both)
    console.print(
        f"Discordant pairs: {numbers['gained']} gained, {numbers['lost']} lost. "
        f"Exact McNemar, one-sided: p = {numbers['p']:.3g}",
        highlight=False,
    )
    colour = "green" if gate["verdict"] == "pass" else "red"
    console.print(f"[bold {colour}]{gate['verdict']}[/]: {escape(gate['reason'])}", highlight=False)


def run_gate(
    candidate: Annotated[str, typer.Option(help="The version that is to be shown better.")],
    baseline: Annotated[str, typer.Option(help="The version it is compared with.")],
    suite: SuiteOption,
    alpha: Annotated[float | None, typer.Option(help="Level of the test, 0 to 0.5.")] = None,
    home: HomeOption = None,
    as_json: JsonOption = False,
) -> None:
    """Decide from stored runs whether a version is better; exit code 3 if it is not shown."""
    body: dict[str, Any] = {"candidate": candidate, "baseline": baseline, "suite": suite}
    if alpha is not None:
        body["alpha"] = alpha
    with connected(home) as client:
        gate = client.post("/gates", body)
    show(gate, as_json=as_json, otherwise=lambda console: print_gate(gate, console))
    if gate["verdict"] != "pass":
        raise typer.Exit(NOT_PASSED)


def show_gate(
    gate_id: Annotated[str, typer.Argument(metavar="GATE")],
    home: HomeOption = None,
    as_json: JsonOption = False,
) -> None:
    """Show a gate's verdict and what it rests on."""
    with connected(home) as client:
        gate = client.get(f"/gates/{part(gate_id)}")
    show(gate, as_json=as_json, otherwise=lambda console: print_gate(gate, console))


def add_to(app: typer.Typer) -> None:
    """Hang the commands into the tree."""
    suites = typer.Typer(help="Frozen held-out sets.", no_args_is_help=True)
    suites.command("add")(add_suite)
    suites.command("list")(list_suites)
    app.add_typer(suites, name="suites")
    runs = typer.Typer(help="Evaluation runs.", no_args_is_help=True)
    runs.command("run")(run_eval)
    runs.command("show")(show_eval)
    app.add_typer(runs, name="eval")
    gates = typer.Typer(help="Verdicts on candidates.", no_args_is_help=True)
    gates.command("run")(run_gate)
    gates.command("show")(show_gate)
    app.add_typer(gates, name="gate")
