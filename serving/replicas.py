"""Which replicas run, who needs them, and when they may go.

A replica serves one content digest for one tenant. Whoever needs it holds it under a name of
its own; when the last hold is released, the replica is stopped. Holds are in memory: a server
that is killed leaves replicas behind, and the next one ends them (`open`).
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from typing import Any

from evals.targets import Served
from registry.errors import Corrupt, InvalidInput, NotFound, SlipwayError, Unavailable
from registry.registry import Registry
from registry.views import VersionView
from serving.engines import Engine, fingerprint
from serving.launch import Child, PortTaken, free_port, launch, wait_for_tokens
from serving.models import ReplicaStatus
from serving.processes import ProcessId, end_session
from serving.replica_records import ReplicaRecords

KEPT = "kept"
"""The hold that keeps an evaluated replica running until it is deployed."""

_PORT_TRIES = 4
_WATCH_S = 0.25
_log = logging.getLogger(__name__)

OnDeath = Callable[[str, str], Awaitable[None]]
"""Called with a replica's id and the reason when it died by itself."""


@dataclass(frozen=True, kw_only=True)
class LiveReplica:
    """A replica that has produced tokens."""

    id: str
    version: VersionView
    model: str
    """The name inside the engine: `<group>--<digest12>`."""
    url: str
    engine: dict[str, Any]
    fingerprint: str


@dataclass(kw_only=True, eq=False)
class _Entry:
    """A replica in this server's care, from the moment someone asked for it."""

    id: str
    key: tuple[str, str]
    holders: set[str] = field(default_factory=set)
    start: asyncio.Task[LiveReplica] | None = None
    watch: asyncio.Task[None] | None = None
    child: Child | None = None
    known: list[ProcessId] = field(default_factory=list)
    ending: bool = False


