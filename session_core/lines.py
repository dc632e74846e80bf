"""One line a run: its operations, strictly in sequence, whatever the order they came in.

What follows a failure is defined so: an operation that fails leaves the run as it was and
fails alone; what comes after it goes on. A sequence id that never comes holds the line, says
so to whoever waits, and after a while fails what waits behind it and closes the run, since
nobody can know what the missing operation would have done. An operation over which the
engine died twice is failed, so that it cannot bring it down for ever.
"""

from __future__ import annotations

import asyncio
import logging
from asyncio import to_thread
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from sqlmodel import Session

from registry import Entry, InvalidInput, NotFound, SlipwayError, Usage, UsageKind
from session_core import operations as op
from session_core.log import OperationLog
from session_core.models import LoggedOperation
from session_core.operations import Operation, Result, decode, encode
from session_core.recovery import Snapshots, bring_in
from session_core.saves import Saver
from session_core.supervisor import EpochPassed, Supervisor
from session_core.worker_client import OperationFailed, WorkerDied

log = logging.getLogger(__name__)

SAVES = frozenset({op.SAVE_CHECKPOINT, op.SAVE_WEIGHTS})
TRAINING = frozenset({op.FORWARD_BACKWARD, op.FORWARD})
MOST_DEATHS = 2
MOST_FAILED_LOADS = 5
STUMBLE_SECONDS = 1.0


@dataclass(frozen=True, kw_only=True)
class Limits:
    """How a line behaves; durations in seconds."""

    gap_seconds: float = 120.0
    """How long a missing sequence id is waited for."""
    snapshot_steps: int = 10
    """Optimizer steps between two snapshots: they bound what a crash makes repeat."""
    stall_seconds: float = 1800.0
    """An engine that has work and does nothing for so long is ended and started again."""


