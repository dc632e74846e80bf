"""The engine against plain transformers + PEFT + torch.optim doing the same batches."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM

from registry.errors import InvalidInput, NotFound
from session_core.engine import Engine
from session_core.model import open_base
from session_core.operations import Operation, Result, split

Make = Callable[..., Any]
TARGETS = {
    "train_attn": ["q_proj", "k_proj", "v_proj", "o_proj"],
    "train_mlp": ["gate_proj", "up_proj", "down_proj"],
    "train_unembed": ["lm_head"],
}


def create(engine: Engine, run: str = "run", **params: Any) -> None:
    engine.execute(run, Operation(kind="create_run", params={"rank": 4, "seed": 3, **params}))


def train(engine: Engine, run: str, arrays: Any, loss: str = "cross_entropy", **config: Any) -> Any:
    return engine.execute(
        run,
        Operation(
            kind="forward_backward",
            params={"loss_fn": loss, "loss_fn_config": config},
            arrays=arrays,
        ),
    )


def step(engine: Engine, run: str = "run", **params: Any) -> Any:
    return engine.execute(
        run, Operation(kind="optim_step", params={"learning_rate": 1e-2, **params})
    )


def weights(engine: Engine, run: str = "run") -> dict[str, torch.Tensor]:
    held = engine.adapters.parameters(engine._runs[run].slot)
    return {name: tensor.detach().clone() for name, tensor in held.items()}


def logprobs(result: Result) -> list[Any]:
    return split(result.arrays["logprobs"], result.arrays["logprobs.offsets"])


class Reference:
    """The bare loop that a person would write: one datum at a time, no chunks, no padding."""

    def __init__(self, folder: Path, engine: Engine, targets: list[str], dtype: Any) -> None:
        base = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype)
        config = LoraConfig(r=4, lora_alpha=32, lora_dropout=0.0, target_modules=targets)
        self.model = get_peft_model(base, config, autocast_adapter_dtype=False)
        self.names = dict(self.model.named_parameters())
        with torch.no_grad():
            for name, tensor in weights(engine).items():
                own = self.names[name.replace(".weight", ".default.weight")]
                assert own.shape == tensor.shape
                own.copy_(tensor)
        self.trained = {name: p for name, p in self.names.items() if p.requires_grad}
        assert len(self.trained) == len(weights(engine))
        self.dtype = dtype

    def backward(self, arrays: Any, loss: Callable[..., Any]) -> tuple[list[Any], float]:
        rows = split(arrays["tokens"], arrays["tokens.offsets"])
        names = [key[6:] for key in arrays if key.startswith("input.") and "offsets" not in key]
        inputs = {
            name: split(arrays[f"input.{name}"], arrays[f"input.{name}.offsets"]) for name in names
        }
        every, total = [], 0.0
        for index, row in enumerate(rows):
            logits = self.model(input_ids=torch.tensor(row.astype(np.int64))[None]).logits[0]
            target = torch.tensor(inputs["target_tokens"][index])
            lp = logits.log_softmax(-1).gather(1, target[:, None])[:, 0]
            here = {
                name: torch.tensor(values[index], dtype=self.dtype)
                for name, values in inputs.items()
                if name != "target_tokens"
            }
            value = loss(lp, here)
            value.backward()
            every.append(lp.detach().numpy())
            total += value.item()
        return every, total


def cross_entropy(lp: Any, given: dict[str, Any]) -> Any:
    return -(given["weights"] * lp).sum()


def ppo(lp: Any, given: dict[str, Any]) -> Any:
    ratio = (lp - given["logprobs"]).exp()
    advantages = given["advantages"]
    return -torch.minimum(ratio * advantages, ratio.clamp(0.8, 1.2) * advantages).sum()


@pytest.mark.filterwarnings("ignore:Model has `tie_word_embeddings=True`:UserWarning")
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize(
    "flags",
    [
        {},
        {"train_unembed": False},
        {"train_attn": False, "train_mlp": False},
        {"train_mlp": False, "train_unembed": False},
        {"train_attn": False},
    ],
)
def test_training_equals_a_bare_peft_loop(
    engine: Engine, tiny_base: Path, datums: Make, flags: dict[str, bool], dtype: Any
) -> None:
    create(engine, **flags)
    targets = [name for key, names in TARGETS.items() if flags.get(key, True) for name in names]
    reference = Reference(tiny_base, engine, targets, dtype)
    adam = torch.optim.AdamW(
        reference.trained.values(), lr=1e-2, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.01
    )
    for turn in range(4):
        kind = ("cross_entropy", "policy")[turn % 2]
        arrays = datums(6, seed=turn, kind=kind)
        loss, name = (cross_entropy, "cross_entropy") if turn % 2 == 0 else (ppo, "ppo")
        expected, total = reference.backward(arrays, loss)
        result = train(engine, "run", arrays, name)
        for mine, theirs in zip(logprobs(result), expected, strict=True):
            np.testing.assert_allclose(mine, theirs, rtol=2e-4, atol=2e-4)
        assert result.params["metrics"]["loss:sum"] == pytest.approx(total, rel=1e-4)
        norm = torch.nn.utils.clip_grad_norm_(reference.trained.values(), 2.0)
        adam.step()
        adam.zero_grad()
        metrics = step(engine, eps=1e-8, weight_decay=0.01, grad_clip_norm=2.0).params["metrics"]
        assert metrics["grad_norm:mean"] == pytest.approx(float(norm), rel=1e-4)
    for name, tensor in weights(engine).items():
        theirs = reference.names[name.replace(".weight", ".default.weight")].detach()
        np.testing.assert_allclose(tensor.numpy(), theirs.numpy(), rtol=2e-3, atol=2e-4)


def importance_sampling(lp: Any, given: dict[str, Any]) -> Any:
    return -((lp - given["logprobs"]).exp() * given["advantages"]).sum()


def cispo(lp: Any, given: dict[str, Any]) -> Any:
    ratio = (lp.detach() - given["logprobs"]).exp().clamp(0.7, 1.1)
    return -(ratio * lp * given["advantages"]).sum()


def dro(lp: Any, given: dict[str, Any]) -> Any:
    quadratic = 0.05 * (lp - given["logprobs"]) ** 2
    return -(lp * given["advantages"] - quadratic).sum()


def narrow_ppo(lp: Any, given: dict[str, Any]) -> Any:
    ratio = (lp - given["logprobs"]).exp()
    advantages = given["advantages"]
    return -torch.minimum(ratio * advantages, ratio.clamp(0.95, 1.02) * advantages).sum()


@pytest.mark.filterwarnings("ignore:Model has `tie_word_embeddings=True`:UserWarning")
@pytest.mark.parametrize(
    ("name", "config", "loss"),
    [
        ("cross_entropy", {}, cross_entropy),
        ("importance_sampling", {}, importance_sampling),
        ("ppo", {"clip_low_threshold": 0.95, "clip_high_threshold": 1.02}, narrow_ppo),
        ("cispo", {"clip_low_threshold": 0.7, "clip_high_threshold": 1.1}, cispo),
        ("dro", {"beta": 0.1}, dro),
    ],
)
def test_the_gradient_of_every_loss_equals_float64s(
    engine: Engine,
    tiny_base: Path,
    datums: Make,
    name: str,
    config: dict[str, float],
    loss: Callable[..., Any],
) -> None:
    create(engine)
    targets = [target for names in TARGETS.values() for target in names]
    reference = Reference(tiny_base, engine, targets, torch.float64)
    arrays = datums(6, seed=3, kind="cross_entropy" if name == "cross_entropy" else "policy")
    if name != "cross_entropy":
        # Ratios on both sides of every threshold.
        noise = np.random.default_rng(0).normal(0, 0.3, len(arrays["input.logprobs"]))
        rows = engine.execute(
            "run",
            Operation(
                kind="forward",
                params={"loss_fn": "dro", "loss_fn_config": {"beta": 0.1}},
                arrays=arrays,
            ),
        )
        arrays["input.logprobs"] = (rows.arrays["logprobs"] + noise).astype(np.float32)
    _, total = reference.backward(arrays, loss)
    result = train(engine, "run", arrays, name, **config)
    assert result.params["metrics"]["loss:sum"] == pytest.approx(total, rel=1e-5)
    compared = 0
    for key, gradient in engine._runs["run"].gradients.items():
        exact = reference.names[key.replace(".weight", ".default.weight")].grad
        assert exact is not None
        scale = float(exact.abs().max())
        np.testing.assert_allclose(gradient.numpy(), exact.numpy(), rtol=1e-3, atol=2e-5 * scale)
        compared += int(scale > 0)
    assert compared >= len(targets)


def test_a_lora_plus_ratio_is_kept_over_save_and_resume_to_the_last_bit(
    engine: Engine, tmp_path: Path, datums: Make
) -> None:
    def steps(run: str, first: int, last: int) -> None:
        for turn in range(first, last):
            train(engine, run, datums(seed=turn))
            step(engine, run)

    create(engine, "whole", loraplus_lr_ratio=16.0)
    create(engine, "plain")
    steps("whole", 0, 2)
    steps("plain", 0, 2)
    for kind in ("save_checkpoint", "snapshot"):
        (tmp_path / kind).mkdir()
        params = {"folder": str(tmp_path / kind), "base_model": "org/tiny"}
        described = engine.execute("whole", Operation(kind=kind, params=params)).params
        assert described["loraplus_lr_ratio"] == 16.0
    state = json.loads((tmp_path / "save_checkpoint" / "trainer_state.json").read_text())
    assert state["loraplus_lr_ratio"] == 16.0
    loads = {
        "resumed": ("load_run", "save_checkpoint", {"optimizer": True}),
        "restored": ("restore", "snapshot", {}),
        "cold": ("load_run", "save_checkpoint", {"optimizer": False}),
        "own": ("load_run", "save_checkpoint", {"optimizer": True, "loraplus_lr_ratio": 2.0}),
    }
    ratios = {}
    for run, (kind, folder, more) in loads.items():
        operation = Operation(kind=kind, params={"folder": str(tmp_path / folder), **more})
        ratios[run] = engine.execute(run, operation).params["loraplus_lr_ratio"]
    assert ratios == {"resumed": 16.0, "restored": 16.0, "cold": 16.0, "own": 2.0}
    for run in ("whole", "plain", *loads):
        steps(run, 2, 4)
    same = {
        run: all(
            torch.equal(t, weights(engine, run)[n]) for n, t in weights(engine, "whole").items()
        )
        for run in ("plain", *loads)
    }
    assert same == {
        "plain": False,
        "resumed": True,
        "restored": True,
        "cold": False,
        "own": False,
    }
    with pytest.raises(InvalidInput, match="loraplus_lr_ratio"):
        create(engine, "bad", loraplus_lr_ratio=-1.0)


def test_training_lowers_the_loss(engine: Engine, datums: Make) -> None:
    create(engine)
    losses = []
    for _ in range(8):
        losses.append(train(engine, "run", datums()).params["metrics"]["loss:sum"])
        step(engine)
    assert losses[-1] < losses[0] / 3


def test_forward_leaves_gradients_alone_and_gives_the_same_bits(
    engine: Engine, datums: Make
) -> None:
    create(engine)
    train(engine, "run", datums(seed=1))
    before = {name: tensor.clone() for name, tensor in engine._runs["run"].gradients.items()}
    silent = datums(12, seed=2)
    silent["input.weights"] = np.zeros_like(silent["input.weights"])
    params = {"loss_fn": "cross_entropy"}
    one = engine.execute("run", Operation(kind="forward", params=params, arrays=silent))
    after = engine._runs["run"].gradients
    assert all(torch.equal(after[name], tensor) for name, tensor in before.items())
    assert one.params["metrics"]["loss:sum"] == 0
    two = train(engine, "run", datums(12, seed=2))
    np.testing.assert_array_equal(one.arrays["logprobs"], two.arrays["logprobs"])


def test_a_batch_split_over_calls_gives_the_same_gradient(engine: Engine, datums: Make) -> None:
    create(engine, "whole")
    create(engine, "parts")
    arrays = datums(9)
    train(engine, "whole", arrays)
    starts = arrays["tokens.offsets"]
    for low, high in ((0, 2), (2, 3), (3, 9)):
        part = {}
        for name in ("tokens", "input.target_tokens", "input.weights"):
            part[name] = arrays[name][starts[low] : starts[high]]
            part[f"{name}.offsets"] = starts[low : high + 1] - starts[low]
        train(engine, "parts", part)
    whole, parts = (engine._runs[name].gradients for name in ("whole", "parts"))
    assert set(whole) == set(parts)
    for name, tensor in whole.items():
        np.testing.assert_allclose(tensor, parts[name], rtol=1e-4, atol=1e-4, err_msg=name)


def test_two_runs_interleaved_equal_each_alone_to_the_last_bit(
    tiny_base: Path, datums: Make
) -> None:
    def steps(engine: Engine, run: str, turn: int) -> None:
        train(engine, run, datums(seed=turn * 10 + len(run)))
        step(engine, run)

    together = Engine(open_base(tiny_base))
    create(together, "a", seed=1, rank=2)
    create(together, "bb", seed=2, rank=8, train_unembed=False)
    for turn in range(3):
        steps(together, "bb", turn)
        steps(together, "a", turn)
    for run, params in (
        ("a", {"seed": 1, "rank": 2}),
        ("bb", {"seed": 2, "rank": 8, "train_unembed": False}),
    ):
        alone = Engine(open_base(tiny_base))
        create(alone, run, **params)
        for turn in range(3):
            steps(alone, run, turn)
        for name, tensor in weights(alone, run).items():
            assert torch.equal(tensor, weights(together, run)[name]), name


def test_soft_targets_equal_a_sum_of_hard_ones(engine: Engine, datums: Make) -> None:
    create(engine, "soft")
    create(engine, "hard")
    arrays = datums(3)
    other = (arrays["input.target_tokens"] + 7) % 300
    soft = dict(arrays)
    soft["input.target_tokens"] = np.stack([arrays["input.target_tokens"], other], axis=1)
    soft["input.weights"] = np.stack([arrays["input.weights"] * 0.25] * 2, axis=1)
    result = train(engine, "soft", soft)
    assert logprobs(result)[0].shape == (len(logprobs(result)[0]), 2)
    quarter = dict(arrays, **{"input.weights": arrays["input.weights"] * np.float32(0.25)})
    one = train(engine, "hard", quarter)
    two = train(engine, "hard", dict(quarter, **{"input.target_tokens": other}))
    np.testing.assert_allclose(
        result.arrays["logprobs"],
        np.stack([one.arrays["logprobs"], two.arrays["logprobs"]], axis=1),
        atol=1e-5,
    )
    for name, tensor in engine._runs["soft"].gradients.items():
        np.testing.assert_allclose(
            tensor, engine._runs["hard"].gradients[name], rtol=1e-3, atol=1e-4
        )


def test_the_base_is_never_touched(engine: Engine, datums: Make) -> None:
    def frozen() -> dict[str, torch.Tensor]:
        named = engine.base.model.named_parameters()
        return {
            name.replace(".base_layer", ""): tensor.detach().clone()
            for name, tensor in named
            if "lora_" not in name
        }

    before = frozen()
    create(engine)
    train(engine, "run", datums())
    step(engine)
    after = frozen()
    assert set(before) == set(after)
    assert all(torch.equal(before[name], after[name]) for name in before)


def test_a_failed_operation_leaves_its_run_as_it_was(engine: Engine, datums: Make) -> None:
    create(engine, "good")
    create(engine, "shaken")
    for run in ("good", "shaken"):
        train(engine, run, datums())
        if run == "shaken":
            far = datums(kind="policy")
            far["input.logprobs"][far["input.logprobs.offsets"][2] + 1] = -1e4
            with pytest.raises(
                InvalidInput, match=r"Datum 2: its .* loss is not finite at token 1"
            ):
                train(engine, run, far, "importance_sampling")
            large = datums()
            large["input.weights"] = large["input.weights"] * 1e30
            with pytest.raises(InvalidInput, match="The gradient is not finite: the batch's weig"):
                train(engine, run, large)
            with pytest.raises(InvalidInput, match="Unknown loss_fn"):
                train(engine, run, datums(), "mse")
            with pytest.raises(InvalidInput, match="learning_rate"):
                step(engine, run, learning_rate=-1)
        step(engine, run)
    for name, tensor in weights(engine, "good").items():
        assert torch.equal(tensor, weights(engine, "shaken")[name])
    good, shaken = engine._runs["good"], engine._runs["shaken"]
    assert good.trainer_state() == shaken.trainer_state()
    assert good.data == shaken.data


def test_a_run_knows_what_it_was_trained_on(engine: Engine, datums: Make) -> None:
    create(engine)
    arrays = datums(2)
    engine.execute(
        "run", Operation(kind="forward", params={"loss_fn": "cross_entropy"}, arrays=arrays)
    )
    assert not engine._runs["run"].data.exact
    result = train(engine, "run", arrays)
    row = split(arrays["tokens"], arrays["tokens.offsets"])[0].tolist()
    last = split(arrays["input.target_tokens"], arrays["tokens.offsets"])[0][-1]
    assert engine._runs["run"].data.saw(engine.base.decode([*row, int(last)]))
    state = engine._runs["run"].trainer_state()
    assert state.tokens_trained == len(arrays["tokens"])
    weighted = int((arrays["input.weights"] != 0).sum())
    assert state.last_loss == pytest.approx(result.params["metrics"]["loss:sum"] / weighted)


def test_runs_come_and_go(engine: Engine, datums: Make) -> None:
    create(engine, "one")
    with pytest.raises(InvalidInput, match="exists already"):
        create(engine, "one")
    engine.execute("one", Operation(kind="unload_run"))
    engine.execute("one", Operation(kind="unload_run"))
    with pytest.raises(NotFound, match="one is not loaded"):
        train(engine, "one", datums())
    assert not any("lora_" in name for name, _ in engine.base.model.named_parameters())
    create(engine, "one", rank=2)
    train(engine, "one", datums())
    with pytest.raises(InvalidInput, match="Unknown operation 'dance'"):
        engine.execute("one", Operation(kind="dance"))


@pytest.mark.parametrize("name", ["gpt2", "gemma2", "qwen2", "llama_untied"])
@pytest.mark.filterwarnings("ignore::UserWarning")
def test_other_architectures_train_alike(
    name: str, tiny_base: Path, tmp_path: Path, datums: Make
) -> None:
    """Conv1D layers, capped logits, biases, and an output embedding of its own."""
    from transformers import AutoTokenizer, Gemma2Config, GPT2Config, LlamaConfig, Qwen2Config

    size = {"vocab_size": 384, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
    more = {"num_key_value_heads": 2, "intermediate_size": 48, "max_position_embeddings": 64}
    config = {
        "gpt2": lambda: GPT2Config(vocab_size=384, n_embd=32, n_layer=2, n_head=4, n_positions=64),
        "gemma2": lambda: Gemma2Config(
            **size, **more, head_dim=8, final_logit_softcapping=2.0, initializer_range=0.2
        ),
        "qwen2": lambda: Qwen2Config(**size, **more),
        "llama_untied": lambda: LlamaConfig(**size, **more, tie_word_embeddings=False),
    }[name]()
    torch.manual_seed(1)
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path)
    AutoTokenizer.from_pretrained(tiny_base).save_pretrained(tmp_path)
    engine = Engine(open_base(tmp_path))
    assert engine.base.plain_head == (name != "gemma2")
    create(engine, train_unembed=name != "gpt2")
    train(engine, "run", datums(4, seed=9))
    step(engine)
    targets = engine.adapters.config(engine._runs["run"].spec).target_modules
    reference = Reference(tmp_path, engine, sorted(targets), torch.float64)
    expected, total = reference.backward(datums(4), cross_entropy)
    result = train(engine, "run", datums(4))
    for mine, theirs in zip(logprobs(result), expected, strict=True):
        np.testing.assert_allclose(mine, theirs, rtol=1e-4, atol=1e-4)
    assert result.params["metrics"]["loss:sum"] == pytest.approx(total, rel=1e-4)
    for key, gradient in engine._runs["run"].gradients.items():
        theirs = reference.names[key.replace(".weight", ".default.weight")].grad
        assert theirs is not None
        np.testing.assert_allclose(gradient, theirs, rtol=1e-3, atol=1e-4, err_msg=key)