class Replicas:
    """Starts, shares, watches and ends replicas. One a server; used from its event loop.

    `start_timeout`: seconds a replica has until its first token. `grace`: seconds between
    SIGTERM and SIGKILL when the server stops; `drain`: the same when a replica is no longer
    needed, so that its requests in flight can finish. `max_kept`: evaluated replicas kept for
    a deployment; keeping one more lets the oldest go.
    """

    def __init__(
        self,
        *,
        registry: Registry,
        engine: Engine,
        home: Path,
        clock: Callable[[], datetime],
        new_id: Callable[[], str],
        start_timeout: float = 300.0,
        grace: float = 10.0,
        drain: float = 35.0,
        max_kept: int = 1,
        choose_port: Callable[[], int] = free_port,
    ) -> None:
        self._registry = registry
        self._engine = engine
        self._home = home.resolve()
        self._new_id = new_id
        self._records = ReplicaRecords(registry.db, clock)
        self._start_timeout = start_timeout
        self._grace = grace
        self._drain = drain
        self._max_kept = max_kept
        self._choose_port = choose_port
        self._entries: dict[tuple[str, str], _Entry] = {}
        self._kept: list[str] = []
        self._on_death: list[OnDeath] = []
        self._finishing: set[asyncio.Task[Any]] = set()
        self._closed = False

    async def open(self) -> int:
        """End what a killed server of this home left running; returns how many processes.

        Only processes whose pid and creation time both match are touched.
        """
        ended = 0
        for replica_id, processes in await self._records.unfinished():
            if processes:
                ended += len(await end_session(processes[0], grace=self._grace, known=processes))
            await self._records.ended(
                replica_id, ReplicaStatus.STOPPED, "its server ended without stopping it"
            )
        return ended

    def on_death(self, callback: OnDeath) -> None:
        """Have `callback` told of replicas that die by themselves."""
        self._on_death.append(callback)

    @asynccontextmanager
    async def serve(self, version: VersionView, *, keep: bool) -> AsyncIterator[Served]:
        """A replica of `version` while the block runs, and with `keep` afterwards.

        Reuses the running replica of the same digest. A block that raises keeps nothing.
        Raises Unavailable (the log's telling line in it) when no replica can be started.
        """
        holder = f"serve:{self._new_id()}"
        replica = await self.claim(version, holder)
        try:
            yield Served(
                target_url=replica.url,
                model=replica.model,
                engine=replica.engine,
                fingerprint=replica.fingerprint,
                replica_id=replica.id,
            )
            if keep:
                await self._keep(replica.id)
        finally:
            await self.release(replica.id, holder)

    async def claim(self, version: VersionView, holder: str) -> LiveReplica:
        """The ready replica of `version`, started if need be, held under `holder`.

        Everyone who asks for a digest while it starts waits for the same process. Cancelling
        one of them takes back its hold alone. Raises Unavailable.
        """
        if self._closed:
            raise Unavailable("the server is stopping")
        key = (version.tenant_id, version.digest)
        entry = self._entries.get(key)
        if entry is None:
            entry = _Entry(id=self._new_id(), key=key)
            entry.start = asyncio.create_task(self._start(entry, version))
            entry.start.add_done_callback(_retrieve)
            self._entries[key] = entry
        assert entry.start is not None
        entry.holders.add(holder)
        try:
            return await asyncio.shield(entry.start)
        except asyncio.CancelledError:
            task = asyncio.current_task()
            if entry.start.cancelled() and not (task is not None and task.cancelling()):
                raise Unavailable("the replica was stopped while it started") from None
            await self.release(entry.id, holder)
            raise

    def living(self) -> frozenset[str]:
        """The ids of the replicas that run and have produced tokens."""
        return frozenset(
            entry.id
            for entry in self._entries.values()
            if entry.start is not None and entry.start.done()
        )

    async def release(self, replica_id: str, holder: str) -> None:
        """Give up a hold; stops the replica when it was the last. Unknown ids are ignored."""
        entry = next((e for e in self._entries.values() if e.id == replica_id), None)
        if entry is None or holder not in entry.holders:
            return
        entry.holders.discard(holder)
        if holder == KEPT:
            self._kept.remove(replica_id)
        if not entry.holders:
            await self._end(entry, grace=self._drain)

    async def stop_all(self) -> None:
        """End every replica, and start none from now on. Nothing is left when it returns."""
        self._closed = True
        await asyncio.gather(
            *(self._end(entry, grace=self._grace) for entry in list(self._entries.values()))
        )
        if self._finishing:
            await asyncio.gather(*self._finishing, return_exceptions=True)
        self._records.close()

    async def _keep(self, replica_id: str) -> None:
        entry = next((e for e in self._entries.values() if e.id == replica_id), None)
        if entry is None or self._max_kept < 1:
            return
        if replica_id in self._kept:
            self._kept.remove(replica_id)
        self._kept.append(replica_id)
        entry.holders.add(KEPT)
        while len(self._kept) > self._max_kept:
            await self.release(self._kept[0], KEPT)

    async def _start(self, entry: _Entry, version: VersionView) -> LiveReplica:
        model = f"{version.group}--{version.digest.removeprefix('sha256:')[:12]}"
        try:
            engine = self._engine.describe()
            mark = fingerprint(engine)
            folder = await asyncio.to_thread(self._folder, version)
            await self._records.begin(
                entry.id, version, model=model, engine=engine, fingerprint=mark
            )
            child = await self._start_on_a_free_port(entry, folder, model)
            entry.known = await asyncio.to_thread(child.processes)
            await self._records.ready(entry.id, entry.known)
        except BaseException as error:
            self._forget(entry)
            self._finish(asyncio.current_task())
            await self._end_process(entry, grace=2.0)
            if isinstance(error, SlipwayError):
                message = f"{version.reference} could not be served: {error.message}"
                await self._records.ended(entry.id, ReplicaStatus.FAILED, message)
                kind = (
                    type(error) if type(error) in (Corrupt, InvalidInput, NotFound) else Unavailable
                )
                raise kind(message) from error
            await self._records.ended(entry.id, ReplicaStatus.STOPPED, None)
            raise
        _log.info("replica %s serves %s at %s", entry.id, version.reference, child.url)
        entry.watch = asyncio.create_task(self._watch(entry, child, version))
        return LiveReplica(
            id=entry.id,
            version=version,
            model=model,
            url=child.url,
            engine=engine,
            fingerprint=mark,
        )

    async def _start_on_a_free_port(self, entry: _Entry, folder: Path, model: str) -> Child:
        log = self._home / "logs" / f"replica-{entry.id}.log"
        for attempt in range(1, _PORT_TRIES + 1):
            child = entry.child = launch(
                self._engine,
                folder=folder,
                model=model,
                port=self._choose_port(),
                log=log,
                working_folder=self._home,
            )
            await self._records.started(entry.id, child.url, [child.leader])
            try:
                await wait_for_tokens(child, model=model, timeout=self._start_timeout)
                return child
            except PortTaken:
                await self._end_process(entry, grace=0.0)
                if attempt == _PORT_TRIES:
                    raise
                _log.warning("replica %s: port taken, trying another", entry.id)
        raise AssertionError("unreachable")

    def _folder(self, version: VersionView) -> Path:
        """The version's folder, after a look at its files' sizes.

        A cut-short file would make the engine fail in its own words, or worse, not fail.
        """
        folder = self._registry.store.path(version.digest)
        for file in self._registry.store.manifest(version.digest).files:
            try:
                size = (folder / file.path).stat().st_size
            except FileNotFoundError:
                size = -1
            if size != file.size:
                found = "is missing" if size < 0 else f"has {size} bytes instead of {file.size}"
                raise Corrupt(f"its file {file.path} {found}; make or import the version again")
        return folder

    async def _watch(self, entry: _Entry, child: Child, version: VersionView) -> None:
        """Wait for the process to end by itself, and tell why it did."""
        while child.process.poll() is None:
            await asyncio.sleep(_WATCH_S)
        if entry.ending:
            return
        reason = f"the replica of {version.reference} died: {child.last_words()}"
        _log.error("%s", reason)
        self._forget(entry)
        self._finish(asyncio.current_task())
        await self._end_process(entry, grace=0.0)
        await self._records.ended(entry.id, ReplicaStatus.FAILED, reason)
        for callback in self._on_death:
            await callback(entry.id, reason)

    async def _end(self, entry: _Entry, *, grace: float) -> None:
        """End a replica, whatever it is doing. The work goes on if the caller is cancelled."""
        if entry.ending:
            return
        self._forget(entry)
        task = asyncio.create_task(self._end_now(entry, grace))
        self._finish(task)
        await asyncio.shield(task)

    async def _end_now(self, entry: _Entry, grace: float) -> None:
        assert entry.start is not None
        if not entry.start.done():
            entry.start.cancel()  # it cleans up after itself
            await asyncio.wait([entry.start])
            return
        if entry.watch is not None:
            entry.watch.cancel()
        await self._end_process(entry, grace=grace)
        await self._records.ended(entry.id, ReplicaStatus.STOPPED, None)

    async def _end_process(self, entry: _Entry, *, grace: float) -> None:
        if entry.child is not None:
            await entry.child.end(grace=grace, known=entry.known)

    def _finish(self, task: asyncio.Task[Any] | None) -> None:
        """Have `stop_all` wait for `task`, which is ending a replica."""
        assert task is not None
        self._finishing.add(task)
        task.add_done_callback(self._finishing.discard)

    def _forget(self, entry: _Entry) -> None:
        entry.ending = True
        if self._entries.get(entry.key) is entry:
            del self._entries[entry.key]
        if entry.id in self._kept:
            self._kept.remove(entry.id)


def _retrieve(task: asyncio.Task[LiveReplica]) -> None:
    """Keep asyncio from reporting a failure that the holders have been told of."""
    if not task.cancelled():
        task.exception()
