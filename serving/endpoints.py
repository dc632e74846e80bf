"""Endpoints: stable names for clients, and which version answers under each.

A deployment starts (or takes over) a replica, waits until tokens come out of it, and only then
moves the route; what served before is released after that. A deployment that fails changes
nothing but the `error` that is shown.
"""

from __future__ import annotations

import asyncio
import logging
import re
from collections import defaultdict
from contextlib import suppress
from pathlib import Path
from typing import Any

from registry.errors import InvalidInput, NotFound, SlipwayError, Unavailable
from registry.jobs import JobHandle, Jobs, JobView
from registry.models import Kind
from registry.registry import Registry
from registry.views import VersionView
from serving.endpoint_records import EndpointRecords
from serving.models import EndpointView, ReplicaView
from serving.replicas import KEPT, LiveReplica, Replicas
from serving.routes import write

_NAME = re.compile(r"^[a-z0-9][a-z0-9._-]{0,62}$")
# A request that the gateway routed just before the switch may not have reached its replica.
_SWITCH_S = 0.5
_ReplicaViews = list[ReplicaView]  # `Endpoints.list` hides the name inside the class
_log = logging.getLogger(__name__)


class Endpoints:
    """The endpoints of a server. One a server; used from its event loop.

    `routes` is the gateway's snapshot file. `refresh`: seconds between looks for keys that
    were made or revoked meanwhile.
    """

    def __init__(
        self,
        *,
        registry: Registry,
        replicas: Replicas,
        jobs: Jobs,
        routes: Path,
        refresh: float = 1.0,
    ) -> None:
        self._versions = registry.versions
        self._records = EndpointRecords(registry)
        self._replicas = replicas
        self._jobs = jobs
        self._routes = routes
        self._refresh = refresh
        self._locks: defaultdict[tuple[str, str], asyncio.Lock] = defaultdict(asyncio.Lock)
        self._deployments: dict[tuple[str, str], str] = {}  # the latest job of each endpoint
        self._publishing = asyncio.Lock()
        self._published: str | None = None
        self._refreshing: asyncio.Task[None] | None = None
        replicas.on_death(self._replica_died)

    async def open(self, *, restore: bool = True) -> list[JobView]:
        """Start publishing routes; with `restore`, serve again what was served before.

        A restored endpoint gets the version it had, even if its alias has moved meanwhile.
        Call it after `Replicas.open`. Returns the jobs that restore.
        """
        served = await asyncio.to_thread(self._records.reopen, restore)
        await self.publish()
        self._refreshing = asyncio.create_task(self._keep_publishing())
        jobs = []
        for one in served if restore else ():
            version = await asyncio.to_thread(self._versions.by_id, one.version_id)
            jobs.append(self._start_job(one.tenant_id, one.name, one.reference, version))
        return jobs

    async def close(self) -> None:
        """Stop publishing. Replicas are ended by `Replicas.stop_all`."""
        if self._refreshing is not None:
            self._refreshing.cancel()
            with suppress(asyncio.CancelledError):
                await self._refreshing

    async def deploy(self, tenant_id: str, name: str, reference: str) -> JobView:
        """Serve `reference` (GROUP@alias, GROUP/N) as the endpoint `name`, made if missing.

        Returns the job that does it; its result is the endpoint, its error holds the telling
        line of the replica's log. Raises InvalidInput for a name or a kind of version that
        cannot be served, NotFound for an unknown version.
        """
        if not _NAME.match(name):
            raise InvalidInput(
                f"{name!r} cannot name an endpoint; use up to 63 of a-z, 0-9, '.', '_', '-', "
                "beginning with a letter or digit"
            )
        version = await asyncio.to_thread(self._versions.get, tenant_id, reference)
        if version.kind != Kind.MERGED:
            raise InvalidInput(
                f"{version.reference} is of kind {version.kind}, and only merged models can be "
                f"served; make one with: slipway merge {version.reference}"
            )
        return self._start_job(tenant_id, name, reference, version)

    async def list(self, tenant_id: str) -> list[EndpointView]:
        """All endpoints of a tenant, by name."""
        return await asyncio.to_thread(self._records.views, tenant_id)

    async def get(self, tenant_id: str, name: str) -> EndpointView:
        """One endpoint. Raises NotFound."""
        views = await asyncio.to_thread(self._records.views, tenant_id, name)
        if not views:
            raise NotFound(f"no endpoint is called {name!r}; see: slipway endpoints")
        return views[0]

    async def delete(self, tenant_id: str, name: str) -> EndpointView:
        """Take the endpoint away and stop its replica unless something else needs it.

        Cancels a deployment that is under way. Returns what it was. Raises NotFound.
        """
        await self.get(tenant_id, name)
        deployment = self._deployments.pop((tenant_id, name), None)
        if deployment is not None:
            await self._cancel(tenant_id, deployment)
        async with self._locks[tenant_id, name]:
            view = await self.get(tenant_id, name)
            endpoint_id = await asyncio.to_thread(self._records.remove, tenant_id, name)
            await self.publish()
            if view.replica_id is not None:
                await asyncio.sleep(_SWITCH_S)
                await self._replicas.release(view.replica_id, _holder(endpoint_id))
        return view

    async def replicas(self, tenant_id: str) -> _ReplicaViews:
        """The tenant's replicas, those that ended included, newest first, at most 50."""
        return await asyncio.to_thread(self._records.replica_views, tenant_id)

    async def publish(self) -> None:
        """Write the gateway's snapshot if anything in it has changed."""
        async with self._publishing:
            living = self._replicas.living()
            routes = await asyncio.to_thread(self._records.routes, living)
            text = routes.to_json()
            if text != self._published:
                await asyncio.to_thread(write, self._routes, routes)
                self._published = text

    # -- deployments

    def _start_job(
        self, tenant_id: str, name: str, reference: str, version: VersionView
    ) -> JobView:
        async def run(handle: JobHandle) -> dict[str, Any]:
            return await self._deploy(handle, tenant_id, name, reference, version)

        job = self._jobs.start(
            "deploy", tenant_id, run, key=f"deploy:{tenant_id}:{name}:{version.id}"
        )
        self._deployments[tenant_id, name] = job.id
        return job

    async def _deploy(
        self, handle: JobHandle, tenant_id: str, name: str, reference: str, version: VersionView
    ) -> dict[str, Any]:
        async with self._locks[tenant_id, name]:
            handle.progress(0, 2, f"starting a replica of {version.reference}")
            endpoint_id, old = await asyncio.to_thread(
                self._records.begin,
                tenant_id,
                name,
                reference,
                version,
                self._replicas.living(),
            )
            new: LiveReplica | None = None
            try:
                new = await self._replicas.claim(version, _holder(endpoint_id))
                handle.progress(1, 2, "tokens come out; switching the route")
                await asyncio.to_thread(
                    self._records.switch, endpoint_id, reference, version, new.id
                )
            except BaseException as error:
                await self._deployment_failed(endpoint_id, error)
                if new is not None and new.id != old:
                    await self._replicas.release(new.id, _holder(endpoint_id))
                raise
            await self.publish()
            # It was kept for this.
            await self._replicas.release(new.id, KEPT)
            if old is not None and old != new.id:
                await asyncio.sleep(_SWITCH_S)
                await self._replicas.release(old, _holder(endpoint_id))
            handle.progress(2, 2, f"{name} serves {version.reference}")
            if new.id not in self._replicas.living():
                raise Unavailable(f"the replica of {version.reference} died at once")
            return (await self.get(tenant_id, name)).model_dump(mode="json")

    async def _deployment_failed(self, endpoint_id: str, error: BaseException) -> None:
        if isinstance(error, SlipwayError):
            message = error.message
        elif isinstance(error, asyncio.CancelledError):
            message = "the deployment was cancelled"
        else:
            message = f"{type(error).__name__}: {error}"
        living = self._replicas.living()
        with suppress(NotFound):  # deleted meanwhile
            await asyncio.to_thread(self._records.failed, endpoint_id, message, living)
        await self.publish()

    async def _cancel(self, tenant_id: str, job_id: str) -> None:
        with suppress(SlipwayError):
            await self._jobs.cancel(tenant_id, job_id)

    async def _replica_died(self, replica_id: str, reason: str) -> None:
        await asyncio.to_thread(self._records.replica_died, replica_id, reason)
        await self.publish()

    async def _keep_publishing(self) -> None:
        while True:
            await asyncio.sleep(self._refresh)
            try:
                await self.publish()
            except Exception:
                # A full disk or a busy database: the last snapshot goes on serving.
                _log.exception("the gateway's routes could not be refreshed")


def _holder(endpoint_id: str) -> str:
    return f"endpoint:{endpoint_id}"
