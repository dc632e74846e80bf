"""The ledger of tokens: each operation once, however often it is replayed."""

from __future__ import annotations

from collections.abc import Callable
from datetime import datetime

from sqlalchemy.exc import IntegrityError
from sqlmodel import col, func, select

from registry.database import Database
from registry.errors import InvalidInput
from registry.models import UsageRecord
from registry.views import UsageView

KINDS = ("train", "prefill", "sample")


class Usage:
    """Records tokens and adds them up."""

    def __init__(self, db: Database, clock: Callable[[], datetime]) -> None:
        self._db = db
        self._clock = clock

    def record(
        self,
        *,
        tenant_id: str,
        key_id: str | None,
        operation: str,
        kind: str,
        session_id: str | None,
        tokens: int,
    ) -> bool:
        """Enter an operation; False if it was entered before.

        Args:
            operation: names the operation and kind once for all, such as a request id.
            kind: ``train``, ``prefill`` or ``sample``.
        """
        if kind not in KINDS or tokens < 0:
            raise InvalidInput(f"cannot meter {tokens} tokens of kind {kind!r}")
        row = UsageRecord(
            tenant_id=tenant_id,
            key_id=key_id,
            operation=operation,
            kind=kind,
            session_id=session_id,
            tokens=tokens,
            created_at=self._clock(),
        )
        try:
            with self._db.write() as session:
                session.add(row)
                session.flush()
        except IntegrityError as error:
            # Only the operation's uniqueness means "entered before".
            if "operation" not in str(error.orig):
                raise
            return False
        return True

    def totals(self, tenant_id: str) -> list[UsageView]:
        """A tenant's tokens and operations by kind."""
        with self._db.read() as session:
            statement = (
                select(
                    UsageRecord.kind,
                    func.sum(UsageRecord.tokens),
                    func.count(col(UsageRecord.id)),
                )
                .where(UsageRecord.tenant_id == tenant_id)
                .group_by(UsageRecord.kind)
                .order_by(UsageRecord.kind)
            )
            return [
                UsageView(kind=kind, tokens=int(tokens), operations=operations)
                for kind, tokens, operations in session.exec(statement)
            ]
