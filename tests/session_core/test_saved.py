from __future__ import annotations

from datetime import UTC, datetime, timedelta

import pytest

from registry import InvalidInput, Kind, NewVersion, NotFound, Origin, Registry
from session_core.log import OperationLog
from session_core.models import TrainingRun
from session_core.paths import EXTERNAL_WEIGHTS, SAMPLER_WEIGHTS, WEIGHTS, TinkerPath
from session_core.saved import LONGEST_TTL, SHORTEST_TTL, SavedPaths, check_ttl

START = datetime(2026, 1, 1, tzinfo=UTC)
HOUR = SHORTEST_TTL


class Shelf:
    """A database with a run of each of two tenants, and a clock that is set by hand."""

    def __init__(self, folder) -> None:
        self.now = START
        self.registry = Registry.open(
            f"sqlite:///{folder / 'a.db'}", folder / "store", clock=lambda: self.now
        )
        self.registry.db.create_all()
        self.log = OperationLog(self.registry.db, self.registry.clock, self.registry.new_id)
        self.paths = SavedPaths(self.registry.db, self.registry.clock)
        self.mine, self.run = self.tenant("mine")
        self.theirs, self.other_run = self.tenant("theirs")
        staged = self.registry.store.stage()
        (staged / "adapter_config.json").write_text("{}")
        self.manifest = self.registry.store.publish(staged)

    def tenant(self, name: str) -> tuple[str, str]:
        tenant_id = self.registry.tenants.ensure_tenant(name)
        return tenant_id, self.new_run(tenant_id)

    def new_run(self, tenant_id: str, project_id: str | None = None) -> str:
        session = self.log.create_session(
            tenant_id=tenant_id, user_metadata={}, tags=[], project_id=project_id
        )
        run = TrainingRun(
            id=f"{session.id}:train:0",
            session_id=session.id,
            tenant_id=tenant_id,
            base_model="org/tiny",
            lora={},
            user_metadata={},
            created_at=self.now,
        )
        with self.registry.db.write() as writing:
            writing.add(run)
        return run.id

    def version(self, **metadata) -> str:
        new = NewVersion(
            tenant_id=self.mine,
            group="sums",
            kind=Kind.WEIGHTS,
            origin=Origin.SESSION,
            base_model="org/tiny",
            base_digest="sha256:" + "0" * 64,
            user_metadata=metadata,
        )
        return self.registry.versions.register(new, self.manifest).id

    def save(self, name: str, *, kind: str = WEIGHTS, run: str | None = None, **given) -> str:
        path = TinkerPath(run_id=run or self.run, kind=kind, name=name)
        given = {"version_id": self.version(note=name), "size_bytes": 5, **given}
        self.paths.put(path, tenant_id=self.mine, **given)
        return str(path)


@pytest.fixture
def shelf(tmp_path):
    made = Shelf(tmp_path)
    yield made
    made.registry.db.close()


def names(rows) -> list[str]:
    return [row.path.rsplit("/")[-1] for row in rows]


def test_a_path_names_what_was_saved_last(shelf):
    path = shelf.save("a", size_bytes=5)
    first = shelf.paths.get(shelf.mine, path)
    assert first.user_metadata == {"note": "a"}
    assert (first.size_bytes, first.kind, first.expires_at) == (5, WEIGHTS, None)
    shelf.now += timedelta(seconds=1)
    shelf.save("a", size_bytes=7)
    second = shelf.paths.get(shelf.mine, path)
    assert second.version_id != first.version_id
    assert (second.size_bytes, second.created_at) == (7, shelf.now)


def test_a_path_of_another_tenant_is_not_there(shelf):
    path = shelf.save("a")
    assert shelf.paths.find(shelf.theirs, path) is None
    for act in (
        lambda: shelf.paths.get(shelf.theirs, path),
        lambda: shelf.paths.remove(shelf.theirs, path),
        lambda: shelf.paths.set_ttl(shelf.theirs, path, HOUR),
    ):
        with pytest.raises(NotFound, match="nothing is saved"):
            act()
    assert shelf.paths.page(shelf.theirs, limit=9, offset=0) == ([], 0)
    assert shelf.paths.stored(shelf.theirs) == []


def test_a_twin_of_another_kind_is_named(shelf):
    path = shelf.save("a", kind=SAMPLER_WEIGHTS)
    with pytest.raises(NotFound, match=f"did you mean {path}"):
        shelf.paths.get(shelf.mine, path.replace("sampler_weights", "weights"))


def test_what_is_deleted_is_gone_and_says_so(shelf):
    path = shelf.save("a")
    export = shelf.save("b", kind=EXTERNAL_WEIGHTS, version_id=None, folder="x/exports/1")
    assert shelf.paths.remove(shelf.mine, path) is None
    assert shelf.paths.remove(shelf.mine, export) == "x/exports/1"
    assert shelf.paths.remove(shelf.mine, path) is None
    with pytest.raises(NotFound, match="was deleted at 2026-01-01 00:00:00"):
        shelf.paths.get(shelf.mine, path)
    with pytest.raises(NotFound, match="was deleted"):
        shelf.paths.set_ttl(shelf.mine, path, None)
    with pytest.raises(NotFound, match="nothing is saved"):
        shelf.paths.remove(shelf.mine, path + "-never")
    # Its name is free again.
    shelf.save("a")
    assert shelf.paths.get(shelf.mine, path).path == path


