"""Exports and the signed links that fetch them, as the official SDK asks for them."""

from __future__ import annotations

import json
from datetime import UTC, datetime, timedelta
from urllib.parse import urlsplit

import httpx
import numpy as np
import pytest
import tinker
import torch
from peft import PeftModel
from safetensors.numpy import load
from tinker import types
from transformers import AutoModelForCausalLM

FILES = {"adapter_config.json", "adapter_model.safetensors"}


def fetch(urls: dict[str, str]) -> dict[str, bytes]:
    """The files, by whoever has nothing but the links."""
    found = {}
    for name, url in urls.items():
        answer = httpx.get(url)
        assert answer.status_code == 200, answer.text
        assert len(answer.content) == int(answer.headers["content-length"])
        found[name] = answer.content
    return found


def test_an_export_is_the_adapter_that_was_trained(server, rest, run_of, steps, tmp_path):
    with server.client() as service:
        client = run_of(service, train_unembed=False)
        steps(client, 0, 3)
        path = client.save_weights_external("final").result().path
        assert path.endswith("/external_weights/final")
        tokens = [5, 6, 7, 8, 9]
        sampler = client.save_weights_and_get_sampling_client().result()
        scores = sampler.compute_logprobs(types.ModelInput.from_ints(tokens)).result()
        # Training goes on; the export does not.
        steps(client, 3, 6)
        answer = rest.get_external_weights_urls(path).result()
        soon = datetime.now(UTC) + timedelta(minutes=15)
        assert soon - timedelta(minutes=2) < answer.expires <= soon
        assert set(answer.urls) == FILES
        for name, content in fetch(answer.urls).items():
            (tmp_path / name).write_bytes(content)
    config = json.loads((tmp_path / "adapter_config.json").read_bytes())
    assert config["base_model_name_or_path"] == "org/tiny"
    base = AutoModelForCausalLM.from_pretrained(server.registry.store.path(server.base.digest))
    model = PeftModel.from_pretrained(base, str(tmp_path))
    with torch.no_grad():
        logits = model(torch.tensor([tokens])).logits[0].log_softmax(-1)
    expected = [float(logits[i, token]) for i, token in enumerate(tokens[1:])]
    np.testing.assert_allclose(scores[1:], expected, atol=1e-4)


def test_an_export_is_listed_and_is_no_version(server, rest, run_of):
    with server.client() as service:
        client = run_of(service)
        path = client.save_weights_external("final").result().path
        (listed,) = rest.list_user_checkpoints().result().checkpoints
        assert (listed.tinker_path, listed.checkpoint_type) == (path, "external")
        (folder,) = (server.home / "sessions").glob("*/exports/*")
        assert {file.name for file in folder.iterdir()} == FILES
        assert listed.size_bytes == sum(file.stat().st_size for file in folder.iterdir())
        assert server.registry.versions.list(server.tenant_id, group="default").items == []
        assert rest.get_weights_info_by_tinker_path(path).result().lora_rank == 4
        for attempt in (
            lambda: service.create_sampling_client(model_path=path).result(),
            lambda: service.create_training_client_from_state(path).result(),
            lambda: rest.copy_weights(path, "archive").result(),
        ):
            with pytest.raises(tinker.BadRequestError, match="is an export"):
                attempt()
        with pytest.raises(tinker.RequestFailedError, match="exported 'final' already"):
            client.save_weights_external("final").result()
        with pytest.raises(tinker.RequestFailedError, match="age_encryption_recipients"):
            client.save_weights_external("sealed", age_encryption_recipients=["age1x"]).result()


def test_a_link_ends_with_its_time_its_path_and_its_content(server, rest, run_of):
    with server.client() as service:
        client = run_of(service)
        path = client.save_weights_external("final").result().path
        urls = rest.get_external_weights_urls(path).result().urls
        rest.delete_checkpoint_from_tinker_path(path).result()
        assert list((server.home / "sessions").glob("*/exports/*")) == []
        for url in urls.values():
            assert httpx.get(url).status_code == 404
        with pytest.raises(tinker.NotFoundError, match="was deleted"):
            rest.get_external_weights_urls(path).result()
        # The same name, anew: the old links do not fetch it.
        assert client.save_weights_external("final").result().path == path
        for url in urls.values():
            assert httpx.get(url).status_code == 404
        urls = rest.get_external_weights_urls(path).result().urls
        fetch(urls)
        server.pass_time(16 * 60)
        for url in urls.values():
            answer = httpx.get(url)
            assert (answer.status_code, "expired" in answer.text) == (403, True)
        fetch(rest.get_external_weights_urls(path).result().urls)


def test_a_link_fetches_one_file_and_nothing_else(server, rest, run_of, http, stranger):
    with server.client() as service:
        client = run_of(service)
        path = client.save_weights_external("final").result().path
        urls = rest.get_external_weights_urls(path).result().urls
        config, weights = (urls[name] for name in sorted(FILES))
        for url in (
            config.replace("adapter_config.json", "adapter_model.safetensors"),
            config.replace("adapter_config.json", "%2e%2e/%2e%2e/signing.key"),
            config.replace("adapter_config.json", ""),
        ):
            assert httpx.get(url).status_code == 404, url
        token = urlsplit(config).path.split("/")[4]
        for url in (
            config.replace(token, token[:-1] + ("A" if token[-1] != "A" else "B")),
            config.replace(token, "x"),
            weights.replace("/download/", "/download//"),
        ):
            # A key is of no use there.
            assert http.get(url).status_code == 401, url
        assert httpx.get(f"{server.url}/api/v1/checkpoints").status_code == 401
        assert httpx.post(config).status_code == 401
        route = "/".join(urlsplit(config).path.split("/")[:3])
        run_id, kind, name = path.removeprefix("tinker://").split("/")
        asked = f"{route}/training_runs/{run_id}/checkpoints/{kind}/{name}/external_weights_urls"
        assert http.get(asked).status_code == 200
        assert stranger.get(asked).status_code == 404


def test_a_version_s_files_can_be_fetched_too(server, http, run_of):
    with server.client() as service:
        path = run_of(service).save_state("one").result().path
        run_id, kind, name = path.removeprefix("tinker://").split("/")
        route = f"/api/v1/training_runs/{run_id}/checkpoints/{kind}/{name}/external_weights_urls"
        files = fetch(http.get(route).json()["urls"])
    version = server.registry.versions.get(server.tenant_id, "default/1")
    assert set(files) == {file.path for file in version.files}
    assert load(files["optimizer.safetensors"])


def test_the_command_line_downloads_a_checkpoint(server, cli, rest, run_of, steps, tmp_path):
    with server.client() as service:
        client = run_of(service)
        steps(client, 0, 2)
        path = client.save_state("two").result().path
        export = client.save_weights_external("two").result().path
    downloaded = cli("checkpoint", "download", path, "-o", str(tmp_path / "a"))
    assert downloaded.returncode == 0, downloaded.stderr
    assert cli("checkpoint", "download", export, "-o", str(tmp_path / "b")).returncode == 0
    first, second = (next((tmp_path / name).iterdir()) for name in "ab")
    assert {file.name for file in first.iterdir()} == FILES
    for name in FILES:
        assert (first / name).read_bytes() == (second / name).read_bytes()
    # The export it went through is gone again, and was no version.
    shown = [c.tinker_path for c in rest.list_user_checkpoints().result().checkpoints]
    assert shown == [export, path]
    assert len(server.registry.versions.list(server.tenant_id, group="default").items) == 1
