from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from registry.errors import InvalidInput
from session_core.lora import Adapters, LoraSpec
from session_core.model import Base, open_base


@pytest.fixture
def fresh(tiny_base: Path) -> Base:
    return open_base(tiny_base)


def tensors(adapters: Adapters, slot: str) -> dict[str, torch.Tensor]:
    return {name: tensor.detach().clone() for name, tensor in adapters.parameters(slot).items()}


def test_the_first_weights_depend_on_the_seed_alone(fresh: Base) -> None:
    adapters = Adapters(fresh.model)
    torch.manual_seed(1)
    adapters.add("one", LoraSpec(rank=4, seed=5))
    torch.manual_seed(2)
    adapters.add("two", LoraSpec(rank=4, seed=5))
    adapters.add("three", LoraSpec(rank=4, seed=6))
    one, two, three = (tensors(adapters, slot) for slot in ("one", "two", "three"))
    assert set(one) == set(two)
    for name, tensor in one.items():
        assert torch.equal(tensor, two[name])
        assert (".lora_B." in name) == (not tensor.any())
    assert any(not torch.equal(one[name], three[name]) for name in one)


def test_a_fresh_adapter_changes_nothing(fresh: Base) -> None:
    tokens = torch.arange(12)[None] + 3
    with torch.no_grad():
        bare = fresh.logits(tokens)
        adapters = Adapters(fresh.model)
        adapters.add("one", LoraSpec(rank=4))
        adapters.use("one")
        assert torch.equal(fresh.logits(tokens), bare)


def test_one_adapter_acts_at_a_time(fresh: Base) -> None:
    tokens = torch.arange(12)[None] + 3
    adapters = Adapters(fresh.model)
    with torch.no_grad():
        bare = fresh.logits(tokens)
        outputs = {}
        for slot, seed in (("one", 1), ("two", 2)):
            adapters.add(slot, LoraSpec(rank=4))
            generator = torch.Generator().manual_seed(seed)
            for parameter in adapters.parameters(slot).values():
                parameter.normal_(generator=generator, std=0.1)
        for slot in ("one", "two", "one", None, "two"):
            adapters.use(slot)
            output = outputs.setdefault(slot, fresh.logits(tokens))
            assert torch.equal(fresh.logits(tokens), output)
        assert torch.equal(outputs[None], bare)
        assert not torch.equal(outputs["one"], outputs["two"])
        adapters.remove("one")
        adapters.use("two")
        assert torch.equal(fresh.logits(tokens), outputs["two"])
        adapters.remove("two")
        adapters.use(None)
        assert torch.equal(fresh.logits(tokens), bare)


@pytest.mark.parametrize(
    ("spec", "targets"),
    [
        (LoraSpec(rank=1, train_mlp=False, train_unembed=False), "k_proj o_proj q_proj v_proj"),
        (LoraSpec(rank=1, train_attn=False, train_unembed=False), "down_proj gate_proj up_proj"),
        (LoraSpec(rank=1, train_attn=False, train_mlp=False), "lm_head"),
    ],
)
def test_layers_are_chosen_by_kind(fresh: Base, spec: LoraSpec, targets: str) -> None:
    adapters = Adapters(fresh.model)
    assert sorted(adapters.config(spec).target_modules) == targets.split()
    adapters.add("one", spec)
    held = {name.split(".lora_")[0].rsplit(".", 1)[-1] for name in adapters.parameters("one")}
    assert held == set(targets.split())


@pytest.mark.parametrize(
    ("params", "message"),
    [
        ({"rank": 0}, "rank must be 1 to 256"),
        ({"rank": 257}, "rank must be 1 to 256"),
        ({"rank": 2.5}, "whole number"),
        ({"rank": True}, "whole number"),
        ({"rank": 4, "alpha": 16}, "alpha is 32 here, not 16"),
        ({"rank": 4, "train_attn": False, "train_mlp": False, "train_unembed": False}, "Nothing"),
    ],
)
def test_specs_that_cannot_be_are_refused(params: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidInput, match=message):
        LoraSpec(**params)


def test_a_loaded_adapter_must_fit(fresh: Base) -> None:
    adapters = Adapters(fresh.model)
    spec = LoraSpec(rank=2)
    adapters.add("one", spec)
    good = tensors(adapters, "one")
    first = next(iter(good))
    for broken, message in (
        ({name: good[name] for name in list(good)[1:]}, "lacks the tensor"),
        ({**good, "extra": torch.zeros(1)}, "holds extra"),
        ({**good, first: torch.zeros(3, 3)}, r"has shape \[3, 3\]"),
    ):
        with pytest.raises(InvalidInput, match=message):
            adapters.load("two", spec, broken)
    adapters.load("two", spec, good)
    assert all(torch.equal(tensor, good[name]) for name, tensor in tensors(adapters, "two").items())


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"lora_alpha": 16}, "lora_alpha is 16"),
        ({"use_rslora": True}, "use_rslora"),
        ({"use_dora": True}, "use_dora"),
        ({"rank_pattern": {"q_proj": 4}}, "rank_pattern"),
        ({"modules_to_save": ["lm_head"]}, "modules_to_save"),
        ({"bias": "all"}, "biases"),
        ({"peft_type": "IA3"}, "IA3"),
    ],
)
def test_foreign_kinds_of_adapter_are_refused_by_name(
    fresh: Base, change: dict[str, Any], message: str
) -> None:
    adapters = Adapters(fresh.model)
    spec = LoraSpec(rank=2, train_mlp=False)
    adapters.add("one", spec)
    config = {"peft_type": "LORA", "r": 2, "lora_alpha": 32}
    assert adapters.spec_of(config, tensors(adapters, "one")) == spec
    with pytest.raises(InvalidInput, match=message):
        adapters.spec_of({**config, **change}, tensors(adapters, "one"))


def test_the_seed_takes_the_whole_range(fresh: Base) -> None:
    adapters = Adapters(fresh.model)
    adapters.add("one", LoraSpec(rank=1, seed=2**63 - 1))
    adapters.add("two", LoraSpec(rank=1, seed=0))
