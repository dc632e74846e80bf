"""The demo itself, shortened: every part of it is real."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from registry import Registry

ROOT = Path(__file__).resolve().parents[2]
DEMO = ROOT / "scripts" / "demo.py"


def start(out: Path, environment: dict[str, str]) -> subprocess.Popen[str]:
    """`make demo QUICK=1`, on folders of the test's own."""
    words = ["--quick", "--out", str(out), "--report", str(out.parent / "report.html")]
    command = [sys.executable, str(DEMO), *words]
    with (out.parent / "demo.log").open("w") as log:
        return subprocess.Popen(
            command, env=environment, stdout=log, stderr=subprocess.STDOUT, text=True
        )


@pytest.mark.slow
@pytest.mark.timeout(1500)
def test_the_short_demo_keeps_its_promises(tmp_path, marked):
    out = tmp_path / "out"
    assert start(out, marked).wait() == 0, (tmp_path / "demo.log").read_text()

    results = json.loads((out / "results.json").read_text())
    assert results["resume"]["before"] == results["resume"]["after"]
    assert len(results["resume"]["before"]) >= 5
    forward, reverse = results["gates"]
    assert forward["verdict"] == "pass"
    assert reverse["verdict"] != "pass"
    promoted = next(v for v in results["versions"] if v["reference"] == forward["candidate"])
    assert promoted["kind"] == "merged"
    assert results["endpoint"]["digest"] == promoted["digest"]
    assert results["endpoint"]["evaluated_here"]
    assert len(results["answers"]) == 3
    assert (tmp_path / "report.html").read_text().startswith("<!doctype html>")
    assert (tmp_path / "report.png").read_bytes().startswith(b"\x89PNG")


def logged(text: str) -> Callable[[Path], bool]:
    """True once the demo has printed a text."""
    return lambda out: text in (out.parent / "demo.log").read_text()


def trained(out: Path) -> bool:
    """True once a training step has been logged."""
    log = out / "train-killed.jsonl"
    return log.exists() and log.read_text() != ""


def engine_starting(out: Path) -> bool:
    """True once vLLM has begun to start."""
    return any((out / "home" / "logs").glob("replica-*.log"))


@pytest.mark.slow
@pytest.mark.parametrize(
    "reached",
    [logged("$ slipway up"), engine_starting, trained],
    ids=["server-starting", "engine-starting", "training"],
)
def test_interrupted_it_leaves_nothing_running_and_nothing_half_registered(
    tmp_path, marked, survivors, reached
):
    out = tmp_path / "out"
    demo = start(out, marked)
    while not reached(out):
        assert demo.poll() is None, (tmp_path / "demo.log").read_text()
        time.sleep(0.05)
    demo.send_signal(signal.SIGINT)
    assert demo.wait(timeout=75) == 130, (tmp_path / "demo.log").read_text()
    assert survivors() == []

    home = out / "home"
    if (home / "slipway.db").exists():
        registry = Registry.open(f"sqlite:///{home / 'slipway.db'}", home / "store")
        packages = [p for p in (home / "store" / "packages").glob("*") if p.is_dir()]
        for package in packages:
            assert registry.store.verify(f"sha256:{package.name}") == []
        registry.db.close()
