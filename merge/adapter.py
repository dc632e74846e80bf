"""What a PEFT adapter says of itself: its configuration and tensors, checked.

Every key of the configuration is either understood here or refused by name. A key that is
ignored today is a model that is silently wrong tomorrow.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from merge.folder import read_json
from merge.headers import FLOATS, TensorEntry, read_header
from registry.errors import InvalidInput

ADAPTER_CONFIG = "adapter_config.json"
ADAPTER_WEIGHTS = "adapter_model.safetensors"

_TENSOR = re.compile(r"base_model\.model\.(?P<module>.+)\.lora_(?P<side>[AB])\.weight")
# PEFT stores the base's embeddings with an adapter that targets one of them.
_COPY = re.compile(r"base_model\.model\.(?P<module>(?!.*lora_).+?)(\.base_layer)?\.weight")

# Keys that change nothing of what the adapter computes once it is trained.
_WITHOUT_EFFECT = frozenset(
    {
        "peft_version",
        "base_model_name_or_path",
        "revision",
        "inference_mode",
        "auto_mapping",
        "lora_dropout",
        # Matter only together with keys that are refused.
        "megatron_core",
        "qalora_group_size",
    }
)
# Keys that are read below.
_UNDERSTOOD = frozenset(
    {
        "peft_type",
        "task_type",
        "r",
        "lora_alpha",
        "use_rslora",
        "rank_pattern",
        "alpha_pattern",
        "fan_in_fan_out",
        "bias",
        "init_lora_weights",
        "target_modules",
        "exclude_modules",
        "layers_to_transform",
        "layers_pattern",
    }
)
# These only choose the first values. Others (pissa, olora, corda, loftq, ...) rewrite the base
# as well, so that an adapter trained that way does not belong to the base as it is stored.
_PLAIN_INITS = (True, False, None, "gaussian", "orthogonal", "eva")


@dataclass(frozen=True, kw_only=True)
class Lora:
    """One module's update, ``scale * B @ A``.

    Fields:
        module: the module's name in the base model.
        a: entry of A, [rank, in].
        b: entry of B, [out, rank].
    """

    module: str
    a: TensorEntry
    b: TensorEntry
    rank: int
    scale: float


@dataclass(frozen=True, kw_only=True)
class Adapter:
    """An adapter's updates by module, sorted by name, and what it says of them.

    ``copies`` are weights of the base, by module, that came along; they add nothing, and a
    merge must see to it that they are the base's.
    """

    folder: Path
    loras: Mapping[str, Lora]
    copies: Mapping[str, TensorEntry]
    fan_in_fan_out: bool
    targets: Sequence[str] | str
    excluded: Sequence[str] | str
    all_layers: bool

    @property
    def weights(self) -> Path:
        """The file with A and B."""
        return self.folder / ADAPTER_WEIGHTS

    def targets_module(self, module: str) -> bool:
        """Whether the configuration puts a LoRA on a module, as PEFT decides it."""
        if self.excluded and _names(self.excluded, module):
            return False
        return self.targets == "all-linear" or _names(self.targets, module)


def read_adapter(folder: Path) -> Adapter:
    """Read an adapter's configuration and header.

    Raises:
        InvalidInput: naming the key or tensor, for whatever is broken, unknown or unsupported.
    """
    config = read_json(folder / ADAPTER_CONFIG)
    _check_keys(config)
    header = read_header(folder / ADAPTER_WEIGHTS)
    sides: dict[str, dict[str, TensorEntry]] = {}
    copies: dict[str, TensorEntry] = {}
    for name, entry in header.tensors.items():
        if entry.dtype not in FLOATS:
            raise InvalidInput(f"the adapter's tensor {name} is of type {entry.dtype}: no float")
        if match := _TENSOR.fullmatch(name):
            sides.setdefault(match["module"], {})[match["side"]] = entry
        elif (match := _COPY.fullmatch(name)) and match["module"] not in copies:
            copies[match["module"]] = entry
        else:
            raise InvalidInput(
                f"{ADAPTER_WEIGHTS} holds the tensor {name}, which no rule claims: "
                "only lora_A and lora_B of linear layers are merged."
            )
    loras = {module: _lora(config, module, pair) for module, pair in sorted(sides.items())}
    if not loras:
        raise InvalidInput(f"{ADAPTER_WEIGHTS} holds no LoRA: merging it would give the base.")
    adapter = Adapter(
        folder=folder,
        loras=loras,
        copies=copies,
        fan_in_fan_out=_flag(config, "fan_in_fan_out"),
        targets=_patterns(config, "target_modules"),
        excluded=_patterns(config, "exclude_modules"),
        all_layers=config.get("layers_to_transform") in (None, []),
    )
    _check_targets(adapter)
    return adapter


def _check_keys(config: Mapping[str, Any]) -> None:
    if config.get("peft_type") != "LORA":
        raise InvalidInput(
            f"the adapter's peft_type is {config.get('peft_type')!r}: only LORA can be merged."
        )
    if config.get("task_type") not in (None, "CAUSAL_LM"):
        raise InvalidInput(
            f"the adapter's task_type is {config['task_type']!r}: only CAUSAL_LM can be merged."
        )
    for key, value in sorted(config.items()):
        if value and key not in _WITHOUT_EFFECT | _UNDERSTOOD:
            raise InvalidInput(
                f"the adapter sets {key}, which this merge does not support; serve the adapter "
                "unmerged, or train without it."
            )
    if config.get("bias", "none") != "none":
        raise InvalidInput(
            f"the adapter sets bias={config['bias']!r}, which this merge does not support; "
            "train with bias='none'."
        )
    if not any(config.get("init_lora_weights", True) is init for init in _PLAIN_INITS[:3]) and (
        config.get("init_lora_weights") not in _PLAIN_INITS[3:]
    ):
        raise InvalidInput(
            f"the adapter sets init_lora_weights={config['init_lora_weights']!r}, which changes "
            "the base as well; convert it to a plain LoRA first (PEFT's save_pretrained with "
            "path_initial_model_for_weight_conversion does)."
        )


def _lora(config: Mapping[str, Any], module: str, pair: Mapping[str, TensorEntry]) -> Lora:
    for side in ("A", "B"):
        if side not in pair:
            raise InvalidInput(f"the adapter lacks lora_{side} of {module}")
    a, b = pair["A"], pair["B"]
    rank = _number(config, "r", _pattern(config, "rank_pattern", module))
    alpha = _number(config, "lora_alpha", _pattern(config, "alpha_pattern", module))
    if rank < 1 or rank != int(rank):
        raise InvalidInput(f"the adapter's rank of {module} is {rank}: expected 1 or more")
    rank = int(rank)
    if len(a.shape) != 2 or len(b.shape) != 2 or a.shape[0] != rank or b.shape[1] != rank:
        raise InvalidInput(
            f"the LoRA of {module} has shapes A {list(a.shape)} and B {list(b.shape)}, but its "
            f"rank is {rank} by {ADAPTER_CONFIG}: expected [{rank}, in] and [out, {rank}]."
        )
    divisor = math.sqrt(rank) if _flag(config, "use_rslora") else rank
    return Lora(module=module, a=a, b=b, rank=rank, scale=alpha / divisor)


def _pattern(config: Mapping[str, Any], key: str, module: str) -> Any:
    """The value of the first pattern that names a module, as PEFT matches them; else None."""
    patterns = config.get(key) or {}
    if not isinstance(patterns, dict):
        raise InvalidInput(f"the adapter's {key} is no table of patterns")
    for pattern, value in patterns.items():
        if _search(rf"(.*\.)?({pattern})$", module, key, pattern):
            return value
    return None


def _search(expression: str, text: str, key: str, pattern: str) -> bool:
    try:
        return re.match(expression, text) is not None
    except re.error as error:
        raise InvalidInput(
            f"the adapter's {key} has a pattern that cannot be read, {pattern!r}: {error}"
        ) from None


def _number(config: Mapping[str, Any], key: str, patterned: Any) -> float:
    value = config.get(key) if patterned is None else patterned
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        raise InvalidInput(f"the adapter's {key} is {value!r}: expected a number")
    return value


def _flag(config: Mapping[str, Any], key: str) -> bool:
    value = config.get(key, False)
    if value not in (True, False, None):
        raise InvalidInput(f"the adapter's {key} is {value!r}: expected true or false")
    return bool(value)


def _patterns(config: Mapping[str, Any], key: str) -> Sequence[str] | str:
    value = config.get(key) or ()
    if isinstance(value, str):
        _search(value, "", key, value)
        return value
    if not isinstance(value, list | tuple) or not all(isinstance(item, str) for item in value):
        raise InvalidInput(f"the adapter's {key} is neither a name nor a list of names")
    return tuple(value)


def _names(names: Sequence[str] | str, module: str) -> bool:
    """PEFT's rule: a string is a pattern for the whole name, a list holds endings."""
    if isinstance(names, str):
        return re.fullmatch(names, module) is not None
    return any(module == name or module.endswith(f".{name}") for name in names)


def _check_targets(adapter: Adapter) -> None:
    """Every LoRA must be one the configuration asks for, and every name must have one."""
    if not adapter.targets:
        raise InvalidInput(f"{ADAPTER_CONFIG} names no target_modules")
    for module in adapter.loras:
        if not adapter.targets_module(module):
            raise InvalidInput(
                f"the adapter holds a LoRA of {module}, which its target_modules do not name: "
                "tools that go by the configuration would drop it."
            )
    if isinstance(adapter.targets, str):
        return
    for name in adapter.targets:
        if not any(_names([name], module) for module in adapter.loras):
            raise InvalidInput(
                f"the adapter's target_modules name {name}, but {ADAPTER_WEIGHTS} holds no LoRA "
                "of it: the file is incomplete."
            )
