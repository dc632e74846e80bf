from __future__ import annotations

import threading

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from registry import Conflict, InvalidInput, NewGate, NewRun, NotFound, PolicyUnmet

SUITE = "sha256:" + "5" * 64


def run_of(bench, version, correct: int = 1):
    return bench.registry.evidence.add_run(
        NewRun(
            tenant_id=bench.tenant,
            version_id=version.id,
            version_digest=version.digest,
            suite_name="suite",
            suite_digest=SUITE,
            engine={"name": "test"},
            engine_fingerprint="f",
            counts={"correct": correct, "wrong": 1},
            items=({"id": "1"}, {"id": "2"}),
        )
    )


def gate(bench, candidate, baseline, verdict: str = "pass"):
    return bench.registry.evidence.add_gate(
        NewGate(
            tenant_id=bench.tenant,
            candidate_run=run_of(bench, candidate),
            baseline_run=run_of(bench, baseline),
            verdict=verdict,
            reason="measured",
            statistics={"p": 0.01},
        )
    )


def move(bench, version, alias: str = "production", **options):
    return bench.registry.aliases.move(
        bench.tenant, version.group, alias, version.reference, moved_by="me", **options
    )


def test_production_demands_a_gate_and_says_which_demand_is_unmet(bench):
    base, first, second, third = (bench.register(text=str(n)) for n in range(4))
    with pytest.raises(PolicyUnmet, match=r"none was run.*slipway gate run --candidate sums/2"):
        move(bench, first)
    gate(bench, first, base, verdict="inconclusive")
    with pytest.raises(PolicyUnmet, match="says inconclusive: measured"):
        move(bench, first)
    passed = gate(bench, first, base)
    moved = move(bench, first)
    assert (moved.from_reference, moved.to_reference) == (None, "sums/2")
    assert moved.gate_id == passed.id

    # From now on the comparison that counts is with what is in production.
    gate(bench, second, base)
    with pytest.raises(PolicyUnmet, match=r"against sums/2.*--baseline sums/2"):
        move(bench, second)
    gate(bench, second, first)
    assert move(bench, second).from_reference == "sums/2"
    # The newest gate decides: a later failure is not forgotten.
    gate(bench, third, second)
    gate(bench, third, second, verdict="fail")
    with pytest.raises(PolicyUnmet, match="says fail"):
        move(bench, third)
    assert bench.registry.aliases.get(bench.tenant, "sums", "production").reference == "sums/3"


def test_a_gate_of_other_bytes_does_not_count(bench):
    base, version = bench.register(), bench.register(text="2")
    other = version.model_copy(update={"digest": base.digest})
    gate(bench, other, base)
    with pytest.raises(PolicyUnmet, match=r"of other bytes.*--candidate sums/2"):
        move(bench, version)
    gate(bench, version, base)
    move(bench, version)


def test_a_refused_move_leaves_no_trace(bench):
    version = bench.register()
    with pytest.raises(PolicyUnmet):
        move(bench, version)
    assert bench.registry.aliases.list(bench.tenant) == []
    with pytest.raises(NotFound, match="promote one first"):
        bench.registry.aliases.history(bench.tenant, "sums", "production")
    with pytest.raises(NotFound):
        bench.registry.aliases.rollback(bench.tenant, "sums", "production", moved_by="me")


@pytest.mark.parametrize("started", [False, True])
def test_of_many_swaps_at_once_one_succeeds(bench, started):
    first, *versions = [bench.register() for _ in range(9)]
    expected = None
    if started:
        move(bench, first, "staging")
        expected = first.id
    moved, refused, start = [], [], threading.Barrier(len(versions))

    def swap(version) -> None:
        start.wait()
        try:
            moved.append(move(bench, version, "staging", expected=expected).to_version_id)
        except Conflict as error:
            refused.append(error)

    threads = [threading.Thread(target=swap, args=(version,)) for version in versions]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert (len(moved), len(refused)) == (1, 7)
    assert bench.registry.aliases.get(bench.tenant, "sums", "staging").version_id == moved[0]
    history = bench.registry.aliases.history(bench.tenant, "sums", "staging")
    assert len(history) == 1 + started


def test_an_override_needs_a_reason_and_is_recorded(bench):
    version = bench.register()
    with pytest.raises(InvalidInput, match="reason"):
        move(bench, version, override_reason="  ")
    move(bench, version, override_reason="a fire")
    (line,) = bench.registry.aliases.history(bench.tenant, "sums", "production")
    assert line.override_reason == "a fire"
    assert line.gate_id is None
    assert line.moved_by == "me"


def test_an_override_that_was_not_needed_is_not_held_against_the_gate(bench):
    base, version = bench.register(), bench.register(text="2")
    passed = gate(bench, version, base)
    moved = move(bench, version, override_reason="just in case")
    assert (moved.gate_id, moved.override_reason) == (passed.id, None)


def test_compare_and_swap(bench):
    first, second = bench.register(), bench.register()
    with pytest.raises(Conflict, match="nowhere yet"):
        move(bench, first, "staging", expected=second.id)
    move(bench, first, "staging", expected=None)
    with pytest.raises(Conflict, match=first.id):
        move(bench, second, "staging", expected=None)
    move(bench, second, "staging", expected=first.id)
    assert second.reference == bench.registry.aliases.get(bench.tenant, "sums", "staging").reference


def test_rolling_back_is_a_move_of_its_own(bench):
    first, second = bench.register(), bench.register()
    move(bench, first, override_reason="first")
    with pytest.raises(Conflict, match="no version before"):
        bench.registry.aliases.rollback(bench.tenant, "sums", "production", moved_by="you")
    move(bench, second, override_reason="second")
    back = bench.registry.aliases.rollback(bench.tenant, "sums", "production", moved_by="you")
    assert (back.from_reference, back.to_reference) == ("sums/2", "sums/1")
    assert back.override_reason == "rollback from sums/2"
    assert len(bench.registry.aliases.history(bench.tenant, "sums", "production")) == 3


def test_what_cannot_be_pointed_at(bench):
    version, other = bench.register(), bench.register("other")
    with pytest.raises(InvalidInput, match="version of other"):
        bench.registry.aliases.move(bench.tenant, "sums", "staging", other.reference, moved_by="me")
    with pytest.raises(InvalidInput, match="no alias"):
        move(bench, version, "../up")
    with pytest.raises(NotFound):
        bench.registry.aliases.move(
            bench.stranger, "sums", "staging", version.reference, moved_by="me"
        )
    with pytest.raises(NotFound):
        bench.registry.aliases.history(bench.stranger, "sums", "staging")


@settings(
    max_examples=15,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
@given(
    moves=st.lists(
        st.tuples(st.sampled_from([0, 1, 2]), st.sampled_from([None, 0, 1, 2])), max_size=8
    )
)
def test_the_history_is_a_chain(bench, moves):
    alias = f"a{bench.registry.new_id()}"[:20]
    versions = [bench.register() for _ in range(3)]
    model, chain = None, []
    for target, expected in moves:
        wanted = versions[expected].id if expected is not None else None
        try:
            move(bench, versions[target], alias, expected=wanted)
        except Conflict:
            assert wanted != model
            continue
        assert wanted == model
        chain.append((wanted, versions[target].id))
        model = versions[target].id
    if not chain:
        return
    history = bench.registry.aliases.history(bench.tenant, "sums", alias)[::-1]
    assert [line.to_version_id for line in history] == [after for _, after in chain]
    names = [None, *(line.to_reference for line in history)]
    assert [line.from_reference for line in history] == names[:-1]
