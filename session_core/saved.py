"""What ``tinker://`` paths name, until when, and why one names nothing any more."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any

from sqlalchemy import ColumnElement, and_, or_
from sqlmodel import Session, col, func, select

from registry import Database, InvalidInput, NotFound
from registry.models import Version
from session_core.listing import project
from session_core.models import SavedPath, TrainingRun, TrainingSession
from session_core.paths import TinkerPath, parse_path

# Bounds of a time to live, in seconds: one hour, ten years.
SHORTEST_TTL = 3600
LONGEST_TTL = 10 * 365 * 24 * 3600


def check_ttl(seconds: int | None) -> int | None:
    """A time to live, checked. Raises: InvalidInput: naming the bounds."""
    if seconds is not None and not SHORTEST_TTL <= seconds <= LONGEST_TTL:
        raise InvalidInput(
            f"a time to live of {seconds} s is out of bounds: give {SHORTEST_TTL} s (an hour) to "
            f"{LONGEST_TTL} s (ten years), or none to keep it"
        )
    return seconds


@dataclass(frozen=True, kw_only=True)
class Saved:
    """What a path names.

    Fields:
        version_id: the version, or None for an export, whose ``folder`` is below sessions/.
        user_metadata: the version's.
    """

    path: str
    run_id: str
    kind: str
    version_id: str | None
    folder: str | None
    size_bytes: int
    created_at: datetime
    expires_at: datetime | None
    user_metadata: Mapping[str, Any]


@dataclass(frozen=True, kw_only=True)
class Stored:
    """How much one key's sessions of one project have saved and not removed."""

    project_id: str
    key_id: str | None
    count: int
    size_bytes: int


