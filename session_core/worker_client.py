"""The control plane's end of the engine process: start it, talk to it, notice its death."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import shutil
import signal
import sys
import tempfile
from collections.abc import AsyncGenerator, AsyncIterator, Mapping
from pathlib import Path
from typing import Any

import httpx

from registry.errors import SlipwayError, Unavailable
from session_core.operations import Operation, Result, decode_result, encode

START_SECONDS = 600.0
"""How long loading the base model may take."""

_POLL_SECONDS = 0.05
_SOCKET_LIMIT = 100  # bytes in the path of a Unix socket, on every system
_TAIL_BYTES = 16384
_OK = 200


class WorkerDied(Unavailable):
    """The engine process went away before it answered; nothing is known of the operation."""

    code = "worker_died"


class OperationFailed(SlipwayError):
    """The engine refused or failed an operation; its run is as it was before.

    `category` is "user" when the request was wrong, "server" otherwise.
    """

    code = "operation_failed"

    def __init__(self, message: str, category: str) -> None:
        super().__init__(message)
        self.category = category
        self.status = 400 if category == "user" else 500


class Worker:
    """One engine process, which can be started again after its death.

    Args:
        base_folder: the base model's folder.
        socket: where its Unix socket should be; a path too long for one is replaced by a
            private temporary folder's.
        log_path: its standard output and error are appended here.
        device: "cpu" or "cuda".
        threads: torch threads; 0 leaves the choice to torch. Results are bit-identical only
            between processes of the same number.
        module: what is run, with the options of `session_core.worker`.
    """

    def __init__(
        self,
        *,
        base_folder: Path,
        socket: Path,
        log_path: Path,
        device: str = "cpu",
        threads: int = 0,
        module: str = "session_core.worker",
    ) -> None:
        self._module = module
        self._base_folder = base_folder
        self._wanted_socket = socket
        self._log_path = log_path
        self._device = device
        self._threads = threads
        self._process: asyncio.subprocess.Process | None = None
        self._client: httpx.AsyncClient | None = None
        self._temporary: Path | None = None
        self._health: dict[str, Any] = {}
        self._ended_for: str | None = None

    @property
    def alive(self) -> bool:
        """Whether the process runs."""
        return self._process is not None and self._process.returncode is None

    @property
    def pid(self) -> int | None:
        """The process id, while there is a process."""
        return self._process.pid if self._process is not None else None

    @property
    def health(self) -> dict[str, Any]:
        """What the process said when it was ready: vocabulary, context, eos, device, threads."""
        return self._health

    async def start(self) -> None:
        """Start the process and wait until it serves.

        Raises Unavailable with the log's telling line when it does not come up.
        """
        await self.stop()
        self._ended_for = None
        socket = self._socket_path()
        socket.unlink(missing_ok=True)
        self._log_path.parent.mkdir(parents=True, exist_ok=True)
        begin = self._log_path.stat().st_size if self._log_path.exists() else 0
        # Its own session, so that a Ctrl-C at the terminal is the control plane's to handle.
        with self._log_path.open("ab") as log:
            self._process = await asyncio.create_subprocess_exec(
                *self._command(socket),
                stdin=asyncio.subprocess.PIPE,
                stdout=log,
                stderr=log,
                env=self._environment(),
                start_new_session=True,
            )
        transport = httpx.AsyncHTTPTransport(
            uds=str(socket), limits=httpx.Limits(max_connections=None)
        )
        self._client = httpx.AsyncClient(
            transport=transport, base_url="http://worker", timeout=None
        )
        try:
            async with asyncio.timeout(START_SECONDS):
                while not await self._ready():
                    if not self.alive:
                        line = _telling_line(self._log_path, begin)
                        raise Unavailable(f"The engine did not start: {line}")
                    await asyncio.sleep(_POLL_SECONDS)
        except TimeoutError:
            await self.stop()
            raise Unavailable(
                f"The engine was not ready after {START_SECONDS:.0f} s; see {self._log_path.name}."
            ) from None
        except BaseException:
            await self.stop()
            raise

    async def stop(self) -> None:
        """End the process, if there is one, and wait for its end. Idempotent."""
        process, self._process = self._process, None
        client, self._client = self._client, None
        if process is not None:
            # Nothing in it needs saving: what matters is in snapshots and the log.
            await _end(process)
        if process is not None and process.stdin is not None:
            process.stdin.close()
        if client is not None:
            await client.aclose()
        self._wanted_socket.unlink(missing_ok=True)
        if self._temporary is not None:
            shutil.rmtree(self._temporary, ignore_errors=True)
            self._temporary = None

    async def end(self, reason: str) -> None:
        """Kill the process, whatever it is doing; what waits for it is told the reason."""
        self._ended_for = reason
        if self._process is not None:
            await _end(self._process)

    async def stalled_for(self) -> float:
        """Seconds for which there was work and no sign of progress; 0 without work.

        Raises WorkerDied when it went away.
        """
        async with self._calling("a look at its progress") as client:
            response = await client.get("/health")
        return float(response.json()["stalled"])

    async def execute(self, run_id: str, operation: Operation) -> Result:
        """Have an operation of a run (or of the samplers) executed.

        Raises OperationFailed when the engine says no, WorkerDied when it went away.
        """
        return await self._post("/execute", run_id, operation)

    async def sample(self, sampler_id: str, operation: Operation, *, tenant: str = "") -> Result:
        """Have a sample operation executed. Raises as `execute` does.

        Cancelled, it stops the sampling. Tenants share what is decoded at once.
        """
        return await self._post("/sample", sampler_id, operation, tenant=tenant)

    async def stream(
        self, sampler_id: str, operation: Operation, *, tenant: str = ""
    ) -> AsyncGenerator[dict[str, Any], None]:
        """A sample operation token by token, see `session_core.streaming`; the last item has
        the key ``result``. Closed early, it stops the sampling. Raises as `execute` does."""
        params = {"owner": sampler_id, "tenant": tenant}
        async with self._calling("stream") as client:
            request = client.stream("POST", "/stream", params=params, content=encode(operation))
            async with request as response:
                if response.status_code != _OK:
                    await response.aread()
                    raise _failure(response.json())
                async for line in response.aiter_lines():
                    item = json.loads(line)
                    if "failure" in item:
                        raise _failure(item["failure"])
                    yield item

    async def tokens(self, body: Mapping[str, Any]) -> list[int]:
        """Token ids of a chat (``messages``) or a ``text``. Raises as `execute` does."""
        async with self._calling("tokens") as client:
            response = await client.post("/tokens", json=dict(body))
        if response.status_code != _OK:
            raise _failure(response.json())
        found: list[int] = response.json()["tokens"]
        return found

    async def _post(self, path: str, owner: str, operation: Operation, **more: str) -> Result:
        body = encode(operation)
        async with self._calling(operation.kind) as client:
            response = await client.post(path, params={"owner": owner, **more}, content=body)
        if response.status_code == _OK:
            return decode_result(response.content)
        raise _failure(response.json())

    @contextlib.asynccontextmanager
    async def _calling(self, what: str) -> AsyncIterator[httpx.AsyncClient]:
        client, process = self._client, self._process
        if client is None or process is None:
            raise WorkerDied("The engine is not running.")
        try:
            yield client
        except (httpx.TransportError, RuntimeError) as error:
            # RuntimeError: the client was closed by a stop while this call waited.
            # A process that dropped a call is of no use; make sure that it is gone.
            await _end(process)
            reason = self._ended_for or "it went away"
            raise WorkerDied(f"The engine failed during {what}: {reason}.") from error

    async def _ready(self) -> bool:
        assert self._client is not None
        try:
            response = await self._client.get("/health")
        except httpx.TransportError:
            return False
        self._health = response.json()
        return response.status_code == _OK

    def _command(self, socket: Path) -> list[str]:
        return [
            sys.executable,
            "-m",
            self._module,
            f"--base-model={self._base_folder}",
            f"--socket={socket}",
            f"--device={self._device}",
            f"--threads={self._threads}",
        ]

    def _environment(self) -> dict[str, str]:
        environment = dict(os.environ)
        package_root = str(Path(__file__).resolve().parent.parent)
        paths = [package_root, environment.get("PYTHONPATH", "")]
        environment["PYTHONPATH"] = os.pathsep.join(path for path in paths if path)
        environment["TOKENIZERS_PARALLELISM"] = "false"
        environment["HF_HUB_OFFLINE"] = "1"
        environment["PYTHONUNBUFFERED"] = "1"
        if self._threads:
            environment["OMP_NUM_THREADS"] = str(self._threads)
        return environment

    def _socket_path(self) -> Path:
        if len(os.fsencode(self._wanted_socket)) <= _SOCKET_LIMIT:
            self._wanted_socket.parent.mkdir(parents=True, exist_ok=True)
            return self._wanted_socket
        self._temporary = Path(tempfile.mkdtemp(prefix="slipway-"))
        return self._temporary / "worker.sock"


def _failure(body: Mapping[str, str]) -> OperationFailed:
    return OperationFailed(body["message"], body["category"])


async def _end(process: asyncio.subprocess.Process) -> None:
    if process.returncode is None:
        # Not process.kill(): that may reap the child before asyncio does, which then
        # complains of a child that it does not know.
        with contextlib.suppress(ProcessLookupError):
            os.kill(process.pid, signal.SIGKILL)
        await process.wait()


def _telling_line(log_path: Path, begin: int) -> str:
    """The last line since `begin` that names an error, else the last line there is."""
    with log_path.open("rb") as log:
        end = log.seek(0, os.SEEK_END)
        log.seek(max(begin, end - _TAIL_BYTES))
        text = log.read().decode("utf-8", "replace")
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    errors = [line for line in lines if "error" in line.lower() or "Killed" in line]
    return (errors or lines or ["it ended without a word"])[-1]
