"""Sampling through the official SDK: what a request may ask, and many at once."""

from __future__ import annotations

import time
from typing import Any

import numpy as np
import pytest
from tinker import SampleRequest, types

PROMPT = [5, 9, 33, 7, 120, 45, 11, 6]


@pytest.fixture
def adapted(server: Any) -> Any:
    """A sampling client on a trained adapter, and one on the base."""
    with server.client() as service:
        client = service.create_lora_training_client("org/tiny", rank=4, seed=1).result()
        data = [
            types.Datum(
                model_input=types.ModelInput.from_ints(PROMPT[:-1]),
                loss_fn_inputs={
                    "target_tokens": types.TensorData.from_numpy(np.array(PROMPT[1:])),
                    "weights": types.TensorData.from_numpy(np.ones(7, np.float32)),
                },
            )
        ]
        for _ in range(3):
            client.forward_backward(data, "cross_entropy").result()
            client.optim_step(types.AdamParams(learning_rate=1e-2)).result()
        sampler = client.save_weights_and_get_sampling_client().result()
        yield sampler, service.create_sampling_client(base_model="org/tiny").result()


def params(**given: Any) -> types.SamplingParams:
    return types.SamplingParams(**{"max_tokens": 4, "seed": 3, "stop": [], **given})


def test_the_likeliest_tokens_of_prompt_and_sample(adapted: Any) -> None:
    sampler, _ = adapted
    prompt = types.ModelInput.from_ints(PROMPT)
    response = sampler.sample(
        prompt,
        num_samples=2,
        sampling_params=params(),
        include_prompt_logprobs=True,
        topk_prompt_logprobs=3,
        topk_sample_logprobs=2,
    ).result()
    assert response.prompt_logprobs[0] is None
    assert response.topk_prompt_logprobs[0] is None
    for own, token, best in zip(
        response.prompt_logprobs[1:], PROMPT[1:], response.topk_prompt_logprobs[1:], strict=True
    ):
        assert len(best) == 3
        scores = dict(best)
        assert list(scores.values()) == sorted(scores.values(), reverse=True)
        assert scores.get(token, own) == pytest.approx(own, abs=1e-4)
        assert own <= max(scores.values()) + 1e-4
    for sequence in response.sequences:
        assert len(sequence.topk_logprobs) == len(sequence.tokens) == 4
        for token, logprob, best in zip(
            sequence.tokens, sequence.logprobs, sequence.topk_logprobs, strict=True
        ):
            assert dict(best).get(token, logprob) == pytest.approx(logprob, abs=1e-4)


def test_greedy_takes_the_likeliest(adapted: Any) -> None:
    prompt = types.ModelInput.from_ints(PROMPT)
    for client in adapted:
        (sequence,) = (
            client.sample(
                prompt,
                num_samples=1,
                sampling_params=params(temperature=0),
                topk_sample_logprobs=1,
            )
            .result()
            .sequences
        )
        assert [best[0][0] for best in sequence.topk_logprobs] == sequence.tokens


def test_the_last_tokens_of_a_prompt(adapted: Any) -> None:
    sampler, _ = adapted
    prompt = types.ModelInput.from_ints(PROMPT)
    whole = sampler.compute_logprobs(prompt).result()
    response = sampler.sample(
        prompt,
        num_samples=1,
        sampling_params=params(max_tokens=1),
        include_prompt_logprobs=True,
        prompt_logprobs_last_n=3,
    ).result()
    assert response.prompt_logprobs[:5] == [None] * 5
    np.testing.assert_allclose(response.prompt_logprobs[5:], whole[5:], atol=1e-5)


