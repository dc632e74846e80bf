"""The replica rows: what was started, and the pids by which it can be found again."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from datetime import datetime
from typing import Any, TypeVar

from sqlmodel import col, select

from registry.database import Database
from registry.views import VersionView
from serving.models import Replica, ReplicaStatus
from serving.processes import ProcessId

R = TypeVar("R")


class ReplicaRecords:
    """Reads and writes of the `replica` table.

    Every call runs in one thread of its own: the event loop never waits for the database, and
    writes keep their order even when the task that asked for one is cancelled.
    """

    def __init__(self, db: Database, clock: Callable[[], datetime]) -> None:
        self._db = db
        self._clock = clock
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="replica-records")

    async def begin(
        self,
        replica_id: str,
        version: VersionView,
        *,
        model: str,
        engine: dict[str, Any],
        fingerprint: str,
    ) -> None:
        """Record a replica that is about to be started."""
        row = Replica(
            id=replica_id,
            tenant_id=version.tenant_id,
            version_id=version.id,
            version=version.reference,
            digest=version.digest,
            model=model,
            status=ReplicaStatus.STARTING,
            engine=engine,
            engine_fingerprint=fingerprint,
            processes=[],
            started_at=self._clock(),
        )

        def insert() -> None:
            with self._db.write() as session:
                session.add(row)

        await self._run(insert)

    async def started(self, replica_id: str, url: str, processes: Sequence[ProcessId]) -> None:
        """Record its address and processes, so that they can be ended whatever happens."""
        await self._update(replica_id, url=url, processes=_as_json(processes))

    async def ready(self, replica_id: str, processes: Sequence[ProcessId]) -> None:
        """Record that tokens came out of it."""
        await self._update(
            replica_id,
            status=ReplicaStatus.READY,
            processes=_as_json(processes),
            ready_at=self._clock(),
        )

    async def ended(self, replica_id: str, status: ReplicaStatus, error: str | None) -> None:
        """Record its end."""
        await self._update(replica_id, status=status, error=error, ended_at=self._clock())

    async def unfinished(self) -> list[tuple[str, list[ProcessId]]]:
        """Replicas that no one saw end: their ids and processes, the leader first."""

        def load() -> list[tuple[str, list[ProcessId]]]:
            unfinished = (ReplicaStatus.STARTING, ReplicaStatus.READY)
            with self._db.read() as session:
                rows = session.exec(select(Replica).where(col(Replica.status).in_(unfinished)))
                return [
                    (row.id, [ProcessId(pid=int(p), created=c) for p, c in row.processes])
                    for row in rows
                ]

        return await self._run(load)

    def close(self) -> None:
        """Finish what was asked for."""
        self._thread.shutdown(wait=True)

    async def _update(self, replica_id: str, **values: Any) -> None:
        def update() -> None:
            with self._db.write() as session:
                row = session.get(Replica, replica_id)
                if row is None:  # its insert was cancelled before it ran
                    return
                for name, value in values.items():
                    setattr(row, name, value)
                session.add(row)

        await self._run(update)

    async def _run(self, function: Callable[[], R]) -> R:
        return await asyncio.get_running_loop().run_in_executor(self._thread, function)


def _as_json(processes: Sequence[ProcessId]) -> list[list[float]]:
    return [[one.pid, one.created] for one in processes]
