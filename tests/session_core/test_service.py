"""The session core as its users see it: the official SDK against a real server and engine."""

from __future__ import annotations

import time

import httpx
import numpy as np
import psutil
import pytest
import tinker
from tinker import types

from registry import Kind

PROMPT = [5, 6, 7, 8]


def datum(*answer: int) -> types.Datum:
    """A prompt and an answer; only the answer has weight."""
    tokens = [*PROMPT, *answer]
    weights = [0.0] * (len(PROMPT) - 1) + [1.0] * len(answer)
    return types.Datum(
        model_input=types.ModelInput.from_ints(tokens[:-1]),
        loss_fn_inputs={
            "target_tokens": np.array(tokens[1:], dtype=np.int64),
            "weights": np.array(weights, dtype=np.float32),
        },
    )


BATCHES = [[datum(9 + i, 20, 21), datum(30, 31 + i)] for i in range(30)]
ADAM = types.AdamParams(learning_rate=5e-3, eps=1e-8, grad_clip_norm=1.0)


def steps(client: tinker.TrainingClient, first: int, last: int) -> list[float]:
    """Train on some batches; the losses."""
    waiting = []
    for batch in BATCHES[first:last]:
        waiting.append(client.forward_backward(batch, "cross_entropy"))
        client.optim_step(ADAM)
    return [future.result().metrics["loss:sum"] for future in waiting]


def new_run(service: tinker.ServiceClient, **options) -> tinker.TrainingClient:
    options = {"rank": 4, "seed": 1, **options}
    return service.create_lora_training_client("org/tiny", **options).result()


def files_of(server, reference: str) -> dict[str, str]:
    version = server.registry.versions.get(server.tenant_id, reference)
    return {file.path: file.sha256 for file in version.files}


def test_training_lowers_the_loss_and_a_save_is_a_version(server):
    with server.client(user_metadata={"model_package_group": "sums"}) as service:
        client = new_run(service)
        losses = steps(client, 0, 10)
        saved = client.save_state("ten").result()
        assert losses[-1] < losses[0]
        assert saved.path.endswith("/weights/ten")
        version = server.registry.versions.get(server.tenant_id, "sums/1")
        assert version.kind is Kind.CHECKPOINT
        assert version.provenance["step"] == 10
        assert version.provenance["tinker_path"] == saved.path
        assert version.lora["rank"] == 4
        assert version.lora["alpha"] == 32
        assert version.parents == [server.base.id]
        names = {file.path for file in version.files}
        assert {"adapter_config.json", "adapter_model.safetensors", "probe.json"} <= names
        assert {"optimizer.safetensors", "trainer_state.json", "training-data.json"} <= names
        assert server.registry.store.verify(version.digest) == []

        sampler_path = client.save_weights_for_sampler("deploy").result().path
        assert sampler_path.endswith("/sampler_weights/deploy")
        weights = server.registry.versions.get(server.tenant_id, "sums/2")
        assert weights.kind is Kind.WEIGHTS
        assert "optimizer.safetensors" not in files_of(server, "sums/2")


def test_resuming_three_ways(server):
    with server.client() as service:
        whole = new_run(service)
        steps(whole, 0, 5)
        path = whole.save_state("five").result().path
        uninterrupted = steps(whole, 5, 10)

        resumed = service.create_training_client_from_state_with_optimizer(path).result()
        assert steps(resumed, 5, 10) == uninterrupted
        cold = service.create_training_client_from_state(path).result()
        assert steps(cold, 5, 10) != uninterrupted
        whole.save_state("ten").result()
        resumed.save_state("ten").result()
        # Three saves: the same bits from both ways of getting to step ten.
        assert files_of(server, "default/2") == files_of(server, "default/3")
        child = server.registry.versions.get(server.tenant_id, "default/3")
        first = server.registry.versions.get(server.tenant_id, "default/1")
        assert first.id in child.parents


