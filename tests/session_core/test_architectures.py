"""The engine on every kind of base model that PEFT can target, against plain PEFT in float64.

Each model is small and random, from transformers' own config classes: sliding windows,
capped logits, fused projections, transposed layers, low-rank attention, experts.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from peft import PeftModel
from transformers import (
    AutoModelForCausalLM,
    DeepseekV3Config,
    Gemma2Config,
    Gemma3TextConfig,
    GPT2Config,
    GptOssConfig,
    MistralConfig,
    MixtralConfig,
    Phi3Config,
    Qwen2MoeConfig,
    Qwen3Config,
    Qwen3MoeConfig,
)

from session_core.engine import Engine
from session_core.model import open_base
from session_core.operations import Operation, split
from session_core.sampler import sample_all

Make = Callable[..., Any]
SIZES = {
    "vocab_size": 384,
    "hidden_size": 48,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 2,
}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
CONFIGS: dict[str, Callable[[], Any]] = {
    "gpt2": lambda: GPT2Config(
        vocab_size=384,
        n_embd=48,
        n_layer=2,
        n_head=4,
        n_positions=256,
        bos_token_id=1,
        eos_token_id=2,
    ),
    "phi3": lambda: Phi3Config(**SIZES),
    "qwen3": lambda: Qwen3Config(**SIZES, head_dim=12),
    "mistral": lambda: MistralConfig(**SIZES, sliding_window=8),
    "gemma2": lambda: Gemma2Config(**SIZES, head_dim=12, sliding_window=8),
    "gemma3": lambda: Gemma3TextConfig(
        **SIZES | {"num_hidden_layers": 7}, head_dim=12, sliding_window=8
    ),
    "deepseek": lambda: DeepseekV3Config(
        **SIZES | {"num_key_value_heads": 4},
        n_routed_experts=4,
        num_experts_per_tok=2,
        moe_intermediate_size=32,
        n_group=1,
        topk_group=1,
        first_k_dense_replace=1,
        kv_lora_rank=16,
        q_lora_rank=24,
        qk_nope_head_dim=8,
        qk_rope_head_dim=8,
        v_head_dim=8,
    ),
    "mixtral": lambda: MixtralConfig(**SIZES, num_local_experts=4, num_experts_per_tok=2),
    "qwen2_moe": lambda: Qwen2MoeConfig(**SIZES, **EXPERTS, shared_expert_intermediate_size=32),
    "qwen3_moe": lambda: Qwen3MoeConfig(**SIZES, **EXPERTS, head_dim=12),
    "gpt_oss": lambda: GptOssConfig(
        **SIZES, head_dim=12, num_local_experts=4, num_experts_per_tok=2, sliding_window=8
    ),
}
# Where each of them has its adapters, by the last names; "x+y" is a parameter of a module.
LINEAR = {
    "attn": {"q_proj", "k_proj", "v_proj", "o_proj"},
    "mlp": {"gate_proj", "up_proj", "down_proj"},
}
STACKED = LINEAR | {"mlp": {"experts+gate_up_proj", "experts+down_proj"}}
PLACES = dict.fromkeys(CONFIGS, LINEAR) | {
    "gpt2": {"attn": {"c_attn", "c_proj"}, "mlp": {"c_fc", "c_proj"}},
    "phi3": {"attn": {"qkv_proj", "o_proj"}, "mlp": {"gate_up_proj", "down_proj"}},
    "mixtral": STACKED,
    "qwen3_moe": STACKED,
    "gpt_oss": STACKED,
    "qwen2_moe": LINEAR | {"mlp": LINEAR["mlp"] | STACKED["mlp"]},
    "deepseek": {
        "attn": {"q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "kv_b_proj", "o_proj"},
        "mlp": STACKED["mlp"],  # PEFT cannot say the dense layer's and the shared expert's
    },
}
PROMPTS = [np.random.default_rng(4).integers(3, 380, size=size) for size in (5, 17, 1, 40, 9)]


@pytest.fixture(params=CONFIGS)
def architecture(request: pytest.FixtureRequest) -> str:
    name: str = request.param
    return name


@pytest.fixture
def folder(architecture: str, tiny_base: Path, tmp_path: Path) -> Path:
    """A model folder of the architecture, with the small tokenizer."""
    folder = tmp_path / "base"
    shutil.copytree(tiny_base, folder)
    (folder / "model.safetensors").unlink()
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(CONFIGS[architecture]()).float()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:  # large enough that a wrong one would show
                parameter.normal_(std=0.08)
    model.save_pretrained(folder)
    return folder


def reference(base: Path, adapter: Path) -> Any:
    """What anyone gets who opens the export with PEFT, in float64."""
    model = AutoModelForCausalLM.from_pretrained(
        base, dtype=torch.float64, experts_implementation="eager"
    )
    model = PeftModel.from_pretrained(model, adapter, autocast_adapter_dtype=False)
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(".lora_" in name)
    return model.double()


def export(engine: Engine, run: str, base: Path, folder: Path) -> Path:
    folder.mkdir()
    params = {"folder": str(folder), "base_model": str(base)}
    engine.execute(run, Operation(kind="save_weights", params=params))
    return folder


def jolt(engine: Engine, run: str, seed: int) -> None:
    """Weights as after training: none of them zero."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in engine.adapters.parameters(engine._runs[run].slot).values():
            parameter.normal_(std=0.05, generator=generator)


