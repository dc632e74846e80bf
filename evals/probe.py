"""Self-tests that must hold before a number means anything.

Two faults make an evaluation worthless without looking so: a prompt or grading path under
which right answers score nothing, and a server that silently answers with another model. Both
are tested on the very path and the very server of the run; a failure is an error, not a score.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from evals.outcomes import Outcome
from evals.runner import classify
from evals.suites import Item, Suite
from evals.targets import Codec, Completion, Target
from registry.errors import Corrupt, InvalidInput, Unavailable

FILE = "probe.json"
FORMAT = 1

NOISE_FLOOR_FLOAT32 = 0.02
"""Nats. Two float32 implementations of one model differ by some 1e-4 on average."""
NOISE_FLOOR_HALF = 0.2
"""Nats, for bfloat16 and float16: rounding weights and logits costs some hundredths."""


@dataclass(frozen=True, kw_only=True)
class Probe:
    """A version's probe.json: token sequences with the logprobs two models give them."""

    prompts: list[list[int]]
    base: list[list[float | None]]
    adapter: list[list[float | None]]


@dataclass(frozen=True, kw_only=True)
class ProbeResult:
    """How near the served model is to the version and to its base. Means of |difference|."""

    to_adapter: float
    to_base: float
    adapter_to_base: float
    noise_floor: float
    note: str = ""

    def as_json(self) -> dict[str, Any]:
        """For the evidence."""
        numbers = {
            name: round(getattr(self, name), 6)
            for name in ("to_adapter", "to_base", "adapter_to_base", "noise_floor")
        }
        return numbers | ({"note": self.note} if self.note else {})


def known_answers(suite: Suite, codec: Codec) -> None:
    """Every reference answer must score through this path, and a wrong one must not.

    Answers take the way a model's answers take: token ids, decoded, classed. Raises
    InvalidInput naming the items.
    """
    grader = suite.make_grader()
    unscored, scored = [], []
    for item in suite.items:
        if _outcome(item, item.answer, suite, codec) is not Outcome.CORRECT:
            unscored.append(item.id)
        if _outcome(item, grader.wrong(item.answer), suite, codec) is not Outcome.WRONG:
            scored.append(item.id)
    if unscored:
        raise InvalidInput(
            f"self-test failed: the reference answers of {_some(unscored)} do not score through "
            "the tokenizer and the grader; no model could"
        )
    if scored:
        raise InvalidInput(
            f"self-test failed: a wrong answer to {_some(scored)} is not graded as wrong"
        )


def _outcome(item: Item, answer: str, suite: Suite, codec: Codec) -> Outcome:
    ids = codec.encode(answer)
    completion = Completion(text=codec.decode(ids), token_ids=tuple(ids), finish_reason="stop")
    return classify(item, completion, suite.make_grader(), prompt_tokens=0).outcome


def _some(ids: Sequence[str]) -> str:
    shown = ", ".join(ids[:10])
    return shown if len(ids) <= 10 else f"{shown} and {len(ids) - 10} more"


def read_probe(path: Path) -> Probe:
    """Read a probe.json. Raises Corrupt when it is not one."""
    try:
        raw = json.loads(path.read_bytes())
        if raw["format"] != FORMAT:
            raise ValueError(f"format {raw['format']!r} is not {FORMAT}")
        probe = Probe(prompts=raw["prompts"], base=raw["base"], adapter=raw["adapter"])
        for scores in (probe.base, probe.adapter):
            if [len(row) for row in scores] != [len(prompt) for prompt in probe.prompts]:
                raise ValueError("logprobs and prompts differ in length")
        if not math.isfinite(_distance(probe.base, probe.adapter)):
            raise ValueError("logprobs are not finite")
    except (ValueError, KeyError, TypeError) as error:
        raise Corrupt(f"{path.name} cannot be read: {error}") from None
    return probe


async def check_loaded(target: Target, probe: Probe, *, dtype: str) -> ProbeResult:
    """Show that the server has the version loaded, and not its base.

    The served logprobs must lie within the noise floor of the version's, and nearer to them
    than to the base's. A version that hardly differs from its base cannot be told from it;
    that passes with a note. `dtype`: the server's, which sets the floor. Raises Unavailable
    when the server has something else loaded.
    """
    served = [await target.logprobs(prompt) for prompt in probe.prompts]
    floor = NOISE_FLOOR_FLOAT32 if dtype in ("float32", "float") else NOISE_FLOOR_HALF
    gap = _distance(probe.adapter, probe.base)
    alike = gap <= 2 * floor
    result = ProbeResult(
        to_adapter=_distance(served, probe.adapter),
        to_base=_distance(served, probe.base),
        adapter_to_base=gap,
        noise_floor=floor,
        note="the version differs too little from its base to be told from it" if alike else "",
    )
    near = result.to_adapter <= floor
    if near and (alike or result.to_adapter < result.to_base):
        return result
    what = "the base model" if result.to_base <= floor else "another model"
    raise Unavailable(
        f"self-test failed: the server answers with {what}, not with this version: its logprobs "
        f"on the version's probe are {result.to_adapter:.3f} nats away from the version's and "
        f"{result.to_base:.3f} from the base's (noise floor {floor})"
    )


def _distance(a: Sequence[Sequence[float | None]], b: Sequence[Sequence[float | None]]) -> float:
    """Mean absolute difference over all tokens but each sequence's first."""
    differences = [
        abs(float(x) - float(y))
        for row, other in zip(a, b, strict=True)
        for x, y in zip(row[1:], other[1:], strict=True)
        if x is not None and y is not None
    ]
    if not differences:
        raise ValueError("there are no logprobs to compare")
    return sum(differences) / len(differences)