def test_sampling_and_logprobs(server):
    with server.client() as service:
        client = new_run(service)
        steps(client, 0, 20)
        sampler = client.save_weights_and_get_sampling_client().result()
        params = types.SamplingParams(max_tokens=4, temperature=0, stop=[])
        prompt = types.ModelInput.from_ints(PROMPT)
        first = sampler.sample(prompt, num_samples=2, sampling_params=params).result()
        assert len(first.sequences) == 2
        assert first.sequences[0].tokens == first.sequences[1].tokens
        assert len(first.sequences[0].logprobs) == 4
        scored = sampler.compute_logprobs(
            types.ModelInput.from_ints([*PROMPT, *first.sequences[0].tokens])
        ).result()
        assert scored[0] is None
        np.testing.assert_allclose(scored[len(PROMPT) :], first.sequences[0].logprobs, atol=1e-4)
        base = service.create_sampling_client(base_model="org/tiny").result()
        plain = base.sample(prompt, num_samples=1, sampling_params=params).result()
        assert plain.sequences[0].logprobs != first.sequences[0].logprobs
        # An unnamed snapshot takes no version number.
        assert server.registry.versions.list(server.tenant_id, group="default").items == []


def test_a_custom_loss_through_the_sdks_own_path(server):
    def twice(data, logprobs):
        loss = -2.0 * sum(row[-1] for row in logprobs)
        return loss, {"mine": float(loss.detach())}

    with server.client() as service:
        client = new_run(service)
        result = client.forward_backward_custom(BATCHES[0], twice).result()
        assert "mine" in result.metrics
        norm = client.optim_step(ADAM).result().metrics
        assert norm["grad_norm:mean"] > 0


def test_the_engine_killed_in_the_middle_changes_no_bit(server):
    with server.client() as service:
        undisturbed = new_run(service)
        expected = steps(undisturbed, 0, 15)
        undisturbed.save_state("end").result()

        disturbed = new_run(service)
        futures = []
        for number, batch in enumerate(BATCHES[:15]):
            futures.append(disturbed.forward_backward(batch, "cross_entropy"))
            disturbed.optim_step(ADAM)
            if number in (4, 12):
                futures[number].result()
                server.kill_engine()
        assert [f.result().metrics["loss:sum"] for f in futures] == expected
        disturbed.save_state("end").result()
        assert files_of(server, "default/1") == files_of(server, "default/2")


def test_everything_killed_in_the_middle_changes_no_bit(server):
    with server.client() as service:
        undisturbed = new_run(service)
        expected = steps(undisturbed, 0, 12)
        undisturbed.save_state("end").result()

        disturbed = new_run(service)
        futures = []
        for batch in BATCHES[:12]:
            futures.append(disturbed.forward_backward(batch, "cross_entropy"))
            disturbed.optim_step(ADAM)
        saved = disturbed.save_state("end")
        futures[3].result()
        server.kill_everything()
        server.start()
        assert [f.result().metrics["loss:sum"] for f in futures] == expected
        saved.result()
        assert files_of(server, "default/1") == files_of(server, "default/2")
        # Nothing was billed twice.
        (train,) = [u for u in server.registry.usage.totals(server.tenant_id) if u.kind == "train"]
        per_pass = sum(d.model_input.length for batch in BATCHES[:12] for d in batch)
        assert train.tokens == 2 * per_pass


def test_mistakes_are_said_and_harm_nothing(server):
    with server.client() as service:
        with pytest.raises(tinker.APIStatusError, match="org/tiny"):
            service.create_lora_training_client("org/other", rank=4).result()
        client = new_run(service)
        before = steps(client, 0, 1)
        bad = types.Datum(
            model_input=types.ModelInput.from_ints([1, 999_999]),
            loss_fn_inputs={
                "target_tokens": np.array([1, 2]),
                "weights": np.ones(2, dtype=np.float32),
            },
        )
        with pytest.raises(tinker.RequestFailedError, match="999999"):
            client.forward_backward([bad], "cross_entropy").result()
        with pytest.raises(tinker.RequestFailedError, match="no_such_loss"):
            client.forward_backward(BATCHES[0], "no_such_loss").result()
        assert steps(client, 1, 2) != before
        client.save_state("once").result()
        with pytest.raises(tinker.RequestFailedError, match="once"):
            client.save_state("once").result()
        path = client.save_weights_for_sampler("deploy").result().path
        with pytest.raises(tinker.APIStatusError, match="no optimizer state"):
            service.create_training_client_from_state_with_optimizer(path).result()


