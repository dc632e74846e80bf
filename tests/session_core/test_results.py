"""What is known of a request, as the SDK and a plain client learn it."""

from __future__ import annotations

import asyncio
import os
import pickle
import signal
from typing import Any

import httpx
import numpy as np
import pytest
import tinker
from tinker import types
from tinker.proto import tinker_public_pb2 as wire

PROMPT = types.ModelInput.from_ints([5, 6, 7])
ENDLESS = types.SamplingParams(max_tokens=240, temperature=1.0, stop=[])


@pytest.fixture
def raw(server: Any) -> Any:
    with httpx.Client(base_url=f"{server.url}/api/v1", headers=server.headers, timeout=60) as made:
        yield made


def sampler_of(server: Any) -> tinker.SamplingClient:
    return server.client().create_sampling_client(base_model="org/tiny").result()


def ask(raw: httpx.Client, sampler_id: str, seq: int, samples: int = 1, tokens: int = 240) -> str:
    body = {
        "sampling_session_id": sampler_id,
        "seq_id": seq,
        "num_samples": samples,
        "prompt": {"chunks": [{"type": "encoded_text", "tokens": [5, 6, 7]}]},
        "sampling_params": {"max_tokens": tokens, "stop": []},
    }
    return str(raw.post("asample", json=body).json()["request_id"])


def poll(raw: httpx.Client, request_id: str, **more: Any) -> httpx.Response:
    return raw.post("retrieve_future", json={"request_id": request_id, **more})


def test_a_sample_nobody_waits_for_is_given_up(server: Any, raw: httpx.Client) -> None:
    sampler = sampler_of(server)
    seen = []

    async def story() -> None:
        async def one() -> None:
            await sampler.sample(PROMPT, 64, ENDLESS)

        asked = [asyncio.create_task(one()) for _ in range(16)]
        await asyncio.sleep(0.7)
        for task in asked:
            task.cancel()
        seen.extend(await asyncio.gather(*asked, return_exceptions=True))

    asyncio.run(story())
    abandoned = [n for n, one in enumerate(seen) if isinstance(one, asyncio.CancelledError)]
    assert len(abandoned) >= 8
    # Sequence ids are given out again for a request that is known, and these are known.
    ids = [ask(raw, sampler._sampling_session_id, seq) for seq in abandoned]

    def gone() -> bool:
        answers = [poll(raw, request_id).json() for request_id in ids]
        return all("was cancelled" in answer.get("error", "") for answer in answers)

    server.wait_until(gone, seconds=30)
    assert sampler.sample(PROMPT, 1, types.SamplingParams(max_tokens=2)).result().sequences


def test_cancelling_is_for_samples_and_for_ones_own(server: Any, raw: httpx.Client) -> None:
    sampler = sampler_of(server)
    request_id = ask(raw, sampler._sampling_session_id, 5, samples=64)
    stranger = {"X-API-Key": server.key_of_a_stranger()}
    refused = raw.post("cancel_future", json={"request_id": request_id}, headers=stranger)
    unknown = raw.post("cancel_future", json={"request_id": "nothing"}, headers=stranger)
    assert refused.status_code == unknown.status_code == 404
    assert (
        refused.json()["error"]["message"].replace(request_id, "nothing")
        == (unknown.json()["error"]["message"])
    )
    for _ in range(2):
        assert raw.post("cancel_future", json={"request_id": request_id}).status_code == 204
    answer = poll(raw, request_id).json()
    assert answer == {"error": "the request was cancelled", "category": "user"}

    client = server.client().create_lora_training_client("org/tiny", rank=2).result()
    run_id = client.get_info().model_id
    step = {"model_id": run_id, "seq_id": 2, "adam_params": {"learning_rate": 1e-3}}
    step_id = raw.post("optim_step", json=step).json()["request_id"]
    refused = raw.post("cancel_future", json={"request_id": step_id})
    assert refused.status_code == 400
    assert "cannot be taken back" in refused.json()["error"]["message"]
    waiting = poll(raw, step_id).json()
    assert waiting["queue_state"] == "active"
    assert "waiting for operation 1 of this run" in waiting["queue_state_reason"]


