from __future__ import annotations

import asyncio

import pytest
from starlette.responses import Response

from evals import leakage
from evals.outcomes import ItemResult
from evals.service import EvalService
from registry import (
    Conflict,
    InvalidInput,
    Jobs,
    Kind,
    NotFound,
    Origin,
    PolicyUnmet,
    random_id,
    utc_now,
)
from session_core.probe import dump_probe
from session_core.training_data import TrainingData

PROMPT = [5, 6, 7, 8]
BASE, ADAPTER = [-3.0, -4.0, -5.0], [-2.5, -4.5, -4.0]
CLEAN = {leakage.FILE: TrainingData().dump()}


@pytest.fixture
def service(registry, provider):
    return EvalService(registry, Jobs(utc_now, random_id), provider, backoff_s=0.001)


@pytest.fixture
def base(add_version):
    return add_version("base", origin=Origin.IMPORT)


@pytest.fixture
def candidate(add_version, base):
    """A merged version whose adapter carries the probe and the record of its training."""
    probe = dump_probe([PROMPT], base=[BASE], adapter=[ADAPTER])
    files = {"probe.json": probe, **CLEAN}
    adapter = add_version(kind=Kind.WEIGHTS, origin=Origin.SESSION, files=files, tokenizer=False)
    return add_version(parents=(adapter.id, base.id))


@pytest.fixture
def answers(stand_in, base):
    """The base gets every third item right, all else everything; each is really loaded."""

    def answer(model, question):
        a, b = question.removeprefix("What is ").rstrip("?").split(" + ")
        right = int(a) + int(b)
        return str(right) if model != base.reference or int(b) % 3 == 0 else "The answer is 1"

    def score(model, ids):
        return [None, *(BASE if model == base.reference else ADAPTER)]

    stand_in.answer, stand_in.score = answer, score


@pytest.fixture
def evaluate(service, tenant):
    """Run a suite to its end; the job as it is then."""

    def run(reference, suite="sums", **options):
        async def main():
            job = service.start_run(tenant, reference, suite, **options)
            return await service._jobs.wait(tenant, job.id, 30)

        return asyncio.run(main())

    return run


@pytest.fixture
def sums(service, tenant, spec):
    return service.add_suite(tenant, spec(24))


def test_a_suite_is_checked_before_it_is_frozen(service, registry, tenant, spec):
    with pytest.raises(InvalidInput, match="'judge' is unknown"):
        service.add_suite(tenant, spec(grader={"kind": "judge"}))
    assert registry.evidence.suites(tenant) == []
    added = service.add_suite(tenant, spec())
    assert (added.name, added.items) == ("sums", 8)
    assert service.add_suite(tenant, spec()) == added


def test_a_run_leaves_evidence(registry, provider, tenant, evaluate, candidate, sums, answers):
    job = evaluate(candidate.reference)
    assert (job.status, job.error) == ("done", None)
    assert (job.done, job.total) == (24, 24)
    assert job.result["correct"] == 24
    low, high = job.result["interval"]
    assert 0.8 < low < high == 1
    run = registry.evidence.run(tenant, job.result["id"])
    assert (run.version_digest, run.suite_digest) == (candidate.digest, sums.digest)
    assert run.engine["dtype"] == "float32"
    assert run.engine["replica_id"] == "replica-1"
    assert run.engine["grader"] == "numeric/1"
    assert run.engine["self_tests"] == {
        "known_answers": 24,
        "loaded": {
            "to_adapter": 0.0,
            "to_base": pytest.approx(2 / 3, abs=1e-6),
            "adapter_to_base": pytest.approx(2 / 3, abs=1e-6),
            "noise_floor": 0.02,
        },
    }
    assert "stand-in" in run.engine_fingerprint
    assert run.counts == {"correct": 24, "wrong": 0, "no_answer": 0, "truncated": 0, "error": 0}
    items = [ItemResult.model_validate(item) for item in registry.evidence.items(run)]
    assert [item.id for item in items] == [f"sums-{i}" for i in range(24)]
    assert (items[3].raw, items[3].extracted) == ("16", "16")
    assert provider.held == []
    assert provider.kept == []


def test_the_same_answers_give_the_same_evidence_digest(evaluate, base, sums, answers):
    first, second = evaluate(base.reference), evaluate(base.reference)
    assert first.result["evidence_digest"] == second.result["evidence_digest"]
    assert first.result["id"] != second.result["id"]


