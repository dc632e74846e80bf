"""Which of a model's weights an adapter sits on: attention, MLP or output embedding.

Linear layers are targeted by their names. Experts that are kept as one tensor
[experts, ., .] have no layer of their own: PEFT targets the parameter (`target_parameters`).
Routers are never trained: they decide which expert sees a token. Nor are layers that PEFT takes
for experts of old by their name (the dense and the shared experts' layers of DeepSeek-V3): no
configuration of PEFT can say them, so an adapter on them could not be exported.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Literal

from peft import LoraConfig
from peft.utils.transformers_weight_conversion import convert_peft_config_for_transformers
from torch import nn
from transformers.pytorch_utils import Conv1D

Group = Literal["attn", "mlp", "unembed"]
GROUPS: tuple[Group, ...] = ("attn", "mlp", "unembed")

_ATTENTION = frozenset({"attn", "self_attn", "attention", "self_attention", "cross_attn"})
_ROUTERS = frozenset({"router", "gate", "shared_expert_gate"})


@dataclass(frozen=True, kw_only=True)
class Chosen:
    """Names for a PEFT config.

    Fields:
        modules: `target_modules`.
        parameters: `target_parameters`.
        transposed: `fan_in_fan_out`: whether layers hold their weights as [in, out].
    """

    modules: list[str]
    parameters: list[str]
    transposed: bool


@dataclass(frozen=True, kw_only=True)
class Targets:
    """All that may be adapted in a model, each by its full name.

    Fields:
        modules: linear layers.
        parameters: stacked experts; always of the MLP.
        transposed: those of the layers that hold their weights as [in, out].
    """

    modules: dict[str, Group]
    parameters: tuple[str, ...]
    transposed: frozenset[str]

    def chosen(self, *, attn: bool, mlp: bool, unembed: bool) -> Chosen:
        """What a PEFT config has to name for these groups; empty where there is none."""
        wanted = {"attn": attn, "mlp": mlp, "unembed": unembed}
        names = [name for name, group in self.modules.items() if wanted[group]]
        return Chosen(
            modules=_shortest(names, self.modules),
            parameters=sorted({".".join(n.split(".")[-2:]) for n in self.parameters})
            if mlp
            else [],
            transposed=bool(self.transposed.intersection(names)),
        )

    def groups_of(self, names: Iterable[str]) -> set[Group]:
        """The groups of adapted places, named as PEFT's files name them (less `.lora_...`)."""
        # Of two parameters in one module PEFT calls the inner one `base_layer`.
        experts: dict[str, Group] = {name.rsplit(".", 1)[0]: "mlp" for name in self.parameters}
        known = self.modules | experts
        places = (name.removesuffix(".base_layer") for name in names)
        return {known[place] for place in places if place in known}


def find_targets(model: Any) -> Targets:
    """The targets of a causal language model."""
    head = model.get_output_embeddings()
    modules: dict[str, Group] = {}
    transposed: set[str] = set()
    parameters: list[str] = []
    for name, module in model.named_modules():
        parts = name.split(".")
        if parts[-1] == "experts":
            stacked = module.named_parameters(recurse=False)
            parameters.extend(f"{name}.{own}" for own, tensor in stacked if tensor.dim() == 3)
        if not isinstance(module, nn.Linear | Conv1D) or _ROUTERS.intersection(parts):
            continue
        if module is head:
            modules[name] = "unembed"
        else:
            modules[name] = "attn" if _ATTENTION.intersection(parts) else "mlp"
        if isinstance(module, Conv1D):
            transposed.add(name)
    sayable = {ending: _sayable(model, ending) for ending in {_ending(name) for name in modules}}
    return Targets(
        modules={name: group for name, group in modules.items() if sayable[_ending(name)]},
        parameters=tuple(parameters),
        transposed=frozenset(transposed),
    )


def _sayable(model: Any, ending: str) -> bool:
    """Whether a PEFT config that names a layer is not rewritten to mean another."""
    config = LoraConfig(target_modules=[ending])
    try:
        convert_peft_config_for_transformers(config, model, None)
    except ValueError:  # one half of what it takes for a fused pair
        return False
    return ending in (config.target_modules or ())


def _ending(name: str) -> str:
    return name.rsplit(".", 1)[-1]


def _shortest(chosen: list[str], everything: Iterable[str]) -> list[str]:
    """Target names for a PEFT config: last components where these mean just the chosen."""
    endings = {_ending(name) for name in chosen}
    meant = {name for name in everything if _ending(name) in endings}
    return sorted(endings if meant == set(chosen) else chosen)
