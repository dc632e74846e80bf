from __future__ import annotations

import pytest

from evals import leakage
from evals.suites import parse
from registry import Corrupt, Kind, Origin
from session_core.training_data import TrainingData

LONG = "Tom has {} apples and buys {} more at the market, how many apples has he now?"


@pytest.fixture
def long_suite(spec):
    items = [
        {"id": f"apples-{i}", "question": LONG.format(20 + i, i), "answer": str(20 + 2 * i)}
        for i in range(6)
    ]
    return parse(spec(items=items))


def trained_on(*texts) -> TrainingData:
    data = TrainingData()
    data.add(texts)
    return data


def datum(suite, codec, place, *, answer=None):
    """An item as training sees it: rendered, with the answer, decoded without special tokens."""
    item = suite.items[place]
    rendered = suite.render(item) + (item.answer if answer is None else answer) + "<|im_end|>\n"
    return codec.decode(codec.encode(rendered))


def test_nothing_is_found_in_other_data(suite, codec):
    data = trained_on("system\nAnswer with the number only.\nuser\nWhat is 99 + 1?\nassistant\n100")
    assert leakage.leaked_items(suite, data, codec) == []
    assert leakage.leaked_items(suite, TrainingData(), codec) == []


def test_a_trained_item_is_found(suite, codec):
    data = trained_on(datum(suite, codec, 5), datum(suite, codec, 2))
    assert leakage.leaked_items(suite, data, codec) == ["sums-2", "sums-5"]


@pytest.mark.parametrize(
    "change",
    [
        str.upper,
        lambda text: text.replace("\n", "  \n\n "),
        lambda text: text.replace("?", "?!"),
        lambda text: text.removesuffix("12").rstrip(),
    ],
    ids=["case", "white space", "punctuation", "prompt alone"],
)
def test_it_is_found_in_disguise(suite, codec, change):
    data = trained_on(change(datum(suite, codec, 1).strip()))
    assert leakage.leaked_items(suite, data, codec) == ["sums-1"]


@pytest.mark.parametrize("text", ["What is 11 + 1?", "what is 11 + 1? 12", "What is 11 + 1\n12"])
def test_a_bare_question_is_found(suite, codec, text):
    assert leakage.leaked_items(suite, trained_on(text), codec) == ["sums-1"]


def test_a_question_within_a_longer_text_is_found_by_its_words(long_suite, codec):
    hidden = f"Dear diary. {LONG.format(23, 3)} I did not know. And then we went home."
    assert leakage.leaked_items(long_suite, trained_on(hidden), codec) == ["apples-3"]


def test_a_question_of_the_same_form_is_not_leaked(long_suite, codec):
    data = trained_on(*(LONG.format(50 + i, 90 - i) for i in range(20)))
    assert leakage.leaked_items(long_suite, data, codec) == []


def test_what_a_version_carries_is_checked(registry, add_version, suite, codec):
    clean = add_version(files={leakage.FILE: trained_on("something else").dump()})
    leaky = add_version(files={leakage.FILE: trained_on(datum(suite, codec, 4)).dump()})
    assert leakage.check(registry, clean, suite, codec).status == "clean"
    found = leakage.check(registry, leaky, suite, codec)
    assert (found.status, found.items) == ("leaked", ("sums-4",))


def test_an_imported_version_is_unchecked(registry, add_version, suite, codec):
    base = add_version("base", origin=Origin.IMPORT)
    assert leakage.check(registry, base, suite, codec).status == "unchecked"


@pytest.mark.parametrize("origin", [Origin.SESSION, Origin.MERGE])
def test_a_version_trained_here_without_a_record_is_unknown(
    registry, add_version, suite, codec, origin
):
    version = add_version(origin=origin)
    assert leakage.check(registry, version, suite, codec).status == "unknown"


def test_a_merge_answers_for_its_parents(registry, add_version, suite, codec):
    base = add_version("base", origin=Origin.IMPORT)
    record = trained_on(datum(suite, codec, 0)).dump()
    adapter = add_version(kind=Kind.WEIGHTS, origin=Origin.SESSION, files={leakage.FILE: record})
    merged = add_version(parents=(adapter.id, base.id))
    assert leakage.check(registry, merged, suite, codec).items == ("sums-0",)
    silent = add_version(kind=Kind.WEIGHTS, origin=Origin.SESSION)
    merged = add_version(parents=(silent.id, base.id))
    assert leakage.check(registry, merged, suite, codec).status == "unknown"


def test_a_broken_record_is_an_error(registry, add_version, suite, codec):
    version = add_version(files={leakage.FILE: b"{}"})
    with pytest.raises(Corrupt, match=r"training-data\.json"):
        leakage.check(registry, version, suite, codec)
