"""Copies: a second path for what is saved, in a run of its own that is never trained."""

from __future__ import annotations

import uuid
from collections.abc import Callable
from datetime import datetime

from sqlmodel import Session

from registry import Database, InvalidInput, NotFound, Principal, VersionView
from session_core.models import SavedPath, SessionStatus, TrainingRun, TrainingSession
from session_core.paths import TinkerPath, parse_path, run_id_of
from session_core.saved import check_ttl, expiry

# Idempotency keys are a client's own; in here they become ids that nobody else can have.
_NAMESPACE = uuid.UUID("9c4f0d9e-3f0c-4f1a-9a44-6f6a3d3e7a10")


class Copies:
    """Makes copies. Synchronous. No bytes are copied: both paths name one version."""

    def __init__(self, db: Database, clock: Callable[[], datetime]) -> None:
        self._db = db
        self._clock = clock

    def into_session(
        self,
        caller: Principal,
        source: str,
        version: VersionView,
        *,
        session_id: str,
        number: int,
        ttl_seconds: int | None,
    ) -> str:
        """The path of a copy in a run of a session; asked again, the same.

        Raises:
            NotFound: if the session is not the caller's.
            InvalidInput: if it has ended, or has another run of that number.
        """
        with self._db.write() as session:
            owner = session.get(TrainingSession, session_id)
            if owner is None or owner.tenant_id != caller.tenant_id:
                raise NotFound(f"there is no session {session_id}")
            if owner.status is not SessionStatus.ACTIVE:
                raise InvalidInput(f"session {session_id} is {owner.status.value}: take another")
            return self._copy(session, caller, source, version, session_id, number, ttl_seconds)

    def into_project(
        self,
        caller: Principal,
        source: str,
        version: VersionView,
        *,
        project_id: str,
        token: str,
        ttl_seconds: int | None,
    ) -> str:
        """The path of a copy in a new session of a project, which is finished from the start.

        Args:
            token: names the request; asked again with it, the path is the same.

        Raises:
            InvalidInput: if the token named another copy.
        """
        session_id = str(uuid.uuid5(_NAMESPACE, f"{caller.tenant_id}:{token}"))
        with self._db.write() as session:
            if session.get(TrainingSession, session_id) is None:
                now = self._clock()
                row = TrainingSession(
                    id=session_id,
                    tenant_id=caller.tenant_id,
                    key_id=caller.key_id,
                    status=SessionStatus.FINISHED,
                    user_metadata={},
                    tags=[],
                    project_id=project_id,
                    finish_reason="success",
                    finish_detail=f"made to hold a copy of {source}",
                    created_at=now,
                    heartbeat_at=now,
                )
                session.add(row)
                session.flush()
            return self._copy(session, caller, source, version, session_id, 0, ttl_seconds)

    def _copy(
        self,
        session: Session,
        caller: Principal,
        source: str,
        version: VersionView,
        session_id: str,
        number: int,
        ttl_seconds: int | None,
    ) -> str:
        original = parse_path(source)
        run_id = run_id_of(session_id, number)
        path = TinkerPath(run_id=run_id, kind=original.kind, name=original.name)
        known = session.get(TrainingRun, run_id)
        if known is not None:
            if known.copy_of != source:
                what = f"a copy of {known.copy_of}" if known.copy_of else "a run of its own"
                raise InvalidInput(f"{run_id} is {what} already: copy under another number")
            return str(path)
        now = self._clock()
        run = TrainingRun(
            id=run_id,
            session_id=session_id,
            tenant_id=caller.tenant_id,
            base_model=version.base_model,
            parent_version_id=version.id,
            lora=version.lora,
            user_metadata={},
            copy_of=source,
            created_at=now,
        )
        session.add(run)
        session.flush()
        saved = SavedPath(
            path=str(path),
            run_id=run_id,
            tenant_id=caller.tenant_id,
            kind=path.kind,
            version_id=version.id,
            size_bytes=version.size_bytes,
            created_at=now,
            expires_at=expiry(now, check_ttl(ttl_seconds)),
        )
        session.add(saved)
        return str(path)
