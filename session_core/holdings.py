"""What a tenant has stored, and what its sessions say of themselves."""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from sqlmodel import col, func, or_, select

from registry import Database
from session_core.listing import project
from session_core.models import SavedPath, TrainingRun, TrainingSession

_AT_ONCE = 500
"""Ids in one statement: databases bound how many there may be."""


@dataclass(frozen=True, kw_only=True)
class Stored:
    """Checkpoints of one project that are there now."""

    project_id: str
    count: int
    size_bytes: int


class Holdings:
    """Adds up what a tenant holds. Synchronous."""

    def __init__(self, db: Database, clock: Callable[[], datetime]) -> None:
        self._db = db
        self._clock = clock

    def stored(self, tenant_id: str, *, project_id: str | None = None) -> list[Stored]:
        """The checkpoints that were neither removed nor have expired, a row a project."""
        name = project()
        statement = (
            select(name, func.count(), func.sum(SavedPath.size_bytes))
            .select_from(SavedPath)
            .join(TrainingRun, col(TrainingRun.id) == SavedPath.run_id)
            .join(TrainingSession, col(TrainingSession.id) == TrainingRun.session_id)
            .where(
                SavedPath.tenant_id == tenant_id,
                col(SavedPath.removed_at).is_(None),
                or_(col(SavedPath.expires_at).is_(None), col(SavedPath.expires_at) > self._clock()),
            )
            .group_by(name)
            .order_by(name)
        )
        if project_id is not None:
            statement = statement.where(name == project_id)
        with self._db.read() as session:
            return [
                Stored(project_id=found, count=count, size_bytes=int(size))
                for found, count, size in session.exec(statement)
            ]

    def described(
        self, tenant_id: str, session_ids: Collection[str]
    ) -> dict[str, tuple[dict[str, Any], str]]:
        """The metadata and the project of a tenant's sessions, by id."""
        wanted = sorted(session_ids)
        found: dict[str, tuple[dict[str, Any], str]] = {}
        with self._db.read() as session:
            for begin in range(0, len(wanted), _AT_ONCE):
                statement = select(
                    TrainingSession.id, TrainingSession.user_metadata, project()
                ).where(
                    TrainingSession.tenant_id == tenant_id,
                    col(TrainingSession.id).in_(wanted[begin : begin + _AT_ONCE]),
                )
                found.update(
                    {key: (dict(said), name) for key, said, name in session.exec(statement)}
                )
        return found
