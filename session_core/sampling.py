"""Sampling requests: held in memory, executed beside training.

A sample depends on nothing that comes after it, so it needs no place in a run's line. It is
not durable either: after a restart its id is unknown, and clients submit it again.
"""

from __future__ import annotations

import asyncio
import contextlib
from asyncio import to_thread
from collections import Counter, OrderedDict
from collections.abc import AsyncGenerator, Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from registry import Entry, Principal, Usage, UsageKind
from session_core import operations as op
from session_core.models import Sampler
from session_core.operations import Operation, Result
from session_core.saves import Saver
from session_core.supervisor import EpochPassed, Supervisor
from session_core.worker_client import OperationFailed, WorkerDied

MOST_LOADED = 8
"""Samplers kept in the engine beside the runs; the one not used for longest makes room."""
MOST_KEPT = 20_000
"""Results kept for clients that have not fetched them yet."""
MOST_DEATHS = 2


@dataclass(kw_only=True, eq=False)
class Sample:
    """A request under way, or its result or failure."""

    id: str
    tenant_id: str
    num_samples: int
    task: asyncio.Task[Result]


class Samples:
    """Accepts sample requests and answers for them."""

    def __init__(
        self,
        *,
        supervisor: Supervisor,
        saver: Saver,
        usage: Usage,
        new_id: Callable[[], str],
    ) -> None:
        self._supervisor = supervisor
        self._saver = saver
        self._usage = usage
        self._new_id = new_id
        self._by_id: OrderedDict[str, Sample] = OrderedDict()
        self._by_seq: dict[tuple[str, int], str] = {}
        self._loaded: OrderedDict[str, int] = OrderedDict()  # sampler id -> epoch
        self._loading = asyncio.Lock()
        self._recording: set[asyncio.Future[None]] = set()
        self._users: Counter[str] = Counter()  # requests under way, by sampler

    def submit(
        self, sampler: Sampler, operation: Operation, *, seq: int | None, caller: Principal
    ) -> Sample:
        """Start a request; with a sequence id the sampler has had, return that request."""
        known = self.known(sampler, seq)
        if known is not None:
            return known
        key = (sampler.id, seq) if seq is not None else None
        request_id = self._new_id()
        sample = Sample(
            id=request_id,
            tenant_id=caller.tenant_id,
            num_samples=int(operation.params.get("num_samples") or 1),
            task=asyncio.create_task(self._run(request_id, sampler, operation, caller)),
        )
        self._by_id[request_id] = sample
        if key is not None:
            self._by_seq[key] = request_id
        while len(self._by_id) > MOST_KEPT and next(iter(self._by_id.values())).task.done():
            self._by_id.popitem(last=False)
        return sample

    def known(self, sampler: Sampler, seq: int | None) -> Sample | None:
        """The request that a sampler's sequence id has already, if it is one."""
        request_id = self._by_seq.get((sampler.id, seq)) if seq is not None else None
        return self._by_id.get(request_id) if request_id is not None else None

    def get(self, tenant_id: str, request_id: str) -> Sample | None:
        """A tenant's request, if it is known."""
        sample = self._by_id.get(request_id)
        return sample if sample is not None and sample.tenant_id == tenant_id else None

    def cancel(self, tenant_id: str, request_id: str) -> bool:
        """Give a tenant's request up; whether it is known."""
        sample = self.get(tenant_id, request_id)
        if sample is not None:
            sample.task.cancel()
        return sample is not None

    async def stop(self) -> None:
        """Abandon every request."""
        tasks = [sample.task for sample in self._by_id.values()]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await asyncio.gather(*self._recording, return_exceptions=True)

    async def stream(
        self, sampler: Sampler, operation: Operation, *, caller: Principal
    ) -> AsyncGenerator[dict[str, Any], None]:
        """A request answered token by token, see `session_core.streaming`.

        What was sampled is metered, also when the caller goes away before the end.
        """
        counts = {UsageKind.PREFILL: len(operation.arrays["tokens"]), UsageKind.SAMPLE: 0}
        request_id = self._new_id()
        with self._in_use(sampler.id):
            await self._load(sampler)
            lines = self._supervisor.stream(sampler.id, operation, tenant=caller.tenant_id)
            try:
                async with contextlib.aclosing(lines):
                    async for line in lines:
                        counts[UsageKind.SAMPLE] += "token" in line
                        yield line
            finally:
                if counts[UsageKind.SAMPLE]:
                    await self._record(request_id, sampler, counts, caller)

    async def _run(
        self, request_id: str, sampler: Sampler, operation: Operation, caller: Principal
    ) -> Result:
        with self._in_use(sampler.id):
            result = await self._until_done(sampler, operation, caller.tenant_id)
        counts = {
            UsageKind.PREFILL: int(result.params["prompt_tokens"]),
            UsageKind.SAMPLE: len(result.arrays["tokens"]),
        }
        await self._record(request_id, sampler, counts, caller)
        return result

    async def _until_done(self, sampler: Sampler, operation: Operation, tenant: str) -> Result:
        """Sample, through the engine's deaths."""
        deaths = 0
        while True:
            try:
                await self._load(sampler)
                return await self._supervisor.sample(sampler.id, operation, tenant=tenant)
            except EpochPassed:
                continue
            except WorkerDied:
                deaths += 1
                if deaths >= MOST_DEATHS:
                    raise

    @contextlib.contextmanager
    def _in_use(self, sampler_id: str) -> Iterator[None]:
        """Keep a sampler in the engine meanwhile."""
        self._users[sampler_id] += 1
        try:
            yield
        finally:
            self._users[sampler_id] -= 1
            if not self._users[sampler_id]:
                del self._users[sampler_id]

    async def _load(self, sampler: Sampler) -> None:
        async with self._loading:
            epoch = await self._supervisor.ready()
            if self._loaded.get(sampler.id) != epoch:
                folder = await to_thread(self._saver.sampler_folder, sampler)
                params = {"sampler_id": sampler.id, "folder": str(folder) if folder else None}
                load = Operation(kind=op.LOAD_SAMPLER, params=params)
                await self._supervisor.execute(
                    sampler.id, load, epoch=epoch, tenant=sampler.tenant_id
                )
                self._loaded[sampler.id] = epoch
            self._loaded.move_to_end(sampler.id)
            await self._make_room(epoch, sampler.tenant_id)

    async def _make_room(self, epoch: int, tenant: str) -> None:
        """Unload the samplers that were not used for longest; those in use stay."""
        idle = [name for name in self._loaded if name not in self._users]
        for name in idle[: max(0, len(self._loaded) - MOST_LOADED)]:
            if self._loaded[name] == epoch:
                unload = Operation(kind=op.UNLOAD_SAMPLER, params={"sampler_id": name})
                try:
                    await self._supervisor.execute(name, unload, epoch=epoch, tenant=tenant)
                except OperationFailed:
                    continue  # A request that was given up is still being decoded.
            del self._loaded[name]

    async def _record(
        self,
        request_id: str,
        sampler: Sampler,
        counts: Mapping[UsageKind, int],
        caller: Principal,
    ) -> None:
        """Enter what was computed into the ledger, also when whoever asked is given up."""
        writing = asyncio.ensure_future(to_thread(self._meter, request_id, sampler, counts, caller))
        self._recording.add(writing)
        writing.add_done_callback(self._recording.discard)
        await asyncio.shield(writing)

    def _meter(
        self,
        request_id: str,
        sampler: Sampler,
        counts: Mapping[UsageKind, int],
        caller: Principal,
    ) -> None:
        # However many samples share a prompt, it is read once.
        entries = [
            Entry(
                tenant_id=caller.tenant_id,
                key_id=caller.key_id,
                operation=f"{request_id}:{kind}",
                kind=kind,
                session_id=sampler.session_id,
                base_model=sampler.base_model,
                tokens=tokens,
            )
            for kind, tokens in counts.items()
        ]
        self._usage.record(*entries)