@pytest.mark.parametrize("sparse", [False, True])
def test_targets_along_the_prompt(adapted: Any, sparse: bool) -> None:
    sampler, _ = adapted
    whole = sampler.compute_logprobs(types.ModelInput.from_ints(PROMPT)).result()
    if sparse:
        # Of every other position its own token.
        rows = [0, 1, 1, 2, 2, 3, 3, 4]
        targets = types.TensorData(
            data=[PROMPT[1], PROMPT[3], PROMPT[5], PROMPT[7]],
            dtype="int64",
            shape=[7, 300],
            sparse_crow_indices=rows,
            sparse_col_indices=[0, 1, 2, 299],
        )
    else:
        targets = types.TensorData.from_numpy(np.array([PROMPT[1:], [-1] * 7]).T)
    found = (
        sampler.sample(
            types.ModelInput.from_ints(PROMPT),
            num_samples=1,
            sampling_params=params(max_tokens=1),
            target_prompt_logprobs=targets,
        )
        .result()
        .target_prompt_logprobs
    )
    assert found.shape == targets.shape
    if sparse:
        assert found.sparse_col_indices == [0, 1, 2, 299]
        np.testing.assert_allclose(found.data, [whole[i] for i in (1, 3, 5, 7)], atol=1e-5)
    else:
        scores = np.array(found.data).reshape(7, 2)
        np.testing.assert_allclose(scores[:, 0], whole[1:], atol=1e-5)
        assert not scores[:, 1].any()


def test_alternatives_along_the_prompt(adapted: Any) -> None:
    sampler, _ = adapted

    def ask() -> Any:
        return (
            sampler.sample(
                types.ModelInput.from_ints(PROMPT),
                num_samples=1,
                sampling_params=params(max_tokens=1),
                prompt_alt_tokens_k=5,
            )
            .result()
            .prompt_alt_tokens
        )

    drawn = ask()
    assert drawn.tokens.shape == drawn.logprobs.shape == [7, 5]
    assert ask().tokens.data == drawn.tokens.data


def test_hundreds_at_once_from_two_samplers_repeat_what_each_gave_alone(adapted: Any) -> None:
    """Seeds under load: at least 99.9 % of the tokens."""
    generator = np.random.default_rng(0)
    asks = []
    for number in range(240):
        prompt = generator.integers(3, 380, size=generator.integers(2, 40)).tolist()
        asks.append((adapted[number % 2], types.ModelInput.from_ints(prompt), number))

    def start(client: Any, prompt: Any, seed: int) -> Any:
        return client.sample(
            prompt, num_samples=1, sampling_params=params(seed=seed, max_tokens=16)
        )

    futures = [start(*ask) for ask in asks]
    together = [future.result().sequences[0].tokens for future in futures]
    equal = total = 0
    for ask, tokens in zip(asks, together, strict=True):
        alone = start(*ask).result().sequences[0].tokens
        equal += sum(a == b for a, b in zip(alone, tokens, strict=True))
        total += len(alone)
    assert total == 240 * 16
    assert equal / total >= 0.999


def test_sampling_goes_on_beside_training(server: Any, adapted: Any) -> None:
    """A long batch of training, and a sample that does not wait for its end."""
    sampler, _ = adapted
    with server.client() as service:
        client = service.create_lora_training_client("org/tiny", rank=4, seed=1).result()
        row = np.arange(3, 203)
        datum = types.Datum(
            model_input=types.ModelInput.from_ints(row[:-1].tolist()),
            loss_fn_inputs={
                "target_tokens": types.TensorData.from_numpy(row[1:]),
                "weights": types.TensorData.from_numpy(np.ones(199, np.float32)),
            },
        )
        training = [client.forward_backward([datum] * 64, "cross_entropy") for _ in range(8)]
        sampled = sampler.sample(
            types.ModelInput.from_ints(PROMPT), num_samples=1, sampling_params=params()
        )
        assert len(sampled.result().sequences[0].tokens) == 4
        ended = time.monotonic()
        for future in training:
            future.result()
        assert time.monotonic() - ended > 0.05, "all the training came first"


def test_a_request_type_of_its_own_is_not_lost(adapted: Any) -> None:
    """The SDK's request model and ours agree in every field that it sends."""
    from session_core.dialects.tinker import bodies

    ours = set(bodies.Sample.model_fields)
    theirs = set(SampleRequest.model_fields)
    not_read = {"base_model", "model_path", "record_stability_info", "type"}
    assert theirs - ours <= not_read
