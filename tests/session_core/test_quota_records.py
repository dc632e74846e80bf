from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime, timedelta
from threading import Barrier

import pytest

from registry import Entry, InvalidInput, NotFound, QuotaExceeded, Registry, TooMany, UsageKind
from session_core import operations as op
from session_core.log import OperationLog
from session_core.models import SessionStatus, TrainingRun
from session_core.quota_records import Quotas
from session_core.quotas import Quota


class Office:
    """Quotas of two tenants, and a log to have them kept in."""

    def __init__(self, folder, **defaults):
        self.now = datetime(2026, 3, 1, 23, 0, tzinfo=UTC)
        self.registry = Registry.open(
            f"sqlite:///{folder / 'a.db'}", folder / "store", clock=lambda: self.now
        )
        self.db = self.registry.db
        self.db.create_all()
        self.tenant = self.registry.tenants.ensure_tenant("mine")
        self.other = self.registry.tenants.ensure_tenant("other")
        self.log = OperationLog(self.db, lambda: self.now, self.registry.new_id)
        self.quotas = Quotas(self.db, self.registry.usage, lambda: self.now, Quota(**defaults))

    def session(self, tenant=None):
        tenant = tenant or self.tenant
        return self.log.create_session(
            lambda session: self.quotas.admit_session(session, tenant),
            tenant_id=tenant,
            user_metadata={},
            tags=[],
        )

    def run(self, session_id, tenant=None):
        run = f"{session_id}:train:0"
        row = TrainingRun(
            id=run,
            session_id=session_id,
            tenant_id=tenant or self.tenant,
            base_model="b",
            lora={},
            user_metadata={},
            created_at=self.now,
        )
        made = self.append(run, 0, kind=op.CREATE_RUN, run=row, tenant=tenant)
        self.log.finish(made.id, b"made")
        return run

    def append(self, run_id, seq, *, tokens=0, kind=op.FORWARD, run=None, tenant=None, promised=0):
        def admit(session):
            self.quotas.admit_operation(
                session,
                tenant_id=tenant or self.tenant,
                run_id=run_id,
                seq=seq,
                tokens=tokens,
                promised=promised,
            )

        return self.log.append(
            run_id=run_id,
            tenant_id=tenant or self.tenant,
            key_id=None,
            seq=seq,
            kind=kind,
            payload=b"",
            tokens=tokens,
            admit=admit,
            run=run,
        )

    def use(self, operation, tokens, tenant=None):
        self.registry.usage.record(
            Entry(
                tenant_id=tenant or self.tenant,
                operation=operation,
                kind=UsageKind.SAMPLE,
                tokens=tokens,
            )
        )


@pytest.fixture
def office(tmp_path):
    made = Office(tmp_path)
    yield made
    made.db.close()


def test_limits_are_the_servers_until_a_tenant_has_its_own(office):
    assert office.quotas.of(office.tenant) == Quota()
    made = office.quotas.set(office.tenant, {"sessions": 3, "operations": None})
    assert (made.tenant, made.sessions, made.operations) == ("mine", 3, None)
    assert made.set_by_hand == ["operations", "sessions"]
    office.quotas.set(office.tenant, {"context": 64})
    assert office.quotas.of(office.tenant) == Quota(sessions=3, operations=None, context=64)
    assert office.quotas.of(office.other) == Quota()
    assert office.quotas.reset(office.tenant).set_by_hand == []
    assert office.quotas.of(office.tenant) == Quota()
    assert office.quotas.reset(office.tenant).sessions is None
    assert [view.tenant for view in office.quotas.list()] == ["mine", "other"]
    assert [view.tenant for view in office.quotas.list(office.other)] == ["other"]


def test_what_cannot_be_set_is_refused_and_nothing_is_set(office):
    with pytest.raises(InvalidInput, match="context is -1"):
        office.quotas.set(office.tenant, {"sessions": 1, "context": -1})
    assert office.quotas.of(office.tenant) == Quota()
    with pytest.raises(NotFound):
        office.quotas.set("nobody", {"sessions": 1})
    with pytest.raises(NotFound):
        office.quotas.reset("nobody")


def test_a_session_counts_until_it_ends(office):
    office.quotas.set(office.tenant, {"sessions": 2})
    first = office.session()
    office.session()
    with pytest.raises(QuotaExceeded, match="2 sessions are active"):
        office.session()
    office.session(office.other)
    office.log.end_session(first.id, SessionStatus.EXPIRED)
    office.session()
    (view,) = office.quotas.list(office.tenant)
    assert view.active_sessions == 2


def test_however_many_race_no_session_gets_past_the_limit(office):
    office.quotas.set(office.tenant, {"sessions": 3})
    together = Barrier(12)

    def open_one(_):
        together.wait()
        try:
            return office.session().id
        except QuotaExceeded:
            return None

    with ThreadPoolExecutor(12) as pool:
        opened = list(pool.map(open_one, range(12)))
    assert sum(name is not None for name in opened) == 3


def test_operations_that_wait_are_bounded_but_never_the_one_they_wait_for(office):
    run = office.run(office.session().id)
    office.quotas.set(office.tenant, {"operations": 2})
    waiting = office.append(run, 2)
    office.append(run, 3)
    with pytest.raises(TooMany, match="2 operations"):
        office.append(run, 4)
    # A retry of what is there is no operation more.
    assert office.append(run, 2).id == waiting.id
    # The first did not come yet: it must get in, or none would ever be done.
    missing = office.append(run, 1)
    office.log.finish(missing.id, b"")
    office.log.finish(waiting.id, b"")
    office.append(run, 4)
    (view,) = office.quotas.list(office.tenant)
    assert view.waiting_operations == 2


def test_the_days_tokens_are_those_used_those_that_wait_and_those_promised(office):
    run = office.run(office.session().id)
    office.quotas.set(office.tenant, {"tokens_per_day": 100})
    office.use("sampled", 30)
    office.use("theirs", 1000, office.other)
    office.append(run, 1, tokens=40)
    assert office.quotas.standing(office.tenant)[1] == 70
    with pytest.raises(QuotaExceeded, match="70 are used"):
        office.append(run, 2, tokens=31)
    with pytest.raises(QuotaExceeded):
        office.append(run, 2, tokens=30, promised=1)
    office.append(run, 2, tokens=30)
    office.append(run, 3)
    # The next day begins at midnight in UTC; what waits is still to be used.
    office.now += timedelta(hours=1)
    assert office.quotas.standing(office.tenant)[1] == 70
    assert office.quotas.standing(office.other) == (Quota(), 0)
