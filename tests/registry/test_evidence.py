from __future__ import annotations

import pytest

from registry import InvalidInput, NewRun, NotFound

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
