"""Leakage: does a suite's item occur in what a version was trained on?

Versions carry hashes of their training data, never the text; items are hashed here by the
same functions (`session_core.training_data`).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from evals.suites import Item, Suite
from evals.targets import Codec
from registry.errors import NotFound
from registry.models import Origin
from registry.registry import Registry
from registry.views import VersionView
from session_core.training_data import TrainingData, load

FILE = "training-data.json"


@dataclass(frozen=True, kw_only=True)
class Leakage:
    """What is known about a version and a suite."""

    status: Literal["clean", "leaked", "unchecked", "unknown"]
    """`unchecked`: trained elsewhere, so nobody can tell. `unknown`: trained here, and the
    record of it is missing, which is a fault."""
    items: tuple[str, ...] = ()
    """Ids of the items that occur in the training data."""


def leaked_items(suite: Suite, data: TrainingData, codec: Codec) -> list[str]:
    """Ids of the items that were trained on, in the suite's order.

    An item was, if (a) a datum is its prompt, with or without the answer, or its question, but
    for case, punctuation and white space; or (b) its question has eight words or more and every
    run of eight words of it occurs in the data.
    """
    return [item.id for item in suite.items if _occurs(suite, item, data, codec)]


def _occurs(suite: Suite, item: Item, data: TrainingData, codec: Codec) -> bool:
    def shown(text: str) -> str:
        # Training data is hashed as decoded: special tokens are left out of both.
        return codec.decode(codec.encode(text))

    prompt = suite.render(item)
    texts = [shown(prompt + item.answer), shown(prompt), item.question]
    texts.append(f"{item.question} {item.answer}")
    return any(data.saw(text) for text in texts) or data.saw_every_ngram(item.question)


def check(registry: Registry, version: VersionView, suite: Suite, codec: Codec) -> Leakage:
    """Compare a suite with all that is known of a version's training data."""
    records = _records(registry, version)
    if records is None:
        return Leakage(status="unknown")
    if not records:
        return Leakage(status="unchecked")
    data = TrainingData()
    for record in records:
        data.merge(load(record))
    found = leaked_items(suite, data, codec)
    return Leakage(status="leaked" if found else "clean", items=tuple(found))


def _records(registry: Registry, version: VersionView) -> list[bytes] | None:
    """The training-data files that count for a version; None if one is missing.

    A merge trains nothing: what its parents were trained on counts, when it carries no file of
    its own. An imported version (the base model) was trained elsewhere: no files.
    """
    own = registry.store.path(version.digest) / FILE
    if own.is_file():
        return [own.read_bytes()]
    if version.origin is Origin.IMPORT:
        return []
    if version.origin is not Origin.MERGE:
        return None
    found: list[bytes] = []
    for parent_id in version.parents:
        try:
            records = _records(registry, registry.versions.by_id(parent_id))
        except NotFound:
            return None
        if records is None:
            return None
        found += records
    return found or None
