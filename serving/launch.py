"""Start one replica process and wait until tokens come out of it."""

from __future__ import annotations

import asyncio
import errno
import json
import os
import socket
import subprocess
import time
from dataclasses import dataclass
from pathlib import Path

import httpx

from registry.errors import Unavailable
from serving.engines import Engine
from serving.logs import how_it_ended, telling_line
from serving.processes import ProcessId, end_session, identify, members, spawn

_POLL_S = 0.2
_PROBE_TIMEOUT_S = 60.0  # the first tokens of a cold engine on a busy machine are slow
_PORT_TAKEN = ("address already in use", f"[Errno {errno.EADDRINUSE}]")


class StartFailed(Unavailable):
    """The process ended, or produced no token in time; the message holds the telling line."""


class PortTaken(StartFailed):
    """Someone took the port between our choosing it and the process binding it."""


@dataclass(frozen=True, kw_only=True)
class Child:
    """A replica process that we started."""

    process: subprocess.Popen[bytes]
    leader: ProcessId
    url: str
    """`http://127.0.0.1:PORT`"""
    log: Path
    log_start: int
    """Where in the log its own output begins, in bytes."""

    def processes(self) -> list[ProcessId]:
        """All living processes of the replica, the leader first."""
        return members(self.leader.pid) or [self.leader]

    def last_words(self) -> str:
        """Why the process ended: the log's telling line and the exit code."""
        code = self.process.poll()
        how = "still running" if code is None else how_it_ended(code)
        line = telling_line(self.log, start=self.log_start)
        return f"{line} ({how}; see logs/{self.log.name})"

    async def end(self, *, grace: float, known: list[ProcessId]) -> None:
        """End the process and all of its session, and reap it."""
        await end_session(self.leader, grace=grace, known=known, ours=True)
        while self.process.poll() is None:
            await asyncio.sleep(0.02)


def free_port() -> int:
    """A loopback port nobody listens on now."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port: int = listener.getsockname()[1]
        return port


def launch(
    engine: Engine, *, folder: Path, model: str, port: int, log: Path, working_folder: Path
) -> Child:
    """Start `engine` on the model in `folder`.

    Raises StartFailed when there is no such program, Unavailable when the engine is missing.
    """
    command = engine.command(folder, model, port)
    log_start = log.stat().st_size if log.exists() else 0
    try:
        process = spawn(command, environment=engine.environment(), log=log, folder=working_folder)
    except OSError as error:
        reason = os.strerror(error.errno or 0)
        raise StartFailed(f"{engine.name} could not be run: {command[0]}: {reason}") from error
    return Child(
        process=process,
        leader=identify(process.pid),  # not reaped yet, so it can be identified even if dead
        url=f"http://127.0.0.1:{port}",
        log=log,
        log_start=log_start,
    )


async def wait_for_tokens(child: Child, *, model: str, timeout: float) -> None:
    """Return once `child` has generated tokens as `model`; that is what ready means.

    An open port or a friendly /health proves neither that the engine behind it lives nor that
    it is this child that answers. Raises PortTaken or StartFailed; `timeout` is in seconds.
    """
    deadline = time.monotonic() + timeout
    async with httpx.AsyncClient(
        base_url=child.url, timeout=_PROBE_TIMEOUT_S, trust_env=False
    ) as client:
        while True:
            probe = asyncio.create_task(_probe(client, model, deadline))
            try:
                # The child may end while something else on its port keeps the probe waiting.
                while child.process.poll() is None and not probe.done():
                    await asyncio.wait({probe}, timeout=_POLL_S)
            finally:
                probe.cancel()
            if child.process.poll() is not None:
                _raise_ended(child)
            problem = probe.result()
            if problem is None:
                return
            if time.monotonic() >= deadline:
                raise StartFailed(
                    f"no token within {timeout:.0f} s ({problem}): {child.last_words()}"
                )
            await asyncio.sleep(_POLL_S)


def _raise_ended(child: Child) -> None:
    words = child.last_words()
    if any(sign in words.lower() or sign in words for sign in _PORT_TAKEN):
        raise PortTaken(words)
    raise StartFailed(words)


async def _probe(client: httpx.AsyncClient, model: str, deadline: float) -> str | None:
    """None when tokens came, else what came instead."""
    timeout = max(0.5, min(_PROBE_TIMEOUT_S, deadline - time.monotonic()))
    body = {"model": model, "prompt": "Hello", "max_tokens": 2, "temperature": 0}
    try:
        response = await client.post("/v1/completions", json=body, timeout=timeout)
    except httpx.HTTPError as error:
        return f"no answer: {type(error).__name__}"
    if response.status_code != 200:
        return f"answers {response.status_code} {response.text[:200]!r}"
    try:
        content = response.json()
        if content["model"] != model:
            return f"another server answers, with model {content['model']!r}"
        tokens = content["usage"]["completion_tokens"]
    except (json.JSONDecodeError, KeyError, TypeError):
        return f"answers no completion: {response.text[:200]!r}"
    return None if isinstance(tokens, int) and tokens > 0 else "answers without a token"
