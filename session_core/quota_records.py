"""The quotas in the database: what each tenant may have, and how much of it is in use.

What counts is counted within the transaction that lets something more in, so that however
many requests race, none gets past a limit.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from datetime import datetime

from sqlmodel import Session, col, func, select

from registry import Database, NotFound, Usage, View, day_of
from registry.models import Tenant
from session_core.models import (
    LoggedOperation,
    OperationStatus,
    SessionStatus,
    TenantQuota,
    TrainingSession,
)
from session_core.quotas import Quota, check_limit


class QuotaView(View):
    """A tenant's limits (None: no limit), and what is in use.

    Fields:
        set_by_hand: the limits that are the tenant's own; the others are the server's.
        active_sessions, waiting_operations: now.
        tokens_today: used in this UTC day, with those of operations that wait.
    """

    tenant: str
    sessions: int | None
    operations: int | None
    samples: int | None
    tokens_per_day: int | None
    context: int | None
    set_by_hand: list[str]
    active_sessions: int
    waiting_operations: int
    tokens_today: int


class Quotas:
    """Quotas of tenants. Synchronous.

    Args:
        defaults: the server's, for what a tenant has no limit of its own of.
    """

    def __init__(
        self, db: Database, usage: Usage, clock: Callable[[], datetime], defaults: Quota
    ) -> None:
        self._db = db
        self._usage = usage
        self._clock = clock
        self._defaults = defaults

    def of(self, tenant_id: str) -> Quota:
        """A tenant's quota."""
        with self._db.read() as session:
            return self._of(session, tenant_id)

    def standing(self, tenant_id: str) -> tuple[Quota, int]:
        """A tenant's quota, and today's tokens as `tokens_today` counts them, if they matter."""
        with self._db.read() as session:
            quota = self._of(session, tenant_id)
            if quota.tokens_per_day is None:
                return quota, 0
            return quota, self.tokens_today(session, tenant_id)

    def list(self, tenant_id: str | None = None) -> list[QuotaView]:
        """The quotas of all tenants by name, or of one."""
        with self._db.read() as session:
            statement = select(Tenant).order_by(Tenant.name)
            if tenant_id is not None:
                statement = statement.where(Tenant.id == tenant_id)
            return [self._view(session, tenant) for tenant in session.exec(statement).all()]

    def set(self, tenant_id: str, limits: Mapping[str, int | None]) -> QuotaView:
        """Set some of a tenant's limits; None takes a limit away, also one of the server's.

        Raises:
            InvalidInput: for a limit there is none of, or that is out of bounds.
            NotFound: if there is no such tenant.
        """
        checked = {name: check_limit(name, value) for name, value in limits.items()}
        with self._db.write() as session:
            tenant = _tenant(session, tenant_id)
            row = session.get(TenantQuota, tenant_id)
            known = row.limits if row is not None else {}
            row = row or TenantQuota(tenant_id=tenant_id, limits={}, set_at=self._clock())
            row.limits, row.set_at = {**known, **checked}, self._clock()
            session.add(row)
            session.flush()
            return self._view(session, tenant)

    def reset(self, tenant_id: str) -> QuotaView:
        """Give a tenant the server's limits again. Raises: NotFound."""
        with self._db.write() as session:
            tenant = _tenant(session, tenant_id)
            row = session.get(TenantQuota, tenant_id)
            if row is not None:
                session.delete(row)
                session.flush()
            return self._view(session, tenant)

    # Within the transaction of what is let in.

    def admit_session(self, session: Session, tenant_id: str) -> None:
        """Let a session in. Raises: QuotaExceeded."""
        self._of(session, tenant_id).check_sessions(self._active(session, tenant_id))

    def admit_operation(
        self,
        session: Session,
        *,
        tenant_id: str,
        run_id: str,
        seq: int,
        tokens: int,
        promised: int = 0,
    ) -> Quota:
        """Let an operation in; the quota that it keeps to.

        Args:
            tokens: that it is billed for.
            promised: tokens that samples under way may still use.

        Raises:
            TooMany: if too many wait; never for the one whose turn it is, for which those of
                its run that wait can do nothing but wait.
            QuotaExceeded: if there are not so many tokens left today.
        """
        quota = self._of(session, tenant_id)
        if quota.operations is not None and not self._is_next(session, run_id, seq):
            quota.check_operations(self._waiting(session, tenant_id))
        if quota.tokens_per_day is not None and tokens:
            quota.check_tokens(self.tokens_today(session, tenant_id) + promised, tokens)
        return quota

    def tokens_today(self, session: Session, tenant_id: str) -> int:
        """Tokens a tenant used in this UTC day, with those of operations that wait."""
        waiting = session.exec(
            select(func.sum(LoggedOperation.tokens)).where(
                LoggedOperation.tenant_id == tenant_id,
                LoggedOperation.status == OperationStatus.QUEUED,
            )
        ).one()
        used = self._usage.on_day(session, tenant_id, day_of(self._clock()))
        return used + int(waiting or 0)

    def _of(self, session: Session, tenant_id: str) -> Quota:
        row = session.get(TenantQuota, tenant_id)
        return self._defaults.with_limits(row.limits) if row is not None else self._defaults

    def _view(self, session: Session, tenant: Tenant) -> QuotaView:
        row = session.get(TenantQuota, tenant.id)
        quota = self._of(session, tenant.id)
        return QuotaView(
            tenant=tenant.name,
            sessions=quota.sessions,
            operations=quota.operations,
            samples=quota.samples,
            tokens_per_day=quota.tokens_per_day,
            context=quota.context,
            set_by_hand=sorted(row.limits) if row is not None else [],
            active_sessions=self._active(session, tenant.id),
            waiting_operations=self._waiting(session, tenant.id),
            tokens_today=self.tokens_today(session, tenant.id),
        )

    @staticmethod
    def _active(session: Session, tenant_id: str) -> int:
        statement = select(func.count()).where(
            TrainingSession.tenant_id == tenant_id,
            TrainingSession.status == SessionStatus.ACTIVE,
        )
        return session.exec(statement).one()

    @staticmethod
    def _waiting(session: Session, tenant_id: str) -> int:
        statement = select(func.count()).where(
            LoggedOperation.tenant_id == tenant_id,
            LoggedOperation.status == OperationStatus.QUEUED,
        )
        return session.exec(statement).one()

    @staticmethod
    def _is_next(session: Session, run_id: str, seq: int) -> bool:
        """Whether all operations of the run before this one are there, and settled."""
        settled = session.exec(
            select(func.max(LoggedOperation.seq)).where(
                LoggedOperation.run_id == run_id,
                col(LoggedOperation.status) != OperationStatus.QUEUED,
            )
        ).one()
        return seq == (-1 if settled is None else int(settled)) + 1


def _tenant(session: Session, tenant_id: str) -> Tenant:
    tenant = session.get(Tenant, tenant_id)
    if tenant is None:
        raise NotFound(f"there is no tenant {tenant_id}")
    return tenant