def test_it_expires_on_the_second_and_the_reaper_finds_its_files(shelf):
    export = shelf.save(
        "a", kind=EXTERNAL_WEIGHTS, version_id=None, folder="x/exports/1", ttl_seconds=HOUR
    )
    path = shelf.save("b", ttl_seconds=HOUR)
    kept = shelf.save("c")
    shelf.now = START + timedelta(seconds=HOUR - 1)
    assert shelf.paths.expire() == []
    assert shelf.paths.get(shelf.mine, export).expires_at == START + timedelta(seconds=HOUR)
    shelf.now = START + timedelta(seconds=HOUR)
    # Gone before the reaper has been, and after.
    for _ in range(2):
        for gone in (export, path):
            with pytest.raises(NotFound, match="expired at 2026-01-01 01:00:00"):
                shelf.paths.get(shelf.mine, gone)
            with pytest.raises(NotFound, match="expired"):
                shelf.paths.set_ttl(shelf.mine, gone, None)
        assert names(shelf.paths.of_run(shelf.mine, shelf.run)) == ["c"]
        reaped = shelf.paths.expire()
    assert reaped == []
    assert shelf.paths.get(shelf.mine, kept).path == kept


def test_the_reaper_gives_each_folder_once(shelf):
    shelf.save("a", kind=EXTERNAL_WEIGHTS, version_id=None, folder="x/1", ttl_seconds=HOUR)
    shelf.save("b", ttl_seconds=HOUR)
    shelf.now += timedelta(seconds=HOUR)
    assert shelf.paths.expire() == ["x/1"]
    assert shelf.paths.expire() == []


def test_a_time_to_live_is_counted_from_now_and_can_be_taken_back(shelf):
    path = shelf.save("a", ttl_seconds=HOUR)
    shelf.now += timedelta(minutes=30)
    shelf.paths.set_ttl(shelf.mine, path, 2 * HOUR)
    assert shelf.paths.get(shelf.mine, path).expires_at == shelf.now + timedelta(hours=2)
    shelf.paths.set_ttl(shelf.mine, path, None)
    shelf.now += timedelta(days=400)
    assert shelf.paths.expire() == []
    assert shelf.paths.get(shelf.mine, path).expires_at is None


@pytest.mark.parametrize("seconds", [0, -1, SHORTEST_TTL - 1, LONGEST_TTL + 1])
def test_a_time_to_live_has_bounds(shelf, seconds):
    with pytest.raises(InvalidInput, match=f"{seconds} s is out of bounds"):
        check_ttl(seconds)
    path = shelf.save("a")
    with pytest.raises(InvalidInput):
        shelf.paths.set_ttl(shelf.mine, path, seconds)


def test_pages_and_the_newest_of_each_kind(shelf):
    second_run = shelf.new_run(shelf.mine)
    for number in range(7):
        shelf.now += timedelta(seconds=1)
        shelf.save(f"w{number}")
        shelf.save(f"s{number}", kind=SAMPLER_WEIGHTS, run=second_run)
    shelf.paths.remove(shelf.mine, f"tinker://{shelf.run}/weights/w6")
    rows, total = shelf.paths.page(shelf.mine, limit=4, offset=0)
    assert (names(rows)[0], len(rows), total) == ("s6", 4, 13)
    seen = [
        path
        for offset in range(0, 15, 4)
        for path in names(shelf.paths.page(shelf.mine, limit=4, offset=offset)[0])
    ]
    assert len(seen) == len(set(seen)) == 13
    newest = shelf.paths.newest([shelf.run, second_run, shelf.other_run])
    assert {key: row.path.rsplit("/")[-1] for key, row in newest.items()} == {
        (shelf.run, WEIGHTS): "w5",
        (second_run, SAMPLER_WEIGHTS): "s6",
    }


def test_what_is_stored_is_added_up_by_project(shelf):
    ours = shelf.new_run(shelf.mine, project_id="ours")
    shelf.save("a", size_bytes=3_000_000_000)
    shelf.save("b", size_bytes=3_000_000_000)
    shelf.save("a", run=ours, size_bytes=11)
    shelf.paths.remove(shelf.mine, shelf.save("c", size_bytes=100))
    found = {row.project_id: (row.count, row.size_bytes) for row in shelf.paths.stored(shelf.mine)}
    assert found == {"default": (2, 6_000_000_000), "ours": (1, 11)}
    (only,) = shelf.paths.stored(shelf.mine, project_id="ours")
    assert only.size_bytes == 11
