"""The session core, put together: what the dialects and the front door call.

Every method is asynchronous and belongs to one event loop. Nothing is acknowledged before
it is durable, except samples, which are not.
"""

from __future__ import annotations

import asyncio
import logging
from asyncio import to_thread
from collections.abc import Mapping
from datetime import timedelta
from pathlib import Path
from typing import Any

from registry import (
    InvalidInput,
    Principal,
    Registry,
    Signer,
    SlipwayError,
    VersionView,
)
from session_core import operations as op
from session_core.admission import Admission
from session_core.allowance import Allowance
from session_core.hints import LORAPLUS_KEY, lr_ratio_of
from session_core.holdings import Holdings
from session_core.lines import Limits, Line
from session_core.listing import Listing
from session_core.live import Live
from session_core.log import OperationLog
from session_core.models import (
    LoggedOperation,
    OperationStatus,
    Sampler,
    SessionStatus,
    TrainingRun,
    TrainingSession,
)
from session_core.operations import Operation, Refused
from session_core.paths import folder_name, run_id_of, sampler_id_of
from session_core.quota_records import Quotas
from session_core.quotas import Quota
from session_core.results import Results
from session_core.sampling import Sample, Samples
from session_core.saves import Base, Saver, group_of
from session_core.supervisor import Supervisor
from session_core.worker_client import Worker

log = logging.getLogger(__name__)

REAP_SECONDS = 30.0
SERVER_FAULT = 500
# The range of sequence ids on the wire (int32).
LARGEST_SEQ = 2**31 - 1


