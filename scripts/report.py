"""The demo's report: one self-contained HTML page and a PNG of its figure.

python scripts/report.py demo-out/results.json --html demo-report.html --png demo-report.png
"""

from __future__ import annotations

import argparse
import html
import io
import json
import sys
from pathlib import Path
from typing import Any

import matplotlib as mpl

mpl.use("Agg")

import matplotlib.pyplot as plt
from matplotlib.axes import Axes
from matplotlib.figure import Figure

INK, ACCENT, MUTED, PAPER = "#1b2733", "#1f6f8b", "#8a97a3", "#ffffff"
# Kinds of version, and the colour of their box in the lineage.
BOXES = {"merged": "#d8ecf2", "checkpoint": "#f3ead7", "weights": "#f3ead7"}

STYLE = """
body{font:16px/1.5 system-ui,sans-serif;color:#1b2733;max-width:60rem;margin:2rem auto}
h1{margin-bottom:0} .lead{color:#5a6772;margin-top:.2rem} figure{margin:1.5rem 0}
svg{width:100%;height:auto} table{border-collapse:collapse;width:100%;margin:1rem 0}
th,td{text-align:left;padding:.35rem .6rem;border-bottom:1px solid #e2e7eb;vertical-align:top}
td.n{text-align:right;font-variant-numeric:tabular-nums} code{font-size:.9em;overflow-wrap:anywhere}
.pass{color:#19743b;font-weight:600}.fail,.inconclusive{color:#a33;font-weight:600}
"""


def draw_loss(axes: Axes, results: dict[str, Any]) -> None:
    """Loss by step: the run that was killed, and the one resumed over it."""
    for name, style in (("killed", {"color": MUTED, "lw": 4}), ("resumed", {"color": ACCENT})):
        points = results["losses"][name]
        axes.plot([p["step"] for p in points], [p["loss"] for p in points], label=name, **style)
    axes.axvline(results["resume"]["from_step"], color=INK, lw=0.8, ls=":")
    axes.set(xlabel="step", ylabel="loss (nats a token)", title="Training loss", ylim=(0, None))
    axes.legend(frameon=False)


def draw_accuracy(axes: Axes, results: dict[str, Any]) -> None:
    """Held-out accuracy of each version with its Wilson 95 % interval."""
    for row, run in enumerate(reversed(results["runs"])):
        accuracy, (low, high) = run["correct"] / run["items"], run["interval"]
        axes.barh(row, accuracy, color=ACCENT if run["candidate"] else MUTED, height=0.5)
        error = [[accuracy - low], [high - accuracy]]
        axes.errorbar(accuracy, row, xerr=error, color=INK, capsize=4, lw=1.2)
        axes.text(high + 0.02, row, f"{accuracy:.1%}", va="center")
    axes.set_yticks(
        range(len(results["runs"])), [r["reference"] for r in reversed(results["runs"])]
    )
    title = f"Held-out accuracy, {results['runs'][0]['items']} items"
    axes.set(xlim=(0, 1.1), xlabel="correct (Wilson 95 %)", title=title)


def draw_lineage(axes: Axes, results: dict[str, Any]) -> None:
    """Every version as a box, an arrow from parent to child."""
    versions = results["versions"]
    place = {v["reference"]: (0.5, 1 - (i + 0.5) / len(versions)) for i, v in enumerate(versions)}
    for version in versions:
        x, y = place[version["reference"]]
        box = {"boxstyle": "round,pad=0.5", "fc": BOXES.get(version["kind"], PAPER), "ec": INK}
        text = f"{version['reference']}  ·  {version['kind']}  ·  {version['digest'][7:19]}"
        axes.text(x, y, text, ha="center", va="center", fontsize=9, bbox=box)
        for rank, parent in enumerate(version["parents"]):
            start = place[parent]
            # Neighbours are joined straight down, others by an arc at the side.
            beside = abs(start[1] - y) > 1.1 / len(versions)
            right = bool(rank % 2)
            ends = ((0.84, start[1]), (0.8, y)) if right else ((0.16, start[1]), (0.2, y))
            arrow = {
                "arrowstyle": "->",
                "color": MUTED,
                "shrinkA": 0 if beside else 14,
                "shrinkB": 0 if beside else 14,
                # The arc bends away from the boxes.
                "connectionstyle": f"arc3,rad={(-0.3 if right else 0.3) if beside else 0}",
            }
            if not beside:
                ends = (start, (x, y))
            axes.annotate("", xy=ends[1], xytext=ends[0], arrowprops=arrow)
    axes.set(xlim=(0, 1), ylim=(0, 1), title="Lineage")
    axes.axis("off")


def draw_endpoint(axes: Axes, results: dict[str, Any]) -> None:
    """What serves, and what it answered."""
    endpoint = results["endpoint"]
    lines = [
        f"{endpoint['name']} serves {endpoint['version']}",
        f"digest {endpoint['digest'][7:19]}, replica {endpoint['replica_id'][:8]}",
        "the replica that was evaluated" if endpoint["evaluated_here"] else "a fresh replica",
        "",
    ]
    for row in results["answers"]:
        lines.append(row["question"].split(":")[-1].strip() + f" {row['answer']}")
        lines.append(f"    endpoint: {row['endpoint'][:44]}")
        lines.append(f"    base:     {row['base'][:44]}")
    axes.text(
        0.02, 0.97, "\n".join(lines), va="top", family="monospace", fontsize=9, parse_math=False
    )
    axes.set(title="Endpoint")
    axes.axis("off")