# Of the reference's own making, and true: nothing is merged, and GPT-2's head is no Conv1D.
@pytest.mark.filterwarnings("ignore:Model has `tie_word_embeddings=True`:UserWarning")
@pytest.mark.filterwarnings("ignore:fan_in_fan_out is set to True but:UserWarning")
def test_training_export_and_sampling_equal_plain_peft(
    folder: Path, datums: Make, tmp_path: Path
) -> None:
    engine = Engine(open_base(folder))
    runs = {
        "whole": {},
        "attention": {"train_mlp": False, "train_unembed": False},
        "beside": {"rank": 2},
    }
    for seed, (run, flags) in enumerate(runs.items()):
        params = {"rank": 4, "seed": seed, **flags}
        engine.execute(run, Operation(kind="create_run", params=params))
        jolt(engine, run, seed)
    for run in runs:
        plain = reference(folder, export(engine, run, folder, tmp_path / run))
        arrays = datums(3, seed=1)
        result = engine.execute(
            run,
            Operation(kind="forward_backward", params={"loss_fn": "cross_entropy"}, arrays=arrays),
        )
        expected = backward(plain, arrays)
        np.testing.assert_allclose(result.arrays["logprobs"], expected, rtol=2e-4, atol=2e-4)
        theirs = {
            name.replace(".default.weight", ".weight"): parameter.grad
            for name, parameter in plain.named_parameters()
            if parameter.requires_grad
        }
        mine = engine._runs[run].gradients
        assert set(mine) == set(theirs)
        for name, gradient in mine.items():
            scale = float(theirs[name].abs().max())
            assert scale > 0, name
            assert float((gradient - theirs[name]).abs().max()) < 1e-4 * scale, name

        sampler = {"sampler_id": run, "folder": str(tmp_path / run)}
        engine.execute("", Operation(kind="load_sampler", params=sampler))
        params = {"max_tokens": 12, "temperature": 0, "stop": []}
        operations = [
            Operation(kind="sample", params=params, arrays={"tokens": prompt.astype(np.int32)})
            for prompt in PROMPTS
        ]
        for prompt, sampled in zip(PROMPTS, sample_all(engine, run, operations), strict=True):
            assert sampled.arrays["tokens"].tolist() == greedy(plain, prompt, 12)


def backward(model: Any, arrays: Any) -> Any:
    """Logprobs, one datum at a time; gradients land on the model."""
    names = ("tokens", "input.target_tokens", "input.weights")
    every = []
    for tokens, targets, weights in zip(
        *(split(arrays[name], arrays[f"{name}.offsets"]) for name in names), strict=True
    ):
        logits = model(input_ids=torch.tensor(tokens.astype(np.int64))[None]).logits[0]
        chosen = torch.tensor(targets.astype(np.int64))[:, None]
        logprobs = logits.log_softmax(-1).gather(1, chosen)[:, 0]
        (-(torch.tensor(weights) * logprobs).sum()).backward()
        every.append(logprobs.detach().numpy())
    return np.concatenate(every)


def greedy(model: Any, prompt: Any, count: int) -> list[int]:
    whole = model.generate(
        input_ids=torch.tensor(prompt[None]),
        attention_mask=torch.ones(1, len(prompt), dtype=torch.long),
        max_new_tokens=count,
        do_sample=False,
        eos_token_id=None,
        pad_token_id=0,
    )
    found: list[int] = whole[0, len(prompt) :].tolist()
    return found


def test_layers_are_chosen_by_kind(architecture: str, folder: Path) -> None:
    engine = Engine(open_base(folder))
    for kind in ("attn", "mlp", "unembed"):
        flags = {f"train_{name}": name == kind for name in ("attn", "mlp", "unembed")}
        engine.execute(kind, Operation(kind="create_run", params={"rank": 2, **flags}))
        places = {
            name.split(".lora_")[0].removeprefix("base_model.model.")
            for name in engine.adapters.parameters(engine._runs[kind].slot)
        }
        last = {name.rsplit(".", 1)[-1] for name in places}
        if kind == "unembed":
            assert last == {"lm_head"}
            continue
        wanted = PLACES[architecture][kind]
        linear = {name for name in wanted if "+" not in name}
        # PEFT's name of two parameters of one module: the module's, and `base_layer`.
        stacked = {"experts", "base_layer"} if linear != wanted else set()
        assert last == linear | stacked
        assert all(("attn" in place) == (kind == "attn") for place in places)


def test_what_is_loaded_again_is_the_same_run(folder: Path, datums: Make, tmp_path: Path) -> None:
    """Resumed from a checkpoint: the flags are told from the file, and the step is the same."""
    engine = Engine(open_base(folder))
    checkpoint = tmp_path / "checkpoint"
    checkpoint.mkdir()
    create = {"rank": 4, "seed": 3, "train_unembed": False}
    engine.execute("one", Operation(kind="create_run", params=create))
    one_step(engine, "one", datums(3, seed=1))
    engine.execute("one", Operation(kind="save_checkpoint", params={"folder": str(checkpoint)}))
    load = {"folder": str(checkpoint), "optimizer": True}
    described = engine.execute("two", Operation(kind="load_run", params=load)).params
    assert {name: described[name] for name in create} == create
    for run in ("one", "two"):
        one_step(engine, run, datums(3, seed=2))
    one, two = (engine.adapters.parameters(engine._runs[run].slot) for run in ("one", "two"))
    assert all(torch.equal(tensor, two[name]) for name, tensor in one.items())
    assert any(tensor.any() for name, tensor in one.items() if ".lora_B." in name)


def one_step(engine: Engine, run: str, arrays: Any) -> None:
    params = {"loss_fn": "cross_entropy"}
    engine.execute(run, Operation(kind="forward_backward", params=params, arrays=arrays))
    engine.execute(run, Operation(kind="optim_step", params={"learning_rate": 1e-2}))
