"""Recipes of post-training, through the official SDK, against plain torch where there is one."""

from __future__ import annotations

import json

import numpy as np
import pytest
import tinker
from tinker import types

ADAM = types.AdamParams(learning_rate=5e-3, eps=1e-8)


def new_run(service: tinker.ServiceClient, **options) -> tinker.TrainingClient:
    options = {"rank": 4, "seed": 1, **options}
    return service.create_lora_training_client("org/tiny", **options).result()


def datum(tokens: list[int], **inputs) -> types.Datum:
    """All of it has weight, unless inputs say otherwise."""
    given = inputs or {"weights": np.ones(len(tokens) - 1, np.float32)}
    return types.Datum(
        model_input=types.ModelInput.from_ints(tokens[:-1]),
        loss_fn_inputs={"target_tokens": np.array(tokens[1:]), **given},
    )


def saved_file(server, reference: str, name: str) -> bytes:
    version = server.registry.versions.get(server.tenant_id, reference)
    return (server.registry.store.path(version.digest) / name).read_bytes()


def test_a_lora_plus_ratio_comes_with_the_metadata_and_is_recorded(server):
    with server.client() as service:
        wrong = {"loraplus_lr_ratio": "fast"}
        with pytest.raises(tinker.TinkerError, match="loraplus_lr_ratio is the learning rate"):
            new_run(service, user_metadata=wrong)
        plus = new_run(service, user_metadata={"loraplus_lr_ratio": "16"})
        plain = new_run(service)
        for client in (plus, plain):
            client.forward_backward([datum([5, 6, 7, 8, 9])], "cross_entropy")
            client.optim_step(ADAM).result()
        path = plus.save_state("one").result().path
        plain.save_state("one").result()
        # What the checkpoint says holds, unless the new run asks for another.
        for metadata in (None, {"loraplus_lr_ratio": "2"}):
            loaded = service.create_training_client_from_state_with_optimizer(
                path, user_metadata=metadata
            ).result()
            loaded.save_state("again").result()
    ratios = []
    for number in (1, 2, 3, 4):
        version = server.registry.versions.get(server.tenant_id, f"default/{number}")
        state = json.loads(saved_file(server, f"default/{number}", "trainer_state.json"))
        assert version.provenance["loraplus_lr_ratio"] == state["loraplus_lr_ratio"]
        ratios.append(state["loraplus_lr_ratio"])
    assert ratios == [16.0, 1.0, 16.0, 2.0]
    tensors = [saved_file(server, f"default/{n}", "adapter_model.safetensors") for n in (1, 2, 3)]
    assert tensors[0] != tensors[1]
    assert tensors[0] == tensors[2]