class SessionService:
    """Sessions, runs and samplers on one base model.

    Args:
        home: folder for snapshots; the service's own.
        base: the base model's version in the registry.
        base_name: the name clients ask for it by; ``other_names`` are taken too.
        logs: folder for the engine's log.
        threads: the engine's; 0 leaves the choice to torch.
        engine_module: what its process runs, see `session_core.worker`.
        quota: what a tenant may have that has no limits of its own.
        idle: after how long without a sign of life a session expires.
        reap_seconds: how often what has expired is looked for.
    """

    def __init__(
        self,
        *,
        registry: Registry,
        home: Path,
        base: VersionView,
        base_name: str,
        logs: Path,
        other_names: frozenset[str] = frozenset(),
        device: str = "cpu",
        threads: int = 0,
        engine_module: str = "session_core.worker",
        limits: Limits | None = None,
        quota: Quota | None = None,
        idle: timedelta = timedelta(hours=1),
        reap_seconds: float = REAP_SECONDS,
    ) -> None:
        self.registry = registry
        self.base = Base(version=base, name=base_name, aliases=other_names)
        self.base_folder = registry.store.path(base.digest)
        self.worker = Worker(
            base_folder=self.base_folder,
            socket=home / "worker.sock",
            log_path=logs / "worker.log",
            device=device,
            threads=threads,
            module=engine_module,
        )
        self.operations = OperationLog(registry.db, registry.clock, registry.new_id)
        self.listing = Listing(registry.db)
        self.holdings = Holdings(registry.db, registry.clock)
        self.saver = Saver(registry=registry, log=self.operations, base=self.base, home=home)
        self.quotas = Quotas(registry.db, registry.usage, registry.clock, quota or Quota())
        self._allowance = Allowance(self.quotas, lambda: self.context)
        self._admission = Admission(self.operations, self.quotas, self._allowance)
        self._limits = limits or Limits()
        self._supervisor = Supervisor(self.worker, stall_seconds=self._limits.stall_seconds)
        self._samples = Samples(
            supervisor=self._supervisor,
            saver=self.saver,
            usage=registry.usage,
            new_id=registry.new_id,
        )
        self.live = Live(
            operations=self.operations,
            saver=self.saver,
            samples=self._samples,
            supervisor=self._supervisor,
            allowance=self._allowance,
        )
        self.signer = Signer(home / "signing.key", registry.clock)
        self._home = home
        self._idle = idle
        self._reap_seconds = reap_seconds
        self._lines: dict[str, Line] = {}
        self.results = Results(
            operations=self.operations,
            samples=self._samples,
            supervisor=self._supervisor,
            line_of=lambda run_id: self._lines.get(run_id),
        )
        self._reaper: asyncio.Task[None] | None = None

    @property
    def context(self) -> int:
        """How many tokens the base model takes at once; 0 before the engine has started."""
        return int(self.worker.health.get("context") or 0)

    async def start(self) -> None:
        """Start the engine and take up what an earlier process left undone.

        Raises:
            Unavailable: if the engine does not come up.
        """
        self._home.mkdir(parents=True, exist_ok=True)
        await self._supervisor.start()
        for run in await to_thread(self.operations.runs_with_work):
            line = self._line(run)
            session = await to_thread(self.operations.session, run.tenant_id, run.session_id)
            if session.status is not SessionStatus.ACTIVE:
                await line.end()
        self._reaper = asyncio.create_task(self._reap(), name="session reaper")

    async def stop(self) -> None:
        """Stop; what is queued stays in the log and goes on at the next start."""
        if self._reaper is not None:
            self._reaper.cancel()
            await asyncio.gather(self._reaper, return_exceptions=True)
        # Lines before the engine: an engine that is stopped looks like one that died.
        await asyncio.gather(*(line.stop() for line in self._lines.values()))
        await self._samples.stop()
        await self._supervisor.stop()

    # Sessions.

    async def create_session(
        self,
        caller: Principal,
        *,
        user_metadata: Mapping[str, Any],
        tags: list[str],
        sdk_version: str | None,
        display_name: str | None,
        project_id: str | None = None,
    ) -> TrainingSession:
        """Open a session.

        Raises:
            QuotaExceeded: if the tenant has as many active ones as it may.
            InvalidInput: if the metadata names a group that cannot be one: said now, and not
                at the first save, after the training.
        """
        group_of(user_metadata)
        return await to_thread(
            self.operations.create_session,
            lambda session: self.quotas.admit_session(session, caller.tenant_id),
            tenant_id=caller.tenant_id,
            key_id=caller.key_id,
            user_metadata=dict(user_metadata),
            tags=tags,
            sdk_version=sdk_version,
            display_name=display_name,
            project_id=project_id,
        )

    async def heartbeat(self, caller: Principal, session_id: str) -> SessionStatus:
        """Note that a session's client is alive; the session's status."""
        return await to_thread(self.operations.heartbeat, caller.tenant_id, session_id)

    async def end_session(
        self,
        tenant_id: str,
        session_id: str,
        status: SessionStatus,
        *,
        reason: str | None = None,
        detail: str | None = None,
    ) -> SessionStatus:
        """End a session: what it has queued is still done, then its runs leave the engine.

        Ending it again is fine; the first status stays, with its reason.
        """
        await to_thread(self.operations.session, tenant_id, session_id)
        return await self._end(session_id, status, reason=reason, detail=detail)

    async def _end(
        self, session_id: str, status: SessionStatus, **said: str | None
    ) -> SessionStatus:
        status = await to_thread(self.operations.end_session, session_id, status, **said)
        for run in await to_thread(self.operations.runs, session_id=session_id):
            if run.id in self._lines:
                await self._lines[run.id].end()
        return status

    async def _reap(self) -> None:
        while True:
            await asyncio.sleep(self._reap_seconds)
            moment = self.registry.clock() - self._idle
            try:
                for session_id in await to_thread(self.operations.silent_since, moment):
                    log.info("session %s expired: its client fell silent", session_id)
                    await self._end(session_id, SessionStatus.EXPIRED)
                await to_thread(self.saver.exports.expire)
            except Exception:
                log.exception("what has expired was not ended; it is next time")
            self._lines = {name: line for name, line in self._lines.items() if not line.ended}

    # Runs.

    async def create_run(
        self,
        caller: Principal,
        session_id: str,
        number: int,
        *,
        base_model: str,
        lora: Mapping[str, Any],
        user_metadata: Mapping[str, Any],
    ) -> LoggedOperation:
        """Create a session's run of a number; repeated, it returns what it returned before.

        Raises:
            NotFound: if the session is not the caller's.
            InvalidInput: if it has ended, or the base model is not served.
        """
        self.base.check(base_model)
        operation = Operation(
            kind=op.CREATE_RUN,
            params={**lora, LORAPLUS_KEY: lr_ratio_of(user_metadata)},
        )
        return await self._begin(caller, session_id, number, operation, user_metadata)

    async def load_run(
        self,
        caller: Principal,
        session_id: str,
        number: int,
        *,
        path: str,
        optimizer: bool,
        user_metadata: Mapping[str, Any],
    ) -> LoggedOperation:
        """Create a run from what was saved; its rank and layers are the save's.

        Raises: as `create_run`, and as `Saver.loadable`.
        """
        version = await to_thread(self.saver.loadable, caller.tenant_id, path, optimizer=optimizer)
        params = {
            "version_id": version.id,
            "optimizer": optimizer,
            LORAPLUS_KEY: lr_ratio_of(user_metadata),
        }
        operation = Operation(kind=op.LOAD_RUN, params=params)
        return await self._begin(caller, session_id, number, operation, user_metadata)

    async def _begin(
        self,
        caller: Principal,
        session_id: str,
        number: int,
        operation: Operation,
        user_metadata: Mapping[str, Any],
    ) -> LoggedOperation:
        group_of(user_metadata)
        await self._active(caller, session_id)
        run = TrainingRun(
            id=run_id_of(session_id, number),
            session_id=session_id,
            tenant_id=caller.tenant_id,
            base_model=self.base.name,
            lora={},
            user_metadata=dict(user_metadata),
            created_at=self.registry.clock(),
        )
        return await self._append(caller, run, 0, operation, new=True)

    async def submit(
        self, caller: Principal, run_id: str, seq: int, operation: Operation | Refused
    ) -> LoggedOperation:
        """Log an operation of a run and return at once; repeated, it runs nothing twice.

        Raises:
            NotFound: if the run is not the caller's.
            InvalidInput: if its session has ended, or the sequence id is none or was another
                operation's.
            TooMany: if too many operations of the tenant wait.
        """
        if not 1 <= seq <= LARGEST_SEQ:
            raise InvalidInput(f"sequence id {seq} is out of bounds: they count up from 1")
        run = await to_thread(self.operations.run, caller.tenant_id, run_id)
        if run.copy_of is not None:
            raise InvalidInput(
                f"{run_id} holds a copy of {run.copy_of} and cannot be trained: create a training "
                "client from the copy's path"
            )
        if run.corrupted is not None:
            raise InvalidInput(run.corrupted)
        await self._active(caller, run.session_id)
        return await self._append(caller, run, seq, operation)

    async def load_into(
        self, caller: Principal, run_id: str, seq: int, *, path: str, optimizer: bool
    ) -> LoggedOperation:
        """Replace a run's state by what was saved. Raises: as `submit`.

        A path that cannot be loaded from takes its place, and fails in its turn.
        """
        try:
            version = await to_thread(
                self.saver.loadable, caller.tenant_id, path, optimizer=optimizer
            )
        except SlipwayError as error:
            if error.status >= SERVER_FAULT:
                raise
            refused = Refused(kind=op.LOAD_RUN, message=error.message)
            return await self.submit(caller, run_id, seq, refused)
        run = await to_thread(self.operations.run, caller.tenant_id, run_id)
        expected = {k: v for k, v in run.lora.items() if k != "seed"}
        params = {
            **expected,
            "version_id": version.id,
            "optimizer": optimizer,
            LORAPLUS_KEY: lr_ratio_of(run.user_metadata),
        }
        return await self.submit(caller, run_id, seq, Operation(kind=op.LOAD_RUN, params=params))

    async def _active(self, caller: Principal, session_id: str) -> TrainingSession:
        session = await to_thread(self.operations.session, caller.tenant_id, session_id)
        if session.status is not SessionStatus.ACTIVE:
            raise InvalidInput(
                f"session {session_id} is {session.status.value}: it takes no more operations; "
                "open a new one and load what was saved"
            )
        return session

    async def _append(
        self,
        caller: Principal,
        run: TrainingRun,
        seq: int,
        wanted: Operation | Refused,
        *,
        new: bool = False,
    ) -> LoggedOperation:
        # Encoding a large batch takes a while, and so does committing it.
        row = await to_thread(self._admission.log, caller, run, seq, wanted, new=new)
        if row.status is OperationStatus.QUEUED:
            self._line(run).wake()
        return row

    def _line(self, run: TrainingRun) -> Line:
        line = self._lines.get(run.id)
        if line is None or line.ended:
            line = self._lines[run.id] = Line(
                run.id,
                tenant=run.tenant_id,
                operations=self.operations,
                saver=self.saver,
                supervisor=self._supervisor,
                usage=self.registry.usage,
                folder=self._home / folder_name(run.id),
                limits=self._limits,
                settled=self.results.settle,
            )
        return line

    # Samplers.

    async def create_sampler(
        self,
        caller: Principal,
        session_id: str,
        number: int,
        *,
        base_model: str | None,
        model_path: str | None,
    ) -> Sampler:
        """A session's sampler of a number, on the base model or on what was saved.

        Raises:
            NotFound: if session or path are not the caller's.
            InvalidInput: if neither or another base model is named.
        """
        await self._active(caller, session_id)
        version_id = None
        if model_path is not None:
            version = await to_thread(
                self.saver.loadable, caller.tenant_id, model_path, optimizer=False
            )
            version_id = version.id
        elif base_model is None:
            raise InvalidInput("a sampler needs a base_model or a model_path")
        if base_model is not None:
            self.base.check(base_model)
        row = Sampler(
            id=sampler_id_of(session_id, number),
            session_id=session_id,
            tenant_id=caller.tenant_id,
            base_model=self.base.name,
            model_path=model_path,
            version_id=version_id,
            created_at=self.registry.clock(),
        )
        return await to_thread(self.operations.add_sampler, row)

    async def sample(
        self, caller: Principal, sampler_id: str, operation: Operation, *, seq: int | None
    ) -> Sample:
        """Start sampling.

        Raises:
            NotFound: if the sampler is not the caller's.
            TooMany, QuotaExceeded: if it is more than the tenant may have.
        """
        sampler = await to_thread(self.operations.sampler, caller.tenant_id, sampler_id)
        known = self._samples.known(sampler, seq)
        if known is not None:
            return known
        operation, release = await self._allowance.reserve(caller.tenant_id, operation)
        sample = self._samples.submit(sampler, operation, seq=seq, caller=caller)
        sample.task.add_done_callback(lambda _: release())
        return sample

    async def join_sampler(self, caller: Principal, sampler_id: str) -> int:
        """A number for a copy of a sampler's client, given out once; the first client is 0.

        Raises: NotFound: if the sampler is not the caller's.
        """
        return await to_thread(self.operations.join_sampler, caller.tenant_id, sampler_id)