def draw(results: dict[str, Any]) -> Figure:
    """The four panels in one figure."""
    figure, panels = plt.subplots(2, 2, figsize=(12, 8), layout="constrained")
    draw_loss(panels[0][0], results)
    draw_accuracy(panels[0][1], results)
    draw_lineage(panels[1][0], results)
    draw_endpoint(panels[1][1], results)
    for axes in (panels[0][0], panels[0][1]):
        axes.spines[["top", "right"]].set_visible(False)
    return figure


def table(header: list[str], rows: list[list[str]]) -> str:
    """An HTML table; cells are HTML already."""
    head = "".join(f"<th>{cell}</th>" for cell in header)
    body = "".join("<tr>" + "".join(f"<td>{cell}</td>" for cell in row) + "</tr>" for row in rows)
    return f"<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>"


def gate_rows(results: dict[str, Any]) -> list[list[str]]:
    """One row a gate: who against whom, the discordant pairs, p, and the verdict."""
    rows = []
    for gate in results["gates"]:
        verdict = html.escape(gate["verdict"])
        rows.append(
            [
                html.escape(gate["candidate"]),
                html.escape(gate["baseline"]),
                f"{gate['gained']} / {gate['lost']}",
                f"{gate['p']:.2g}",
                f'<span class="{verdict}">{verdict}</span>',
                html.escape(gate["reason"]),
            ]
        )
    return rows


def page(results: dict[str, Any], svg: str) -> str:
    """The whole page."""
    escape = html.escape
    runs = [
        [
            escape(run["reference"]),
            f"{run['correct']} of {run['items']}",
            f"{run['correct'] / run['items']:.1%}",
            f"{run['interval'][0]:.1%} to {run['interval'][1]:.1%}",
            escape(", ".join(f"{name} {n}" for name, n in run["counts"].items() if n)),
        ]
        for run in results["runs"]
    ]
    resume = [
        [str(step), f"<code>{before!r}</code>", f"<code>{after!r}</code>"]
        for step, before, after in zip(
            results["resume"]["steps"],
            results["resume"]["before"],
            results["resume"]["after"],
            strict=True,
        )
    ]
    versions = [
        [
            escape(v["reference"]),
            escape(v["kind"]),
            f"<code>{escape(v['digest'])}</code>",
            escape(", ".join(v["parents"]) or "none"),
        ]
        for v in results["versions"]
    ]
    answers = [
        [escape(a["question"]), escape(a["answer"]), escape(a["endpoint"]), escape(a["base"])]
        for a in results["answers"]
    ]
    stages = [[escape(s["name"]), f"{s['seconds']:.0f} s"] for s in results["stages"]]
    endpoint = results["endpoint"]
    return f"""<!doctype html><html lang="en"><meta charset="utf-8">
<meta name="viewport" content="width=device-width,initial-scale=1"><title>Slipway demo</title>
<style>{STYLE}</style>
<h1>From a training session to a gated endpoint</h1>
<p class="lead">{escape(results["base_model"])}, {results["seconds"] / 60:.1f} minutes,
{escape(results["finished"])}</p>
<figure>{svg}</figure>
<h2>Held-out accuracy</h2>
{table(["version", "correct", "accuracy", "Wilson 95 %", "outcomes"], runs)}
<h2>Gates</h2>
{
        table(
            ["candidate", "baseline", "gained / lost", "exact McNemar p", "verdict", "why"],
            gate_rows(results),
        )
    }
<h2>Resume</h2>
<p>The run was killed after step {results["resume"]["killed_at"]} and resumed from the checkpoint of
step {results["resume"]["from_step"]}: the losses of the steps both ran.</p>
{table(["step", "before the kill", "resumed"], resume)}
<h2>Versions</h2>
{table(["version", "kind", "digest", "parents"], versions)}
<h2>Endpoint</h2>
<p><code>{escape(endpoint["name"])}</code> at <code>{escape(endpoint["url"])}</code> served
{escape(endpoint["version"])}, digest <code>{escape(endpoint["digest"])}</code>, on replica
<code>{escape(endpoint["replica_id"])}</code>.</p>
{table(["question", "answer", "endpoint", "base model"], answers)}
<h2>Time</h2>
{table(["stage", "took"], stages)}
</html>
"""


def write_report(results: dict[str, Any], *, html_path: Path, png_path: Path) -> None:
    """Write the page and the picture of its figure."""
    figure = draw(results)
    svg = io.StringIO()
    figure.savefig(svg, format="svg")
    figure.savefig(png_path, dpi=130)
    plt.close(figure)
    markup = svg.getvalue()
    html_path.write_text(page(results, markup[markup.index("<svg") :]))


def main() -> int:
    parser = argparse.ArgumentParser(description="Write the demo's report from its results.")
    parser.add_argument("results", type=Path)
    parser.add_argument("--html", type=Path, default=Path("demo-report.html"))
    parser.add_argument("--png", type=Path, default=Path("demo-report.png"))
    options = parser.parse_args()
    results = json.loads(options.results.read_text())
    write_report(results, html_path=options.html, png_path=options.png)
    print(f"Wrote {options.html} and {options.png}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
