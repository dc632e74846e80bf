"""Jobs: work that outlives its request. In memory: a restarted server has none."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any, Literal

from registry.errors import NotFound, SlipwayError
from registry.views import View

log = logging.getLogger(__name__)

Status = Literal["running", "done", "failed", "cancelled"]
LONGEST_WAIT_SECONDS = 30.0


class JobView(View):
    """A job as its owner sees it."""

    id: str
    kind: str
    status: Status
    done: int
    total: int
    message: str
    error: str | None
    result: dict[str, Any] | None
    created_at: datetime


@dataclass(kw_only=True, eq=False)
class _Job:
    id: str
    kind: str
    tenant_id: str
    key: str | None
    created_at: datetime
    status: Status = "running"
    done: int = 0
    total: int = 0
    message: str = ""
    error: str | None = None
    result: dict[str, Any] | None = None
    task: asyncio.Task[None] | None = None
    ended: asyncio.Event = field(default_factory=asyncio.Event)

    def view(self) -> JobView:
        names = JobView.model_fields
        return JobView(**{name: getattr(self, name) for name in names})


class JobHandle:
    """What a job's work is given to say how far it is."""

    def __init__(self, job: _Job) -> None:
        self._job = job

    @property
    def id(self) -> str:
        """The job's id."""
        return self._job.id

    def progress(self, done: int, total: int, message: str = "") -> None:
        """Say how far the work is."""
        self._job.done, self._job.total, self._job.message = done, total, message


Work = Callable[[JobHandle], Awaitable[dict[str, Any]]]


class Jobs:
    """Starts jobs on the running event loop and answers for them."""

    def __init__(self, clock: Callable[[], datetime], new_id: Callable[[], str]) -> None:
        self._clock = clock
        self._new_id = new_id
        self._jobs: dict[str, _Job] = {}

    def start(self, kind: str, tenant_id: str, work: Work, *, key: str | None = None) -> JobView:
        """Start work; with the ``key`` of a job that is running, return that job instead."""
        if key is not None:
            for job in self._jobs.values():
                if (job.key, job.tenant_id, job.status) == (key, tenant_id, "running"):
                    return job.view()
        job = _Job(
            id=self._new_id(), kind=kind, tenant_id=tenant_id, key=key, created_at=self._clock()
        )
        self._jobs[job.id] = job
        job.task = asyncio.get_running_loop().create_task(self._run(job, work))
        return job.view()

    @staticmethod
    async def _run(job: _Job, work: Work) -> None:
        try:
            job.result = await work(JobHandle(job))
            job.status = "done"
        except asyncio.CancelledError:
            job.status = "cancelled"
        except SlipwayError as error:
            job.status, job.error = "failed", error.message
        except Exception:
            log.exception("job %s (%s) failed", job.id, job.kind)
            job.status, job.error = "failed", "the server failed; its log says how"
        finally:
            job.ended.set()

    def get(self, tenant_id: str, job_id: str) -> JobView:
        """A job. Raises: NotFound: if this tenant has none with that id."""
        return self._mine(tenant_id, job_id).view()

    def list(self, tenant_id: str) -> list[JobView]:
        """A tenant's jobs, newest first."""
        mine = [job for job in self._jobs.values() if job.tenant_id == tenant_id]
        return [job.view() for job in reversed(mine)]

    async def wait(self, tenant_id: str, job_id: str, seconds: float) -> JobView:
        """A job once it has ended, or as it is after ``seconds`` (at most 30)."""
        job = self._mine(tenant_id, job_id)
        with suppress(TimeoutError):
            await asyncio.wait_for(job.ended.wait(), min(seconds, LONGEST_WAIT_SECONDS))
        return job.view()

    async def cancel(self, tenant_id: str, job_id: str) -> JobView:
        """Stop a job and wait until it has cleaned up; fine if it has ended."""
        job = self._mine(tenant_id, job_id)
        await self._stop(job)
        return job.view()

    async def stop(self) -> None:
        """Stop every job."""
        await asyncio.gather(*(self._stop(job) for job in self._jobs.values()))

    @staticmethod
    async def _stop(job: _Job) -> None:
        if job.task is not None and not job.ended.is_set():
            job.task.cancel()
            await asyncio.wait([job.task])
            # A task cancelled before its first step never gets to say so itself.
            if not job.ended.is_set():
                job.status = "cancelled"
                job.ended.set()

    def _mine(self, tenant_id: str, job_id: str) -> _Job:
        job = self._jobs.get(job_id)
        if job is None or job.tenant_id != tenant_id:
            raise NotFound(f"there is no job {job_id}: jobs end when the server stops")
        return job
