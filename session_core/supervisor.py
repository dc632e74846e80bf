"""Keeps one engine process running, and counts how often it was started."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncGenerator, Mapping
from typing import Any

from session_core.operations import Operation, Result
from session_core.turns import Turns
from session_core.worker_client import Worker, WorkerDied

log = logging.getLogger(__name__)

CHECKS = 10
"""How often within the time of a stall the engine is looked at."""


class Supervisor:
    """An engine that is started again when it died.

    Each start is an epoch. State an owner put into the engine in one epoch is gone in the
    next, so owners remember the epoch they loaded in and load again when it has passed.

    Args:
        stall_seconds: an engine that has work and gives no sign of progress for so long is
            ended, as if it had died.
    """

    def __init__(self, worker: Worker, *, stall_seconds: float) -> None:
        self._worker = worker
        self._stall_seconds = stall_seconds
        self._starting = asyncio.Lock()
        # One training operation is in the engine at a time: it computes one at a time anyway,
        # and so a death can be laid at the door of the operation that brought it.
        self._turns = Turns(time.monotonic)
        self._watch: asyncio.Task[None] | None = None
        self._closed = False
        self.epoch = 0

    @property
    def up(self) -> bool:
        """Whether the engine runs and has been found ready."""
        return self._worker.alive and not self._starting.locked()

    async def start(self) -> None:
        """Start the engine. Raises: Unavailable: if it does not come up."""
        await self.ready()
        self._watch = asyncio.create_task(self._watch_progress(), name="engine watch")

    async def stop(self) -> None:
        """End the engine for good."""
        self._closed = True
        if self._watch is not None:
            self._watch.cancel()
            await asyncio.gather(self._watch, return_exceptions=True)
        await self._worker.stop()

    async def ready(self) -> int:
        """The epoch of a living engine, started first if need be.

        Raises:
            Unavailable: if it does not come up.
            WorkerDied: if the engine was stopped for good.
        """
        async with self._starting:
            if self._closed:
                raise WorkerDied("The engine was stopped.")
            if not self._worker.alive:
                if self.epoch:
                    log.warning("the engine went away; starting it again")
                await self._worker.start()
                self.epoch += 1
            return self.epoch

    async def execute(
        self, run_id: str, operation: Operation, *, epoch: int, tenant: str
    ) -> Result:
        """Have a training operation executed in the epoch its run was loaded in.

        Tenants take turns, see `session_core.turns`.

        Raises:
            WorkerDied: if the engine died over it.
            EpochPassed: if the engine died before it; nothing was executed.
            OperationFailed: if the engine refused it.
        """
        async with self._turns.turn(tenant):
            if epoch != self.epoch or not self._worker.alive:
                raise EpochPassed("The engine was started anew.")
            return await self._worker.execute(run_id, operation)

    async def sample(self, sampler_id: str, operation: Operation, *, tenant: str) -> Result:
        """Have a sample operation executed, beside training. Raises as `execute`."""
        return await self._worker.sample(sampler_id, operation, tenant=tenant)

    def stream(
        self, sampler_id: str, operation: Operation, *, tenant: str
    ) -> AsyncGenerator[dict[str, Any], None]:
        """The same token by token, see `Worker.stream`."""
        return self._worker.stream(sampler_id, operation, tenant=tenant)

    async def tokens(self, body: Mapping[str, Any]) -> list[int]:
        """Token ids of a chat or a text, see `Worker.tokens`."""
        await self.ready()
        return await self._worker.tokens(body)

    async def _watch_progress(self) -> None:
        while True:
            await asyncio.sleep(self._stall_seconds / CHECKS)
            if not self.up:
                continue
            try:
                async with asyncio.timeout(self._stall_seconds):
                    stalled = await self._worker.stalled_for()
            except TimeoutError:
                stalled = self._stall_seconds
            except WorkerDied:
                continue
            if stalled >= self._stall_seconds:
                log.error("the engine made no progress for %.0f s; it is ended", stalled)
                await self._worker.end(f"it was stuck: no progress for {stalled:.0f} s")


class EpochPassed(Exception):
    """The engine an owner's state was in is gone: load it again and go on."""