def test_a_version_without_a_probe_says_so(evaluate, base, sums, answers):
    loaded = evaluate(base.reference).result["engine"]["self_tests"]["loaded"]
    assert loaded == {"skipped": "base/1 has no probe.json"}


def test_keep_is_passed_on(provider, evaluate, candidate, sums, answers):
    evaluate(candidate.reference, keep=True)
    assert provider.kept == [candidate.reference]


def test_a_server_that_answers_with_the_base_gives_no_evidence(
    registry, tenant, stand_in, provider, evaluate, candidate, sums, answers
):
    stand_in.score = lambda model, ids: [None, *BASE]
    job = evaluate(candidate.reference, keep=True)
    assert job.status == "failed"
    assert "the server answers with the base model" in job.error
    assert registry.evidence.runs(tenant) == []
    assert (provider.held, provider.kept) == ([], [])


def test_a_dead_server_gives_no_evidence(
    registry, tenant, stand_in, evaluate, candidate, sums, answers
):
    stand_in.fault = lambda question, attempt: Response("gone", status_code=500)
    job = evaluate(candidate.reference)
    assert job.status == "failed"
    assert "answered none of the 24 items" in job.error
    assert registry.evidence.runs(tenant) == []


def test_a_known_answer_that_cannot_score_starts_no_server(
    service, tenant, provider, evaluate, add_version, sums
):
    from tokenizers import Tokenizer, models

    deaf = Tokenizer(models.WordLevel({"[UNK]": 0}, unk_token="[UNK]")).to_str().encode()
    version = add_version(files={"tokenizer.json": deaf, **CLEAN}, tokenizer=False)
    job = evaluate(version.reference)
    assert "self-test failed: the reference answers" in job.error
    assert provider.started == []


@pytest.mark.parametrize("kind", [Kind.WEIGHTS, Kind.CHECKPOINT, Kind.GGUF])
def test_only_a_merged_version_can_be_run(evaluate, add_version, sums, kind):
    version = add_version(kind=kind)
    with pytest.raises(InvalidInput, match=f"slipway merge {version.reference}"):
        evaluate(version.reference)


def test_unknown_names_are_refused_at_once(evaluate, candidate, sums):
    with pytest.raises(NotFound, match="no version sums/99"):
        evaluate("sums/99")
    with pytest.raises(NotFound, match="no suite other"):
        evaluate(candidate.reference, "other")


def test_asking_twice_at_once_runs_once(service, tenant, provider, candidate, sums, answers):
    async def main():
        jobs = [service.start_run(tenant, candidate.reference, s) for s in ("sums", sums.digest)]
        await service._jobs.wait(tenant, jobs[0].id, 30)
        return jobs

    first, second = asyncio.run(main())
    assert first.id == second.id
    assert provider.started == [candidate.reference]


def test_cancelling_a_run_lets_the_replica_go(
    registry, service, tenant, stand_in, provider, candidate, sums, answers
):
    stand_in.delay = lambda question: 1.0

    async def main():
        job = service.start_run(tenant, candidate.reference, "sums", keep=True)
        while not stand_in.in_flight:
            await asyncio.sleep(0.01)
        return await service._jobs.cancel(tenant, job.id)

    assert asyncio.run(main()).status == "cancelled"
    assert (provider.held, provider.kept) == ([], [])
    assert registry.evidence.runs(tenant) == []


def test_a_better_candidate_passes_and_may_be_promoted(
    registry, service, tenant, evaluate, base, candidate, sums, answers
):
    for version in (base, candidate):
        evaluate(version.reference)
    gate = service.start_gate(tenant, candidate.reference, base.reference, "sums")
    assert gate.verdict == "pass"
    assert (gate.candidate, gate.baseline) == (candidate.reference, base.reference)
    assert gate.candidate_digest == candidate.digest
    table = gate.statistics
    assert (table["gained"], table["lost"], table["n"], table["looks"]) == (16, 0, 24, 1)
    assert table["leakage"] == {"candidate": "clean", "baseline": "unchecked"}
    assert registry.evidence.gate(tenant, gate.id) == gate
    move = registry.aliases.move(tenant, "sums", "production", candidate.reference, moved_by="key")
    assert move.gate_id == gate.id


