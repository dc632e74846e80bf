"""The ledger is what ran: no more and no less, whatever goes wrong between."""

from __future__ import annotations

import contextlib
import sqlite3

import numpy as np
import pytest
import tinker
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)
from sqlalchemy.exc import DatabaseError
from tinker import types

from registry import Entry, Registry, UsageKind
from session_core.log import OperationLog
from session_core.models import OperationStatus, TrainingRun

TABLES = {"the ledger": "INSERT ON usage_record", "the result": "UPDATE ON training_operation"}


@contextlib.contextmanager
def broken(path, what, when="1"):
    """The database refuses to write one of the two, or what of it a condition names."""
    with contextlib.closing(sqlite3.connect(path, timeout=20)) as database, database:
        database.execute(
            f"CREATE TRIGGER broken BEFORE {TABLES[what]} WHEN {when} "
            "BEGIN SELECT RAISE(ABORT, 'broken for the test'); END"
        )
    yield
    with contextlib.closing(sqlite3.connect(path, timeout=20)) as database, database:
        database.execute("DROP TRIGGER broken")


class Ledger(RuleBasedStateMachine):
    """Operations that are appended, retried, executed, broken off and failed, in any order."""

    def __init__(self) -> None:
        super().__init__()
        self.folder = type(self).folders()
        self.registry = Registry.open(f"sqlite:///{self.folder / 'a.db'}", self.folder / "store")
        self.registry.db.create_all()
        self.tenant = self.registry.tenants.ensure_tenant("mine")
        self.log = OperationLog(self.registry.db, self.registry.clock, self.registry.new_id)
        session = self.log.create_session(tenant_id=self.tenant, user_metadata={}, tags=[])
        self.run = TrainingRun(
            id=f"{session.id}:train:0",
            session_id=session.id,
            tenant_id=self.tenant,
            base_model="org/tiny",
            lora={},
            user_metadata={},
            created_at=self.registry.clock(),
        )
        self.seq = 0
        self.ran: dict[str, int] = {}
        self.append(again=False)

    def append(self, *, again: bool):
        if not again:
            self.seq += 1
        return self.log.append(
            run_id=self.run.id,
            tenant_id=self.tenant,
            key_id=None,
            seq=self.seq,
            kind="forward_backward",
            payload=b"",
            run=self.run if self.seq == 1 and not again else None,
        )

    def bill(self, row, tokens):
        entry = Entry(tenant_id=self.tenant, operation=row.id, kind=UsageKind.TRAIN, tokens=tokens)
        return lambda session: self.registry.usage.enter(session, entry)

    @property
    def next(self):
        return self.log.next_queued(self.run.id)

    @rule(again=st.booleans())
    def submit(self, again):
        self.append(again=again)

    @precondition(lambda self: self.next is not None)
    @rule(tokens=st.integers(0, 50))
    def execute(self, tokens):
        row = self.next
        self.log.finish(row.id, b"result", also=self.bill(row, tokens))
        self.ran[row.id] = tokens

    @precondition(lambda self: self.next is not None)
    @rule(tokens=st.integers(0, 50), what=st.sampled_from(sorted(TABLES)))
    def break_off(self, tokens, what):
        """It was computed, and then the database would not have it; it is done again."""
        row = self.next
        with broken(self.folder / "a.db", what), pytest.raises(DatabaseError):
            self.log.finish(row.id, b"result", also=self.bill(row, tokens))
        assert self.next.id == row.id

    @precondition(lambda self: self.next is not None)
    @rule()
    def fail(self):
        self.log.fail(self.next.id, "no", "user")

    @invariant()
    def the_ledger_is_what_ran(self):
        (total,) = self.registry.usage.totals(self.tenant) or (None,)
        assert (total.tokens if total else 0) == sum(self.ran.values())
        assert (total.operations if total else 0) == len(self.ran)
        done = [self.log.operation(self.tenant, name) for name in self.ran]
        assert all(row.status is OperationStatus.DONE for row in done)

    def teardown(self):
        self.registry.db.close()


def test_whatever_happens_the_ledger_is_what_ran(tmp_path_factory):
    Ledger.folders = lambda: tmp_path_factory.mktemp("ledger")
    case = settings(max_examples=20, stateful_step_count=15, deadline=None)
    run_state_machine_as_test(Ledger, settings=case)


def datum(length: int) -> types.Datum:
    tokens = np.arange(3, 4 + length)
    return types.Datum(
        model_input=types.ModelInput.from_ints(tokens[:-1].tolist()),
        loss_fn_inputs={
            "target_tokens": tokens[1:].astype(np.int64),
            "weights": np.ones(length, np.float32),
        },
    )


def used(server, **options):
    rows = server.registry.usage.totals(server.tenant_id, **options)
    return {(row.group, row.kind.value): (row.tokens, row.operations) for row in rows}


def test_each_kind_of_use_is_counted_as_what_it_is(server):
    with server.client() as service:
        client = service.create_lora_training_client("org/tiny", rank=4, seed=1).result()
        client.forward_backward([datum(5), datum(7)], "cross_entropy").result()
        client.forward([datum(11)], "cross_entropy").result()
        client.optim_step(types.AdamParams()).result()
        with pytest.raises(tinker.RequestFailedError):
            client.forward_backward([datum(5)], "no_such_loss").result()
        assert used(server, by="session") == {
            (service.holder.get_session_id(), "train"): (12, 1),
            (service.holder.get_session_id(), "prefill"): (11, 1),
        }
        sampler = client.save_weights_and_get_sampling_client().result()
        prompt = types.ModelInput.from_ints([5, 6, 7])
        params = types.SamplingParams(max_tokens=4, stop=[])
        # Three samples share one prompt, which is read once.
        sampler.sample(prompt, 3, params).result()
        assert used(server)["prefill", "prefill"] == (14, 2)
        assert used(server)["sample", "sample"] == (12, 1)
        sampler.compute_logprobs(prompt).result()
        assert used(server)["prefill", "prefill"] == (17, 3)
        key = server.registry.tenants.keys(server.tenant_id)[0]
        assert {group for group, _ in used(server, by="key")} == {key.id}

        before = used(server)
        with pytest.raises(tinker.RequestFailedError):
            sampler.sample(prompt, 1, types.SamplingParams(max_tokens=4, top_p=2.0)).result()
        # Half a bill is none, and a result that cannot be billed is not given out.
        database = server.home / "slipway.db"
        half = broken(database, "the ledger", "NEW.kind = 'sample'")
        with half, pytest.raises(tinker.RequestFailedError):
            sampler.sample(prompt, 1, params).result()
        assert used(server) == before


def test_what_is_done_again_after_a_crash_is_billed_once(server):
    adam = types.AdamParams(learning_rate=1e-3)
    with server.client() as service:
        client = service.create_lora_training_client("org/tiny", rank=4, seed=1).result()
        waiting = []
        for number in range(24):
            waiting.append(client.forward_backward([datum(4 + number)], "cross_entropy"))
            client.optim_step(adam)
        for moment in (2, 9, 17):
            waiting[moment].result()
            if moment == 9:
                server.kill_engine()
            else:
                server.kill_everything()
                server.start()
        for future in waiting:
            future.result()
    assert used(server) == {("train", "train"): (sum(range(4, 28)), 24)}
