"""Recipes of post-training, through the official SDK, against plain torch where there is one."""

from __future__ import annotations

import json

import numpy as np
import pytest
import tinker
import torch
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


def logprobs_of(client, datums) -> list[torch.Tensor]:
    """Target logprobs of each datum under the model being trained, as it is now."""
    outputs = client.forward(datums, "cross_entropy").result().loss_fn_outputs
    return [torch.tensor(output["logprobs"].to_numpy().copy()) for output in outputs]


def test_dpo_moves_the_margin_and_its_gradient_is_that_of_plain_torch(server):
    """Rafailov et al. 2023, equation 7, as a custom loss: -log sigmoid(beta * margin)."""
    beta = 0.5
    prompt, chosen, rejected = [5, 6, 7, 8], [20, 21, 22], [30, 31]
    datums = [
        datum(
            prompt + answer,
            weights=np.array([0] * (len(prompt) - 1) + [1] * len(answer), np.float32),
        )
        for answer in (chosen, rejected)
    ]
    masks = [torch.tensor(d.loss_fn_inputs["weights"].to_numpy().copy()) for d in datums]
    with server.client() as service:
        client = new_run(service)
        reference = logprobs_of(client, datums)
        slopes: list[list[torch.Tensor]] = []

        def dpo(data, logprobs):
            del data
            ratios = [
                ((lp - ref) * mask).sum()
                for lp, ref, mask in zip(logprobs, reference, masks, strict=True)
            ]
            margin = ratios[0] - ratios[1]
            loss = -torch.nn.functional.logsigmoid(beta * margin)
            slopes.append(list(torch.autograd.grad(loss, logprobs, retain_graph=True)))
            return loss, {"margin:mean": margin.item()}

        margins, losses = [], []
        for _ in range(6):
            passed = client.forward_backward_custom(datums, dpo).result()
            margins.append(passed.metrics["margin:mean"])
            losses.append(passed.metrics["loss:sum"])
            client.optim_step(ADAM).result()
    # At the start the model is its own reference: sigmoid(0) is a half.
    assert margins[0] == pytest.approx(0, abs=1e-6)
    assert losses[0] == pytest.approx(float(np.log(2)), rel=1e-6)
    for slope, mask, sign in zip(slopes[0], masks, (-1, 1), strict=True):
        np.testing.assert_allclose(slope.numpy(), (sign * beta / 2 * mask).numpy(), rtol=1e-5)
    assert margins == sorted(margins)
    assert margins[-1] > 1


def test_on_policy_distillation_brings_the_student_to_its_teacher(server):
    """Samples of the student, scored by the teacher: the advantage is minus the reverse KL."""
    with server.client() as service:
        teacher = new_run(service, seed=2)
        for _ in range(5):
            teacher.forward_backward([datum([5, 6, 7, 9, 9, 9, 9])], "cross_entropy")
            teacher.optim_step(ADAM).result()
        expert = teacher.save_weights_and_get_sampling_client().result()
        student = new_run(service, seed=3)
        prompt = [5, 6, 7]
        gaps = []
        for step in range(30):
            sampler = student.save_weights_and_get_sampling_client().result()
            params = types.SamplingParams(max_tokens=4, temperature=1.0, seed=step, stop=["\0"])
            made = sampler.sample(types.ModelInput.from_ints(prompt), 64, params).result()
            batch, gap, answers = [], [], []
            wholes = [prompt + list(sequence.tokens) for sequence in made.sequences]
            scores = [expert.compute_logprobs(types.ModelInput.from_ints(w)) for w in wholes]
            for sequence, whole, score in zip(made.sequences, wholes, scores, strict=True):
                theirs = np.array(score.result()[len(prompt) :], np.float32)
                ours = np.array(sequence.logprobs, np.float32)
                gap.append(float((ours - theirs).sum()))
                answers.append((whole, ours, theirs - ours))
            # A constant baseline: it changes no expectation, and most of the noise.
            mean = np.mean([advantage for _, _, advantage in answers])
            before = np.zeros(len(prompt) - 1, np.float32)
            for whole, ours, advantage in answers:
                centred = ((advantage - mean) / len(answers)).astype(np.float32)
                batch.append(
                    datum(
                        whole,
                        logprobs=np.concatenate([before, ours]),
                        advantages=np.concatenate([before, centred]),
                    )
                )
            gaps.append(float(np.mean(gap)))
            student.forward_backward(batch, "importance_sampling")
            student.optim_step(types.AdamParams(learning_rate=2e-2, eps=1e-8)).result()
    # The mean over the samples is an estimate of the reverse KL.
    assert np.mean(gaps[-5:]) < 0.65 * np.mean(gaps[:5])


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
