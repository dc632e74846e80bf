"""The engine's process, driven as the control plane drives it."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest

from registry.errors import Unavailable
from session_core.engine import Engine
from session_core.operations import Operation, encode
from session_core.worker import failure
from session_core.worker_client import OperationFailed, Worker, WorkerDied

Make = Callable[..., Any]


@pytest.fixture
def drive(tiny_base: Path, tmp_path: Path) -> Callable[[Callable[[Worker], Awaitable[None]]], None]:
    """Runs a coroutine function with a started worker, and stops that in any case."""

    def run(body: Callable[[Worker], Awaitable[None]]) -> None:
        async def main() -> None:
            worker = Worker(
                base_folder=tiny_base,
                socket=tmp_path / "worker.sock",
                log_path=tmp_path / "logs" / "worker.log",
                threads=1,
            )
            await worker.start()
            try:
                await body(worker)
            finally:
                await worker.stop()

        asyncio.run(main())

    return run


def create(rank: int = 4) -> Operation:
    return Operation(kind="create_run", params={"rank": rank})


def train(arrays: Any) -> Operation:
    return Operation(kind="forward_backward", params={"loss_fn": "cross_entropy"}, arrays=arrays)


async def gone(pid: int) -> None:
    for _ in range(200):
        if not psutil.pid_exists(pid) or psutil.Process(pid).status() == psutil.STATUS_ZOMBIE:
            return
        await asyncio.sleep(0.05)
    raise AssertionError(f"process {pid} is still there")


def test_it_computes_what_the_engine_computes(drive: Any, engine: Engine, datums: Make) -> None:
    async def body(worker: Worker) -> None:
        assert worker.alive
        assert worker.health["vocabulary"] == engine.base.vocabulary
        assert worker.health["eos"] == [2]
        await worker.execute("run", create())
        engine.execute("run", create())
        for turn in range(2):
            step = Operation(kind="optim_step", params={"learning_rate": 1e-2})
            for operation in (train(datums(seed=turn)), step):
                theirs = await worker.execute("run", operation)
                assert encode(theirs) == encode(engine.execute("run", operation))

    drive(body)


def test_failures_say_whose_they_are(drive: Any, datums: Make, tmp_path: Path) -> None:
    async def body(worker: Worker) -> None:
        with pytest.raises(OperationFailed, match="Run run is not loaded") as caught:
            await worker.execute("run", train(datums()))
        assert (caught.value.category, caught.value.status) == ("user", 400)
        await worker.execute("run", create())
        folder = tmp_path / "absent" / "folder"
        save = Operation(kind="save_weights", params={"folder": str(folder)})
        with pytest.raises(OperationFailed, match="FileNotFoundError") as caught:
            await worker.execute("run", save)
        assert (caught.value.category, caught.value.status) == ("server", 500)
        await worker.execute("run", train(datums()))

    drive(body)


def test_many_samples_at_once(drive: Any) -> None:
    async def body(worker: Worker) -> None:
        await worker.execute("", Operation(kind="load_sampler", params={"sampler_id": "s"}))

        async def one(index: int) -> int:
            operation = Operation(
                kind="sample",
                params={"max_tokens": 8, "seed": index, "stop": []},
                arrays={"tokens": np.arange(3, 9 + index, dtype=np.int32)},
            )
            result = await worker.sample("s", operation)
            return len(result.arrays["tokens"])

        assert await asyncio.gather(*(one(index) for index in range(120))) == [8] * 120

    drive(body)


def test_a_kill_amid_an_operation_is_noticed_and_survived(drive: Any, datums: Make) -> None:
    async def body(worker: Worker) -> None:
        await worker.execute("run", create())
        long = asyncio.create_task(worker.execute("run", train(datums(2000, longest=120))))
        await asyncio.sleep(0.5)
        assert not long.done()
        assert worker.pid is not None
        os.kill(worker.pid, signal.SIGKILL)
        with pytest.raises(WorkerDied, match="during forward_backward"):
            await long
        assert not worker.alive
        with pytest.raises(WorkerDied):
            await worker.execute("run", create())
        await worker.start()
        assert worker.alive
        await worker.execute("run", create())

    drive(body)


def test_stopping_amid_an_operation_is_a_death_too(drive: Any, datums: Make) -> None:
    async def body(worker: Worker) -> None:
        await worker.execute("run", create())
        long = asyncio.create_task(worker.execute("run", train(datums(2000, longest=120))))
        await asyncio.sleep(0.3)
        pid = worker.pid
        await worker.stop()
        await worker.stop()
        with pytest.raises(WorkerDied):
            await long
        assert pid is not None
        await gone(pid)

    drive(body)


def test_it_answers_while_it_computes(drive: Any, datums: Make) -> None:
    async def body(worker: Worker) -> None:
        await worker.execute("run", create())
        long = asyncio.create_task(worker.execute("run", train(datums(1500, longest=120))))
        await asyncio.sleep(0.2)
        started = time.monotonic()
        assert await worker._ready()
        assert time.monotonic() - started < 1
        assert not long.done()
        await long

    drive(body)


def test_it_goes_with_its_parent(tiny_base: Path, tmp_path: Path) -> None:
    script = (
        "import asyncio, pathlib, sys\n"
        "from session_core.worker_client import Worker\n"
        "async def main():\n"
        "    base, home = map(pathlib.Path, sys.argv[1:])\n"
        "    worker = Worker(base_folder=base, socket=home / 's', log_path=home / 'l', threads=1)\n"
        "    await worker.start()\n"
        "    print(worker.pid, flush=True)\n"
        "    await asyncio.sleep(600)\n"
        "asyncio.run(main())\n"
    )
    with subprocess.Popen(
        [sys.executable, "-c", script, str(tiny_base), str(tmp_path)],
        stdout=subprocess.PIPE,
        text=True,
    ) as parent:
        assert parent.stdout is not None
        pid = int(parent.stdout.readline())
        assert psutil.pid_exists(pid)
        parent.kill()
    asyncio.run(gone(pid))


def test_a_base_that_cannot_be_loaded_is_told_by_the_logs_line(tmp_path: Path) -> None:
    worker = Worker(
        base_folder=tmp_path / "no-such-model",
        socket=tmp_path / "s",
        log_path=tmp_path / "worker.log",
        threads=1,
    )
    with pytest.raises(Unavailable, match=r"did not start: .*no-such-model"):
        asyncio.run(worker.start())
    assert not worker.alive


def test_a_socket_path_too_long_is_replaced(tiny_base: Path, tmp_path: Path) -> None:
    async def main() -> None:
        worker = Worker(
            base_folder=tiny_base,
            socket=tmp_path / ("deep" * 30) / "worker.sock",
            log_path=tmp_path / "worker.log",
            threads=1,
        )
        await worker.start()
        folder = worker._temporary
        assert folder is not None
        assert folder.stat().st_mode & 0o077 == 0
        await worker.execute("run", create())
        await worker.stop()
        assert not folder.exists()

    asyncio.run(main())


@pytest.mark.parametrize(
    "error",
    [
        MemoryError(),
        RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory: you tried"),
        RuntimeError("CUDA out of memory. Tried to allocate"),
    ],
)
def test_want_of_memory_is_told_in_plain_words(error: Exception) -> None:
    response = failure(error)
    assert response.status_code == 500
    assert b"ran out of memory" in response.body
    assert b"fewer or shorter datums" in response.body
