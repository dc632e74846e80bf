"""What is asked of a prompt, against a plain softmax over the whole of it."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from scipy import stats

from session_core import prompts
from session_core.operations import Operation
from session_core.prompts import NOTHING, PromptScores, score_prompt
from session_core.requests import SampleRequest, read_request

VOCABULARY = 12
LOGITS = torch.randn(9, VOCABULARY, generator=torch.Generator().manual_seed(3)) * 2
TOKENS = np.array([1, 5, 11, 0, 3, 3, 7, 2, 9])
EXPECTED = LOGITS.double().log_softmax(-1).numpy()


def request(arrays: Any = None, **params: Any) -> SampleRequest:
    operation = Operation(
        kind="sample", params={"seed": 4, **params}, arrays={"tokens": TOKENS, **(arrays or {})}
    )
    return read_request(operation, vocabulary=VOCABULARY, context=20, eos=frozenset())


def score(item: SampleRequest) -> PromptScores:
    return score_prompt(
        item,
        lambda start, end: LOGITS[start:end],
        vocabulary=VOCABULARY,
        device=torch.device("cpu"),
    )


@pytest.fixture(params=[2 * VOCABULARY, 6 * 2**20], ids=["in chunks", "at once"], autouse=True)
def chunks(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(prompts.CHUNK_LOGITS, "cpu", request.param)


def test_logprobs_of_the_prompt() -> None:
    found = score(request(prompt_logprobs=True))
    assert found.logprobs is not None
    assert np.isnan(found.logprobs[0])
    np.testing.assert_allclose(found.logprobs[1:], EXPECTED[np.arange(8), TOKENS[1:]], rtol=1e-5)
    assert set(found.arrays()) == {"prompt_logprobs"}


def test_the_last_tokens_alone() -> None:
    found = score(request(prompt_logprobs=True, last_scored=3, top_prompt=2))
    assert found.logprobs is not None
    assert found.top_ids is not None
    assert found.top_logprobs is not None
    assert np.isnan(found.logprobs).tolist() == [True] * 6 + [False] * 3
    assert (found.top_logprobs[:6] == NOTHING).all()
    assert (found.top_logprobs[6:] > NOTHING).all()
    assert not found.top_ids[:6].any()


def test_the_likeliest_come_first() -> None:
    found = score(request(top_prompt=4))
    assert found.logprobs is None, "they were not asked for"
    assert found.top_ids is not None
    assert found.top_logprobs is not None
    order = np.argsort(-EXPECTED[:8], axis=1)[:, :4]
    assert (found.top_ids[1:] == order).all()
    np.testing.assert_allclose(
        found.top_logprobs[1:], np.take_along_axis(EXPECTED[:8], order, 1), rtol=1e-5
    )


def test_targets_and_those_that_ask_nothing() -> None:
    targets = np.arange(16).reshape(8, 2) % VOCABULARY
    targets[3, 0] = targets[5, 1] = -1
    found = score(request({"prompt_targets": targets}))
    expected = np.take_along_axis(EXPECTED[:8], targets.clip(0), 1)
    expected[targets < 0] = 0
    assert found.target_logprobs is not None
    np.testing.assert_allclose(found.target_logprobs, expected, rtol=1e-5)


def test_alternatives_follow_the_tempered_distribution() -> None:
    found = score(request(alternatives=VOCABULARY, temperature=2.0))
    assert found.alternative_ids is not None
    assert found.alternative_logprobs is not None
    ids = found.alternative_ids
    np.testing.assert_allclose(
        found.alternative_logprobs, np.take_along_axis(EXPECTED[:8], ids, 1), rtol=1e-5
    )
    many = [score(request(alternatives=12, temperature=2.0, seed=s)) for s in range(400)]
    counts = np.bincount(
        np.concatenate([f.alternative_ids[2] for f in many if f.alternative_ids is not None]),
        minlength=VOCABULARY,
    )
    tempered = (LOGITS[2].double() / 2).softmax(-1).numpy()
    assert stats.chisquare(counts, tempered * counts.sum()).pvalue > 1e-3
    again = score(request(alternatives=VOCABULARY, temperature=2.0))
    assert (again.alternative_ids == ids).all(), "the seed decides"
    greedy = score(request(alternatives=3, temperature=0))
    assert greedy.alternative_ids is not None
    assert (greedy.alternative_ids == EXPECTED[:8].argmax(1)[:, None]).all()


@pytest.mark.parametrize(
    ("params", "arrays", "message"),
    [
        ({"last_scored": 2}, {}, "needs prompt_logprobs"),
        ({"last_scored": 9, "prompt_logprobs": True}, {}, "9 tokens 8 can be scored"),
        ({"last_scored": 0, "prompt_logprobs": True}, {}, "last_scored must be 1 or more"),
        ({"top_prompt": 13}, {}, "top_prompt must be 0 to 12"),
        ({"top_sample": -1}, {}, "top_sample must be 0 to 12"),
        ({"alternatives": 99}, {}, "alternatives must be 0 to 12"),
        ({}, {"prompt_targets": np.zeros((9, 1), np.int64)}, r"shape \[8, K\]"),
        ({}, {"prompt_targets": np.zeros(8, np.int64)}, r"its shape is \[8\]"),
        ({}, {"prompt_targets": np.full((8, 1), 12)}, "outside the vocabulary of 12"),
        ({}, {"prompt_targets": np.full((8, 1), -2)}, "-1 asks nothing"),
    ],
)
def test_what_cannot_be_asked(params: Any, arrays: Any, message: str) -> None:
    with pytest.raises(Exception, match=message):
        request(arrays, **params)
