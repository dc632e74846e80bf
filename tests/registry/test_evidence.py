from __future__ import annotations

import pytest

from registry import Corrupt, InvalidInput, NewGate, NewRun, NotFound

SPEC = {"name": "suite", "items": [{"id": "1", "question": "1 + 1 =", "answer": "2"}]}


def add_run(bench, version, suite, correct: int):
    return bench.registry.evidence.add_run(
        NewRun(
            tenant_id=bench.tenant,
            version_id=version.id,
            version_digest=version.digest,
            suite_name=suite.name,
            suite_digest=suite.digest,
            engine={"name": "test"},
            engine_fingerprint="f",
            counts={"correct": correct, "wrong": 1 - correct},
            items=({"id": "1", "raw": "zwei ✓"},),
        )
    )


def test_a_suite_is_frozen_under_its_digest(bench):
    evidence = bench.registry.evidence
    first = evidence.add_suite(bench.tenant, "suite", SPEC)
    assert evidence.add_suite(bench.tenant, "suite", dict(reversed(SPEC.items()))) == first
    changed = evidence.add_suite(bench.tenant, "suite", {**SPEC, "more": 1})
    assert changed.digest != first.digest
    assert evidence.suite(bench.tenant, "suite")[0] == changed
    assert evidence.suite(bench.tenant, first.digest) == (first, SPEC)
    with pytest.raises(NotFound, match="slipway suites add"):
        evidence.suite(bench.stranger, "suite")
    with pytest.raises(InvalidInput, match="items"):
        evidence.add_suite(bench.tenant, "suite", {"items": 3})


def test_runs_are_kept_with_every_item(bench):
    version, evidence = bench.register(), bench.registry.evidence
    suite = evidence.add_suite(bench.tenant, "suite", SPEC)
    assert evidence.latest_run(bench.tenant, version.id, suite.digest) is None
    add_run(bench, version, suite, 0)
    newest = add_run(bench, version, suite, 1)
    assert newest.reference == "sums/1"
    assert (newest.items, newest.correct) == (1, 1)
    assert evidence.items(newest) == [{"id": "1", "raw": "zwei ✓"}]
    assert evidence.latest_run(bench.tenant, version.id, suite.digest) == newest
    assert len(evidence.runs(bench.tenant, version_id=version.id)) == 2
    with pytest.raises(NotFound):
        evidence.run(bench.stranger, newest.id)
    assert evidence.runs(bench.stranger) == []


def test_verdicts_are_kept_and_listed_by_candidate_and_suite(bench):
    base, candidate, evidence = bench.register(), bench.register(text="2"), bench.registry.evidence
    suite = evidence.add_suite(bench.tenant, "suite", SPEC)
    runs = add_run(bench, candidate, suite, 1), add_run(bench, base, suite, 0)
    made = [
        evidence.add_gate(
            NewGate(
                tenant_id=bench.tenant,
                candidate_run=runs[0],
                baseline_run=runs[1],
                verdict=verdict,
                reason="measured",
                statistics={"p": 0.5},
            )
        )
        for verdict in ("fail", "pass")
    ]
    assert (made[0].candidate, made[0].baseline) == ("sums/2", "sums/1")
    assert evidence.gate(bench.tenant, made[0].id) == made[0]
    assert evidence.gates(bench.tenant, version_id=candidate.id) == made[::-1]
    assert evidence.gates(bench.tenant, suite_digest=suite.digest, limit=1) == made[1:]
    assert evidence.gates(bench.tenant, version_id=base.id) == []
    assert evidence.gates(bench.stranger) == []
    with pytest.raises(NotFound) as theirs:
        evidence.gate(bench.stranger, made[0].id)
    with pytest.raises(NotFound) as none:
        evidence.gate(bench.tenant, "none")
    assert theirs.value.message.replace(made[0].id, "none") == none.value.message


def test_forged_items_are_noticed(bench):
    suite = bench.registry.evidence.add_suite(bench.tenant, "suite", SPEC)
    run = add_run(bench, bench.register(), suite, 0)
    blob = bench.folder / "store" / "blobs" / run.evidence_digest.removeprefix("sha256:")
    blob.write_bytes(blob.read_bytes().replace(b"zwei", b"drei"))
    with pytest.raises(Corrupt, match="altered"):
        bench.registry.evidence.items(run)


def test_a_text_may_hold_any_line_break(bench):
    raw = "a\nb\r\nc\u2028d\x85e\x0bf"
    suite = bench.registry.evidence.add_suite(bench.tenant, "suite", SPEC)
    version = bench.register()
    run = bench.registry.evidence.add_run(
        NewRun(
            tenant_id=bench.tenant,
            version_id=version.id,
            version_digest=version.digest,
            suite_name=suite.name,
            suite_digest=suite.digest,
            engine={},
            engine_fingerprint="f",
            counts={},
            items=({"raw": raw}, {"raw": "next"}),
        )
    )
    assert bench.registry.evidence.items(run) == [{"raw": raw}, {"raw": "next"}]
