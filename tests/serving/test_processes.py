from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import psutil
import pytest

from serving.processes import ProcessId, child_environment, end_session, identify, members, spawn

# A leader with a child that will not listen, and a grandchild of that.
TREE = """
import signal, subprocess, sys, time
deep = "import time; time.sleep(600)"
child = (
    "import signal, subprocess, sys, time; signal.signal(15, signal.SIG_IGN);"
    f"subprocess.Popen([sys.executable, '-c', {deep!r}]); print('up', flush=True); time.sleep(600)"
)
subprocess.Popen([sys.executable, "-c", child])
if "stubborn" in sys.argv:
    signal.signal(15, signal.SIG_IGN)
time.sleep(600)
"""


def start_tree(home: Path, *arguments: str) -> tuple[subprocess.Popen[bytes], ProcessId]:
    process = spawn(
        [sys.executable, "-c", TREE, *arguments, str(home)],
        environment={},
        log=home / "logs" / "tree.log",
        folder=home,
    )
    leader = identify(process.pid)
    deadline = time.monotonic() + 20
    while len(members(leader.pid)) < 3 or "up" not in (home / "logs" / "tree.log").read_text():
        assert time.monotonic() < deadline
        time.sleep(0.05)
    return process, leader


@pytest.mark.parametrize("arguments", [(), ("stubborn",)])
def test_a_whole_session_is_ended(home: Path, arguments: tuple[str, ...]) -> None:
    process, leader = start_tree(home, *arguments)
    all_of_it = members(leader.pid)
    assert all_of_it[0] == leader
    ended = asyncio.run(end_session(leader, grace=0.5, ours=True))
    assert sorted(ended) == sorted(one.pid for one in all_of_it)
    assert all(one.find() is None for one in all_of_it)
    assert process.wait(5) in (-15, -9)


def test_a_leader_that_died_first_leaves_nothing_behind(home: Path) -> None:
    process, leader = start_tree(home)
    rest = members(leader.pid)[1:]
    process.kill()
    process.wait(5)
    asyncio.run(end_session(leader, grace=0.5, ours=True))
    assert all(one.find() is None for one in rest)


def test_a_strangers_dead_leader_proves_nothing_but_known_members_are_ended(home: Path) -> None:
    process, leader = start_tree(home)
    first, *rest = members(leader.pid)[1:]
    process.kill()
    process.wait(5)
    assert asyncio.run(end_session(leader, grace=0.1, known=[first])) == [first.pid]
    assert all(one.find() is not None for one in rest)
    asyncio.run(end_session(leader, grace=0.1, known=rest))


def test_a_reused_pid_is_left_alone(home: Path) -> None:
    process, leader = start_tree(home)
    other = replace(leader, created=leader.created - 100)
    assert other.find() is None
    assert asyncio.run(end_session(other, grace=0.1, known=[other], ours=True)) == []
    assert process.poll() is None
    asyncio.run(end_session(leader, grace=0.1, ours=True))
    process.wait(5)


def test_children_get_no_secrets(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("SLIPWAY_API_KEY", "VLLM_API_KEY", "HF_TOKEN", "db_password"):
        monkeypatch.setenv(name, "s3cret")
    environment = child_environment({"EXTRA": "1"})
    assert "s3cret" not in environment.values()
    assert environment["EXTRA"] == "1"
    assert environment["PATH"] == os.environ["PATH"]


def test_the_log_is_for_its_owner(home: Path) -> None:
    process = spawn(
        [sys.executable, "-c", "print('said')"],
        environment={},
        log=home / "logs" / "a.log",
        folder=home,
    )
    assert process.wait(20) == 0
    assert (home / "logs" / "a.log").read_text() == "said\n"
    assert (home / "logs" / "a.log").stat().st_mode & 0o777 == 0o600
    assert not psutil.pid_exists(process.pid)
