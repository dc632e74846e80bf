"""What is known of a request: it waits and why, its result, or why it failed."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from asyncio import to_thread
from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum
from typing import Literal

from registry import InvalidInput, NotFound, NotServed, Principal, SlipwayError
from session_core import operations as op
from session_core.lines import Line
from session_core.log import OperationLog
from session_core.models import LoggedOperation, OperationStatus
from session_core.operations import Result, decode_result
from session_core.sampling import Sample, Samples
from session_core.supervisor import Supervisor
from session_core.worker_client import OperationFailed

log = logging.getLogger(__name__)


class Queue(StrEnum):
    """How what is waited for is getting on."""

    ACTIVE = "active"
    PAUSED = "paused"  # nothing is computed at the moment


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """The state of a request.

    Fields:
        message: what it waits for, or why it failed.
        category: whose fault a failure was, "user" or "server".
    """

    state: Literal["waiting", "done", "failed"]
    kind: str
    result: Result | None = None
    message: str = ""
    category: str = ""
    queue: Queue = Queue.ACTIVE


class Results:
    """Answers for requests, and wakes whoever waits for one when it is settled.

    Args:
        line_of: the line of a run's id, while it has one.
    """

    def __init__(
        self,
        *,
        operations: OperationLog,
        samples: Samples,
        supervisor: Supervisor,
        line_of: Callable[[str], Line | None],
    ) -> None:
        self._operations = operations
        self._samples = samples
        self._supervisor = supervisor
        self._line_of = line_of
        self._waiters: dict[str, asyncio.Event] = {}

    def settle(self, request_id: str) -> None:
        """Wake whoever waits for a request: its result is stored."""
        event = self._waiters.pop(request_id, None)
        if event is not None:
            event.set()

    async def of(self, caller: Principal, request_id: str, *, seconds: float) -> Outcome:
        """What is known of a request once it is settled, or after ``seconds``.

        Raises:
            NotFound: if the caller has no such request (samples of an earlier process are
                not known any more).
        """
        sample = self._samples.get(caller.tenant_id, request_id)
        if sample is not None:
            return await self._of_sample(sample, seconds)
        # The waiter is there before the look, so that no settling falls between them.
        event = self._waiters.setdefault(request_id, asyncio.Event())
        row = await to_thread(self._operations.operation, caller.tenant_id, request_id)
        if row is not None and row.status is OperationStatus.QUEUED:
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(event.wait(), seconds)
            row = await to_thread(self._operations.operation, caller.tenant_id, request_id)
        if row is None or row.status is not OperationStatus.QUEUED:
            self._waiters.pop(request_id, None)
        if row is None:
            raise NotFound(f"there is no request {request_id}")
        if row.status is OperationStatus.DONE:
            assert row.result is not None
            return Outcome(state="done", kind=row.kind, result=decode_result(row.result))
        if row.status is OperationStatus.FAILED:
            return Outcome(
                state="failed",
                kind=row.kind,
                message=row.error or "",
                category=row.category or "server",
            )
        return self._waiting(row.kind, self._standing(row))

    async def cancel(self, caller: Principal, request_id: str) -> None:
        """Give a sample up: the engine stops decoding it. Done or cancelled before, it is fine.

        Raises:
            NotFound: if the caller has no such request.
            NotServed: for a training operation, which others were submitted upon.
        """
        if self._samples.cancel(caller.tenant_id, request_id):
            return
        row = await to_thread(self._operations.operation, caller.tenant_id, request_id)
        if row is None:
            raise NotFound(f"there is no request {request_id}")
        raise NotServed(
            f"{request_id} is a {row.kind}, and training operations cannot be taken back: what "
            "was submitted after it builds on it"
        )

    def _standing(self, row: LoggedOperation) -> str:
        line = self._line_of(row.run_id)
        if line is None:
            return "waiting for its turn"
        if line.waiting_for is not None:
            return f"waiting for operation {line.waiting_for} of this run, which has not come"
        if line.executing is None or line.executing >= row.seq:
            return "being computed" if line.executing == row.seq else "waiting for its turn"
        ahead = row.seq - line.executing
        return f"{ahead} operation{'s' if ahead > 1 else ''} of this run before it"

    def _waiting(self, kind: str, message: str) -> Outcome:
        if self._supervisor.up:
            return Outcome(state="waiting", kind=kind, message=message)
        message = "the engine went away and is being started again; nothing is lost"
        return Outcome(state="waiting", kind=kind, message=message, queue=Queue.PAUSED)

    async def _of_sample(self, sample: Sample, seconds: float) -> Outcome:
        await asyncio.wait([sample.task], timeout=seconds)
        if not sample.task.done():
            return self._waiting(op.SAMPLE, "being sampled")
        if sample.task.cancelled():
            return _failed(InvalidInput("the request was cancelled"), sample.id)
        error = sample.task.exception()
        if error is not None:
            return _failed(error, sample.id)
        return Outcome(state="done", kind=op.SAMPLE, result=sample.task.result())


def _failed(error: BaseException, sample_id: str) -> Outcome:
    message, category = "the server failed; its log says how", "server"
    if isinstance(error, OperationFailed):
        message, category = error.message, error.category
    elif isinstance(error, SlipwayError):
        message = error.message
        category = "user" if error.status < 500 else "server"
    else:
        log.error("sampling %s failed", sample_id, exc_info=error)
    return Outcome(state="failed", kind=op.SAMPLE, message=message, category=category)
