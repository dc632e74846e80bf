from __future__ import annotations

from datetime import UTC, date, datetime, timedelta
from decimal import Decimal

import pytest
from sqlalchemy.exc import IntegrityError

from registry import Entry, InvalidInput, Registry, UsageKind

TRAIN, PREFILL, SAMPLE = UsageKind.TRAIN, UsageKind.PREFILL, UsageKind.SAMPLE


class Clock:
    """A clock that stands still until it is moved."""

    def __init__(self) -> None:
        self.now = datetime(2026, 1, 31, 23, 59, 59, tzinfo=UTC)

    def __call__(self) -> datetime:
        return self.now


@pytest.fixture
def clock():
    return Clock()


@pytest.fixture
def registry(bench, clock):
    """The bench's registry, with a clock of one's own."""
    made = Registry.open(bench.url, bench.folder / "store", clock=clock)
    yield made
    made.db.close()


@pytest.fixture
def entry(bench):
    """Makes entries: (operation, tokens, kind=, **fields)."""

    def make(operation, tokens, kind=TRAIN, **fields) -> Entry:
        given = {"tenant_id": bench.tenant, **fields}
        return Entry(operation=operation, tokens=tokens, kind=kind, **given)

    return make


def summed(registry, tenant, **options):
    return [
        (row.group, row.kind.value, row.tokens, row.operations)
        for row in registry.usage.totals(tenant, **options)
    ]


def test_the_ledger_counts_each_operation_once(bench, registry, entry):
    usage = registry.usage
    assert usage.record(entry("one", 5)) == 1
    assert usage.record(entry("one", 5)) == 0
    assert usage.record(entry("one", 5), entry("two", 7), entry("two", 7)) == 1
    assert usage.record(entry("none", 0)) == 1
    assert summed(registry, bench.tenant) == [("train", "train", 12, 3)]
    assert usage.totals(bench.stranger) == []
    with pytest.raises(InvalidInput):
        usage.record(entry("three", 5), entry("four", -1))
    assert usage.record(entry("three", 5)) == 1


def test_an_entry_for_nobody_is_no_replay(registry, entry):
    with pytest.raises(IntegrityError):
        registry.usage.record(entry("one", 1, tenant_id="nobody"))
    assert registry.usage.totals("nobody") == []


def test_sums_by_kind_day_session_and_key(bench, registry, entry, clock):
    keys = [registry.tenants.create_key(bench.tenant, name)[0] for name in ("laptop", "ci")]
    registry.usage.record(
        entry("1", 1, session_id="a", key_id=keys[0].id),
        entry("2", 2, PREFILL, session_id="a", key_id=keys[1].id),
    )
    clock.now += timedelta(seconds=1)
    registry.usage.record(entry("3", 4, session_id="b", key_id=keys[0].id), entry("4", 8, SAMPLE))
    tenant = bench.tenant
    assert summed(registry, tenant) == [
        ("prefill", "prefill", 2, 1),
        ("sample", "sample", 8, 1),
        ("train", "train", 5, 2),
    ]
    assert summed(registry, tenant, by="day") == [
        ("2026-01-31", "prefill", 2, 1),
        ("2026-01-31", "train", 1, 1),
        ("2026-02-01", "sample", 8, 1),
        ("2026-02-01", "train", 4, 1),
    ]
    assert summed(registry, tenant, by="session") == [
        (None, "sample", 8, 1),
        ("a", "prefill", 2, 1),
        ("a", "train", 1, 1),
        ("b", "train", 4, 1),
    ]
    named = {(row.name, row.tokens) for row in registry.usage.totals(tenant, by="key")}
    assert named == {(None, 8), ("ci", 2), ("laptop", 5)}
    assert summed(registry, tenant, since=date(2026, 2, 1)) == [
        ("sample", "sample", 8, 1),
        ("train", "train", 4, 1),
    ]
    assert summed(registry, tenant, since=date(2026, 2, 2)) == []
    with registry.db.read() as session:
        assert registry.usage.on_day(session, tenant, "2026-01-31") == 3
        assert registry.usage.on_day(session, tenant, "2026-02-01") == 12
        assert registry.usage.on_day(session, bench.stranger, "2026-02-01") == 0


def test_a_price_holds_for_what_comes_after_it(bench, registry, entry):
    costs = lambda: [row.cost for row in registry.usage.totals(bench.tenant)]  # noqa: E731
    registry.usage.record(entry("free", 10**6))
    assert costs() == [None]
    registry.prices.set(TRAIN, Decimal("0.1"))
    registry.usage.record(entry("cheap", 3))
    registry.prices.set(TRAIN, Decimal("3"))
    registry.usage.record(entry("dear", 10**6))
    assert costs() == [Decimal("3.0000003")]
    # A replay costs nothing more.
    registry.prices.set(TRAIN, Decimal("1000"))
    registry.usage.record(entry("dear", 10**6))
    assert costs() == [Decimal("3.0000003")]
    registry.prices.set(TRAIN, None)
    registry.usage.record(entry("free again", 10**6))
    assert costs() == [Decimal("3.0000003")]


def test_a_model_s_own_price_goes_before_the_one_for_all(bench, registry, entry):
    registry.prices.set(SAMPLE, Decimal("1"))
    registry.prices.set(SAMPLE, Decimal("7"), base_model="org/large")
    for number, model in enumerate(("org/large", "org/small", None)):
        registry.usage.record(
            entry(str(number), 10**6, SAMPLE, base_model=model, session_id=str(number))
        )
    costs = [row.cost for row in registry.usage.totals(bench.tenant, by="session")]
    assert costs == [7, 1, 1]
    listed = [(p.kind, p.base_model, p.per_million) for p in registry.prices.list()]
    assert listed == [(SAMPLE, None, 1), (SAMPLE, "org/large", 7)]
    registry.prices.set(SAMPLE, None, base_model="org/large")
    registry.usage.record(entry("9", 10**6, SAMPLE, base_model="org/large", session_id="9"))
    assert registry.usage.totals(bench.tenant, by="session")[-1].cost == 1


@pytest.mark.parametrize("price", ["-1", "NaN", "Infinity", "1000000001", "0.0000000001"])
def test_what_is_no_price_is_refused(registry, price):
    with pytest.raises(InvalidInput, match="no price"):
        registry.prices.set(TRAIN, Decimal(price))
    assert registry.prices.list() == []
