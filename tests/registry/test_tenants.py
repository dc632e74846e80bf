from __future__ import annotations

import pytest
from sqlalchemy.exc import IntegrityError

from registry import InvalidInput, NotFound, Unauthorized, key_hash


def test_a_key_is_kept_as_a_hash_only(bench):
    view, key = bench.registry.tenants.create_key(bench.tenant, "laptop")
    assert key.startswith("tml-")
    assert len(key) > 40
    stored = b"".join(path.read_bytes() for path in bench.folder.glob("registry.db*"))
    assert key.encode() not in stored
    who = bench.registry.tenants.authenticate(key)
    assert (who.tenant_id, who.key_id, who.key_name) == (bench.tenant, view.id, "laptop")


def test_a_revoked_key_and_an_unknown_one_are_refused_alike(bench):
    view, key = bench.registry.tenants.create_key(bench.tenant, "laptop")
    first = bench.registry.tenants.revoke(bench.tenant, view.id)
    assert bench.registry.tenants.revoke(bench.tenant, view.id) == first
    said = set()
    for wrong in (key, "tml-nobody", ""):
        with pytest.raises(Unauthorized) as caught:
            bench.registry.tenants.authenticate(wrong)
        said.add(caught.value.message)
    assert len(said) == 1
    assert bench.registry.tenants.live_keys() == {}


def test_keys_of_others_are_not_there(bench):
    view, _ = bench.registry.tenants.create_key(bench.tenant, "laptop")
    assert bench.registry.tenants.keys(bench.stranger) == []
    with pytest.raises(NotFound):
        bench.registry.tenants.revoke(bench.stranger, view.id)


@pytest.mark.parametrize("name", ["", "   ", "x" * 101])
def test_a_key_needs_a_name(bench, name):
    with pytest.raises(InvalidInput, match="name"):
        bench.registry.tenants.create_key(bench.tenant, name)


def test_a_tenant_is_made_once(bench):
    assert bench.registry.tenants.ensure_tenant("mine") == bench.tenant


def test_the_ledger_counts_each_operation_once(bench):
    usage = bench.registry.usage
    entry = {"tenant_id": bench.tenant, "key_id": None, "session_id": "s", "kind": "train"}
    assert usage.record(**entry, operation="one", tokens=5)
    assert not usage.record(**entry, operation="one", tokens=5)
    assert usage.record(**entry, operation="two", tokens=7)
    (total,) = usage.totals(bench.tenant)
    assert (total.kind, total.tokens, total.operations) == ("train", 12, 2)
    assert usage.totals(bench.stranger) == []
    with pytest.raises(InvalidInput):
        usage.record(**{**entry, "kind": "gift"}, operation="three", tokens=1)
    with pytest.raises(InvalidInput):
        usage.record(**entry, operation="three", tokens=-1)


def test_an_entry_for_nobody_is_no_replay(bench):
    with pytest.raises(IntegrityError):
        bench.registry.usage.record(
            tenant_id="nobody",
            key_id=None,
            operation="one",
            kind="train",
            session_id=None,
            tokens=1,
        )
    assert bench.registry.usage.totals("nobody") == []


def test_the_gateway_is_given_the_hashes_of_live_keys_only(bench):
    live = bench.registry.tenants.create_key(bench.tenant, "live")[1]
    theirs = bench.registry.tenants.create_key(bench.stranger, "theirs")[1]
    ended, _ = bench.registry.tenants.create_key(bench.tenant, "ended")
    bench.registry.tenants.revoke(bench.tenant, ended.id)
    assert bench.registry.tenants.live_keys() == {
        key_hash(live): bench.tenant,
        key_hash(theirs): bench.stranger,
    }
    assert [key.name for key in bench.registry.tenants.keys(bench.tenant)] == ["live", "ended"]
