from __future__ import annotations

from datetime import UTC, datetime, timedelta

import pytest

from registry import InvalidInput, NotFound, Registry
from session_core.listing import Listing, Search
from session_core.log import OperationLog
from session_core.models import SessionStatus, TrainingRun, TrainingSession
from session_core.paths import WEIGHTS, TinkerPath
from session_core.saved import SavedPaths

START = datetime(2026, 1, 1, tzinfo=UTC)


class Hall:
    """A database of sessions, and a clock that moves a second a session."""

    def __init__(self, folder) -> None:
        self.now = START
        self.registry = Registry.open(
            f"sqlite:///{folder / 'a.db'}", folder / "store", clock=lambda: self.now
        )
        self.registry.db.create_all()
        self.log = OperationLog(self.registry.db, self.registry.clock, self.registry.new_id)
        self.listing = Listing(self.registry.db)
        self.tenant = self.registry.tenants.ensure_tenant("mine")
        self.stranger = self.registry.tenants.ensure_tenant("theirs")

    def session(self, **fields) -> TrainingSession:
        self.now += timedelta(seconds=1)
        given = {"tenant_id": self.tenant, "user_metadata": {}, "tags": [], **fields}
        return self.log.create_session(**given)

    def run(self, session: TrainingSession, operations: int = 0) -> TrainingRun:
        run = TrainingRun(
            id=f"{session.id}:train:0",
            session_id=session.id,
            tenant_id=session.tenant_id,
            base_model="org/tiny",
            lora={},
            user_metadata={},
            created_at=self.now,
        )
        with self.registry.db.write() as writing:
            writing.add(run)
        for seq in range(operations):
            self.now += timedelta(seconds=1)
            self.log.append(
                run_id=run.id,
                tenant_id=run.tenant_id,
                key_id=None,
                seq=seq,
                kind="optim_step",
                payload=b"",
            )
        return run

    def found(self, search: Search, limit: int = 50) -> list[str]:
        rows, _ = self.listing.search(self.tenant, search, limit=limit, now=self.now)
        return [row.session.display_name for row in rows]


@pytest.fixture
def hall(tmp_path):
    made = Hall(tmp_path)
    yield made
    made.registry.db.close()


def test_runs_come_in_pages_with_the_time_of_their_last_request(hall):
    first = hall.run(hall.session(), operations=3)
    last = hall.now
    idle = hall.run(hall.session(project_id="ours"))
    hall.run(hall.session(tenant_id=hall.stranger))
    rows, total = hall.listing.runs(hall.tenant, limit=1, offset=0)
    assert ([row.run.id for row in rows], total) == ([idle.id], 2)
    assert rows[0].last_request == idle.created_at
    rows, total = hall.listing.runs(hall.tenant, limit=9, offset=1)
    assert ([row.run.id for row in rows], total) == ([first.id], 2)
    assert rows[0].last_request == last
    assert hall.listing.run(first).last_request == last
    assert hall.listing.runs(hall.tenant, limit=9, offset=2) == ([], 2)
    rows, total = hall.listing.runs(hall.tenant, limit=9, offset=0, project_id="ours")
    assert ([row.run.id for row in rows], total) == ([idle.id], 1)
    assert hall.listing.runs(hall.tenant, limit=9, offset=0, project_id="default")[1] == 1


def test_sessions_come_in_pages(hall):
    made = [hall.session().id for _ in range(5)]
    hall.session(tenant_id=hall.stranger)
    pages = [hall.listing.session_ids(hall.tenant, limit=2, offset=n) for n in (0, 2, 4, 6)]
    assert [list(page) for page in pages] == [made[:2:-1], made[2:0:-1], made[:1], []]


def test_a_session_is_put_into_a_project_by_its_tenant_only(hall):
    session = hall.session()
    hall.listing.assign_project(hall.tenant, session.id, "ours")
    assert hall.log.session(hall.tenant, session.id).project_id == "ours"
    with pytest.raises(NotFound):
        hall.listing.assign_project(hall.stranger, session.id, "theirs")