def test_the_base_does_not_pass_against_the_trained_version(
    registry, service, tenant, evaluate, base, candidate, sums, answers
):
    for version in (base, candidate):
        evaluate(version.reference)
    gate = service.start_gate(tenant, base.reference, candidate.reference, sums.digest)
    assert gate.verdict == "fail"
    assert gate.statistics["leakage"] == {"candidate": "unchecked", "baseline": "clean"}
    with pytest.raises(PolicyUnmet):
        registry.aliases.move(tenant, "base", "production", base.reference, moved_by="key")


def test_looks_are_counted_by_group_and_suite(
    service, tenant, evaluate, add_version, base, candidate, sums, answers
):
    second = add_version(parents=candidate.parents)
    for version in (base, candidate, second):
        evaluate(version.reference)
    looks = [
        service.start_gate(tenant, version.reference, base.reference, "sums").statistics["looks"]
        for version in (candidate, second, candidate)
    ]
    assert looks == [1, 2, 3]
    back = service.start_gate(tenant, base.reference, candidate.reference, "sums")
    assert back.statistics["looks"] == 1


def test_the_latest_run_decides(
    service, tenant, stand_in, evaluate, base, candidate, sums, answers
):
    right = stand_in.answer
    stand_in.answer = lambda model, question: "no"
    evaluate(candidate.reference)
    stand_in.answer = right
    for version in (base, candidate):
        evaluate(version.reference)
    assert service.start_gate(tenant, candidate.reference, base.reference, "sums").verdict == "pass"


def test_a_missing_run_is_named(service, tenant, evaluate, base, candidate, sums, answers):
    evaluate(candidate.reference)
    with pytest.raises(NotFound, match="slipway eval run base/1 --suite sums"):
        service.start_gate(tenant, candidate.reference, base.reference, "sums")


def test_a_run_of_another_suite_does_not_count(
    service, tenant, spec, evaluate, base, candidate, sums, answers
):
    for version in (base, candidate):
        evaluate(version.reference)
    service.add_suite(tenant, spec(20))
    with pytest.raises(NotFound, match="there is no run of sums"):
        service.start_gate(tenant, candidate.reference, base.reference, "sums")
    gate = service.start_gate(tenant, candidate.reference, base.reference, sums.digest)
    assert gate.verdict == "pass"


def test_differing_engines_are_refused(
    service, registry, tenant, provider, evaluate, base, candidate, sums, answers
):
    evaluate(base.reference)
    provider.engine["version"] = "2"
    evaluate(candidate.reference)
    with pytest.raises(Conflict, match=r"differ in version \(2 and 1\)"):
        service.start_gate(tenant, candidate.reference, base.reference, "sums")
    assert registry.evidence.gates(tenant) == []


def test_a_version_is_not_gated_against_itself(service, tenant, base, sums):
    with pytest.raises(InvalidInput, match="the same bytes"):
        service.start_gate(tenant, base.reference, base.id, "sums")


@pytest.mark.parametrize("alpha", [0.0, 0.5, -1.0])
def test_alpha_is_bounded(service, tenant, base, candidate, sums, alpha):
    with pytest.raises(InvalidInput, match="alpha"):
        service.start_gate(tenant, candidate.reference, base.reference, "sums", alpha=alpha)


def test_unknown_training_data_is_refused(
    registry, service, tenant, evaluate, add_version, base, sums, answers
):
    blank = add_version("blank")
    for version in (base, blank):
        evaluate(version.reference)
    with pytest.raises(Conflict, match="what blank/1 was trained on is unknown"):
        service.start_gate(tenant, blank.reference, base.reference, "sums")
    assert registry.evidence.gates(tenant) == []


def test_leaked_items_are_named(
    registry, service, tenant, evaluate, add_version, base, sums, answers
):
    data = TrainingData()
    data.add([f"What is {10 + i} + {i}?" for i in (3, 7)])
    leaky = add_version("leaky", files={leakage.FILE: data.dump()})
    for version in (base, leaky):
        evaluate(version.reference)
    with pytest.raises(Conflict, match=r"2 of 24 items .* of leaky/1: sums-3, sums-7; remove"):
        service.start_gate(tenant, leaky.reference, base.reference, "sums")
    assert registry.evidence.gates(tenant) == []


def test_other_tenants_see_nothing(registry, service, evaluate, base, candidate, sums, answers):
    for version in (base, candidate):
        evaluate(version.reference)
    other = registry.tenants.ensure_tenant("other")
    with pytest.raises(NotFound):
        service.start_gate(other, candidate.reference, base.reference, "sums")
    with pytest.raises(NotFound):
        service.start_gate(other, candidate.id, base.id, sums.digest)
