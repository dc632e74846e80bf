"""Pages of runs and sessions, found by the database and never by loading all there is."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any

from sqlalchemy import ColumnElement, and_, false, or_
from sqlmodel import col, func, select

from registry import Database, InvalidInput, NotFound
from session_core.models import (
    LoggedOperation,
    SavedPath,
    SessionStatus,
    TrainingRun,
    TrainingSession,
)

NO_PROJECT = "default"
"""The project of a session that was put into none."""


@dataclass(frozen=True, kw_only=True)
class ListedRun:
    """A run and the time of its last request."""

    run: TrainingRun
    last_request: datetime


@dataclass(frozen=True, kw_only=True)
class ListedSession:
    """A session, and how much was saved in it and not removed."""

    session: TrainingSession
    saves: int
    saved_bytes: int


@dataclass(frozen=True, kw_only=True)
class Search:
    """Which sessions to find; what is None or empty finds all.

    Fields:
        session_id, display_name: either one matches; each word of the name must occur.
        user_metadata: every pair must be there.
        finished: reasons that a client may have finished with, beside ``statuses``.
        after: (created_at, id) of the last session of the page before.
    """

    session_id: str | None = None
    display_name: str | None = None
    project_ids: Sequence[str] | None = None
    user_metadata: Mapping[str, str] = field(default_factory=dict)
    statuses: Sequence[SessionStatus] | None = None
    finished: Sequence[str] | None = None
    after: tuple[datetime, str] | None = None


class Listing:
    """Lists a tenant's runs and sessions, newest first. Synchronous."""

    def __init__(self, db: Database) -> None:
        self._db = db

    def runs(
        self, tenant_id: str, *, limit: int, offset: int, project_id: str | None = None
    ) -> tuple[Sequence[ListedRun], int]:
        """A page of runs, and how many there are in all."""
        wanted: list[ColumnElement[bool]] = [col(TrainingRun.tenant_id) == tenant_id]
        if project_id is not None:
            of_project = select(TrainingSession.id).where(project() == project_id)
            wanted.append(col(TrainingRun.session_id).in_(of_project))
        order = (col(TrainingRun.created_at).desc(), col(TrainingRun.id))
        with self._db.read() as session:
            total = session.exec(select(func.count()).select_from(TrainingRun).where(*wanted)).one()
            statement = select(TrainingRun, self._last_request()).where(*wanted)
            rows = session.exec(statement.order_by(*order).limit(limit).offset(offset)).all()
        return [_listed(run, last) for run, last in rows], total

    def run(self, run: TrainingRun) -> ListedRun:
        """One run as it is listed."""
        with self._db.read() as session:
            statement = select(self._last_request()).where(TrainingRun.id == run.id)
            return _listed(run, session.exec(statement).one())

    @staticmethod
    def _last_request() -> Any:
        # The highest sequence id came last, near enough, and is found by an index.
        return (
            select(LoggedOperation.created_at)
            .where(LoggedOperation.run_id == TrainingRun.id)
            .order_by(col(LoggedOperation.seq).desc())
            .limit(1)
            .correlate(TrainingRun)
            .scalar_subquery()
        )

    def session_ids(self, tenant_id: str, *, limit: int, offset: int) -> Sequence[str]:
        """A page of sessions' ids."""
        order = (col(TrainingSession.created_at).desc(), col(TrainingSession.id))
        with self._db.read() as session:
            statement = select(TrainingSession.id).where(TrainingSession.tenant_id == tenant_id)
            return session.exec(statement.order_by(*order).limit(limit).offset(offset)).all()

    def assign_project(self, tenant_id: str, session_id: str, project_id: str) -> None:
        """Put a session into a project. Raises: NotFound: if the tenant has no such session."""
        with self._db.write() as session:
            row = session.get(TrainingSession, session_id)
            if row is None or row.tenant_id != tenant_id:
                raise NotFound(f"there is no session {session_id}")
            row.project_id = project_id
            session.add(row)

    def search(
        self, tenant_id: str, search: Search, *, limit: int, now: datetime
    ) -> tuple[Sequence[ListedSession], bool]:
        """Up to ``limit`` sessions, and whether there are more behind them.

        Raises:
            InvalidInput: for a metadata key that the database cannot look for.
        """
        wanted = [col(TrainingSession.tenant_id) == tenant_id, *_conditions(search)]
        order = (col(TrainingSession.created_at).desc(), col(TrainingSession.id).desc())
        with self._db.read() as session:
            statement = select(TrainingSession).where(*wanted).order_by(*order)
            rows = session.exec(statement.limit(limit + 1)).all()
            saved = {
                session_id: (count, int(size))
                for session_id, count, size in session.exec(
                    select(TrainingRun.session_id, func.count(), func.sum(SavedPath.size_bytes))
                    .join(SavedPath, col(SavedPath.run_id) == TrainingRun.id)
                    .where(
                        col(TrainingRun.session_id).in_([row.id for row in rows]),
                        col(SavedPath.removed_at).is_(None),
                        or_(col(SavedPath.expires_at).is_(None), col(SavedPath.expires_at) > now),
                    )
                    .group_by(TrainingRun.session_id)
                )
            }
        found = []
        for row in rows[:limit]:
            saves, size = saved.get(row.id, (0, 0))
            found.append(ListedSession(session=row, saves=saves, saved_bytes=size))
        return found, len(rows) > limit


def project() -> ColumnElement[str]:
    """The project a session is in."""
    return func.coalesce(col(TrainingSession.project_id), NO_PROJECT)


def _listed(run: TrainingRun, last: datetime | None) -> ListedRun:
    return ListedRun(run=run, last_request=last or run.created_at)


def _conditions(search: Search) -> list[ColumnElement[bool]]:
    wanted: list[ColumnElement[bool]] = []
    named: list[ColumnElement[bool]] = []
    if search.session_id is not None:
        named.append(col(TrainingSession.id) == search.session_id)
    if search.display_name is not None:
        words = search.display_name.split()
        held = [col(TrainingSession.display_name).icontains(w, autoescape=True) for w in words]
        named.append(and_(*held) if held else false())
    if named:
        wanted.append(or_(*named))
    if search.project_ids is not None:
        wanted.append(project().in_(search.project_ids))
    for key, value in search.user_metadata.items():
        if '"' in key or "\\" in key:
            raise InvalidInput(f"the metadata key {key!r} cannot be searched for: it has a quote")
        wanted.append(col(TrainingSession.user_metadata)[key].as_string() == value)
    if search.statuses is not None or search.finished is not None:
        any_of: list[ColumnElement[bool]] = [col(TrainingSession.status).in_(search.statuses or ())]
        if search.finished is not None:
            any_of.append(
                and_(
                    col(TrainingSession.status) == SessionStatus.FINISHED,
                    col(TrainingSession.finish_reason).in_(search.finished),
                )
            )
        wanted.append(or_(*any_of))
    if search.after is not None:
        moment, last = search.after
        created = col(TrainingSession.created_at)
        same = and_(created == moment, col(TrainingSession.id) < last)
        wanted.append(or_(created < moment, same))
    return wanted
