"""The gateway's process, as the control plane starts and ends it.

The gateway outlives a control plane that is killed; the file `gateway/process.json` lets the
next one find it and end it.
"""

from __future__ import annotations

import asyncio
import json
import socket
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

import httpx

from registry.errors import Conflict, Unavailable
from serving.logs import how_it_ended, telling_line
from serving.processes import ProcessId, end_session, identify, spawn

_POLL_S = 0.05


def snapshot_path(home: Path) -> Path:
    """Where the routes of the server at `home` are: written by `Endpoints`, read by the gateway."""
    return home / "gateway" / "routes.json"


class GatewayProcess:
    """The gateway of the server at `home`, listening on `host`:`port`.

    `live`: the control plane's address, which answers for live sessions.
    `start_timeout`: seconds until it must answer. `grace`: seconds between SIGTERM and SIGKILL.
    """

    def __init__(
        self,
        *,
        home: Path,
        host: str = "127.0.0.1",
        port: int = 8001,
        live: str | None = None,
        start_timeout: float = 60.0,
        grace: float = 5.0,
    ) -> None:
        self._home = home.resolve()
        self._host = host
        self._port = port
        self._live = live
        self._start_timeout = start_timeout
        self._grace = grace
        self._record = self._home / "gateway" / "process.json"
        self._log = self._home / "logs" / "gateway.log"
        self._process: subprocess.Popen[bytes] | None = None
        self._leader: ProcessId | None = None

    @property
    def url(self) -> str:
        """Where clients reach it: `http://HOST:PORT`."""
        host = "127.0.0.1" if self._host in ("0.0.0.0", "::") else self._host
        return f"http://[{host}]:{self._port}" if ":" in host else f"http://{host}:{self._port}"

    async def start(self) -> None:
        """End the gateway of a killed server, start one, and wait until it answers.

        Raises Conflict when the port is taken, Unavailable when the process ends.
        """
        await self.end_leftover()
        self._refuse_taken_port()
        log_start = self._log.stat().st_size if self._log.exists() else 0
        command = [
            *(sys.executable, "-m", "serving.gateway"),
            *("--routes", str(snapshot_path(self._home))),
            *("--host", self._host, "--port", str(self._port)),
            *(("--live", self._live) if self._live is not None else ()),
        ]
        self._process = spawn(command, environment={}, log=self._log, folder=self._home)
        self._leader = identify(self._process.pid)
        self._record.parent.mkdir(parents=True, exist_ok=True)
        self._record.write_text(
            json.dumps({"pid": self._leader.pid, "created": self._leader.created})
        )
        try:
            await self._wait(log_start)
        except BaseException:
            await self.stop()
            raise

    def alive(self) -> bool:
        """Whether the process runs."""
        return self._process is not None and self._process.poll() is None

    async def stop(self) -> None:
        """End the gateway; streams in flight get `grace` seconds."""
        if self._process is None or self._leader is None:
            return
        await end_session(self._leader, grace=self._grace, ours=True)
        while self._process.poll() is None:
            await asyncio.sleep(_POLL_S)
        self._record.unlink(missing_ok=True)

    async def end_leftover(self) -> bool:
        """End the recorded gateway of an earlier server; whether there was one."""
        try:
            content = json.loads(self._record.read_text())
            leader = ProcessId(pid=int(content["pid"]), created=float(content["created"]))
        except (OSError, ValueError, KeyError, TypeError):
            return False
        ended = await end_session(leader, grace=self._grace)
        self._record.unlink(missing_ok=True)
        return bool(ended)

    def _refuse_taken_port(self) -> None:
        family = socket.AF_INET6 if ":" in self._host else socket.AF_INET
        with socket.socket(family) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind((self._host, self._port))
            except OSError as error:
                raise Conflict(
                    f"the gateway cannot listen on {self._host}:{self._port} "
                    f"({error.strerror}); end what uses that port, or choose another"
                ) from error

    async def _wait(self, log_start: int) -> None:
        assert self._process is not None
        deadline = time.monotonic() + self._start_timeout
        async with httpx.AsyncClient(timeout=2.0, trust_env=False) as client:
            while time.monotonic() < deadline:
                code = self._process.poll()
                if code is not None:
                    line = telling_line(self._log, start=log_start)
                    raise Unavailable(
                        f"the gateway did not start: {line} ({how_it_ended(code)}; "
                        f"see logs/{self._log.name})"
                    )
                with suppress(httpx.HTTPError):
                    if (await client.get(f"{self.url}/healthz")).status_code == 200:
                        return
                await asyncio.sleep(_POLL_S)
        raise Unavailable(f"the gateway did not answer within {self._start_timeout:.0f} s")
