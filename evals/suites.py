"""Suites: held-out items with the template, decoding and grader they are asked under.

A suite is one JSON file, frozen as a whole under one digest (the registry's). Templates are
rendered here and sent as token ids, so no server's chat template can change what is asked:

    {"format": 1, "name": "sums",
     "template": "<|im_start|>user\\n{question}<|im_end|>\\n<|im_start|>assistant\\n",
     "decoding": {"max_tokens": 24, "temperature": 0, "stop": ["<|im_end|>"]},
     "grader": {"kind": "numeric"},
     "items": [{"id": "sums-1", "question": "12 + 34 =", "answer": "46"}]}
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from evals.graders import GRADERS, Grader
from registry.errors import InvalidInput

FORMAT = 1
PLACEHOLDER = "{question}"
_SHOWN = 20


class _Part(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)


class Decoding(_Part):
    """How answers are drawn: greedily, up to a limit."""

    max_tokens: int = Field(ge=1, le=32768)
    """Tokens an answer may have; one that reaches it counts as truncated."""
    temperature: float = Field(default=0.0, ge=0.0, le=0.0)
    """0, greedy: gates compare item by item, and sampling would drown that in noise."""
    stop: list[str] = Field(default_factory=list, max_length=16)
    """Texts that end an answer, beside the model's own end token; not part of it."""


class GraderSpec(_Part):
    """Which grader; `numeric` or `exact`."""

    kind: str


class Item(_Part):
    """One question with its reference answer."""

    id: str = Field(min_length=1, max_length=200)
    question: str = Field(min_length=1)
    answer: str = Field(min_length=1)


class Suite(_Part):
    """A validated suite."""

    format: Literal[1]
    name: str = Field(pattern=r"^[a-z0-9][a-z0-9._-]{0,62}$")
    template: str
    decoding: Decoding
    grader: GraderSpec
    items: list[Item] = Field(min_length=1)

    def render(self, item: Item) -> str:
        """The prompt, special tokens included. Braces in questions and template are text."""
        return self.template.replace(PLACEHOLDER, item.question)

    def make_grader(self) -> Grader:
        """The grader it names."""
        return GRADERS[self.grader.kind]


def parse(spec: object) -> Suite:
    """A suite from its JSON value. Raises InvalidInput that explains every mistake."""
    mistakes = problems(spec)
    if mistakes:
        shown = mistakes[:_SHOWN]
        if len(mistakes) > _SHOWN:
            shown.append(f"and {len(mistakes) - _SHOWN} more")
        name = spec.get("name") if isinstance(spec, dict) else None
        title = f"suite {name!r}" if isinstance(name, str) else "this suite"
        raise InvalidInput(f"{title} cannot be used:\n" + "\n".join(f"- {m}" for m in shown))
    return Suite.model_validate(spec)


def load(path: Path) -> Suite:
    """A suite from a JSON file. Raises InvalidInput that explains every mistake."""
    try:
        spec = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise InvalidInput(f"there is no file {path}") from None
    except UnicodeDecodeError:
        raise InvalidInput(f"{path.name} is not UTF-8 text; a suite is one JSON file") from None
    except json.JSONDecodeError as error:
        raise InvalidInput(
            f"{path.name} is not JSON: {error.msg} at line {error.lineno}, column {error.colno}"
        ) from None
    return parse(spec)


def problems(spec: object) -> list[str]:
    """Every mistake in a suite's JSON value, each a line for a person; empty when it is good."""
    if not isinstance(spec, dict):
        return ["a suite is a JSON object with name, template, decoding, grader and items"]
    found = []
    try:
        Suite.model_validate(spec)
    except ValidationError as error:
        found = [_explain(entry) for entry in error.errors(include_url=False)]
    # What concerns more than one field is checked on the raw value, so that one wrong field
    # does not hide the rest.
    return [*found, *_template_mistakes(spec), *_grader_mistakes(spec), *_item_mistakes(spec)]


def _explain(entry: Any) -> str:
    place = ""
    for step in entry["loc"]:
        place += f"[{step}]" if isinstance(step, int) else f".{step}" if place else str(step)
    if entry["type"] == "missing":
        return f"{place} is missing"
    if entry["type"] == "extra_forbidden":
        return f"{place} is not a field of a suite"
    if place == "name" and entry["type"] == "string_pattern_mismatch":
        return "name: use lower-case letters, digits, dots, dashes and underscores, at most 63"
    if place == "decoding.temperature":
        return "decoding.temperature: only 0 (greedy) can be compared item by item"
    return f"{place}: {entry['msg']}"


def _template_mistakes(spec: dict[Any, Any]) -> Iterator[str]:
    template = spec.get("template")
    if isinstance(template, str) and template.count(PLACEHOLDER) != 1:
        times = template.count(PLACEHOLDER)
        yield f"template: {PLACEHOLDER} must stand in it exactly once, not {times} times"
    decoding = spec.get("decoding")
    stops = decoding.get("stop") if isinstance(decoding, dict) else None
    if isinstance(stops, list) and "" in stops:
        yield "decoding.stop: an empty text would end every answer at once"


def _grader_mistakes(spec: dict[Any, Any]) -> Iterator[str]:
    kind = _kind(spec)
    if isinstance(kind, str) and kind not in GRADERS:
        yield f"grader.kind: {kind!r} is unknown; use {' or '.join(sorted(GRADERS))}"


def _item_mistakes(spec: dict[Any, Any]) -> Iterator[str]:
    items = spec.get("items")
    if not isinstance(items, list):
        return
    entries = [item if isinstance(item, dict) else {} for item in items]
    yield from _repeated("id", (entry.get("id") for entry in entries))
    questions = (entry.get("question") for entry in entries)
    yield from _repeated(
        "question", (" ".join(q.split()) if isinstance(q, str) else None for q in questions)
    )
    grader = GRADERS.get(_kind(spec) or "")
    for place, entry in enumerate(entries):
        question, answer = entry.get("question"), entry.get("answer")
        if isinstance(question, str) and question and not question.strip():
            yield f"items[{place}].question is blank"
        if not isinstance(answer, str) or not answer:
            continue
        if not answer.strip():
            yield f"items[{place}].answer is blank"
        elif grader and (mistake := grader.mistake(answer)):
            yield f"items[{place}].answer: {mistake}, as the {_kind(spec)} grader needs"


def _repeated(field: str, values: Iterable[object]) -> Iterator[str]:
    first: dict[str, int] = {}
    for place, value in enumerate(values):
        if not isinstance(value, str):
            continue
        if value in first:
            yield f"items[{place}].{field} repeats that of items[{first[value]}]: {value[:80]!r}"
        else:
            first[value] = place


def _kind(spec: dict[Any, Any]) -> str | None:
    grader = spec.get("grader")
    kind = grader.get("kind") if isinstance(grader, dict) else None
    return kind if isinstance(kind, str) else None
