"""Stopping at awkward moments: nothing may be left running, and it must not take long."""

from __future__ import annotations

import json
import shutil
import signal
import sqlite3
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

STAND_IN = Path(__file__).resolve().parents[1] / "serving" / "stand_in.py"
SUITE = {
    "format": 1,
    "name": "one",
    "template": "Q: {question}\nA:",
    "decoding": {"max_tokens": 8, "temperature": 0.0, "stop": ["\n"]},
    "grader": {"kind": "numeric"},
    "items": [{"id": "i1", "question": "what is 3 and 4?", "answer": "7"}],
}


def until(reached: Callable[[], object], seconds: float = 60) -> None:
    deadline = time.monotonic() + seconds
    while not reached():
        assert time.monotonic() < deadline
        time.sleep(0.1)


def stand_ins(up):
    return [p for p in up.family() if str(STAND_IN) in " ".join(p.cmdline())]


@pytest.fixture
def hanging(tiny_base, tmp_path):
    """A base model whose engine never comes up."""
    folder = tmp_path / "org--hangs"
    shutil.copytree(tiny_base, folder)
    config = folder / "config.json"
    config.write_text(json.dumps({**json.loads(config.read_text()), "mode": "hang"}))
    return folder


@pytest.fixture
def suite(tmp_path):
    path = tmp_path / "suite.json"
    path.write_text(json.dumps(SUITE))
    return str(path)


@pytest.mark.parametrize("sig", [signal.SIGINT, signal.SIGTERM])
def test_preparations_that_take_their_time_do_not_hold_it_up(up, tmp_path, sig):
    holder = sqlite3.connect(tmp_path / "busy.db", isolation_level=None)
    holder.execute("create table t (a)")
    holder.execute("begin exclusive")
    up.environment["SLIPWAY_DATABASE_URL"] = f"sqlite:///{tmp_path / 'busy.db'}?timeout=60"
    up.start()
    until(lambda: "Starting" in up.log.read_text())
    time.sleep(1)
    began = time.monotonic()
    assert up.stop(sig) == 0
    assert time.monotonic() - began < 10
    holder.close()
    up.start()
    up.wait_ready()
    assert len(up.json("packages", "list")) == 1
    assert up.stop() == 0


def test_a_closed_terminal_is_a_stop(up):
    up.start()
    up.wait_ready()
    assert up.stop(signal.SIGHUP) == 0
    assert not (up.home / "server.json").exists()


def test_a_closed_terminal_is_nothing_to_a_server_that_was_told_so(up):
    up.command = ["nohup", *up.command]
    up.start()
    up.wait_ready()
    up.process.send_signal(signal.SIGHUP)
    time.sleep(1)
    assert up.json("status")["pid"] == up.process.pid
    assert up.stop() == 0


def test_a_replica_that_is_starting_is_ended_too(tmp_path, hanging, another, suite):
    up = another(tmp_path / "home", base=hanging)
    up.start()
    up.wait_ready()
    up.json("suites", "add", suite)
    job = up.json("eval", "run", "hangs/1", "--suite", "one", "--no-wait")
    assert job["status"] == "running"
    until(lambda: stand_ins(up))
    assert up.stop() == 0
    # Nothing of it was recorded as if it had been done.
    up.start()
    up.wait_ready()
    assert up.json("jobs") == []
    assert up.slipway("deploy", "hangs@production", "--name", "x").returncode == 1
    assert up.stop() == 0


def test_ctrl_c_at_the_client_takes_the_work_back(tmp_path, hanging, another, suite):
    up = another(tmp_path / "home", base=hanging)
    up.start()
    up.wait_ready()
    up.json("suites", "add", suite)
    command = [sys.executable, "-m", "slipway", "eval", "run", "hangs/1", "--suite", "one"]
    with subprocess.Popen(
        command, env=up.environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as client:
        until(lambda: stand_ins(up))
        client.send_signal(signal.SIGINT)
        stdout, stderr = client.communicate(timeout=30)
    assert client.returncode == 130
    assert "Traceback" not in stdout + stderr
    until(lambda: [job["status"] for job in up.json("jobs")] == ["cancelled"])
    until(lambda: not stand_ins(up))
    assert up.stop() == 0


def test_a_second_signal_does_not_wait_for_what_will_not_end(up, suite):
    # The engine's leader is deaf to the polite signal, and the server would give it time.
    stand_in = up.environment["SLIPWAY_ENGINE_COMMAND"]
    up.environment["SLIPWAY_ENGINE_COMMAND"] = f"""sh -c 'trap "" TERM; "$@"; :' - {stand_in}"""
    up.start()
    up.wait_ready()
    up.json("suites", "add", suite)
    up.json("eval", "run", "tiny/1", "--suite", "one", "--keep")
    began = time.monotonic()
    up.process.send_signal(signal.SIGTERM)
    time.sleep(2)
    assert up.process.poll() is None
    assert stand_ins(up)
    assert up.stop(signal.SIGTERM) == 0
    assert time.monotonic() - began < 9
    assert not (up.home / "server.json").exists()
