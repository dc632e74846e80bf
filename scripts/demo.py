"""The demo: from an empty home to a live, gated endpoint, with real parts at every stage.

    make demo            (or: python scripts/demo.py [--quick] [--device cuda])

Every stage is a command a user could type; this script only types them, and checks what they
say. It starts its own server on a home of its own (``demo-out/home``), leaves a report behind,
and stops everything it started, whatever happens.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from time import monotonic
from typing import Any

from demo_processes import CommandFailed, Processes, free_port
from report import write_report
from rich.console import Console
from rich.table import Table

SCRIPTS = Path(__file__).resolve().parent
ROOT = SCRIPTS.parent
BASE_MODEL = "HuggingFaceTB/SmolLM2-135M-Instruct"
BASE = "smollm2-135m-instruct/1"
GROUP = "arithmetic"
SUITE = "two-digit-sums"
# How many steps after the halfway save the training run is killed, and as many are compared.
STEPS_BEFORE_KILL = 5


@dataclass(frozen=True, kw_only=True)
class Plan:
    """How much of everything."""

    steps: int = 80
    batch_size: int = 32
    held_out: int = 240
    # What the whole demo promises; the short one promises only that the parts work.
    least_gain: float = 0.20
    largest_p: float = 0.01


QUICK = Plan(steps=24, held_out=100, least_gain=0.0, largest_p=0.05)


class DemoFailed(Exception):
    """A promise of the demo was not kept."""


@dataclass
class Demo:
    """One run of the demo: its plan, its processes, and what it has found so far."""

    plan: Plan
    out: Path
    device: str
    processes: Processes
    console: Console
    results: dict[str, Any] = field(
        default_factory=lambda: {"stages": [], "base_model": BASE_MODEL}
    )

    @contextmanager
    def stage(self, title: str) -> Iterator[None]:
        """Print a heading, and note how long what follows took."""
        self.console.rule(f"[bold]{title}", align="left")
        began = monotonic()
        yield
        self.results["stages"].append({"name": title, "seconds": monotonic() - began})

    def slipway(self, *words: str) -> Any:
        """Run a `slipway` command, shown as one would type it; its JSON answer."""
        self.console.print(f"[dim]$ slipway {' '.join(words)}")
        with self.console.status(f"slipway {words[0]} is at work"):
            return json.loads(self.processes.run([self.binary("slipway"), *words, "--json"]))

    def refused(self, *words: str) -> str:
        """Run a `slipway` command that must fail; what it said."""
        try:
            self.slipway(*words)
        except CommandFailed as failure:
            # Any other failure proves nothing of the gate.
            if "demands a passing gate" not in failure.message:
                raise
            self.console.print(f"[yellow]refused:[/] {failure.message}")
            return failure.message
        raise DemoFailed(f"`slipway {' '.join(words)}` went through, and must not have")

    @staticmethod
    def binary(name: str) -> str:
        """A program of the environment this script runs in."""
        return str(Path(sys.executable).with_name(name))


def start_server(demo: Demo) -> None:
    """`slipway up` in a home of its own; everything run later finds it by `slipway env`."""
    home, port, gateway_port = demo.out / "home", free_port(8000), free_port(8001)
    words = ["--port", str(port), "--gateway-port", str(gateway_port), "--device", demo.device]
    command = [
        demo.binary("slipway"),
        "up",
        "--home",
        str(home),
        "--base-model",
        BASE_MODEL,
        *words,
    ]
    demo.console.print(f"[dim]$ {' '.join(['slipway', *command[1:]])}")
    demo.processes.start_server(command, log=demo.out / "server.log", ready=home / "server.json")
    demo.processes.adopt_environment([demo.binary("slipway"), "env", "--home", str(home)])
    demo.console.print(f"Serving at {demo.processes.environment['SLIPWAY_URL']}")


def freeze_suite(demo: Demo) -> None:
    """Write the held-out set, disjoint from training, and freeze it under its digest."""
    path = demo.out / "suite.json"
    script = SCRIPTS / "recipes" / "arithmetic.py"
    train_items = str(demo.plan.steps * demo.plan.batch_size)
    sizes = ["--items", str(demo.plan.held_out), "--train-items", train_items]
    demo.processes.run([sys.executable, str(script), "suite", *sizes, "--out", str(path)])
    suite = demo.slipway("suites", "add", str(path))
    demo.console.print(f"{suite['items']} held-out items frozen as {suite['digest'][:19]}")


def evaluate(demo: Demo, reference: str, *, candidate: bool, keep: bool = False) -> dict[str, Any]:
    """Run the suite on a version and note the result."""
    words = ["eval", "run", reference, "--suite", SUITE, "--wait", *(["--keep"] if keep else [])]
    run = demo.slipway(*words)
    row = {
        "reference": reference,
        "candidate": candidate,
        "correct": run["correct"],
        "items": run["items"],
        "counts": run["counts"],
        "interval": run["interval"],
    }
    demo.results.setdefault("runs", []).append(row)
    demo.console.print(f"{reference}: {run['correct']} of {run['items']} correct")
    return dict(run)


def read_log(path: Path) -> list[dict[str, Any]]:
    """The lines a training script has logged so far; a line cut short by a kill is left out."""
    lines = path.read_text().splitlines() if path.exists() else []
    return [json.loads(line) for line in lines if line.endswith("}")]


def train(demo: Demo) -> None:
    """Train, kill the script after its halfway save, resume it, and compare the losses."""
    plan = demo.plan
    script = [sys.executable, str(SCRIPTS / "recipes" / "sft_arithmetic.py"), "--group", GROUP]
    script += ["--steps", str(plan.steps), "--batch-size", str(plan.batch_size)]
    script += ["--base-model", BASE_MODEL]
    first, second = demo.out / "train-killed.jsonl", demo.out / "train-resumed.jsonl"
    half = plan.steps // 2
    last = half + STEPS_BEFORE_KILL

    def far_enough() -> bool:
        return any(line.get("step", 0) >= last for line in read_log(first))

    demo.processes.run_until([*script, "--log", str(first)], far_enough)
    killed = [line for line in read_log(first) if "step" in line]
    saved = next(line["saved"] for line in read_log(first) if "saved" in line)
    demo.console.print(f"Killed (SIGKILL) after step {killed[-1]['step']}; resuming from {saved}")
    demo.processes.run([*script, "--log", str(second), "--resume", saved], show=True)
    resumed = [line for line in read_log(second) if "step" in line]

    before = {line["step"]: line["loss"] for line in killed}
    after = {line["step"]: line["loss"] for line in resumed}
    steps = list(range(half + 1, last + 1))
    table = Table("step", "loss before the kill", "loss resumed", title="Resume, to the last digit")
    for step in steps:
        table.add_row(str(step), repr(before[step]), repr(after[step]))
    demo.console.print(table)
    if any(before[step] != after[step] for step in steps):
        raise DemoFailed("the resumed run's losses differ from those printed before the kill")
    demo.results["losses"] = {"killed": killed, "resumed": resumed}
    demo.results["resume"] = {
        "from_step": half,
        "killed_at": killed[-1]["step"],
        "steps": steps,
        "before": [before[step] for step in steps],
        "after": [after[step] for step in steps],
    }


def gate(demo: Demo, candidate: str, baseline: str) -> dict[str, Any]:
    """Run a gate and note its verdict."""
    words = ["gate", "run", "--candidate", candidate, "--baseline", baseline, "--suite", SUITE]
    try:
        verdict = demo.slipway(*words)
    except CommandFailed as failure:
        # The command says by its exit code that the gate was not passed; without a verdict on
        # its output it failed in earnest.
        if not failure.output.startswith("{"):
            raise
        verdict = json.loads(failure.output)
    statistics = verdict["statistics"]
    row = {
        "candidate": candidate,
        "baseline": baseline,
        "gained": statistics["gained"],
        "lost": statistics["lost"],
        "p": statistics["p"],
        "verdict": verdict["verdict"],
        "reason": verdict["reason"],
    }
    demo.results.setdefault("gates", []).append(row)
    demo.console.print(demo.processes.run([demo.binary("slipway"), "gate", "show", verdict["id"]]))
    return dict(verdict)


def check_gain(demo: Demo, verdict: dict[str, Any]) -> None:
    """The promise of the demo, measured."""
    base, tuned = (run["correct"] / run["items"] for run in demo.results["runs"])
    if verdict["verdict"] != "pass":
        raise DemoFailed(f"the gate did not pass: {verdict['reason']}")
    if tuned - base < demo.plan.least_gain or verdict["statistics"]["p"] >= demo.plan.largest_p:
        raise DemoFailed(f"accuracy rose from {base:.1%} to {tuned:.1%} only")


def deploy(demo: Demo, version: dict[str, Any], evidence: dict[str, Any]) -> None:
    """Serve the alias, and check that it is the replica and the digest that were evaluated."""
    endpoint = demo.slipway("deploy", f"{GROUP}@production", "--name", GROUP, "--wait")
    same = endpoint["replica_id"] == evidence["engine"]["replica_id"]
    if endpoint["digest"] != version["digest"] or not same:
        raise DemoFailed("the endpoint is not the replica and digest that were gated")
    demo.results["endpoint"] = {
        "name": GROUP,
        "url": demo.processes.environment["OPENAI_BASE_URL"],
        "version": endpoint["version"],
        "digest": endpoint["digest"],
        "replica_id": endpoint["replica_id"],
        "evaluated_here": same,
    }


def ask(demo: Demo, baseline_run: str) -> None:
    """Three held-out questions through the official client, beside the base model's answers."""
    from openai import OpenAI

    environment = demo.processes.environment
    client = OpenAI(
        base_url=environment["OPENAI_BASE_URL"], api_key=environment["OPENAI_API_KEY"], timeout=120
    )
    suite = json.loads((demo.out / "suite.json").read_text())
    base_answers = {
        item["id"]: item["raw"] for item in demo.slipway("eval", "show", baseline_run, "--items")
    }
    table = Table("question", "answer", "endpoint", "base model", title="Held-out questions")
    demo.results["answers"] = []
    for item in suite["items"][:3]:
        messages = [
            {"role": "system", "content": "Answer with the number only."},
            {"role": "user", "content": item["question"]},
        ]
        reply = client.chat.completions.create(
            model=GROUP, messages=messages, temperature=0, max_tokens=24
        )
        answer = reply.choices[0].message.content or ""
        row = (item["question"], item["answer"], answer.strip(), base_answers[item["id"]].strip())
        table.add_row(*row)
        demo.results["answers"].append(
            dict(zip(("question", "answer", "endpoint", "base"), row, strict=True))
        )
    demo.console.print(table)


