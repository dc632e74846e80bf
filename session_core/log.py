"""The durable log of operations, and the rows of the sessions, runs and samplers around it.

An operation is committed here before its request id is given out. One row keyed by
(run, sequence) is the reorder buffer, the table that makes retries harmless, and the store
of results. Nothing here knows the engine.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import datetime
from typing import Any

from sqlalchemy.exc import IntegrityError
from sqlmodel import Session, col, func, select

from registry import Database, InvalidInput, NotFound
from session_core.models import (
    LoggedOperation,
    OperationStatus,
    Sampler,
    SessionStatus,
    TrainingRun,
    TrainingSession,
)


class OperationLog:
    """Rows of sessions, runs, operations and samplers. Synchronous."""

    def __init__(
        self, db: Database, clock: Callable[[], datetime], new_id: Callable[[], str]
    ) -> None:
        self._db = db
        self._clock = clock
        self._new_id = new_id

    # Sessions.

    def create_session(
        self, admit: Callable[[Session], None] | None = None, **fields: Any
    ) -> TrainingSession:
        """A new active session; ``fields`` are the row's.

        Args:
            admit: asked within the transaction; raises to keep it out.
        """
        now = self._clock()
        row = TrainingSession(id=self._new_id(), created_at=now, heartbeat_at=now, **fields)
        with self._db.write() as session:
            if admit is not None:
                admit(session)
            session.add(row)
        return row

    def session(self, tenant_id: str, session_id: str) -> TrainingSession:
        """A tenant's session. Raises: NotFound."""
        with self._db.read() as session:
            row = session.get(TrainingSession, session_id)
        if row is None or row.tenant_id != tenant_id:
            raise NotFound(f"there is no session {session_id}")
        return row

    def sessions(
        self, tenant_id: str | None = None, *, status: SessionStatus | None = None
    ) -> Sequence[TrainingSession]:
        """Sessions, newest first: a tenant's, or everybody's for the server's own use."""
        statement = select(TrainingSession).order_by(col(TrainingSession.created_at).desc())
        if tenant_id is not None:
            statement = statement.where(TrainingSession.tenant_id == tenant_id)
        if status is not None:
            statement = statement.where(TrainingSession.status == status)
        with self._db.read() as session:
            return session.exec(statement).all()

    def heartbeat(self, tenant_id: str, session_id: str) -> SessionStatus:
        """Note a sign of life; the session's status. Raises: NotFound."""
        status = self.session(tenant_id, session_id).status
        if status is SessionStatus.ACTIVE:
            with self._db.write() as session:
                row = session.get_one(TrainingSession, session_id)
                row.heartbeat_at = self._clock()
                session.add(row)
        return status

    def end_session(
        self,
        session_id: str,
        status: SessionStatus,
        *,
        reason: str | None = None,
        detail: str | None = None,
    ) -> SessionStatus:
        """End a session unless it has ended; the status it has now. Repeating it is fine."""
        with self._db.write() as session:
            row = session.get_one(TrainingSession, session_id)
            if row.status is SessionStatus.ACTIVE:
                row.status, row.finish_reason, row.finish_detail = status, reason, detail
                session.add(row)
            return row.status

    def silent_since(self, moment: datetime) -> list[str]:
        """Ids of active sessions last heard of before a moment."""
        with self._db.read() as session:
            statement = select(TrainingSession.id).where(
                TrainingSession.status == SessionStatus.ACTIVE,
                col(TrainingSession.heartbeat_at) < moment,
            )
            return list(session.exec(statement))

    # Runs.

    def run(self, tenant_id: str, run_id: str) -> TrainingRun:
        """A tenant's run. Raises: NotFound."""
        with self._db.read() as session:
            row = session.get(TrainingRun, run_id)
        if row is None or row.tenant_id != tenant_id:
            raise NotFound(f"there is no training run {run_id}")
        return row

    def runs(
        self, tenant_id: str | None = None, *, session_id: str | None = None
    ) -> Sequence[TrainingRun]:
        """Runs, newest first."""
        statement = select(TrainingRun).order_by(col(TrainingRun.created_at).desc())
        if tenant_id is not None:
            statement = statement.where(TrainingRun.tenant_id == tenant_id)
        if session_id is not None:
            statement = statement.where(TrainingRun.session_id == session_id)
        with self._db.read() as session:
            return session.exec(statement).all()

    def update_run(self, run_id: str, **fields: Any) -> TrainingRun:
        """Set columns of a run."""
        with self._db.write() as session:
            row = session.get_one(TrainingRun, run_id)
            for name, value in fields.items():
                setattr(row, name, value)
            session.add(row)
        return row

    # Operations.

    def append(
        self,
        *,
        run_id: str,
        tenant_id: str,
        key_id: str | None,
        seq: int,
        kind: str,
        payload: bytes,
        tokens: int = 0,
        digest: str = "",
        admit: Callable[[Session], str | None] | None = None,
        run: TrainingRun | None = None,
    ) -> LoggedOperation:
        """Commit an operation, or return the one this sequence id already has.

        Args:
            digest: of what was asked for.
            tokens: that it is billed for.
            admit: asked within the transaction of an operation that is new; says why it is to
                fail when its turn comes, or raises to keep it out.
            run: a new run's row, committed with its first operation.

        Raises:
            InvalidInput: if the sequence id was used for another operation.
        """
        row = LoggedOperation(
            id=self._new_id(),
            run_id=run_id,
            tenant_id=tenant_id,
            key_id=key_id,
            seq=seq,
            kind=kind,
            payload=payload,
            digest=digest,
            tokens=tokens,
            created_at=self._clock(),
        )
        try:
            with self._db.write() as session:
                known = _by_seq(session, run_id, seq)
                if known is not None:
                    return _checked(known, tenant_id, kind, digest)
                if run is not None:
                    session.add(run)
                    session.flush()
                refusal = admit(session) if admit is not None else None
                if refusal is not None:
                    row.error, row.category, row.tokens = refusal, "user", 0
                session.add(row)
            return row
        except IntegrityError:
            with self._db.read() as session:
                known = _by_seq(session, run_id, seq)
        if known is None:
            raise NotFound(f"there is no training run {run_id}")
        return _checked(known, tenant_id, kind, digest)

    def operation(self, tenant_id: str, request_id: str) -> LoggedOperation | None:
        """A tenant's operation by its request id, if there is one."""
        with self._db.read() as session:
            row = session.get(LoggedOperation, request_id)
        return row if row is not None and row.tenant_id == tenant_id else None

    def next_queued(self, run_id: str) -> LoggedOperation | None:
        """A run's queued operation of the lowest sequence id."""
        with self._db.read() as session:
            statement = select(LoggedOperation).where(
                LoggedOperation.run_id == run_id,
                LoggedOperation.status == OperationStatus.QUEUED,
            )
            return session.exec(statement.order_by(col(LoggedOperation.seq)).limit(1)).first()

    def runs_with_work(self) -> Sequence[TrainingRun]:
        """The runs that have queued operations."""
        with self._db.read() as session:
            queued = select(LoggedOperation.run_id).where(
                LoggedOperation.status == OperationStatus.QUEUED
            )
            return session.exec(select(TrainingRun).where(col(TrainingRun.id).in_(queued))).all()

    def last_settled(self, run_id: str) -> int:
        """The highest sequence id of a run whose result is known, -1 if none is."""
        with self._db.read() as session:
            statement = select(func.max(LoggedOperation.seq)).where(
                LoggedOperation.run_id == run_id,
                LoggedOperation.status != OperationStatus.QUEUED,
            )
            last = session.exec(statement).one()
        return -1 if last is None else int(last)

    def done_after(self, run_id: str, seq: int, kinds: frozenset[str]) -> Sequence[LoggedOperation]:
        """A run's operations that were done after a sequence id, in order, of some kinds."""
        with self._db.read() as session:
            statement = select(LoggedOperation).where(
                LoggedOperation.run_id == run_id,
                LoggedOperation.seq > seq,
                LoggedOperation.status == OperationStatus.DONE,
                col(LoggedOperation.kind).in_(kinds),
            )
            return session.exec(statement.order_by(col(LoggedOperation.seq))).all()

    def finish(
        self,
        request_id: str,
        result: bytes,
        *,
        also: Callable[[Session], object] | None = None,
    ) -> None:
        """Store an operation's result; ``also`` is done in the same transaction."""
        self._settle(request_id, also, status=OperationStatus.DONE, result=result)

    def fail(self, request_id: str, message: str, category: str) -> None:
        """Store an operation's failure."""
        failure = {"error": message, "category": category}
        self._settle(request_id, None, status=OperationStatus.FAILED, **failure)

    def _settle(
        self, request_id: str, also: Callable[[Session], object] | None, **fields: Any
    ) -> None:
        with self._db.write() as session:
            row = session.get_one(LoggedOperation, request_id)
            for name, value in fields.items():
                setattr(row, name, value)
            row.done_at = self._clock()
            session.add(row)
            if also is not None:
                also(session)

    def count_death(self, request_id: str) -> int:
        """Note that the engine died over an operation; how often it has."""
        with self._db.write() as session:
            row = session.get_one(LoggedOperation, request_id)
            row.deaths += 1
            session.add(row)
            return row.deaths

    def fail_queued(self, run_id: str, message: str) -> list[str]:
        """Fail all that waits in a run; the request ids."""
        with self._db.write() as session:
            rows = session.exec(
                select(LoggedOperation).where(
                    LoggedOperation.run_id == run_id,
                    LoggedOperation.status == OperationStatus.QUEUED,
                )
            ).all()
            for row in rows:
                row.status, row.error, row.category = OperationStatus.FAILED, message, "user"
                row.done_at = self._clock()
                session.add(row)
            return [row.id for row in rows]

    # Samplers.

    def add_sampler(self, row: Sampler) -> Sampler:
        """Add a sampler, or return the one its id already has."""
        with self._db.write() as session:
            known = session.get(Sampler, row.id)
            if known is None:
                session.add(row)
                return row
            return known

    def sampler(self, tenant_id: str, sampler_id: str) -> Sampler:
        """A tenant's sampler. Raises: NotFound."""
        with self._db.read() as session:
            row = session.get(Sampler, sampler_id)
        if row is None or row.tenant_id != tenant_id:
            raise NotFound(f"there is no sampler {sampler_id}")
        return row

    def join_sampler(self, tenant_id: str, sampler_id: str) -> int:
        """Count one more client of a tenant's sampler; its number. Raises: NotFound."""
        self.sampler(tenant_id, sampler_id)
        with self._db.write() as session:
            row = session.get_one(Sampler, sampler_id)
            row.clients += 1
            session.add(row)
            return row.clients

    def samplers(self, session_id: str, *, below: str | None = None) -> Sequence[Sampler]:
        """A session's samplers, newest first; only unnamed snapshots below a folder if given."""
        statement = select(Sampler).where(Sampler.session_id == session_id)
        if below is not None:
            statement = statement.where(
                col(Sampler.snapshot).startswith(f"{below}/", autoescape=True)
            )
        with self._db.read() as session:
            return session.exec(statement.order_by(col(Sampler.created_at).desc())).all()

    def drop_sampler(self, sampler_id: str) -> None:
        """Forget a sampler."""
        with self._db.write() as session:
            row = session.get(Sampler, sampler_id)
            if row is not None:
                session.delete(row)


def _by_seq(session: Session, run_id: str, seq: int) -> LoggedOperation | None:
    statement = select(LoggedOperation).where(
        LoggedOperation.run_id == run_id, LoggedOperation.seq == seq
    )
    return session.exec(statement).one_or_none()


def _checked(known: LoggedOperation, tenant_id: str, kind: str, digest: str) -> LoggedOperation:
    """What a sequence id has already, if this is a retry of it."""
    if known.tenant_id != tenant_id:
        raise NotFound(f"there is no training run {known.run_id}")
    if known.kind != kind or known.digest != digest:
        now = f"{kind} now" if known.kind != kind else "another one now"
        raise InvalidInput(
            f"sequence id {known.seq} of {known.run_id} was {known.kind} before and is {now}: "
            "two clients write to one run"
        )
    return known