def test_copies_of_a_client_get_numbers_of_their_own(server: Any) -> None:
    sampler = sampler_of(server)
    params = types.SamplingParams(max_tokens=4, seed=3, stop=[])
    said = [sampler.sample(PROMPT, 1, params).result().sequences[0].tokens]
    copies = [pickle.loads(pickle.dumps(sampler)) for _ in range(2)]
    for copy in copies:
        said.append(copy.sample(PROMPT, 1, params).result().sequences[0].tokens)
    assert [copy._cloned_sampler_id for copy in copies] == [1, 2]
    assert said[0] == said[1] == said[2]
    body = {"sampling_session_id": sampler._sampling_session_id}
    stranger = {"X-API-Key": server.key_of_a_stranger()}
    answer = httpx.post(f"{server.url}/api/v1/join_sampling_session", json=body, headers=stranger)
    assert answer.status_code == 404


def test_a_large_result_is_announced_by_its_size_first(server: Any, raw: httpx.Client) -> None:
    sampler = sampler_of(server)
    request_id = ask(raw, sampler._sampling_session_id, 9, samples=8, tokens=40)

    def announced() -> dict[str, Any] | None:
        answer = poll(raw, request_id, allow_metadata_only=True).json()
        return answer if answer.get("status") == "complete_metadata" else None

    server.wait_until(lambda: announced() is not None, seconds=30)
    size = (announced() or {})["response_payload_size"]
    whole = poll(raw, request_id)
    assert len(whole.content) == size
    assert len(wire.SampleResponse.FromString(whole.content).sequences) == 8
    small = ask(raw, sampler._sampling_session_id, 10, tokens=1)
    server.wait_until(lambda: "type" not in _json(poll(raw, small)), seconds=30)
    answer = poll(raw, small, allow_metadata_only=True)
    assert answer.headers["content-type"] == "application/x-protobuf"


def _json(response: httpx.Response) -> dict[str, Any]:
    if "json" not in response.headers["content-type"]:
        return {}
    found: dict[str, Any] = response.json()
    return found


def test_whoever_waits_is_told_why(server: Any, raw: httpx.Client) -> None:
    client = server.client().create_lora_training_client("org/tiny", rank=2).result()
    run_id = client.get_info().model_id
    steps = []
    os.kill(server.engine_pid(), signal.SIGSTOP)  # It computes nothing, and lives.
    try:
        for seq in (1, 2, 3):
            step = {"model_id": run_id, "seq_id": seq, "adam_params": {"learning_rate": 1e-3}}
            steps.append(raw.post("optim_step", json=step).json()["request_id"])
        first, _, third = (poll(raw, step) for step in steps)
        assert first.json()["queue_state_reason"] == "being computed"
        assert third.json()["queue_state_reason"] == "2 operations of this run before it"
    finally:
        server.kill_engine()
    seen = set()

    def done() -> bool:
        answer = poll(raw, steps[-1]).json()
        seen.add((answer.get("queue_state"), answer.get("queue_state_reason")))
        return "error" in answer or "metrics" in answer

    server.wait_until(done, seconds=60)
    # The steps had no gradient, and each says so for itself.
    answers = [poll(raw, step).json() for step in steps]
    assert all("error" in answer or "metrics" in answer for answer in answers)


def test_results_of_training_are_announced_too(server: Any) -> None:
    client = server.client().create_lora_training_client("org/tiny", rank=2).result()
    tokens = np.arange(10, 200)
    datum = types.Datum(
        model_input=types.ModelInput.from_ints(tokens[:-1].tolist()),
        loss_fn_inputs={
            "target_tokens": tokens[1:],
            "weights": np.ones(len(tokens) - 1, np.float32),
        },
    )
    output = client.forward_backward([datum, datum], "cross_entropy").result()
    assert [len(row["logprobs"].data) for row in output.loss_fn_outputs] == [189, 189]
