"""Child processes that lead a session of their own, and how to end all of one.

A replica is a tree: vLLM's API server starts an engine, which starts a worker. Every member
stays in the session its leader opened, so the session is what gets ended. A process is known
by pid *and* creation time, because pids are handed out again.
"""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import psutil

# The kernel counts creation in ticks since boot; turned into a wall-clock time it may move by
# a fraction of a second when the clock is adjusted.
_SAME_TIME_S = 1.5
_POLL_S = 0.1
_AFTER_LEADER_S = 1.0
_AFTER_KILL_S = 5.0
_SECRET_ENDINGS = ("_KEY", "_TOKEN", "_SECRET", "_PASSWORD")


@dataclass(frozen=True, kw_only=True)
class ProcessId:
    """One process for good: `pid`, and `created` in seconds since the epoch."""

    pid: int
    created: float

    def find(self) -> psutil.Process | None:
        """The living process, or None when it is gone or its pid is someone else's now."""
        with suppress(psutil.Error):
            process = psutil.Process(self.pid)
            if self.is_same(process) and process.status() != psutil.STATUS_ZOMBIE:
                return process
        return None

    def is_same(self, process: psutil.Process) -> bool:
        """Whether `process` has this pid and this creation time."""
        same: bool = (
            process.pid == self.pid and abs(process.create_time() - self.created) < _SAME_TIME_S
        )
        return same


def child_environment(extra: Mapping[str, str]) -> dict[str, str]:
    """This process's environment without its secrets, and with `extra`.

    A child needs none of our keys, and one (`VLLM_API_KEY`) would lock us out of it.
    """
    kept = {
        name: value
        for name, value in os.environ.items()
        if not name.upper().endswith(_SECRET_ENDINGS)
    }
    return {**kept, **extra}


def spawn(
    command: Sequence[str], *, environment: Mapping[str, str], log: Path, folder: Path
) -> subprocess.Popen[bytes]:
    """Start `command` as leader of a new session, its output appended to `log`.

    `environment` is added to ours (see `child_environment`); `folder` is the working folder.
    A new session keeps a Ctrl-C in the terminal from reaching the child before its parent has
    decided what to do about it.
    """
    log.parent.mkdir(parents=True, exist_ok=True)
    descriptor = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    try:
        return subprocess.Popen(
            list(command),
            stdin=subprocess.DEVNULL,
            stdout=descriptor,
            stderr=subprocess.STDOUT,
            cwd=folder,
            env=child_environment(environment),
            start_new_session=True,
        )
    finally:
        os.close(descriptor)


def identify(pid: int) -> ProcessId:
    """`pid` with its creation time. Raises psutil.NoSuchProcess when it is gone."""
    return ProcessId(pid=pid, created=psutil.Process(pid).create_time())


def members(leader: int) -> list[ProcessId]:
    """The living processes of the session led by pid `leader`, the leader first."""
    found = []
    for process in psutil.process_iter():
        with suppress(psutil.Error, ProcessLookupError):
            if os.getsid(process.pid) == leader and process.status() != psutil.STATUS_ZOMBIE:
                found.append(ProcessId(pid=process.pid, created=process.create_time()))
    return sorted(found, key=lambda one: (one.pid != leader, one.pid))


async def end_session(
    leader: ProcessId, *, grace: float, known: Sequence[ProcessId] = (), ours: bool = False
) -> list[int]:
    """SIGTERM to the leader, up to `grace` seconds, then SIGKILL to all that is left.

    `known` names members seen earlier: they are ended even if the leader died before them.
    The session is searched for others only while the leader's pid is provably the leader's;
    `ours` says that this process started it, and so may trust the pid for a moment longer.
    Returns the pids that were alive when it was called.
    """
    at_first = alive = await asyncio.to_thread(_living, leader, known, ours)
    process = leader.find()
    if process is not None:
        with suppress(psutil.Error):
            process.send_signal(signal.SIGTERM)
        deadline = time.monotonic() + grace
        while alive and time.monotonic() < deadline:
            await asyncio.sleep(_POLL_S)
            if leader.find() is None:  # the rest goes by itself at once, or not at all
                deadline = min(deadline, time.monotonic() + _AFTER_LEADER_S)
            alive = await asyncio.to_thread(_living, leader, [*known, *alive], ours)
    deadline = time.monotonic() + _AFTER_KILL_S
    while alive and time.monotonic() < deadline:
        for one in alive:
            if (left := one.find()) is not None:
                with suppress(psutil.Error):
                    left.kill()
        await asyncio.sleep(0.02)
        alive = await asyncio.to_thread(_living, leader, [*known, *alive], ours)
    return [one.pid for one in at_first]


def _living(leader: ProcessId, known: Sequence[ProcessId], ours: bool) -> list[ProcessId]:
    found = {one for one in known if one.find() is not None}
    try:
        searchable = leader.is_same(psutil.Process(leader.pid))
    except psutil.NoSuchProcess:
        # No new process gets a pid that still names a session, so its members are ours.
        searchable = ours
    if searchable:
        found.update(members(leader.pid))
    return sorted(found, key=lambda one: (one.pid != leader.pid, one.pid))
