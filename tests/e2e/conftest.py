"""The running product: a server of its own home, on the real base model."""

from __future__ import annotations

import os
import re
import shlex
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import psutil
import pytest

ROOT = Path(__file__).resolve().parents[2]
BASE_MODEL = "HuggingFaceTB/SmolLM2-135M-Instruct"
# Every process a test starts inherits this variable, however deep, and can be found by it.
MARK = "SLIPWAY_TEST_MARK"


def slipway() -> str:
    """The console script of the environment the tests run in."""
    return str(Path(sys.executable).with_name("slipway"))


def living(mark: str) -> list[str]:
    """Command lines of the living processes that carry a mark."""
    found = []
    for process in psutil.process_iter():
        try:
            if process.environ().get(MARK) == mark and process.status() != psutil.STATUS_ZOMBIE:
                found.append(" ".join(process.cmdline()))
        except psutil.Error:
            continue
    return found


@pytest.fixture
def marked() -> Iterator[dict[str, str]]:
    """An environment whose processes can be found again; none may be left at the end."""
    mark = uuid.uuid4().hex
    environment = {k: v for k, v in os.environ.items() if not k.startswith(("SLIPWAY_", "TINKER_"))}
    # The cache is the one thing shared between runs.
    if "SLIPWAY_CACHE" in os.environ:
        environment["SLIPWAY_CACHE"] = os.environ["SLIPWAY_CACHE"]
    yield {**environment, MARK: mark, "TINKER_TELEMETRY": "0", "PYTHONUNBUFFERED": "1"}
    left = living(mark)
    for process in psutil.process_iter():
        try:
            if process.environ().get(MARK) == mark:
                process.kill()
        except psutil.Error:
            continue
    assert left == []


@pytest.fixture
def survivors(marked: dict[str, str]) -> Callable[[], list[str]]:
    """The command lines of this test's processes that are alive now."""
    return lambda: living(marked[MARK])


@dataclass(frozen=True, kw_only=True)
class Server:
    """A running server: its home, and the environment `slipway env` gives."""

    home: Path
    environment: dict[str, str]

    def run(self, *command: str) -> str:
        """Run a command against this server; its standard output."""
        done = subprocess.run(
            command, env=self.environment, capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, done.stderr
        return done.stdout


def exports(text: str) -> dict[str, str]:
    """What a shell would have after `eval` of these lines."""
    pairs = re.findall(r"^export (\w+)=(.*)$", text, re.MULTILINE)
    return {name: shlex.split(value)[0] for name, value in pairs}


@pytest.fixture
def server(tmp_path: Path, marked: dict[str, str]) -> Iterator[Server]:
    """`slipway up` with the real base model on free ports, stopped by SIGTERM."""
    sys.path.insert(0, str(ROOT / "scripts"))
    try:
        from demo_processes import free_port
    finally:
        sys.path.remove(str(ROOT / "scripts"))
    home, log = tmp_path / "home", tmp_path / "server.log"
    ports = ["--port", str(free_port(0)), "--gateway-port", str(free_port(0))]
    with log.open("w") as sink:
        process = subprocess.Popen(
            [slipway(), "up", "--home", str(home), "--base-model", BASE_MODEL, *ports],
            env=marked,
            stdout=sink,
            stderr=subprocess.STDOUT,
        )
    try:
        deadline = time.monotonic() + 180
        while not (home / "server.json").exists():
            assert process.poll() is None, log.read_text()
            assert time.monotonic() < deadline, log.read_text()
            time.sleep(0.1)
        environment = dict(marked)
        environment["PATH"] = f"{Path(sys.executable).parent}{os.pathsep}{marked['PATH']}"
        started = Server(home=home, environment=environment)
        environment.update(exports(started.run(slipway(), "env", "--home", str(home))))
        yield started
    finally:
        process.send_signal(signal.SIGTERM)
        assert process.wait(timeout=90) == 0, log.read_text()
