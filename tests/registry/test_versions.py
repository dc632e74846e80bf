from __future__ import annotations

import multiprocessing

import pytest

from registry import InvalidInput, Kind, NotFound


def test_numbers_rise_from_one_in_each_group(bench):
    assert [bench.register().number for _ in range(3)] == [1, 2, 3]
    assert bench.register("other").reference == "other/1"
    groups = bench.registry.versions.groups(bench.tenant)
    assert [(group.name, group.versions) for group in groups] == [("other", 1), ("sums", 3)]


def test_two_versions_may_share_content_but_not_identity(bench):
    first, second = bench.register(), bench.register()
    assert first.digest == second.digest
    assert first.id != second.id
    assert bench.registry.versions.by_digest(bench.tenant, first.digest).id == first.id


def test_the_same_source_makes_one_version(bench):
    first = bench.register(source_key="run:5")
    assert bench.register(source_key="run:5", text="other") == first
    assert bench.register().number == 2


def test_references(bench):
    version = bench.register()
    bench.registry.aliases.move(bench.tenant, "sums", "staging", version.reference, moved_by="me")
    for reference in ("sums/1", "sums@staging", version.id):
        found = bench.registry.versions.get(bench.tenant, reference)
        assert found.id == version.id
        assert found.aliases == ["staging"]
    for reference in ("sums/0", "sums/x", "sums/-1", "sums/99999999999"):
        with pytest.raises(InvalidInput, match="GROUP/NUMBER"):
            bench.registry.versions.get(bench.tenant, reference)


def test_another_tenants_versions_look_as_if_they_were_not(bench):
    version = bench.register()
    for reference in ("sums/1", version.id):
        with pytest.raises(NotFound) as theirs:
            bench.registry.versions.get(bench.stranger, reference)
        missing = reference.replace("/1", "/2").replace(version.id, "0" * 36)
        with pytest.raises(NotFound) as none:
            bench.registry.versions.get(bench.tenant, missing)
        assert theirs.value.message.replace(reference, missing) == none.value.message
    assert bench.registry.versions.list(bench.stranger).items == []
    with pytest.raises(NotFound):
        bench.register(tenant_id=bench.stranger, parents=(version.id,))
    # The refused registration has used up no number.
    assert bench.register(tenant_id=bench.stranger).number == 1


@pytest.mark.parametrize("name", ["", "..", "a/b", "A", "-a", "a" * 64, "a@b", "a b", "ä"])
def test_names_that_are_no_group(bench, name):
    with pytest.raises(InvalidInput, match="group name"):
        bench.register(name)


def test_lineage_is_walked_both_ways(bench):
    base = bench.register("base")
    half = bench.register(parents=(base.id,))
    final = bench.register(parents=(base.id, half.id))
    merged = bench.register(parents=(final.id, base.id))
    lineage = bench.registry.versions.lineage(bench.tenant, half.reference)
    assert [v.id for v in lineage.ancestors] == [base.id]
    assert [v.id for v in lineage.descendants] == [final.id, merged.id]
    whole = bench.registry.versions.lineage(bench.tenant, merged.id)
    assert {v.id for v in whole.ancestors} == {base.id, half.id, final.id}


def test_pages_hold_every_version_once_newest_first(bench):
    made = [bench.register(kind=Kind.MERGED if n % 2 else Kind.WEIGHTS).id for n in range(11)]
    listed, cursor = [], None
    while True:
        page = bench.registry.versions.list(bench.tenant, limit=3, cursor=cursor)
        listed += [version.id for version in page.items]
        cursor = page.cursor
        if cursor is None:
            break
    assert listed == made[::-1]
    merged = bench.registry.versions.list(bench.tenant, kind=Kind.MERGED)
    assert len(merged.items) == 5
    with pytest.raises(InvalidInput, match="limit"):
        bench.registry.versions.list(bench.tenant, limit=0)
    with pytest.raises(InvalidInput, match="cursor"):
        bench.registry.versions.list(bench.tenant, cursor="nowhere")


def _register_many(url: str, store: str, tenant: str, times: int) -> None:
    from pathlib import Path

    from registry import NewVersion, Origin, Registry

    registry = Registry.open(url, Path(store))
    for _ in range(times):
        staged = registry.store.stage()
        (staged / "a").write_text("a")
        manifest = registry.store.publish(staged)
        new = NewVersion(
            tenant_id=tenant,
            group="many",
            kind=Kind.MERGED,
            origin=Origin.IMPORT,
            base_model="b",
            base_digest=manifest.digest,
        )
        registry.versions.register(new, manifest)
    registry.db.close()


def test_many_processes_never_get_the_same_number(bench):
    context = multiprocessing.get_context("spawn")
    arguments = (bench.url, str(bench.folder / "store"), bench.tenant, 25)
    workers = [context.Process(target=_register_many, args=arguments) for _ in range(4)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    assert [worker.exitcode for worker in workers] == [0] * 4
    listed = bench.registry.versions.list(bench.tenant, group="many", limit=200).items
    assert sorted(version.number for version in listed) == list(range(1, 101))