def test_a_full_disk_fails_the_save_and_nothing_else(server):
    with server.client() as service:
        client = new_run(service)
        steps(client, 0, 2)
        client.save_state("fits").result()
        with server.full_disk(), pytest.raises(tinker.RequestFailedError, match="disk"):
            client.save_state("does-not-fit").result()
        versions = server.registry.versions.list(server.tenant_id, group="default").items
        assert [version.reference for version in versions] == ["default/1"]
        assert server.registry.store.verify(versions[0].digest) == []
        steps(client, 2, 3)
        client.save_state("fits-again").result()


def test_another_tenants_things_are_not_there(server):
    with server.client() as service:
        client = new_run(service)
        steps(client, 0, 1)
        path = client.save_state("mine").result().path
        stranger = server.key_of_a_stranger()
        headers = {"X-API-Key": stranger}
        with httpx.Client(base_url=server.url, headers=headers) as http:
            run_id = path.removeprefix("tinker://").split("/")[0]
            for method, route, body in (
                ("POST", "/api/v1/get_info", {"model_id": run_id}),
                ("GET", f"/api/v1/training_runs/{run_id}", None),
                ("POST", "/api/v1/weights_info", {"tinker_path": path}),
                (
                    "POST",
                    "/api/v1/optim_step",
                    {"model_id": run_id, "seq_id": 9, "adam_params": {}},
                ),
            ):
                answer = http.request(method, route, json=body)
                assert answer.status_code == 404, (route, answer.text)


def test_a_missing_sequence_id_holds_the_line_and_is_named(server):
    with server.client() as service:
        client = new_run(service)
        steps(client, 0, 1)
        run_id = client.get_info().model_id
        with httpx.Client(base_url=server.url, headers=server.headers) as http:
            body = {"model_id": run_id, "seq_id": 5, "adam_params": {}}
            first = http.post("/api/v1/optim_step", json=body).json()["request_id"]
            assert http.post("/api/v1/optim_step", json=body).json()["request_id"] == first
            deadline = time.monotonic() + 30
            while True:
                answer = http.post(
                    "/api/v1/retrieve_future", json={"request_id": first}, timeout=60
                ).json()
                if answer.get("type") != "try_again":
                    break
                assert time.monotonic() < deadline
            # The run is closed: what comes later is refused at once, and does not wait again.
            later = http.post("/api/v1/optim_step", json={**body, "seq_id": 7})
        assert "operation 3" in answer["error"]
        assert answer["category"] == "user"
        assert later.status_code == 400
        assert "operation 3" in later.text


def test_a_group_that_cannot_be_one_is_refused_before_the_training(server):
    client = server.client(user_metadata={"model_package_group": "My Group"})
    with client as service, pytest.raises(tinker.APIStatusError, match="no group name"):
        new_run(service)


def test_a_database_that_fails_for_a_while_loses_nothing(server):
    with server.client() as service:
        undisturbed = new_run(service)
        expected = steps(undisturbed, 0, 6)
        client = new_run(service)
        begun = steps(client, 0, 2)
        with server.broken_results():
            waiting = client.forward_backward(BATCHES[2], "cross_entropy")
            time.sleep(2.5)
        assert [*begun, waiting.result().metrics["loss:sum"]] == expected[:3]
        client.optim_step(ADAM)
        assert steps(client, 3, 6) == expected[3:]


def test_a_snapshot_that_cannot_be_read_is_done_without(server):
    with server.client() as service:
        expected = steps(new_run(service), 0, 10)
        client = new_run(service)
        assert steps(client, 0, 6) == expected[:6]
        spoiled = list((server.home / "sessions").glob("*/snapshots/*/adapter_model.safetensors"))
        assert spoiled
        for path in spoiled:
            path.write_bytes(b"spoiled")
        server.kill_engine()
        assert steps(client, 6, 10) == expected[6:]


def test_it_stops_and_leaves_no_process(server):
    pid = server.engine_pid()
    server.stop()
    assert not psutil.pid_exists(pid)