def note_versions(demo: Demo) -> None:
    """Every version and its parents, oldest first, for the report's lineage."""
    versions = [demo.slipway("packages", "show", BASE)]
    listed = demo.slipway("packages", "list", "--group", GROUP)
    versions += sorted(listed, key=lambda version: version["number"])
    names = {version["id"]: version["reference"] for version in versions}
    demo.results["versions"] = [
        {
            "reference": version["reference"],
            "kind": version["kind"],
            "digest": version["digest"],
            "parents": [names[parent] for parent in version["parents"] if parent in names],
        }
        for version in versions
    ]


def run(demo: Demo) -> None:
    """The whole story."""
    began = monotonic()
    with demo.stage("Start the server"):
        start_server(demo)
    with demo.stage("Baseline: the base model on held-out items"):
        freeze_suite(demo)
        baseline = evaluate(demo, BASE, candidate=False)
    with demo.stage("Train over the tinker SDK, kill, resume"):
        train(demo)
    final = f"{GROUP}/2"
    with demo.stage("Merge"):
        merged = demo.slipway("merge", final, "--wait")
        reference = merged["reference"]
    with demo.stage("Evaluate the candidate, and decide"):
        demo.refused("promote", reference)
        evidence = evaluate(demo, reference, candidate=True, keep=True)
        verdict = gate(demo, reference, BASE)
        # The other side: the base model offered against what was trained must not get through.
        reverse = gate(demo, BASE, reference)
        if reverse["verdict"] == "pass":
            raise DemoFailed("the gate let the base model pass against the trained one")
        demo.refused("promote", BASE)
        check_gain(demo, verdict)
    with demo.stage("Promote and deploy"):
        demo.slipway("promote", reference)
        deploy(demo, merged, evidence)
        ask(demo, baseline["id"])
        note_versions(demo)
    demo.results["seconds"] = monotonic() - began
    demo.results["finished"] = datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC")


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="From an empty machine to a live, gated endpoint.")
    parser.add_argument("--quick", action="store_true", help="fewer steps and items, same parts")
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--out", type=Path, default=ROOT / "demo-out", help="made anew each time")
    parser.add_argument("--report", type=Path, default=ROOT / "demo-report.html")
    return parser.parse_args()


