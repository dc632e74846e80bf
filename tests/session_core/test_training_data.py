from __future__ import annotations

import hashlib
import json

import pytest

from registry.errors import Corrupt
from session_core.training_data import (
    TrainingData,
    exact_hash,
    load,
    ngram_hashes,
    normalise,
    normalised_hash,
)

TEXT = "What is 17 + 4? Answer with the number only, please: 21."


def test_exact_is_the_first_16_hex_of_sha256() -> None:
    assert exact_hash("abc") == hashlib.sha256(b"abc").hexdigest()[:16]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("  Hello,\n WORLD! ", "hello world"),
        ("3 - 4 = -1", "3 - 4 = -1"),
        ("2+2", "2+2"),
        ("ﬁne", "fine"),
        ("?!.", ""),
    ],
)
def test_normalising(text: str, expected: str) -> None:
    assert normalise(text) == expected


def test_ngrams_are_runs_of_eight_words() -> None:
    assert ngram_hashes("one two three four five six seven") == []
    words = "one two three four five six seven eight nine"
    assert len(ngram_hashes(words)) == 2
    assert ngram_hashes(words.upper() + "!")[0] == exact_hash(
        "one two three four five six seven eight"
    )


def test_a_text_is_seen_word_for_word_and_but_for_case() -> None:
    data = TrainingData()
    data.add([TEXT])
    assert data.saw(TEXT)
    assert data.saw(TEXT.upper())
    assert not data.saw(TEXT + " no")


def test_a_question_inside_a_datum_is_seen_by_its_ngrams() -> None:
    data = TrainingData()
    data.add([TEXT])
    assert data.saw_every_ngram("17 + 4? Answer with the number only")
    assert not data.saw_every_ngram("17 + 5? Answer with the number only")
    assert not data.saw_every_ngram("17 + 4?"), "too short to tell"


def test_dump_and_load_are_exact_and_ordered() -> None:
    one, two = TrainingData(), TrainingData()
    one.add(["a b c d e f g h i", "second"])
    two.add(["second", "a b c d e f g h i", "second"])
    assert one.dump() == two.dump()
    raw = json.loads(one.dump())
    assert raw["format"] == 1
    assert raw["exact"] == sorted(raw["exact"])
    assert len(raw["ngrams8"]) == 2
    assert load(one.dump()) == one


def test_merging_takes_the_union() -> None:
    one, two = TrainingData(), TrainingData()
    one.add(["first"])
    two.add(["second"])
    one.merge(two)
    assert one.exact == {exact_hash("first"), exact_hash("second")}
    assert normalised_hash("SECOND") in one.normalised


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"[]",
        b"{}",
        b'{"format":2,"exact":[],"normalised":[],"ngrams8":[]}',
        b'{"format":1,"exact":"x","normalised":[],"ngrams8":[]}',
        b'{"format":1,"exact":[1],"normalised":[],"ngrams8":[]}',
    ],
)
def test_a_broken_file_is_corrupt(data: bytes) -> None:
    with pytest.raises(Corrupt, match=r"training-data\.json"):
        load(data)


def test_lone_surrogates_do_not_stop_a_run() -> None:
    TrainingData().add(["\ud800 broken"])
