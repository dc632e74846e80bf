from __future__ import annotations

import tempfile
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from registry import InvalidInput, NotFound, Registry
from session_core import operations as op
from session_core.log import OperationLog
from session_core.models import OperationStatus, SessionStatus, TrainingRun
from session_core.recovery import Snapshots


class Written:
    """A log with one run of one tenant in it."""

    def __init__(self, folder: Path) -> None:
        self.registry = Registry.open(f"sqlite:///{folder / 'a.db'}", folder / "store")
        self.registry.db.create_all()
        self.tenant = self.registry.tenants.ensure_tenant("mine")
        self.stranger = self.registry.tenants.ensure_tenant("stranger")
        self.log = OperationLog(self.registry.db, self.registry.clock, self.registry.new_id)
        self.session = self.log.create_session(tenant_id=self.tenant, user_metadata={}, tags=[])
        self.run = f"{self.session.id}:train:0"
        row = TrainingRun(
            id=self.run,
            session_id=self.session.id,
            tenant_id=self.tenant,
            base_model="b",
            lora={},
            user_metadata={},
            created_at=self.registry.clock(),
        )
        self.first = self.append(0, kind=op.CREATE_RUN, run=row)

    def append(self, seq: int, *, kind: str = op.OPTIM_STEP, tenant: str | None = None, run=None):
        return self.log.append(
            run_id=self.run,
            tenant_id=tenant or self.tenant,
            key_id=None,
            seq=seq,
            kind=kind,
            payload=b"%d" % seq,
            run=run,
        )


@pytest.fixture
def written(tmp_path):
    made = Written(tmp_path)
    yield made
    made.registry.db.close()


@settings(max_examples=12, deadline=None)
@given(st.lists(st.integers(1, 12), min_size=1, max_size=30))
def test_whatever_the_order_and_the_retries_each_is_there_once_in_sequence(arrivals):
    with tempfile.TemporaryDirectory() as folder:
        written = Written(Path(folder))
        written.log.finish(written.first.id, b"made")
        ids: dict[int, str] = {}
        for seq in arrivals:
            assert written.append(seq).id == ids.setdefault(seq, written.append(seq).id)
        taken = []
        while (row := written.log.next_queued(written.run)) is not None:
            assert row.id == ids[row.seq]
            taken.append(row.seq)
            written.log.finish(row.id, b"done")
            assert written.log.last_settled(written.run) == row.seq
        assert taken == sorted(set(arrivals))
        written.registry.db.close()


def test_a_sequence_id_is_one_operation_for_good(written):
    row = written.append(1)
    written.log.finish(row.id, b"result")
    again = written.append(1)
    assert (again.id, again.status, again.result) == (row.id, OperationStatus.DONE, b"result")
    with pytest.raises(InvalidInput, match="was optim_step before"):
        written.append(1, kind=op.FORWARD)
    with pytest.raises(NotFound):
        written.append(1, tenant=written.stranger)


def test_what_was_committed_is_there_for_the_next_process(written):
    written.append(2)
    other = OperationLog(written.registry.db, written.registry.clock, written.registry.new_id)
    assert [run.id for run in other.runs_with_work()] == [written.run]
    assert other.next_queued(written.run).id == written.first.id


def test_failures_are_kept_apart_from_what_is_replayed(written):
    written.log.finish(written.first.id, b"")
    good, bad = written.append(1), written.append(2)
    written.log.finish(good.id, b"")
    written.log.fail(bad.id, "too large", "user")
    kinds = frozenset({op.OPTIM_STEP, op.CREATE_RUN})
    assert [r.seq for r in written.log.done_after(written.run, -1, kinds)] == [0, 1]
    assert [r.seq for r in written.log.done_after(written.run, 0, kinds)] == [1]
    assert written.log.operation(written.tenant, bad.id).error == "too large"
    assert written.log.operation(written.stranger, bad.id) is None
    assert written.log.count_death(bad.id) == 1
    assert written.log.count_death(bad.id) == 2


def test_closing_a_run_fails_all_that_waits(written):
    waiting = [written.append(seq).id for seq in (5, 4)]
    failed = written.log.fail_queued(written.run, "operation 3 never came")
    assert set(failed) == {written.first.id, *waiting}
    assert written.log.next_queued(written.run) is None


def test_a_session_ends_once(written):
    session = written.session.id
    assert written.log.heartbeat(written.tenant, session) is SessionStatus.ACTIVE
    assert written.log.end_session(session, SessionStatus.STOPPED) is SessionStatus.STOPPED
    assert written.log.end_session(session, SessionStatus.FINISHED) is SessionStatus.STOPPED
    assert written.log.heartbeat(written.tenant, session) is SessionStatus.STOPPED
    assert written.log.silent_since(written.registry.clock()) == []
    with pytest.raises(NotFound):
        written.log.heartbeat(written.stranger, session)


def test_a_silent_session_is_found(written):
    assert written.log.silent_since(written.session.heartbeat_at) == []
    assert written.log.silent_since(written.registry.clock()) == [written.session.id]


def test_a_snapshot_counts_once_it_has_its_name(tmp_path):
    snapshots = Snapshots(tmp_path / "run")
    assert snapshots.newest() is None
    partial = snapshots.begin(4)
    (partial / "a").write_text("four")
    assert snapshots.newest() is None
    snapshots.commit(partial)
    assert snapshots.newest() == (4, tmp_path / "run" / "4")
    # Begun and never finished, as in a crash: the older one still counts.
    snapshots.begin(12)
    assert snapshots.newest() == (4, tmp_path / "run" / "4")
    snapshots.commit(snapshots.begin(12))
    assert snapshots.newest() == (12, tmp_path / "run" / "12")
    assert [path.name for path in (tmp_path / "run").iterdir()] == ["12"]
    snapshots.drop()
    assert snapshots.newest() is None