def test_searching_by_what_is_known_of_a_session(hall):
    alpha = hall.session(display_name="Alpha run", user_metadata={"a": "1", "b": "x"})
    hall.session(display_name="beta RUN_2", user_metadata={"a": "1"}, project_id="ours")
    hall.session(display_name="gamma 100%", user_metadata={"a": "2", "dotted.key": "v"})
    hall.session(display_name="stranger's", tenant_id=hall.stranger, user_metadata={"a": "1"})
    for search, expected in (
        (Search(), ["gamma 100%", "beta RUN_2", "Alpha run"]),
        (Search(user_metadata={"a": "1"}), ["beta RUN_2", "Alpha run"]),
        (Search(user_metadata={"a": "1", "b": "x"}), ["Alpha run"]),
        (Search(user_metadata={"dotted.key": "v"}), ["gamma 100%"]),
        (Search(user_metadata={"a": "3"}), []),
        (Search(display_name="run alpha"), ["Alpha run"]),
        (Search(display_name="RUN"), ["beta RUN_2", "Alpha run"]),
        # What means something to LIKE is only a character here.
        (Search(display_name="0%"), ["gamma 100%"]),
        (Search(display_name="n_"), ["beta RUN_2"]),
        (Search(display_name=" "), []),
        (Search(session_id=alpha.id), ["Alpha run"]),
        (Search(session_id=alpha.id, display_name="gamma"), ["gamma 100%", "Alpha run"]),
        (Search(project_ids=["ours"]), ["beta RUN_2"]),
        (Search(project_ids=["default"]), ["gamma 100%", "Alpha run"]),
        (Search(project_ids=[]), []),
    ):
        assert hall.found(search) == expected, search


@pytest.mark.parametrize("key", ['say "x"', "back\\slash"])
def test_a_metadata_key_that_cannot_be_looked_for_is_refused(hall, key):
    with pytest.raises(InvalidInput, match="cannot be searched"):
        hall.found(Search(user_metadata={key: "1"}))


def test_searching_by_how_a_session_ended(hall):
    ends = {
        "active": None,
        "good": (SessionStatus.FINISHED, "success"),
        "bad": (SessionStatus.FINISHED, "errored"),
        "stopped": (SessionStatus.STOPPED, None),
        "silent": (SessionStatus.EXPIRED, None),
    }
    for name, end in ends.items():
        session = hall.session(display_name=name)
        if end is not None:
            hall.log.end_session(session.id, end[0], reason=end[1], detail="because")
            # The first end stays.
            hall.log.end_session(session.id, SessionStatus.STOPPED, reason="late")
            assert hall.log.session(hall.tenant, session.id).finish_reason == end[1]
    for search, expected in (
        (Search(statuses=[SessionStatus.ACTIVE]), {"active"}),
        (Search(statuses=[SessionStatus.FINISHED]), {"good", "bad"}),
        (Search(finished=["errored"]), {"bad"}),
        (Search(statuses=[SessionStatus.STOPPED], finished=["success"]), {"stopped", "good"}),
        (Search(statuses=[]), set()),
        (Search(), set(ends)),
    ):
        assert set(hall.found(search)) == expected, search


def test_a_search_in_pages_finds_each_once(hall):
    for number in range(7):
        session = hall.session(display_name=str(number))
        if number % 2:
            hall.now -= timedelta(seconds=1)  # two at the same moment
    seen, after = [], None
    while True:
        rows, more = hall.listing.search(hall.tenant, Search(after=after), limit=2, now=hall.now)
        seen += [row.session.display_name for row in rows]
        if not more:
            break
        after = (rows[-1].session.created_at, rows[-1].session.id)
    assert sorted(seen) == [str(number) for number in range(7)]
    assert session.display_name == "6"


def test_what_was_saved_in_a_session_is_added_up(hall):
    session = hall.session()
    run = hall.run(session)
    paths = SavedPaths(hall.registry.db, hall.registry.clock)
    for name, ttl in (("a", None), ("b", 3600), ("c", None)):
        path = TinkerPath(run_id=run.id, kind=WEIGHTS, name=name)
        paths.put(path, tenant_id=hall.tenant, size_bytes=10, folder="x", ttl_seconds=ttl)
    paths.remove(hall.tenant, f"tinker://{run.id}/weights/c")

    def saved() -> tuple[int, int]:
        ((row,), _) = hall.listing.search(hall.tenant, Search(), limit=1, now=hall.now)
        return row.saves, row.saved_bytes

    assert saved() == (2, 20)
    hall.now += timedelta(hours=1)
    assert saved() == (1, 10)
