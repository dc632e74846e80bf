"""What became of one item of a suite: the unit of evidence."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from enum import StrEnum

from pydantic import BaseModel, ConfigDict


class Outcome(StrEnum):
    """The five classes; every item falls into exactly one, and none is dropped."""

    CORRECT = "correct"
    WRONG = "wrong"
    NO_ANSWER = "no_answer"  # it ended, and nothing in it can be graded
    TRUNCATED = "truncated"  # the token limit came before a correct answer
    ERROR = "error"  # the server gave no answer, after retries


class ItemResult(BaseModel):
    """One item's answer and its class, as stored in the evidence."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    id: str
    question: str
    answer: str
    """The reference answer."""
    outcome: Outcome
    raw: str = ""
    """What the model wrote, untouched."""
    extracted: str | None = None
    """The part of it that was graded."""
    finish_reason: str | None = None
    prompt_tokens: int = 0
    completion_tokens: int = 0
    error: str | None = None

    @property
    def correct(self) -> bool:
        """Whether it counts."""
        return self.outcome is Outcome.CORRECT


def counts(results: Iterable[ItemResult]) -> dict[str, int]:
    """Items per class, every class named; the numbers add up to the number of items."""
    found = Counter(result.outcome for result in results)
    return {outcome.value: found[outcome] for outcome in Outcome}
