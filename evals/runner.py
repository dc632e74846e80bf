"""Asks every item of a suite and classes every answer; drops none."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable

from evals.graders import Grader
from evals.outcomes import ItemResult, Outcome
from evals.suites import Item, Suite
from evals.targets import Codec, Completion, Target, TargetError
from registry.errors import Unavailable

LENGTH = "length"
"""The finish reason of an answer that reached the token limit."""

Progress = Callable[[int, int], None]
"""Told after each item: items done, items in all."""


def classify(
    item: Item, completion: Completion, grader: Grader, *, prompt_tokens: int
) -> ItemResult:
    """Grade one answer.

    An answer that reached the token limit is correct only if it is correct already and cannot
    be changed by what was cut off right after it ("12" may be the beginning of "123"); in all
    other cases it is truncated, whatever stands in it.
    """
    extracted = grader.extract(completion.text)
    right = extracted is not None and grader.equal(extracted.text, item.answer)
    cut = completion.finish_reason == LENGTH
    if cut and not (right and extracted is not None and not extracted.at_end):
        outcome = Outcome.TRUNCATED
    elif extracted is None:
        outcome = Outcome.NO_ANSWER
    else:
        outcome = Outcome.CORRECT if right else Outcome.WRONG
    return ItemResult(
        id=item.id,
        question=item.question,
        answer=item.answer,
        outcome=outcome,
        raw=completion.text,
        extracted=extracted.text if extracted else None,
        finish_reason=completion.finish_reason,
        prompt_tokens=prompt_tokens,
        completion_tokens=len(completion.token_ids),
    )


async def run(
    suite: Suite,
    target: Target,
    codec: Codec,
    *,
    concurrency: int = 32,
    retries: int = 3,
    backoff_s: float = 0.5,
    progress: Progress | None = None,
    sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
) -> list[ItemResult]:
    """Results in the suite's order, whatever order the answers came in.

    `concurrency`: requests in flight; `retries`: further tries of an item after the first,
    with `backoff_s` seconds before them, doubled each time. An item that fails all of them is
    classed as an error. Raises Unavailable when every item is: then nothing was measured.
    """
    grader = suite.make_grader()
    results: list[ItemResult | None] = [None] * len(suite.items)
    waiting = iter(enumerate(suite.items))
    done = 0

    async def work() -> None:
        nonlocal done
        # One iterator shared by all workers: each takes the next item when it is free.
        for place, item in waiting:
            results[place] = await _ask(item)
            done += 1
            if progress is not None:
                progress(done, len(results))

    async def _ask(item: Item) -> ItemResult:
        prompt = codec.encode(suite.render(item))
        wait = backoff_s
        for attempt in range(retries + 1):
            try:
                completion = await target.generate(prompt, suite.decoding)
            except TargetError as error:
                if not error.retryable or attempt == retries:
                    return _failed(item, error, prompt_tokens=len(prompt))
                # Spread out, so that items that failed together do not come back together.
                await sleep(wait * random.uniform(0.5, 1.0))
                wait *= 2
            else:
                return classify(item, completion, grader, prompt_tokens=len(prompt))
        raise AssertionError("the last attempt returns")

    async with asyncio.TaskGroup() as group:
        for _ in range(min(concurrency, len(results))):
            group.create_task(work())
    finished = [result for result in results if result is not None]
    if all(result.outcome is Outcome.ERROR for result in finished):
        raise Unavailable(
            f"the server answered none of the {len(finished)} items; the first error was: "
            f"{finished[0].error}"
        )
    return finished


def _failed(item: Item, error: TargetError, *, prompt_tokens: int) -> ItemResult:
    return ItemResult(
        id=item.id,
        question=item.question,
        answer=item.answer,
        outcome=Outcome.ERROR,
        prompt_tokens=prompt_tokens,
        error=error.message,
    )
