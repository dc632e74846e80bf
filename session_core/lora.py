"""Every run's adapter, beside the others on the one base model.

PEFT holds them; an adapter is known to it by a slot name of ours, never by a client's. One
is active at a time, or each on rows of its own. Initialisation draws from a generator of the
adapter's own, so a run's first weights depend on its seed alone and not on what else lives in
the process.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
from peft import LoraConfig, PeftModel
from peft.tuners.lora import LoraLayer
from peft.tuners.lora.layer import ParamWrapper
from torch import nn

from registry.errors import InvalidInput
from session_core.fused import FusedLora, RowMap
from session_core.operations import ALPHA
from session_core.projection import HeadAdapter
from session_core.targets import GROUPS, find_targets

MAX_RANK = 256
_PREFIX = "base_model.model."


@dataclass(frozen=True, kw_only=True)
class LoraSpec:
    """What an adapter is: its rank, where it sits, and where it began."""

    rank: int
    seed: int = 0
    alpha: int = ALPHA
    train_attn: bool = True
    train_mlp: bool = True
    train_unembed: bool = True

    def __post_init__(self) -> None:
        if isinstance(self.rank, bool) or not isinstance(self.rank, int):
            raise InvalidInput(f"LoRA rank must be a whole number, not {self.rank!r}.")
        if not 1 <= self.rank <= MAX_RANK:
            raise InvalidInput(f"LoRA rank must be 1 to {MAX_RANK}, not {self.rank}.")
        if self.alpha != ALPHA:
            raise InvalidInput(f"LoRA alpha is {ALPHA} here, not {self.alpha}.")
        if not (self.train_attn or self.train_mlp or self.train_unembed):
            raise InvalidInput("Nothing to train: set train_attn, train_mlp or train_unembed.")

    def describe(self) -> dict[str, Any]:
        """As JSON parameters."""
        return asdict(self)


class Adapters:
    """The adapters of one base model."""

    def __init__(self, model: Any) -> None:
        self._model = model
        self._peft: PeftModel | None = None
        self._active: frozenset[str] | None = None
        self._owners = RowMap()
        self._specs: dict[str, LoraSpec] = {}
        self._parameters: dict[str, dict[str, nn.Parameter]] = {}
        self._targets = find_targets(model)

    def add(self, slot: str, spec: LoraSpec) -> None:
        """Put a freshly initialised adapter into an empty slot: A from the seed, B zero."""
        config = self.config(spec)
        with warnings.catch_warnings():
            # PEFT warns that merging into tied embeddings is unsafe; nothing is merged here.
            warnings.simplefilter("ignore", UserWarning)
            if self._peft is None:
                self._peft = PeftModel(self._model, config, adapter_name=slot)
            else:
                self._peft.add_adapter(slot, config)
        self._specs[slot] = spec
        self._parameters[slot] = self._find(slot)
        for layer in self._layers(slot):
            # PEFT adds to an expert's weights and not to what comes out of it.
            if not isinstance(layer, ParamWrapper):
                layer.lora_variant[slot] = FusedLora(self._owners)
        self._active = None
        generator = torch.Generator().manual_seed(spec.seed)
        with torch.no_grad():
            for name, parameter in self._parameters[slot].items():
                if ".lora_A." in name:
                    fresh = torch.empty(parameter.shape)
                    nn.init.kaiming_uniform_(fresh, a=math.sqrt(5), generator=generator)
                    parameter.copy_(fresh)
                else:
                    parameter.zero_()

    def load(self, slot: str, spec: LoraSpec, tensors: Mapping[str, torch.Tensor]) -> None:
        """Put an adapter with these tensors (PEFT names) into an empty slot.

        Raises InvalidInput naming a tensor that is missing, extra or of another shape; the
        slot is empty then.
        """
        self.add(slot, spec)
        try:
            self.fill(slot, tensors)
        except BaseException:
            self.remove(slot)
            raise

    def fill(self, slot: str, tensors: Mapping[str, torch.Tensor]) -> None:
        """Overwrite an adapter's tensors, all of them."""
        check_tensors(self._parameters[slot], tensors)
        with torch.no_grad():
            for name, parameter in self._parameters[slot].items():
                parameter.copy_(tensors[name])

    def remove(self, slot: str) -> None:
        """Empty a slot."""
        assert self._peft is not None
        for layer in self._layers(slot):
            layer.lora_variant.pop(slot, None)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)
            self._peft.delete_adapter(slot)
        del self._specs[slot], self._parameters[slot]
        self._active = None

    def use(self, slot: str | None) -> None:
        """Make an adapter the one that acts; None for the bare base model."""
        self._owners.rows = None
        self._activate(frozenset(() if slot is None else (slot,)))

    def use_rows(self, slots: Sequence[str | None]) -> None:
        """Have each row of the next batches [len(slots), ...] be acted on by its own adapter."""
        wanted = frozenset(slot for slot in slots if slot is not None)
        if len(set(slots)) <= 1:
            self.use(slots[0] if slots else None)
            return
        if self._active is None or not wanted <= self._active:
            self._activate(wanted)
        device = next(self._model.parameters()).device
        self._owners.rows = {
            slot: torch.tensor([row for row, name in enumerate(slots) if name == slot]).to(device)
            for slot in wanted
        }

    @property
    def mixable(self) -> bool:
        """Whether rows of several adapters can share a batch.

        Not where experts are routed to: their layers see tokens, not rows.
        """
        config = self._model.config.get_text_config()
        names = ("num_experts", "num_local_experts", "n_routed_experts")
        return not any(getattr(config, name, None) for name in names)

    def _activate(self, slots: frozenset[str]) -> None:
        if self._peft is None or self._active == slots:
            return
        if not slots:
            self._peft.base_model.disable_adapter_layers()
        else:
            self._peft.base_model.enable_adapter_layers()
            if len(slots) == 1:
                self._peft.set_adapter(next(iter(slots)))
            else:
                self._peft.base_model.set_adapter(sorted(slots))
        self._active = slots

    def parameters(self, slot: str) -> dict[str, nn.Parameter]:
        """An adapter's tensors by their names in a PEFT file, in a fixed order."""
        return self._parameters[slot]

    def head(self, slot: str) -> HeadAdapter | None:
        """The adapter's part of the output embedding, if it has one."""
        layer = self._model.get_output_embeddings()
        if not self._specs[slot].train_unembed or not isinstance(layer, LoraLayer):
            return None
        return HeadAdapter(
            a=layer.lora_A[slot].weight,
            b=layer.lora_B[slot].weight,
            scale=layer.scaling[slot],
        )

    def config(self, spec: LoraSpec) -> LoraConfig:
        """The PEFT configuration of an adapter."""
        chosen = self._targets.chosen(
            attn=spec.train_attn, mlp=spec.train_mlp, unembed=spec.train_unembed
        )
        if not (chosen.modules or chosen.parameters):
            raise InvalidInput("This base model has no layer of the kinds that are to be trained.")
        return LoraConfig(
            r=spec.rank,
            lora_alpha=spec.alpha,
            lora_dropout=0.0,
            bias="none",
            task_type="CAUSAL_LM",
            fan_in_fan_out=chosen.transposed,
            target_modules=chosen.modules,
            target_parameters=chosen.parameters or None,
        )

    def spec_of(self, config: Mapping[str, Any], tensors: Mapping[str, Any]) -> LoraSpec:
        """The spec that a PEFT adapter_config.json and its tensors amount to.

        Raises InvalidInput, naming it, for whatever this engine does not train: another
        alpha, rsLoRA, DoRA, biases, ranks that differ by layer, fully trained modules.
        """
        if config.get("peft_type", "LORA") != "LORA":
            raise InvalidInput(f"The adapter is of type {config['peft_type']}, not LORA.")
        for key in ("use_rslora", "use_dora", "rank_pattern", "alpha_pattern", "modules_to_save"):
            if config.get(key):
                raise InvalidInput(f"The adapter sets {key}, which cannot be trained here.")
        if config.get("bias", "none") != "none" or config.get("lora_bias"):
            raise InvalidInput("The adapter has biases, which cannot be trained here.")
        if config.get("lora_alpha") != ALPHA:
            raise InvalidInput(
                f"The adapter's lora_alpha is {config.get('lora_alpha')!r}; this engine trains "
                f"with alpha {ALPHA}, and loading it would change what it computes."
            )
        held = {name.removeprefix(_PREFIX).rsplit(".lora_", 1)[0] for name in tensors}
        groups = self._targets.groups_of(held)
        flags = {f"train_{group}": group in groups for group in GROUPS}
        return LoraSpec(rank=config.get("r", 0), alpha=config["lora_alpha"], **flags)

    def _layers(self, slot: str) -> list[Any]:
        modules = self._model.modules()
        return [item for item in modules if isinstance(item, LoraLayer) and slot in item.lora_A]

    def _find(self, slot: str) -> dict[str, nn.Parameter]:
        ending = f".{slot}.weight"
        found = {
            _PREFIX + name.removesuffix(ending) + ".weight": parameter
            for name, parameter in self._model.named_parameters()
            if ".lora_" in name and name.endswith(ending)
        }
        return dict(sorted(found.items()))


def check_tensors(expected: Mapping[str, Any], found: Mapping[str, torch.Tensor]) -> None:
    """Raise InvalidInput unless both have the same names and shapes."""
    for name in sorted(set(expected) - set(found)):
        raise InvalidInput(f"The adapter file lacks the tensor {name}.")
    for name in sorted(set(found) - set(expected)):
        raise InvalidInput(f"The adapter file holds {name}, which this base model cannot take.")
    for name, tensor in found.items():
        if tensor.shape != expected[name].shape:
            raise InvalidInput(
                f"Tensor {name} has shape {list(tensor.shape)}, this base model needs "
                f"{list(expected[name].shape)}."
            )
