"""Quotas as the SDK meets them."""

from __future__ import annotations

import time

import httpx
import numpy as np
import pytest
import tinker
from tinker import types

from session_core.quota_records import Quotas
from session_core.quotas import Quota


def datum(length: int = 6) -> types.Datum:
    tokens = list(range(5, 6 + length))
    return types.Datum(
        model_input=types.ModelInput.from_ints(tokens[:-1]),
        loss_fn_inputs={
            "target_tokens": np.array(tokens[1:], np.int64),
            "weights": np.ones(length, np.float32),
        },
    )


@pytest.fixture
def limit(server):
    """Sets limits of the server's tenant: (**limits)."""
    registry = server.registry
    quotas = Quotas(registry.db, registry.usage, registry.clock, Quota())
    return lambda **limits: quotas.set(server.tenant_id, limits)


def run_of(service):
    return service.create_lora_training_client("org/tiny", rank=4, seed=1).result()


def test_a_session_too_many_is_refused_until_one_is_stopped(server, limit):
    limit(sessions=1)
    first = server.client()
    run_of(first)
    with pytest.raises(tinker.PermissionDeniedError, match="1 sessions are active, of 1"):
        run_of(server.client())
    first.close("success")
    run_of(server.client())


def test_what_the_day_has_no_tokens_for_fails_alone(server, limit):
    client = run_of(server.client())
    limit(tokens_per_day=16)
    first = client.forward_backward([datum()], "cross_entropy")
    second = client.forward_backward([datum(), datum()], "cross_entropy")
    third = client.forward_backward([datum()], "cross_entropy")
    step = client.optim_step(types.AdamParams(learning_rate=1e-3))
    assert first.result().metrics["tokens:sum"] == 6
    with pytest.raises(tinker.RequestFailedError, match="12 tokens would be more"):
        second.result()
    assert third.result().metrics["tokens:sum"] == 6
    assert step.result()
    # The same gradients, and the step, as if the second had never been.
    other = server.registry.tenants.ensure_tenant("free")
    service = tinker.ServiceClient(
        base_url=server.url, api_key=server.registry.tenants.create_key(other, "test")[1]
    )
    fresh = run_of(service)
    losses = [fresh.forward_backward([datum()], "cross_entropy").result() for _ in range(2)]
    assert losses[1].metrics == third.result().metrics


def test_a_datum_longer_than_the_context_fails_alone(server, limit):
    client = run_of(server.client())
    limit(context=6)
    rest = tinker.RestClient(base_url=server.url, api_key=server.key)
    (model,) = rest.get_server_capabilities().result().supported_models
    assert model.max_context_length == 6
    long = client.forward_backward([datum(6), datum(7)], "cross_entropy")
    fits = client.forward_backward([datum(6)], "cross_entropy")
    with pytest.raises(tinker.RequestFailedError, match="datum 1 has 7 tokens"):
        long.result()
    assert fits.result().metrics["tokens:sum"] == 6


def test_samples_end_where_the_context_does_and_are_counted(server, limit):
    limit(context=8, samples=3, tokens_per_day=40)
    sampler = server.client().create_sampling_client(base_model="org/tiny").result()
    params = types.SamplingParams(max_tokens=30, temperature=0, stop=[])
    prompt = types.ModelInput.from_ints([5, 6, 7])
    (sequence,) = sampler.sample(prompt, 1, params).result().sequences
    assert len(sequence.tokens) == 5
    assert sequence.stop_reason == "length"
    with pytest.raises(tinker.PermissionDeniedError, match="num_samples is 4"):
        sampler.sample(prompt, 4, params).result()
    with pytest.raises(tinker.PermissionDeniedError, match="8 tokens; with one token sampled"):
        sampler.sample(types.ModelInput.from_ints([5] * 8), 1, params).result()
    # 8 of 40 are used; three samples of 5 and their prompt are 18.
    sampler.sample(prompt, 3, params).result()
    with pytest.raises(tinker.PermissionDeniedError, match="26 are used"):
        sampler.sample(prompt, 3, params).result()
    # What was reserved and not used is free again: 14 are left.
    brief = types.SamplingParams(max_tokens=1, temperature=0)
    for _ in range(3):
        sampler.sample(prompt, 1, brief).result()


def test_too_many_at_once_are_told_to_come_again(server, limit):
    client = run_of(server.client())
    limit(operations=1)
    with httpx.Client(base_url=server.url, headers=server.headers) as http:
        body = {"model_id": client.model_id, "adam_params": {"learning_rate": 0.1}}
        # 2 waits for 1, which has not come; 3 is one more than may wait.
        assert http.post("/api/v1/optim_step", json={**body, "seq_id": 2}).status_code == 200
        refused = http.post("/api/v1/optim_step", json={**body, "seq_id": 3})
        assert refused.status_code == 429
        assert refused.json()["error"]["code"] == "too_many"
        assert float(refused.headers["retry-after"]) > 0
        assert http.post("/api/v1/optim_step", json={**body, "seq_id": 1}).status_code == 200
        deadline = time.monotonic() + 30
        while http.post("/api/v1/optim_step", json={**body, "seq_id": 3}).status_code == 429:
            assert time.monotonic() < deadline
            time.sleep(0.05)


def test_the_sdk_waits_for_a_place_and_loses_nothing(server, limit):
    client = run_of(server.client())
    limit(operations=2)
    futures = [client.forward_backward([datum()], "cross_entropy") for _ in range(6)]
    assert [future.result().metrics["tokens:sum"] for future in futures] == [6] * 6


def test_what_is_malformed_fails_in_its_place_and_holds_up_nothing(server):
    client = run_of(server.client())
    with httpx.Client(base_url=server.url, headers=server.headers) as http:

        def post(route, seq, **body):
            sent = {"model_id": client.model_id, "seq_id": seq, **body}
            return http.post(f"/api/v1/{route}", json=sent).json()["request_id"]

        wrong = [
            (post("optim_step", 1, optimizer_params={"type": "sgd"}), "'sgd' is not served"),
            (post("save_weights", 2, path="a", ttl_seconds=1), "time to live"),
            (post("save_weights_for_sampler", 3, kind="lora"), "'lora' is not served"),
            (post("save_weights_for_sampler", 4), "sampling_session_seq_id"),
            (post("load_weights", 5, path="tinker://a/weights/b", optimizer=True), "a/weights/b"),
            (post("load_weights", 6, path="x", optimizer=True, base_model="other"), "other"),
        ]
        good = post("optim_step", 7, adam_params={"learning_rate": 0.1})

        def outcome(request_id):
            while True:
                body = http.post("/api/v1/retrieve_future", json={"request_id": request_id}).json()
                if body.get("type") != "try_again":
                    return body

        for request_id, said in wrong:
            failed = outcome(request_id)
            assert failed["category"] == "user", failed
            assert said in failed["error"]
        assert outcome(good)["type"] == "optim_step"