class Line:
    """Executes one run's operations. Every method runs on the event loop."""

    def __init__(
        self,
        run_id: str,
        *,
        tenant: str,
        operations: OperationLog,
        saver: Saver,
        supervisor: Supervisor,
        usage: Usage,
        folder: Path,
        limits: Limits,
        settled: Callable[[str], None],
    ) -> None:
        self.run_id = run_id
        self._tenant = tenant
        self._operations = operations
        self._saver = saver
        self._supervisor = supervisor
        self._usage = usage
        self._snapshots = Snapshots(folder / "snapshots")
        self._limits = limits
        self._settled = settled
        self._loaded_in = 0
        self._failed_loads = 0
        self._gap_ends = 0.0
        self._next = 0  # the sequence id whose turn it is, if it is known
        self._steps_since_snapshot = 0
        self._wake = asyncio.Event()
        self._ending = False
        self.waiting_for: int | None = None
        """The sequence id that is missing, while one is."""
        self.executing: int | None = None
        """The sequence id of what is being executed, or was last."""
        self._task = asyncio.create_task(self._run(), name=f"line {run_id}")

    def wake(self) -> None:
        """Look at the log again: something was appended."""
        self._wake.set()

    async def end(self) -> None:
        """Finish what is queued in order, then leave the engine. Returns at once."""
        self._ending = True
        self._wake.set()

    async def stop(self) -> None:
        """Leave everything as it is and stop; what is queued goes on at the next start."""
        self._task.cancel()
        await asyncio.gather(self._task, return_exceptions=True)

    @property
    def ended(self) -> bool:
        """Whether it has left the engine for good."""
        return self._task.done()

    async def _run(self) -> None:
        while True:
            try:
                if await self._advance():
                    return
            except Exception:
                # The database would not have it: a full disk, a lock held too long. Whatever
                # was being done is not in the log, so the run is loaded again from there.
                log.exception("the line of %s stumbled; it goes on", self.run_id)
                self._loaded_in = self._next = 0
                await asyncio.sleep(STUMBLE_SECONDS)

    async def _advance(self) -> bool:
        """Do the next thing there is to do; True once the run has left for good."""
        # Cleared before looking: what is appended after the look wakes the waits below.
        self._wake.clear()
        row = await to_thread(self._operations.next_queued, self.run_id)
        if row is None:
            if not self._ending:
                await self._wake.wait()
                return False
            await self._leave()
            # An operation that was let in just before the end is still done.
            row = await to_thread(self._operations.next_queued, self.run_id)
            return row is None and not self._wake.is_set()
        if row.seq != self._next:
            self._next = await to_thread(self._operations.last_settled, self.run_id) + 1
        if row.seq > self._next:
            await self._wait_for(self._next, row.seq)
        else:
            await self._execute(row)
            self._next = row.seq + 1
        return False

    async def _wait_for(self, missing: int, waiting: int) -> None:
        loop = asyncio.get_running_loop()
        if self.waiting_for != missing:
            # One deadline an id: what comes behind it must not put it off for ever.
            self.waiting_for, self._gap_ends = missing, loop.time() + self._limits.gap_seconds
        try:
            async with asyncio.timeout_at(self._gap_ends):
                await self._wake.wait()
        except TimeoutError:
            self.waiting_for = None
            message = (
                f"operation {missing} of {self.run_id} never came, and {waiting} waited for it "
                f"{self._limits.gap_seconds:.0f} s: the run takes no more operations; go on from "
                "its last save"
            )
            await to_thread(self._operations.update_run, self.run_id, corrupted=message)
            for request_id in await to_thread(self._operations.fail_queued, self.run_id, message):
                self._settled(request_id)

    async def _execute(self, row: LoggedOperation) -> None:
        """Bring one operation to its end, through as many deaths of the engine as it takes."""
        self.waiting_for, self.executing = None, row.seq
        while True:
            try:
                result = await self._carry_out(row)
            except EpochPassed:
                continue
            except WorkerDied as error:
                if await to_thread(self._operations.count_death, row.id) < MOST_DEATHS:
                    continue
                message = (
                    f"the engine died {MOST_DEATHS} times over this {row.kind}: it was given up, "
                    "and the run is as it was before it. Its datums may need too much memory: "
                    f"send fewer or shorter ones. The last time: {error.message}"
                )
                await to_thread(self._operations.fail, row.id, message, "server")
            except OperationFailed as error:
                await to_thread(self._operations.fail, row.id, error.message, error.category)
            except SlipwayError as error:
                category = "user" if error.status < 500 else "server"
                await to_thread(self._operations.fail, row.id, error.message, category)
            except Exception:
                log.exception("operation %s (%s) failed", row.id, row.kind)
                message = "the server failed; its log says how"
                await to_thread(self._operations.fail, row.id, message, "server")
            else:
                bill = self._bill(row, result)
                await to_thread(self._operations.finish, row.id, encode(result), also=bill)
                self._settled(row.id)
                await self._maybe_snapshot(row)
                return
            self._settled(row.id)
            return

    async def _carry_out(self, row: LoggedOperation) -> Result:
        if row.error is not None:
            raise OperationFailed(row.error, row.category or "user")
        run = await to_thread(self._operations.run, row.tenant_id, self.run_id)
        if run.corrupted is not None:
            raise InvalidInput(run.corrupted)
        epoch = await self._supervisor.ready()
        if epoch != self._loaded_in:
            await self._load(epoch)

        execute = partial(self._in_engine, epoch=epoch)
        if row.kind in SAVES:
            named = "name" in decode(row.payload).params
            carry: Callable[..., Awaitable[Result]] = (
                self._saver.save if named else self._saver.snapshot_sampler
            )
            return await carry(run, row, execute)
        operation = await self._saver.resolve(decode(row.payload))
        result = await execute(operation)
        if row.kind in (op.CREATE_RUN, op.LOAD_RUN):
            keys = ("rank", "alpha", "seed", "train_attn", "train_mlp", "train_unembed")
            lora = {key: result.params[key] for key in keys if key in result.params}
            parent = decode(row.payload).params.get("version_id")
            await to_thread(
                self._operations.update_run, self.run_id, lora=lora, parent_version_id=parent
            )
            described = {**result.params, "model_id": self.run_id}
            result = Result(params={**described, "path": None})
        return result

    async def _in_engine(self, operation: Operation, *, epoch: int) -> Result:
        return await self._supervisor.execute(
            self.run_id, operation, epoch=epoch, tenant=self._tenant
        )

    async def _load(self, epoch: int) -> None:
        """Bring the run into the engine. A death over it is not the waiting operation's."""
        try:
            replayed = await bring_in(
                self.run_id,
                log=self._operations,
                snapshots=self._snapshots,
                resolve=self._saver.resolve,
                execute=partial(self._in_engine, epoch=epoch),
            )
        except WorkerDied as error:
            self._failed_loads += 1
            if self._failed_loads < MOST_FAILED_LOADS:
                raise EpochPassed(str(error)) from error
            self._failed_loads = 0
            raise OperationFailed(
                f"the engine died {MOST_FAILED_LOADS} times while the run was brought back into "
                "it: start a new run from its last save",
                "server",
            ) from error
        if replayed:
            log.info("%s: %d operations replayed", self.run_id, replayed)
        self._failed_loads = 0
        self._loaded_in = epoch

    def _bill(self, row: LoggedOperation, result: Result) -> Callable[[Session], object] | None:
        """What enters an operation into the ledger as its result is stored, never before."""
        if row.kind not in TRAINING:
            return None
        entry = Entry(
            tenant_id=row.tenant_id,
            key_id=row.key_id,
            operation=row.id,
            kind=UsageKind.TRAIN if row.kind == op.FORWARD_BACKWARD else UsageKind.PREFILL,
            session_id=self.run_id.partition(":")[0],
            base_model=self._saver.base_model,
            tokens=int(result.params["metrics"]["tokens:sum"]),
        )
        return lambda session: self._usage.enter(session, entry)

    async def _maybe_snapshot(self, row: LoggedOperation) -> None:
        """Write a snapshot once enough steps have passed; the log can do without it."""
        if row.kind != op.OPTIM_STEP:
            return
        self._steps_since_snapshot += 1
        if self._steps_since_snapshot < self._limits.snapshot_steps:
            return
        self._steps_since_snapshot = 0
        try:
            folder = await to_thread(self._snapshots.begin, row.seq)
            operation = Operation(kind=op.SNAPSHOT, params={"folder": str(folder)})
            await self._in_engine(operation, epoch=self._loaded_in)
            await to_thread(self._snapshots.commit, folder)
        except (WorkerDied, EpochPassed, OperationFailed, OSError) as error:
            log.warning("%s: no snapshot after %d: %s", self.run_id, row.seq, error)

    async def _leave(self) -> None:
        try:
            if self._loaded_in == self._supervisor.epoch:
                unload = Operation(kind=op.UNLOAD_RUN)
                await self._in_engine(unload, epoch=self._loaded_in)
        except (WorkerDied, EpochPassed, OperationFailed, NotFound):
            pass  # It is gone from the engine already.
        await to_thread(self._snapshots.drop)
