from __future__ import annotations

import asyncio
import random

import httpx
import pytest
from starlette.responses import JSONResponse, Response

from evals import runner
from evals.graders import NumericGrader
from evals.outcomes import Outcome, counts
from evals.suites import Item, parse
from evals.targets import Completion, CompletionsTarget
from registry.errors import Unavailable


def run(stand_in, codec, suite, **options):
    slept = []

    async def sleep(seconds):
        slept.append(seconds)

    async def main():
        async with httpx.AsyncClient(trust_env=False, timeout=20) as client:
            target = CompletionsTarget(
                base_url=stand_in.url, model="sums/1", codec=codec, client=client
            )
            return await runner.run(suite, target, codec, **{"sleep": sleep, **options})

    return asyncio.run(main()), slept


def test_every_item_is_asked_and_kept_whole(stand_in, codec, suite):
    seen = []
    results, _ = run(stand_in, codec, suite, progress=lambda done, of: seen.append((done, of)))
    assert [result.id for result in results] == [item.id for item in suite.items]
    assert seen == [(i + 1, 8) for i in range(8)]
    first = results[0]
    assert first.outcome is Outcome.CORRECT
    assert (first.question, first.answer, first.raw) == ("What is 10 + 0?", "10", "10")
    assert (first.extracted, first.finish_reason, first.error) == ("10", "stop", None)
    assert first.prompt_tokens == len(codec.encode(suite.render(suite.items[0])))
    assert first.completion_tokens == len(codec.encode("10"))


def test_the_order_is_the_suites_whatever_comes_first(stand_in, codec, spec):
    suite = parse(spec(30))
    delays = {item.question: random.Random(5).random() / 20 for item in suite.items}
    stand_in.delay = lambda question: delays[question]
    results, _ = run(stand_in, codec, suite, concurrency=7)
    assert [result.id for result in results] == [item.id for item in suite.items]
    again, _ = run(stand_in, codec, suite, concurrency=30)
    assert again == results
    assert stand_in.peak <= 30


def test_no_more_than_so_many_at_once(stand_in, codec, spec):
    stand_in.delay = lambda question: 0.02
    run(stand_in, codec, parse(spec(20)), concurrency=4)
    assert stand_in.peak == 4


def test_the_five_classes(stand_in, codec, suite):
    answers = {1: "no idea", 2: "99", 3: "1", 4: "14 is what", 5: "the answer"}

    def number(question):
        return int(question.rstrip("?").split(" + ")[1])

    def answer(model, question):
        i = number(question)
        return answers.get(i, str(10 + 2 * i))

    stand_in.answer = answer
    stand_in.finish = lambda q: "length" if number(q) in (3, 5, 7) else "stop"
    stand_in.fault = lambda q, attempt: Response("no", status_code=500) if number(q) == 6 else None
    results, _ = run(stand_in, codec, suite)
    assert [result.outcome.value for result in results] == [
        "correct",
        "no_answer",
        "wrong",
        "truncated",
        "wrong",
        "truncated",
        "error",
        # "24" stands at the very end of a cut answer: it may be the beginning of "245".
        "truncated",
    ]
    assert counts(results) == {
        "correct": 1,
        "wrong": 2,
        "no_answer": 1,
        "truncated": 3,
        "error": 1,
    }
    assert results[6].error == "status 500: no"
    assert results[4].extracted == "14"


@pytest.mark.parametrize(
    ("text", "finish", "outcome"),
    [
        ("46", "stop", Outcome.CORRECT),
        ("The answer is 46. I added", "length", Outcome.CORRECT),
        ("The answer is 46", "length", Outcome.TRUNCATED),
        ("The answer is 46.", "length", Outcome.TRUNCATED),
        ("First 12, and", "length", Outcome.TRUNCATED),
        ("First", "length", Outcome.TRUNCATED),
        ("", "stop", Outcome.NO_ANSWER),
        ("47", "stop", Outcome.WRONG),
    ],
)
def test_classes_of_single_answers(text, finish, outcome):
    item = Item(id="i", question="12 + 34", answer="46")
    completion = Completion(text=text, token_ids=(1, 2), finish_reason=finish)
    found = runner.classify(item, completion, NumericGrader(), prompt_tokens=3)
    assert (found.outcome, found.raw, found.completion_tokens) == (outcome, text, 2)


def test_passing_faults_cost_nothing_but_time(stand_in, codec, suite):
    faults = [
        Response("boom", status_code=500),
        Response("<html>", media_type="application/json"),
        JSONResponse({"choices": []}),
    ]
    stand_in.fault = lambda q, attempt: faults[attempt] if attempt < 3 else None
    results, slept = run(stand_in, codec, suite, backoff_s=1.0)
    assert all(result.outcome is Outcome.CORRECT for result in results)
    assert len(slept) == 24
    assert set(stand_in.asked.values()) == {4}
    assert max(slept) <= 4.0
    assert min(slept) >= 0.5


def test_a_lasting_fault_is_given_up_after_the_retries(stand_in, codec, suite):
    bad = suite.items[2].question
    stand_in.fault = lambda q, attempt: Response("x", status_code=503) if q == bad else None
    results, _ = run(stand_in, codec, suite, retries=2)
    assert stand_in.asked[bad] == 3
    assert [r.id for r in results if r.outcome is Outcome.ERROR] == ["sums-2"]


def test_what_the_server_refuses_is_not_asked_again(stand_in, codec, suite):
    bad = suite.items[2].question
    stand_in.fault = lambda q, attempt: Response("long", status_code=400) if q == bad else None
    results, slept = run(stand_in, codec, suite)
    assert (stand_in.asked[bad], slept) == (1, [])
    assert results[2].error == "status 400: long"


def test_a_server_that_answers_nothing_gives_no_evidence(stand_in, codec, suite):
    stand_in.fault = lambda q, attempt: Response("dead", status_code=500)
    with pytest.raises(Unavailable, match="none of the 8 items; the first error was: status 500"):
        run(stand_in, codec, suite)


def test_cancelling_ends_it(stand_in, codec, suite):
    stand_in.delay = lambda question: 1.0

    async def main():
        async with httpx.AsyncClient(trust_env=False) as client:
            target = CompletionsTarget(base_url=stand_in.url, model="m", codec=codec, client=client)
            task = asyncio.create_task(runner.run(suite, target, codec))
            while not stand_in.in_flight:
                await asyncio.sleep(0.01)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task

    asyncio.run(asyncio.wait_for(main(), 10))
