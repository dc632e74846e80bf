"""Processes of the demo: started, watched, and stopped whatever happens."""

from __future__ import annotations

import json
import os
import re
import shlex
import signal
import socket
import subprocess
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import TracebackType

import psutil

# A server that was asked to stop ends its engines first; vLLM takes its time.
STOP_SECONDS = 60
START_SECONDS = 300
# A command that is interrupted cancels its job on the server before it ends.
COMMAND_SECONDS = 60


class CommandFailed(Exception):
    """A command ended with an error."""

    def __init__(self, command: list[str], message: str, output: str) -> None:
        super().__init__(f"{Path(command[0]).name} {' '.join(command[1:])}: {message}")
        self.message = message
        self.output = output


def free_port(preferred: int) -> int:
    """``preferred`` on loopback if nothing listens there, else any free port."""
    for port in (preferred, 0):
        with socket.socket() as probe:
            try:
                probe.bind(("127.0.0.1", port))
            except OSError:
                continue
            return int(probe.getsockname()[1])
    raise OSError("no free port on 127.0.0.1")


def end_tree(process: psutil.Process, *, first: signal.Signals, grace: float) -> None:
    """Signal a process, wait, and kill what is left of it and its children."""
    try:
        family = [process, *process.children(recursive=True)]
        process.send_signal(first)
    except psutil.NoSuchProcess:
        return
    _, alive = psutil.wait_procs([process], timeout=grace)
    _, alive = psutil.wait_procs(family, timeout=5)
    for survivor in alive:
        survivor.kill()
    psutil.wait_procs(alive, timeout=5)


class Processes:
    """Child processes in sessions of their own, so that only this script ends them."""

    def __init__(self, *, environment: dict[str, str]) -> None:
        # Progress bars and tables are for the person in front of the demo, not for pipes.
        self.environment = {**environment, "TINKER_TELEMETRY": "0", "PYTHONUNBUFFERED": "1"}
        self._running: list[subprocess.Popen[str]] = []

    def __enter__(self) -> Processes:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        # A second Ctrl-C must not cut the stopping short.
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        for process in reversed(self._running):
            if process.poll() is None:
                end_tree(psutil.Process(process.pid), first=signal.SIGTERM, grace=STOP_SECONDS)
            process.wait()

    def _spawn(self, command: list[str], **options: object) -> subprocess.Popen[str]:
        process = subprocess.Popen(
            command,
            env=self.environment,
            text=True,
            start_new_session=True,
            stdin=subprocess.DEVNULL,
            **options,  # type: ignore[call-overload]
        )
        self._running.append(process)
        return process

    def run(self, command: list[str], *, show: bool = False) -> str:
        """Run to the end and return what it printed; ``show`` lets it print here instead.

        Raises:
            CommandFailed: with the last line of its standard error.
        """
        stdout = None if show else subprocess.PIPE
        heard: list[str] = []
        with self._spawn(command, stdout=stdout, stderr=subprocess.PIPE) as process:
            # Both pipes are read at once, or a command that fills one would wait for ever.
            listener = threading.Thread(target=lambda: heard.extend(process.stderr or ()))
            listener.start()
            try:
                output = process.stdout.read() if process.stdout is not None else ""
                listener.join()
            except BaseException:
                # Ended first: closing a pipe waits for whoever reads it, which waits for the
                # command. SIGINT, so that a command can take back what it began.
                end_tree(psutil.Process(process.pid), first=signal.SIGINT, grace=COMMAND_SECONDS)
                raise
        self._running.remove(process)
        if process.returncode != 0:
            lines = [line.strip() for line in heard if line.strip()]
            message = lines[-1] if lines else f"exit code {process.returncode}"
            raise CommandFailed(command, message.removeprefix("Error: "), output)
        return output

    def run_until(self, command: list[str], reached: Callable[[], bool]) -> None:
        """Run until ``reached()``, then end it with SIGKILL.

        Raises:
            CommandFailed: when it ends by itself before that.
        """
        process = self._spawn(command)
        while not reached():
            if process.poll() is not None:
                raise CommandFailed(command, f"ended by itself, exit code {process.returncode}", "")
            time.sleep(0.05)
        end_tree(psutil.Process(process.pid), first=signal.SIGKILL, grace=5)
        process.wait()
        self._running.remove(process)

    def start_server(self, command: list[str], *, log: Path, ready: Path) -> None:
        """Start a server and wait for the file it writes when it is ready."""
        with log.open("w") as sink:
            process = self._spawn(command, stdout=sink, stderr=subprocess.STDOUT)
        deadline = time.monotonic() + START_SECONDS
        while not ready.exists():
            if process.poll() is not None or time.monotonic() > deadline:
                lines = [line for line in log.read_text().splitlines() if line.strip()]
                raise CommandFailed(command, lines[-1] if lines else "said nothing", "")
            time.sleep(0.1)

    def adopt_environment(self, command: list[str]) -> None:
        """Take over the exports a command prints, as ``eval "$(command)"`` would."""
        for line in self.run(command).splitlines():
            if match := re.fullmatch(r"export (\w+)=(.*)", line):
                self.environment[match[1]] = shlex.split(match[2])[0]

    def stop_leftovers(self, home: Path) -> None:
        """End a server that a demo killed outright has left on this home."""
        record = home / "server.json"
        if not record.exists():
            return
        try:
            process = psutil.Process(json.loads(record.read_text())["pid"])
            mine = str(home) in process.cmdline() and process.uids().real == os.getuid()
        except (psutil.Error, ValueError, KeyError):
            return
        if mine:
            end_tree(process, first=signal.SIGTERM, grace=STOP_SECONDS)
