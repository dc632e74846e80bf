from __future__ import annotations

from typing import Any

import numpy as np
import torch
from scipy import stats

from session_core.choose import choose
from session_core.operations import Operation
from session_core.requests import SampleRequest, read_request

LOGITS = torch.tensor([2.0, 1.0, 0.5, 0.0, -1.0, -3.0])


def request(**params: Any) -> SampleRequest:
    operation = Operation(kind="sample", params=params, arrays={"tokens": np.array([1])})
    return read_request(operation, vocabulary=6, context=10, eos=frozenset())


def draws(count: int = 4000, **params: Any) -> np.ndarray[Any, Any]:
    item = request(seed=3, **params)
    row = item.stream_of(0)
    found = [choose(LOGITS[None], [item], [row])[0][0] for _ in range(count)]
    return np.bincount(found, minlength=6)


def test_greedy_is_the_largest() -> None:
    tokens, logprobs = choose(LOGITS[None], [request(temperature=0)], [request().stream_of(0)])
    assert tokens == [0]
    np.testing.assert_allclose(logprobs, [float(LOGITS.log_softmax(-1)[0])], rtol=1e-6)


def test_draws_follow_the_tempered_distribution() -> None:
    for temperature in (0.5, 1.0, 2.0):
        expected = torch.softmax(LOGITS.double() / temperature, -1).numpy() * 4000
        assert stats.chisquare(draws(temperature=temperature), expected).pvalue > 1e-3


def test_logprobs_are_the_models_own_whatever_the_filters() -> None:
    item = request(seed=1, temperature=3.0, top_k=2, top_p=0.9)
    (token,), (logprob,) = choose(LOGITS[None], [item], [item.stream_of(0)])
    np.testing.assert_allclose(logprob, float(LOGITS.log_softmax(-1)[token]), rtol=1e-6)


def test_top_k_keeps_the_k_largest() -> None:
    counts = draws(top_k=2)
    assert counts[2:].sum() == 0
    expected = torch.softmax(LOGITS[:2].double(), -1).numpy() * 4000
    assert stats.chisquare(counts[:2], expected).pvalue > 1e-3


def test_top_p_keeps_the_least_set_that_reaches_p() -> None:
    # Probabilities .55 .20 .12 .07 .03 .00: the first two make .75, three make .88.
    assert (draws(top_p=0.5) > 0).tolist() == [True] + [False] * 5
    assert (draws(top_p=0.7) > 0).tolist() == [True, True] + [False] * 4
    assert (draws(top_p=0.8) > 0).tolist() == [True] * 3 + [False] * 3


def test_top_p_acts_on_what_top_k_left() -> None:
    # Of the first two the first alone has .73.
    assert (draws(top_k=2, top_p=0.7) > 0).tolist() == [True] + [False] * 5


def test_company_does_not_change_what_a_seed_means() -> None:
    items = [
        request(seed=1),
        request(seed=2, top_k=3),
        request(temperature=0),
        request(seed=4, top_p=0.9, temperature=0.7),
        request(seed=5, temperature=2.0),
    ]
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(5, 300, generator=generator)
    together = choose(logits, items, [item.stream_of(0) for item in items])
    for row, item in enumerate(items):
        alone = choose(logits[row][None], [item], [item.stream_of(0)])
        assert (alone[0][0], alone[1][0]) == (together[0][row], together[1][row])


def test_samples_of_one_request_differ() -> None:
    item = request(seed=1)
    assert item.stream_of(0).random() != item.stream_of(1).random()
    assert item.stream_of(0).random() == item.stream_of(0).random()


def test_no_draw_picks_what_a_filter_took_out() -> None:
    class Last:
        def random(self) -> float:
            return float(np.nextafter(1.0, 0.0))

    item = request(seed=1, top_k=2)
    last: Any = Last()
    assert choose(LOGITS[None], [item], [last])[0] == [1]