def own_environment() -> dict[str, str]:
    """The environment less what would send the demo to another server, database or engine."""
    foreign = ("SLIPWAY_", "TINKER_", "OPENAI_")
    kept = {k: v for k, v in os.environ.items() if not k.startswith(foreign)}
    # The cache is shared on purpose; a mark lets tests find every process of a run.
    for name in ("SLIPWAY_CACHE", "SLIPWAY_TEST_MARK"):
        if name in os.environ:
            kept[name] = os.environ[name]
    return kept


def main() -> int:
    options = parse()
    console = Console()
    with Processes(environment=own_environment()) as processes:
        # These end the demo as Ctrl-C does: through the `with`, which stops every process.
        for name in (signal.SIGTERM, signal.SIGHUP):
            signal.signal(name, lambda *_: signal.raise_signal(signal.SIGINT))
        processes.stop_leftovers(options.out / "home")
        shutil.rmtree(options.out, ignore_errors=True)
        options.out.mkdir(parents=True)
        plan = QUICK if options.quick else Plan()
        demo = Demo(
            plan=plan, out=options.out, device=options.device, processes=processes, console=console
        )
        try:
            run(demo)
        except KeyboardInterrupt:
            console.print("[yellow]Interrupted: stopping what was started.")
            return 130
        except (DemoFailed, CommandFailed) as failure:
            console.print(f"[red]The demo failed:[/] {failure}")
            console.print(f"The server's log is {options.out / 'server.log'}")
            return 1
        (options.out / "results.json").write_text(json.dumps(demo.results, indent=1))
        png = options.report.with_suffix(".png")
        write_report(demo.results, html_path=options.report, png_path=png)
        base, tuned = (run["correct"] / run["items"] for run in demo.results["runs"])
        console.rule("[bold]Done", align="left")
        minutes = demo.results["seconds"] / 60
        console.print(f"Held-out accuracy {base:.1%} -> {tuned:.1%} in {minutes:.1f} minutes.")
        console.print(f"Report: {options.report} and {png.name}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
