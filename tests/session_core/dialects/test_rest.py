"""Checkpoints as the official SDK lists, ends, copies and describes them."""

from __future__ import annotations

import json
from datetime import UTC, datetime, timedelta

import pytest
import tinker
from tinker import types

HOUR = 3600


def test_a_deleted_checkpoint_is_gone_and_harms_nobody_who_uses_it(server, rest, run_of, steps):
    with server.client() as service:
        client = run_of(service)
        steps(client, 0, 2)
        path = client.save_state("two").result().path
        weights = client.save_weights_for_sampler("two").result().path
        resumed = service.create_training_client_from_state_with_optimizer(path).result()
        sampler = service.create_sampling_client(model_path=weights).result()
        rest.delete_checkpoint_from_tinker_path(path).result()
        rest.delete_checkpoint_from_tinker_path(weights).result()
        # Again, as a client does that lost the answer.
        rest.delete_checkpoint_from_tinker_path(weights).result()

        run_id = client.get_info().model_id
        assert rest.list_checkpoints(run_id).result().checkpoints == []
        assert rest.list_user_checkpoints().result().cursor.total_count == 0
        assert rest.get_training_run(run_id).result().last_checkpoint is None
        for attempt in (
            lambda: rest.get_weights_info_by_tinker_path(path).result(),
            lambda: service.create_training_client_from_state(path).result(),
            lambda: service.create_sampling_client(model_path=weights).result(),
            lambda: rest.set_checkpoint_ttl_from_tinker_path(path, HOUR).result(),
        ):
            with pytest.raises(tinker.NotFoundError, match="was deleted at"):
                attempt()
        with pytest.raises(tinker.NotFoundError, match="nothing is saved"):
            rest.delete_checkpoint_from_tinker_path(path + "-never").result()

        assert steps(resumed, 2, 4) == steps(client, 2, 4)
        prompt = types.ModelInput.from_ints([5, 6, 7])
        params = types.SamplingParams(max_tokens=2, temperature=0)
        assert sampler.sample(prompt, 1, params).result().sequences
        # The version behind it stays in the registry, whole.
        version = server.registry.versions.get(server.tenant_id, "default/1")
        assert version.provenance["tinker_path"] == path
        assert server.registry.store.verify(version.digest) == []
        # The name is free again.
        assert client.save_state("two").result().path == path


def test_a_checkpoint_expires_when_it_was_told_to(server, rest, run_of):
    with server.client() as service:
        client = run_of(service)
        kept = client.save_state("kept").result().path
        state = client.save_state("brief", ttl_seconds=HOUR).result().path
        weights = client.save_weights_for_sampler("brief", ttl_seconds=HOUR).result().path
        export = client.save_weights_external("brief", ttl_seconds=HOUR).result().path
        later = client.save_state("later", ttl_seconds=HOUR).result().path
        rest.set_checkpoint_ttl_from_tinker_path(later, 3 * HOUR).result()
        rest.set_checkpoint_ttl_from_tinker_path(kept, 2 * HOUR).result()
        rest.set_checkpoint_ttl_from_tinker_path(kept, None).result()

        run_id = client.get_info().model_id
        shown = {c.tinker_path: c for c in rest.list_checkpoints(run_id).result().checkpoints}
        assert set(shown) == {kept, state, weights, export, later}
        assert shown[kept].expires_at is None
        soon = datetime.now(UTC) + timedelta(seconds=HOUR)
        assert abs(shown[state].expires_at - soon) < timedelta(minutes=2)
        assert abs(shown[later].expires_at - soon) < timedelta(hours=2, minutes=2)
        files = list((server.home / "sessions").glob("*/exports/*/adapter_model.safetensors"))
        assert len(files) == 1

        server.pass_time(HOUR + 60)
        listed = rest.list_checkpoints(run_id).result().checkpoints
        assert {c.tinker_path for c in listed} == {kept, later}
        for gone in (state, weights):
            with pytest.raises(tinker.NotFoundError, match="expired at"):
                service.create_sampling_client(model_path=gone).result()
        with pytest.raises(tinker.NotFoundError, match="expired at"):
            rest.get_external_weights_urls(export).result()
        for seconds in (HOUR - 1, 0, -5, 11 * 365 * 24 * HOUR):
            with pytest.raises(tinker.BadRequestError, match="out of bounds"):
                rest.set_checkpoint_ttl_from_tinker_path(kept, seconds).result()
        with pytest.raises(tinker.RequestFailedError, match="out of bounds"):
            client.save_state("never", ttl_seconds=5).result()


def test_the_reaper_drops_an_expired_export(server, run_of):
    with server.client() as service:
        client = run_of(service)
        client.save_weights_external("brief", ttl_seconds=HOUR).result()
        (file,) = (server.home / "sessions").glob("*/exports/*/adapter_model.safetensors")
        server.pass_time(HOUR)
        server.wait_until(lambda: not file.exists(), seconds=30)


