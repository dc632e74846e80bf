"""The ledger of tokens: each operation once, however often it is replayed."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, date, datetime
from decimal import Decimal
from typing import Literal

from sqlalchemy import extract
from sqlalchemy import select as select_columns
from sqlmodel import Session, col, func, select

from registry.database import Database
from registry.errors import InvalidInput
from registry.models import ApiKey, UsageKind, UsageRecord
from registry.prices import price_of
from registry.views import HourView, UsageView

Grouping = Literal["kind", "day", "session", "key"]
MILLION = Decimal(1_000_000)
_COLUMNS = {
    "kind": UsageRecord.kind,
    "day": UsageRecord.day,
    "session": UsageRecord.session_id,
    "key": UsageRecord.key_id,
}


@dataclass(frozen=True, kw_only=True)
class Entry:
    """Tokens of one kind that an operation used.

    Fields:
        operation: names the operation and kind once for all, such as a request id.
        key_id: the API key it came with.
        base_model: for its price.
    """

    tenant_id: str
    operation: str
    kind: UsageKind
    tokens: int
    key_id: str | None = None
    session_id: str | None = None
    base_model: str | None = None


class Usage:
    """Records tokens and adds them up."""

    def __init__(self, db: Database, clock: Callable[[], datetime]) -> None:
        self._db = db
        self._clock = clock

    def record(self, *entries: Entry) -> int:
        """Enter operations, all or none; how many of them were not entered before."""
        with self._db.write() as session:
            return self.enter(session, *entries)

    def enter(self, session: Session, *entries: Entry) -> int:
        """As `record`, within the transaction that makes the operations' results known.

        So an operation whose result is stored is in the ledger, and one that was lost, or
        failed, is not.
        """
        now = self._clock()
        new = 0
        for entry in entries:
            if entry.tokens < 0:
                raise InvalidInput(f"cannot meter {entry.tokens} tokens")
            known = select(UsageRecord.id).where(UsageRecord.operation == entry.operation)
            if session.exec(known).first() is not None:
                continue
            row = UsageRecord(
                tenant_id=entry.tenant_id,
                key_id=entry.key_id,
                operation=entry.operation,
                kind=entry.kind.value,
                session_id=entry.session_id,
                base_model=entry.base_model,
                tokens=entry.tokens,
                price=price_of(session, entry.kind, entry.base_model),
                day=day_of(now),
                created_at=now,
            )
            session.add(row)
            session.flush()
            new += 1
        return new

    def totals(
        self, tenant_id: str, *, by: Grouping = "kind", since: date | None = None
    ) -> list[UsageView]:
        """A tenant's tokens, operations and cost: a row a kind in each group, in order.

        Args:
            since: the first day (UTC) that counts.
        """
        group = _COLUMNS[by]
        # Tokens of one price at a time, so that the cost is exact: no database has decimals
        # that all others have too.
        statement = (
            select_columns(
                col(group),
                col(UsageRecord.kind),
                col(UsageRecord.price),
                func.sum(UsageRecord.tokens),
                func.count(col(UsageRecord.id)),
            )
            .where(col(UsageRecord.tenant_id) == tenant_id)
            .group_by(col(group), col(UsageRecord.kind), col(UsageRecord.price))
        )
        if since is not None:
            statement = statement.where(col(UsageRecord.day) >= since.isoformat())
        with self._db.read() as session:
            parts = session.execute(statement).all()
            names: dict[str | None, str] = {}
            if by == "key":
                keys = select(ApiKey).where(ApiKey.tenant_id == tenant_id)
                names = {key.id: key.name for key in session.exec(keys)}
        made: dict[tuple[str, str], UsageView] = {}
        for name, kind, price, tokens, operations in parts:
            cost = None if price is None else Decimal(price) * int(tokens) / MILLION
            row = UsageView(
                group=name,
                name=names.get(name),
                kind=UsageKind(kind),
                tokens=int(tokens),
                operations=operations,
                cost=cost,
            )
            place = (name or "", kind)
            made[place] = made[place].plus(row) if place in made else row
        return [made[place] for place in sorted(made)]

    def by_hour(self, tenant_id: str, *, start: datetime, end: datetime) -> list[HourView]:
        """A tenant's tokens of each hour (UTC) in [start, end): by hour, the most first."""
        groups = (
            col(UsageRecord.day),
            extract("hour", col(UsageRecord.created_at)),
            col(UsageRecord.kind),
            col(UsageRecord.session_id),
            col(UsageRecord.base_model),
            col(UsageRecord.price),
        )
        statement = (
            select_columns(*groups, func.sum(UsageRecord.tokens))
            .where(
                col(UsageRecord.tenant_id) == tenant_id,
                # The day is what the index finds; the time is exact.
                col(UsageRecord.day).between(day_of(start), day_of(end)),
                col(UsageRecord.created_at) >= start,
                col(UsageRecord.created_at) < end,
            )
            .group_by(*groups)
        )
        with self._db.read() as session:
            rows = session.execute(statement).all()
        made = [
            HourView(
                start=datetime.fromisoformat(day).replace(hour=int(hour), tzinfo=UTC),
                kind=UsageKind(kind),
                session_id=session_id,
                base_model=base_model,
                tokens=int(tokens),
                price=None if price is None else Decimal(price),
            )
            for day, hour, kind, session_id, base_model, price, tokens in rows
        ]
        return sorted(made, key=lambda row: (row.start, -row.tokens))

    def on_day(self, session: Session, tenant_id: str, day: str) -> int:
        """All tokens of a tenant on a UTC day (``2026-01-31``), within a transaction."""
        statement = select(func.sum(UsageRecord.tokens)).where(
            UsageRecord.tenant_id == tenant_id, UsageRecord.day == day
        )
        return int(session.exec(statement).one() or 0)


def day_of(moment: datetime) -> str:
    """The UTC day of a moment, as the ledger writes it."""
    return moment.astimezone(UTC).date().isoformat()