class SavedPaths:
    """The table of paths. Synchronous.

    A path that has expired is gone at that moment; `expire` only notes it and says which
    files can be dropped.
    """

    def __init__(self, db: Database, clock: Callable[[], datetime]) -> None:
        self._db = db
        self._clock = clock

    def put(
        self,
        path: TinkerPath,
        *,
        tenant_id: str,
        size_bytes: int,
        version_id: str | None = None,
        folder: str | None = None,
        ttl_seconds: int | None = None,
    ) -> None:
        """Let a path name a version or an export from now on, whatever it named before."""
        now = self._clock()
        with self._db.write() as session:
            row = session.get(SavedPath, str(path)) or SavedPath(
                path=str(path),
                run_id=path.run_id,
                tenant_id=tenant_id,
                kind=path.kind,
                size_bytes=size_bytes,
                created_at=now,
            )
            row.version_id, row.folder, row.size_bytes = version_id, folder, size_bytes
            row.created_at, row.removed_at = now, None
            row.expires_at = expiry(now, ttl_seconds)
            session.add(row)

    def find(self, tenant_id: str, path: str) -> Saved | None:
        """What a tenant's path names, if anything."""
        with self._db.read() as session:
            rows = self._rows(session, SavedPath.tenant_id == tenant_id, SavedPath.path == path)
        return rows[0] if rows else None

    def get(self, tenant_id: str, path: str) -> Saved:
        """What a tenant's path names.

        Raises:
            InvalidInput: if it is no path.
            NotFound: if it names nothing, saying what became of it.
        """
        parsed = parse_path(path)
        found = self.find(tenant_id, path)
        if found is not None:
            return found
        with self._db.read() as session:
            row = session.get(SavedPath, path)
            if row is not None and row.tenant_id == tenant_id:
                raise NotFound(_fate(row))
            alike = select(SavedPath.path).where(
                SavedPath.tenant_id == tenant_id,
                SavedPath.run_id == parsed.run_id,
                col(SavedPath.path).endswith(f"/{parsed.name}", autoescape=True),
                self._live(),
            )
            other = session.exec(alike.order_by(SavedPath.path).limit(1)).first()
        hint = f"; did you mean {other}?" if other is not None else ""
        raise NotFound(f"nothing is saved at {path}{hint}")

    def remove(self, tenant_id: str, path: str) -> str | None:
        """Let a path name nothing any more; the folder of files to drop, if it had its own.

        Removing what was removed, or has expired, is fine.

        Raises:
            NotFound: if nothing was ever saved there.
        """
        with self._db.write() as session:
            row = self._owned(session, tenant_id, path)
            if row.removed_at is None:
                row.removed_at = self._clock()
                session.add(row)
            return row.folder

    def set_ttl(self, tenant_id: str, path: str, seconds: int | None) -> None:
        """Let a path expire some seconds from now, or never (None).

        Raises:
            InvalidInput: for seconds out of bounds.
            NotFound: if it names nothing.
        """
        check_ttl(seconds)
        with self._db.write() as session:
            row = self._owned(session, tenant_id, path)
            now = self._clock()
            expired = row.expires_at is not None and row.expires_at <= now
            if row.removed_at is not None or expired:
                raise NotFound(_fate(row))
            row.expires_at = expiry(now, seconds)
            session.add(row)

    def expire(self) -> list[str]:
        """Note what has expired since the last time; the folders of files to drop."""
        with self._db.write() as session:
            statement = select(SavedPath).where(
                col(SavedPath.removed_at).is_(None), col(SavedPath.expires_at) <= self._clock()
            )
            rows = session.exec(statement).all()
            for row in rows:
                row.removed_at = row.expires_at
                session.add(row)
            return [row.folder for row in rows if row.folder is not None]

    def of_run(self, tenant_id: str, run_id: str) -> Sequence[Saved]:
        """Everything saved from a run, newest first."""
        with self._db.read() as session:
            return self._rows(session, SavedPath.tenant_id == tenant_id, SavedPath.run_id == run_id)

    def page(self, tenant_id: str, *, limit: int, offset: int) -> tuple[Sequence[Saved], int]:
        """A page of what a tenant has saved, newest first, and how much there is in all."""
        mine = SavedPath.tenant_id == tenant_id
        with self._db.read() as session:
            total = session.exec(
                select(func.count()).select_from(SavedPath).where(mine, self._live())
            ).one()
            return self._rows(session, mine, limit=limit, offset=offset), total

    def newest(self, run_ids: Sequence[str]) -> dict[tuple[str, str], Saved]:
        """The newest save of each kind of each run, by (run id, kind)."""
        rank = func.row_number().over(
            partition_by=(col(SavedPath.run_id), col(SavedPath.kind)),
            order_by=(col(SavedPath.created_at).desc(), col(SavedPath.path)),
        )
        ranked = (
            select(col(SavedPath.path), rank.label("rank"))
            .where(col(SavedPath.run_id).in_(run_ids), self._live())
            .subquery()
        )
        first = select(ranked.c.path).where(ranked.c.rank == 1)
        with self._db.read() as session:
            rows = self._rows(session, col(SavedPath.path).in_(first))
        return {(row.run_id, row.kind): row for row in rows}

    def stored(self, tenant_id: str, *, project_id: str | None = None) -> Sequence[Stored]:
        """What a tenant's saves take, by project and key."""
        statement = (
            select(
                project(),
                TrainingSession.key_id,
                func.count(),
                func.sum(SavedPath.size_bytes),
            )
            .select_from(SavedPath)
            .join(TrainingRun, col(TrainingRun.id) == SavedPath.run_id)
            .join(TrainingSession, col(TrainingSession.id) == TrainingRun.session_id)
            .where(SavedPath.tenant_id == tenant_id, self._live())
            .group_by(project(), col(TrainingSession.key_id))
            .order_by(project(), col(TrainingSession.key_id))
        )
        if project_id is not None:
            statement = statement.where(project() == project_id)
        with self._db.read() as session:
            return [
                Stored(project_id=name, key_id=key, count=count, size_bytes=int(size))
                for name, key, count, size in session.exec(statement)
            ]

    def _live(self) -> ColumnElement[bool]:
        return and_(
            col(SavedPath.removed_at).is_(None),
            or_(col(SavedPath.expires_at).is_(None), col(SavedPath.expires_at) > self._clock()),
        )

    def _rows(
        self, session: Session, *conditions: Any, limit: int | None = None, offset: int = 0
    ) -> Sequence[Saved]:
        statement = (
            select(SavedPath, col(Version.user_metadata))
            .join(Version, col(Version.id) == SavedPath.version_id, isouter=True)
            .where(*conditions, self._live())
            .order_by(col(SavedPath.created_at).desc(), col(SavedPath.path))
            .offset(offset)
            .limit(limit)
        )
        return [
            Saved(
                **row.model_dump(exclude={"tenant_id", "removed_at"}), user_metadata=metadata or {}
            )
            for row, metadata in session.exec(statement)
        ]

    @staticmethod
    def _owned(session: Session, tenant_id: str, path: str) -> SavedPath:
        parse_path(path)
        row = session.get(SavedPath, path)
        if row is None or row.tenant_id != tenant_id:
            raise NotFound(f"nothing is saved at {path}")
        return row


def expiry(now: datetime, seconds: int | None) -> datetime | None:
    """When something expires that lives for some seconds from now."""
    return None if seconds is None else now + timedelta(seconds=seconds)


def _fate(row: SavedPath) -> str:
    """Why a path names nothing any more."""
    if row.removed_at is not None and row.removed_at != row.expires_at:
        return f"{row.path} was deleted at {_shown(row.removed_at)}"
    assert row.expires_at is not None
    return f"{row.path} expired at {_shown(row.expires_at)}: its time to live was over"


def _shown(moment: datetime) -> str:
    return moment.isoformat(sep=" ", timespec="seconds")
