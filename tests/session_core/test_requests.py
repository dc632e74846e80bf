from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from registry.errors import InvalidInput
from session_core.operations import Operation
from session_core.requests import SampleRequest, read_request


def read(tokens: Any = (1, 2, 3), **params: Any) -> SampleRequest:
    operation = Operation(kind="sample", params=params, arrays={"tokens": np.array(tokens)})
    return read_request(operation, vocabulary=50, context=10, eos=frozenset({2}))


def test_defaults_are_those_of_the_wire() -> None:
    request = read()
    assert request.max_tokens == 7, "what the context has left"
    assert (request.temperature, request.top_k, request.top_p) == (1.0, 0, 1.0)
    assert request.num_samples == 1
    assert read().seed != read().seed


def test_none_keeps_eos_and_a_list_takes_its_place() -> None:
    assert read(stop=None).stop_tokens == {2}
    assert read(stop=[]).stop_tokens == frozenset()
    assert read(stop=[7, 8]).stop_tokens == {7, 8}
    assert read(stop="\n").stop_texts == ("\n",)
    assert read(stop=["a", "b"]).stop_texts == ("a", "b")
    assert read(stop=["a"]).stop_tokens == frozenset()


def test_clients_of_text_have_eos_beside_their_own_stops() -> None:
    assert read(stop=[], stop_at_end=True).stop_tokens == {2}
    assert read(stop=["a"], stop_at_end=True).stop_texts == ("a",)
    assert read(stop=["a"], stop_at_end=True, stop_token_ids=[9]).stop_tokens == {2, 9}
    assert read(stop=[], stop_token_ids=[9]).stop_tokens == {9}


def test_max_tokens_ends_with_the_context() -> None:
    assert read(max_tokens=3).max_tokens == 3
    assert read(max_tokens=3000).max_tokens == 7


@pytest.mark.parametrize(
    ("params", "message"),
    [
        ({"tokens": []}, "at least one token"),
        ({"tokens": [[1]]}, "list of at least one"),
        ({"tokens": [1.5]}, "list of at least one token id"),
        ({"tokens": [50]}, "outside the vocabulary of 50"),
        ({"tokens": [-1]}, "outside the vocabulary"),
        ({"tokens": [1] * 10}, "10 tokens.*context of 10 holds 9"),
        ({"max_tokens": 0}, "max_tokens must be 1 or more"),
        ({"max_tokens": 1.5}, "max_tokens must be a whole number"),
        ({"temperature": -0.1}, "temperature must be 0 or more"),
        ({"temperature": float("nan")}, "temperature must be a finite number"),
        ({"top_p": 0}, "top_p must be above 0"),
        ({"top_p": 1.1}, "top_p must be above 0 and at most 1"),
        ({"top_k": -2}, "top_k must be -1 or more"),
        ({"num_samples": 0}, "num_samples must be 1 to 1024"),
        ({"num_samples": 1025}, "num_samples must be 1 to 1024"),
        ({"seed": "x"}, "seed must be a whole number"),
        ({"stop": 5}, "stop must be a text"),
        ({"stop_token_ids": 5}, "stop must be a text"),
        ({"stop": ["a", 1]}, "either token ids or texts"),
        ({"stop": [""]}, "not empty"),
        ({"beam": 1}, "Unknown sampling parameters: beam"),
    ],
)
def test_wrong_requests_are_refused_by_name(params: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidInput, match=message):
        read(**params)


def test_any_seed_will_do() -> None:
    assert read(seed=-5).seed == 2**64 - 5
    assert read(seed=2**63).seed == 2**63