def test_runs_and_checkpoints_come_in_true_pages(server, rest, run_of, steps):
    with server.client() as service:
        first = run_of(service, user_metadata={"n": "1"})
        for number in range(3):
            first.save_state(f"s{number}", user_metadata={"step": str(number)}).result()
        before = datetime.now(UTC)
        steps(first, 0, 1)
        second = run_of(service, rank=8)
        second.save_weights_for_sampler("w").result()

        page = rest.list_training_runs(limit=1, offset=1).result()
        assert (page.cursor.offset, page.cursor.limit, page.cursor.total_count) == (1, 1, 2)
        (run,) = page.training_runs
        assert (run.lora_rank, run.user_metadata, run.corrupted) == (4, {"n": "1"}, False)
        assert before <= run.last_request_time <= datetime.now(UTC)
        assert run.last_checkpoint.checkpoint_id == "weights/s2"
        assert run.last_checkpoint.user_metadata["step"] == "2"
        assert run.last_sampler_checkpoint is None
        newest = rest.list_training_runs(limit=1).result().training_runs[0]
        assert newest.last_sampler_checkpoint.checkpoint_type == "sampler"
        assert rest.list_training_runs(project_id="ours").result().cursor.total_count == 0

        page = rest.list_user_checkpoints(limit=2, offset=1).result()
        assert [c.checkpoint_id for c in page.checkpoints] == ["weights/s2", "weights/s1"]
        assert page.cursor.total_count == 4
        assert all(c.size_bytes > 1000 and not c.public for c in page.checkpoints)
        info = rest.get_weights_info_by_tinker_path(page.checkpoints[0].tinker_path).result()
        assert (info.base_model, info.lora_rank, info.train_mlp) == ("org/tiny", 4, True)
        assert info.optimizer_config == types.AdamOptimizerConfig()


def test_publishing_is_refused_by_name(server, rest, run_of):
    with server.client() as service:
        path = run_of(service).save_state("mine").result().path
        for attempt in (
            rest.publish_checkpoint_from_tinker_path,
            rest.unpublish_checkpoint_from_tinker_path,
        ):
            with pytest.raises(tinker.BadRequestError, match="cannot be published"):
                attempt(path).result()
            with pytest.raises(tinker.NotFoundError, match="nothing is saved"):
                attempt(path + "-never").result()


def test_a_copy_is_a_second_name_for_one_version(server, rest, run_of, steps):
    with server.client() as service:
        client = run_of(service)
        steps(client, 0, 2)
        path = client.save_state("two").result().path
        copied = rest.copy_weights(path, "archive", ttl_seconds=HOUR).result()
        assert copied != path
        assert copied.endswith("/weights/two")
        # Each call makes another, except for a retry of the same one.
        assert rest.copy_weights(path, "archive").result() != copied
        assert rest.list_training_runs(project_id="archive").result().cursor.total_count == 2

        rest.delete_checkpoint_from_tinker_path(path).result()
        resumed = service.create_training_client_from_state_with_optimizer(copied).result()
        assert steps(resumed, 2, 3) == steps(client, 2, 3)
        run = rest.get_training_run_by_tinker_path(copied).result()
        assert run.lora_rank == 4
        assert run.last_checkpoint.expires_at is not None
        assert len(server.registry.versions.list(server.tenant_id, group="default").items) == 1

        with pytest.raises(tinker.BadRequestError, match="another tenant's weights"):
            rest.copy_weights(copied, "archive", weights_access_token="secret").result()
        with pytest.raises(tinker.NotFoundError, match="was deleted"):
            rest.copy_weights(path, "archive").result()


def test_a_copy_is_made_once_a_request(server, http, run_of):
    with server.client() as service:
        client = run_of(service)
        path, other = (client.save_state(name).result().path for name in ("a", "b"))
        session_id = client.get_info().model_id.split(":")[0]
        route, headers = "/api/v1/copy_weights", {"X-Idempotency-Key": "once"}
        body = {"source_path": path, "destination_project_id": "archive"}
        first = http.post(route, json=body, headers=headers).json()["tinker_path"]
        assert http.post(route, json=body, headers=headers).json()["tinker_path"] == first
        taken = http.post(route, json={**body, "source_path": other}, headers=headers)
        assert (taken.status_code, "a copy of" in taken.text) == (400, True)

        into = {"source_path": path, "session_id": session_id, "model_seq_id": 7}
        copied = http.post(route, json=into).json()["tinker_path"]
        assert copied == f"tinker://{session_id}:train:7/weights/a"
        assert http.post(route, json=into).json()["tinker_path"] == copied
        for wrong in (
            {**into, "source_path": other},
            {**into, "model_seq_id": 0},
            {"source_path": path, "session_id": session_id},
            {"source_path": path},
            {**body, "ttl_seconds": 3},
        ):
            assert http.post(route, json=wrong).status_code == 400, wrong
        # The copy's run takes no training.
        step = {"model_id": f"{session_id}:train:7", "seq_id": 1, "adam_params": {}}
        answer = http.post("/api/v1/optim_step", json=step)
        assert (answer.status_code, "cannot be trained" in answer.text) == (400, True)


def test_the_command_line_lists_and_ends_checkpoints(server, cli, run_of):
    with server.client() as service:
        client = run_of(service)
        path = client.save_state("one").result().path
        client.save_state("two").result()
        run_id = client.get_info().model_id
    listed = json.loads(cli("-f", "json", "checkpoint", "list").stdout)
    assert [c["checkpoint_id"] for c in listed["checkpoints"]] == ["weights/two", "weights/one"]
    assert "1 more not shown" in cli("checkpoint", "list", "--limit", "1").stdout
    assert "Yes (Rank 4)" in cli("checkpoint", "info", path).stdout
    runs = json.loads(cli("-f", "json", "run", "list").stdout)
    assert [run["training_run_id"] for run in runs["runs"]] == [run_id]
    assert cli("run", "info", run_id).returncode == 0
    assert cli("checkpoint", "set-ttl", path, "--ttl", "7200").returncode == 0
    assert "Never" not in cli("checkpoint", "info", path).stdout
    refused = cli("checkpoint", "publish", path)
    assert (refused.returncode, "cannot be published" in refused.stderr) == (1, True)
    assert "Deleted 1" in cli("checkpoint", "delete", "-y", path).stdout
    assert "Checkpoint not found" in cli("checkpoint", "info", path).stderr
    models = json.loads(cli("-f", "json", "model", "list").stdout)["models"]
    assert [model["model_name"] for model in models] == ["org/tiny"]
