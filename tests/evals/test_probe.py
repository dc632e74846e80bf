from __future__ import annotations

import asyncio
import json

import pytest

from evals import probe
from evals.graders import GRADERS, NumericGrader
from evals.suites import parse
from registry.errors import Corrupt, InvalidInput, Unavailable
from session_core.probe import dump_probe

PROMPTS = [[5, 6, 7, 8], [9, 10, 11, 12]]
BASE = [[-3.0, -4.0, -5.0], [-6.0, -2.0, -1.0]]
ADAPTER = [[-2.5, -4.5, -4.0], [-6.5, -1.0, -0.5]]


class Fixed:
    """A target whose logprobs are those given."""

    def __init__(self, rows):
        self.rows = dict(zip(map(tuple, PROMPTS), rows, strict=True))

    async def generate(self, token_ids, decoding):
        raise AssertionError("a probe generates nothing")

    async def logprobs(self, token_ids):
        return [None, *self.rows[tuple(token_ids)]]


def shifted(rows, by):
    return [[value + by for value in row] for row in rows]


@pytest.fixture
def probe_file(tmp_path):
    path = tmp_path / "probe.json"
    path.write_bytes(dump_probe(PROMPTS, base=BASE, adapter=ADAPTER))
    return path


def check(rows, path, dtype="float32"):
    return asyncio.run(probe.check_loaded(Fixed(rows), probe.read_probe(path), dtype=dtype))


def test_known_answers_score_and_wrong_ones_do_not(suite, codec):
    probe.known_answers(suite, codec)


def test_known_answers_of_the_exact_grader(spec, codec):
    probe.known_answers(parse(spec(grader={"kind": "exact"})), codec)


def test_a_grader_that_scores_nothing_is_caught(suite, codec, monkeypatch):
    class Deaf(NumericGrader):
        def equal(self, extracted, reference):
            return False

    monkeypatch.setitem(GRADERS, "numeric", Deaf())
    with pytest.raises(InvalidInput, match=r"reference answers of sums-0, sums-1.* do not score"):
        probe.known_answers(suite, codec)


def test_a_grader_that_scores_anything_is_caught(suite, codec, monkeypatch):
    class Kind(NumericGrader):
        def equal(self, extracted, reference):
            return True

    monkeypatch.setitem(GRADERS, "numeric", Kind())
    with pytest.raises(InvalidInput, match=r"a wrong answer to .* is not graded as wrong"):
        probe.known_answers(suite, codec)


def test_a_tokenizer_that_loses_the_answer_is_caught(spec, suite, tmp_path):
    from tokenizers import Tokenizer, models, pre_tokenizers

    words = Tokenizer(models.WordLevel({"[UNK]": 0, "What": 1}, unk_token="[UNK]"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    path = tmp_path / "tokenizer.json"
    path.write_text(words.to_str())
    with pytest.raises(InvalidInput, match=r"and 20 more do not score|do not score"):
        probe.known_answers(parse(spec(30)), probe.Codec(path))


def test_the_version_itself_is_recognised(probe_file):
    found = check(shifted(ADAPTER, 0.001), probe_file)
    assert found.to_adapter == pytest.approx(0.001)
    assert found.to_base > 0.5
    assert found.as_json() == {
        "to_adapter": 0.001,
        "to_base": pytest.approx(found.to_base, abs=1e-6),
        "adapter_to_base": pytest.approx(4 / 6, abs=1e-6),
        "noise_floor": 0.02,
    }


def test_the_base_in_its_place_is_caught(probe_file):
    with pytest.raises(Unavailable, match="answers with the base model, not with this version"):
        check(shifted(BASE, 0.001), probe_file)
    with pytest.raises(Unavailable, match="the base model"):
        check(BASE, probe_file, dtype="bfloat16")


def test_another_model_is_caught(probe_file):
    with pytest.raises(Unavailable, match="answers with another model"):
        check(shifted(ADAPTER, 1.0), probe_file)
    with pytest.raises(Unavailable, match="another model"):
        check(shifted(ADAPTER, 0.1), probe_file)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "auto", ""])
def test_half_precision_has_a_wider_floor(probe_file, dtype):
    assert check(shifted(ADAPTER, 0.1), probe_file, dtype).noise_floor == 0.2


def test_a_version_like_its_base_cannot_be_told_from_it(tmp_path):
    path = tmp_path / "probe.json"
    path.write_bytes(dump_probe(PROMPTS, base=BASE, adapter=BASE))
    assert "too little" in check(BASE, path).as_json()["note"]
    with pytest.raises(Unavailable, match="self-test failed"):
        check(shifted(BASE, 0.1), path)


@pytest.mark.parametrize(
    "change",
    [
        lambda raw: raw.update(format=2),
        lambda raw: raw.pop("base"),
        lambda raw: raw["base"].pop(),
        lambda raw: raw["adapter"][0].pop(),
        lambda raw: raw.update(prompts=[], base=[], adapter=[]),
        lambda raw: raw.update(adapter=[[None] * 4] * 2),
        lambda raw: raw["base"][0].__setitem__(1, "x"),
        lambda raw: raw["base"][0].__setitem__(1, float("nan")),
        lambda raw: raw.update(prompts=3),
    ],
)
def test_a_broken_probe_is_named(probe_file, change):
    raw = json.loads(probe_file.read_bytes())
    change(raw)
    probe_file.write_text(json.dumps(raw))
    with pytest.raises(Corrupt, match=r"probe\.json cannot be read"):
        probe.read_probe(probe_file)


@pytest.mark.parametrize("data", [b"", b"[]", b"null", b"\xff"])
def test_what_is_no_probe_is_named(tmp_path, data):
    path = tmp_path / "probe.json"
    path.write_bytes(data)
    with pytest.raises(Corrupt, match=r"probe\.json cannot be read"):
        probe.read_probe(path)
