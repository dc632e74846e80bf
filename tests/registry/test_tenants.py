from __future__ import annotations

import pytest

from registry import (
    Conflict,
    Forbidden,
    InvalidInput,
    Kind,
    NotFound,
    Role,
    Unauthorized,
    key_hash,
)
from registry.versions import base_key


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


def test_tenants_are_made_once_and_listed_with_their_keys_in_force(bench):
    tenants = bench.registry.tenants
    made = tenants.create("team-b")
    assert tenants.named("team-b") == made.id
    with pytest.raises(Conflict, match="team-b"):
        tenants.create("team-b")
    for name in ("", "Team", "a/b", "-a", "a" * 64, "a b"):
        with pytest.raises(InvalidInput, match="no tenant's name"):
            tenants.create(name)
    with pytest.raises(NotFound, match="team-c"):
        tenants.named("team-c")
    tenants.create_key(made.id, "one")
    tenants.revoke(made.id, tenants.create_key(made.id, "two")[0].id)
    assert [(t.name, t.keys) for t in tenants.list()] == [
        ("mine", 0),
        ("stranger", 0),
        ("team-b", 1),
    ]


def test_a_key_has_a_role_and_a_member_ends_no_administrator_s(bench):
    tenants = bench.registry.tenants
    admin, secret = tenants.create_key(bench.tenant, "a", role=Role.ADMIN)
    member, other = tenants.create_key(bench.tenant, "m")
    assert (admin.role, member.role) == (Role.ADMIN, Role.MEMBER)
    boss, who = tenants.authenticate(secret), tenants.authenticate(other)
    assert (boss.is_admin, who.is_admin) == (True, False)
    with pytest.raises(Forbidden, match="administrator"):
        tenants.revoke(bench.tenant, admin.id, by=who.role)
    assert tenants.authenticate(secret) == boss
    assert tenants.revoke(bench.tenant, member.id, by=who.role).revoked_at is not None
    # Whether a tenant is there is not told to a member who names it.
    said = set()
    for name in ("stranger", "nobody"):
        with pytest.raises(Forbidden) as caught:
            tenants.reached(who, name)
        said.add(caught.value.message)
    assert len(said) == 1
    assert tenants.reached(who, None) == tenants.reached(who, "mine") == bench.tenant
    assert tenants.reached(boss, "stranger") == bench.stranger
    with pytest.raises(NotFound):
        tenants.reached(boss, "nobody")


def test_a_base_model_is_every_tenant_s(bench):
    versions = bench.registry.versions
    base = bench.register("base", source_key=base_key(bench.tenant, "x"))
    theirs = versions.adopt(base, bench.stranger)
    assert (theirs.reference, theirs.digest) == ("base/1", base.digest)
    assert theirs.id != base.id
    assert versions.adopt(base, bench.stranger) == theirs
    assert versions.adopt(base, bench.tenant) == base
    later = bench.registry.tenants.create("later").id
    versions.adopt_bases(later)
    versions.adopt_bases(later)
    (only,) = versions.list(later).items
    assert (only.digest, only.tenant_id) == (base.digest, later)
    trained = bench.register("sums", kind=Kind.WEIGHTS)
    with pytest.raises(InvalidInput, match="its tenant's own"):
        versions.adopt(trained, later)


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
