"""What a merge will do, decided from headers and JSON alone, before any weight is read.

The plan names every tensor of the result, what it is made of, in which file it goes and as
what type; and every other file of the result. Whatever cannot be done right is refused here.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from merge.adapter import Adapter, Lora, read_adapter
from merge.folder import (
    CONFIG,
    GENERATION_CONFIG,
    Weights,
    read_json,
    read_weights,
    text_files,
    validate_model_folder,
)
from merge.headers import FLOATS, TensorEntry
from registry.errors import InvalidInput

DTYPES = {"float32": "F32", "bfloat16": "BF16", "float16": "F16"}
# What an adapter package carries on to the merged one, where it is there.
CARRIED = ("probe.json", "training-data.json")

# Architectures whose linear layers are Conv1D, which stores [in, out], and which layers. The
# shape alone cannot tell: a square matrix fits both ways.
_CONV1D_MODELS = frozenset({"gpt2", "openai-gpt", "imagegpt", "decision_transformer"})
_CONV1D_LAYERS = frozenset({"c_attn", "c_proj", "c_fc", "q_attn"})

_HEAD = "lm_head"
_EMBEDDINGS = (
    "embed_tokens.weight",
    "wte.weight",
    "embed_in.weight",
    "word_embeddings.weight",
    "tokens_embed.weight",
)


@dataclass(frozen=True, kw_only=True)
class TensorPlan:
    """One tensor of the result.

    Fields:
        source: the base's tensor it starts from, as the base's file has it.
        base_file: name of that file.
        dtype: of the result, by safetensors' name.
        lora: what is added; None where nothing is.
        transposed: whether the base stores [in, out], as Conv1D does.
    """

    name: str
    source: TensorEntry
    base_file: str
    dtype: str
    lora: Lora | None = None
    transposed: bool = False

    @property
    def untied(self) -> bool:
        """Whether it starts from the tensor it was tied to."""
        return self.name == f"{_HEAD}.weight" and self.source.name.endswith(_EMBEDDINGS)

    @property
    def untouched(self) -> bool:
        """Whether its bytes are the base's."""
        return self.lora is None and self.dtype == self.source.dtype


@dataclass(frozen=True, kw_only=True)
class ShardPlan:
    """One weight file of the result, its tensors in order; untouched if it equals the base's."""

    name: str
    tensors: tuple[TensorPlan, ...]
    metadata: Mapping[str, str]

    @property
    def untouched(self) -> bool:
        """Whether the file is the base's, byte for byte."""
        return all(tensor.untouched for tensor in self.tensors)


@dataclass(frozen=True, kw_only=True)
class Equality:
    """Two tensors that must hold the same: a copy in the adapter and the base's own."""

    copy: TensorEntry
    source: TensorEntry
    base_file: str


@dataclass(frozen=True, kw_only=True)
class ConfigChange:
    """A key of config.json that had to change; None stands for a key that is not there."""

    key: str
    before: Any
    after: Any


@dataclass(frozen=True, kw_only=True)
class Plan:
    """A whole merge.

    Fields:
        equalities: what must be found equal before anything is written.
        copies: every other file of the result but the index, and where its bytes come from.
        config_changes: what differs between the two config.json.
    """

    base: Path
    adapter: Adapter
    weights: Weights
    shards: tuple[ShardPlan, ...]
    equalities: tuple[Equality, ...]
    copies: Mapping[str, Path]
    config_changes: tuple[ConfigChange, ...]

    @property
    def merged(self) -> list[TensorPlan]:
        """The tensors something is added to."""
        return [t for shard in self.shards for t in shard.tensors if t.lora is not None]

    @property
    def dtype(self) -> str:
        """The least precise type among them, as torch names it: what thresholds go by."""
        precision = ("BF16", "F16", "F32")
        least = min((t.dtype for t in self.merged), key=precision.index)
        return {short: name for name, short in DTYPES.items()}[least]


def make_plan(
    base: Path,
    adapter: Path,
    *,
    dtype: str | None = None,
    base_digest: str | None = None,
    recorded_base_digest: str | None = None,
) -> Plan:
    """Plan the merge of an adapter into a base model.

    Args:
        dtype: ``float32``, ``bfloat16`` or ``float16``; by default each tensor keeps the type
            the base stores it in.
        base_digest: digest of the base in the folder.
        recorded_base_digest: of the base the adapter was trained on; the two must be equal.

    Raises:
        InvalidInput: naming the file, key or tensor that stands in the way.
    """
    if dtype is not None and dtype not in DTYPES:
        raise InvalidInput(f"{dtype!r} is no type to store weights in: use {', '.join(DTYPES)}.")
    if base_digest != recorded_base_digest:
        raise InvalidInput(
            f"the adapter was trained on the base {recorded_base_digest}, and this one is "
            f"{base_digest}: merge it into the base it was trained on."
        )
    validate_model_folder(base)
    config = read_json(base / CONFIG)
    if config.get("quantization_config"):
        raise InvalidInput(
            "the base is quantised (quantization_config in its config.json): merge into the "
            "16-bit or 32-bit weights it was made from."
        )
    weights, read = read_weights(base), read_adapter(adapter)
    claims = _claims(weights, read, config, DTYPES.get(dtype or ""))
    untied = any(tensor.untied for tensor in claims.values())
    copies = {name: base / name for name in (CONFIG, GENERATION_CONFIG) if (base / name).is_file()}
    # File by file, what came with the adapter is what it was trained with.
    copies |= {name: base / name for name in text_files(base)}
    copies |= {name: adapter / name for name in text_files(adapter)}
    copies |= {name: adapter / name for name in CARRIED if (adapter / name).is_file()}
    return Plan(
        base=base,
        adapter=read,
        weights=weights,
        shards=_shards(weights, claims, DTYPES.get(dtype or "")),
        equalities=_equalities(weights, read, config),
        copies=copies,
        config_changes=_config_changes(config, untied=untied, dtype=dtype),
    )


def _claims(
    weights: Weights, adapter: Adapter, config: Mapping[str, Any], dtype: str | None
) -> dict[str, TensorPlan]:
    """Which tensor each LoRA goes to, by name; every LoRA is used exactly once."""
    claims: dict[str, TensorPlan] = {}
    for module, lora in adapter.loras.items():
        name, source = _target(module, weights, config)
        if name in claims:
            raise InvalidInput(f"two LoRAs of the adapter go to the base's tensor {name}")
        if source.dtype not in FLOATS:
            raise InvalidInput(
                f"the base stores {source.name} as {source.dtype}: only F32, F16 and BF16 "
                "weights can be merged into."
            )
        rows, columns = lora.b.shape[0], lora.a.shape[1]
        transposed = _is_transposed(module, config)
        expected = (columns, rows) if transposed else (rows, columns)
        if source.shape != expected:
            raise InvalidInput(
                f"the LoRA of {module} makes a matrix of {list(expected)}, the base's "
                f"{source.name} is {list(source.shape)}: this adapter is another model's."
            )
        claims[name] = TensorPlan(
            name=name,
            source=source,
            base_file=weights.places[source.name],
            dtype=dtype or source.dtype,
            lora=lora,
            transposed=transposed,
        )
    if adapter.fan_in_fan_out and not any(tensor.transposed for tensor in claims.values()):
        raise InvalidInput(
            "the adapter sets fan_in_fan_out, but no layer it targets is known to be stored "
            f"transposed in a {config['model_type']} model."
        )
    _check_complete(weights, adapter, claims)
    return claims


def _target(module: str, weights: Weights, config: Mapping[str, Any]) -> tuple[str, TensorEntry]:
    """A module's tensor: its name in the result, and where its values start."""
    # Some bases are stored without the name of the model inside (`h.0.` for `transformer.h.0.`).
    names = (f"{module}.weight", f"{module.partition('.')[2]}.weight")
    found = [name for name in names if name in weights.places]
    if module == _HEAD and config.get("tie_word_embeddings", not found):
        # Tied: the head's values are the input embedding's. Adding to that one would change
        # what the model reads as well, so the head becomes a tensor of its own.
        return names[0], _embedding(weights)
    if not found:
        raise InvalidInput(
            f"the adapter has weights for {module}, and the base has no tensor {names[0]}: "
            "this adapter is another model's."
        )
    return found[0], weights.entry(found[0])


def _equalities(
    weights: Weights, adapter: Adapter, config: Mapping[str, Any]
) -> tuple[Equality, ...]:
    """Each of the base's weights that came with the adapter, beside the base's own."""
    equalities = []
    for module, copy in adapter.copies.items():
        _, source = _target(module, weights, config)
        if copy.shape != source.shape or source.dtype not in FLOATS:
            raise InvalidInput(
                f"the adapter brings {copy.name} as {list(copy.shape)}, the base has "
                f"{list(source.shape)}: a changed vocabulary is not supported by this merge."
            )
        file = weights.places[source.name]
        equalities.append(Equality(copy=copy, source=source, base_file=file))
    return tuple(equalities)


def _embedding(weights: Weights) -> TensorEntry:
    found = [name for name in weights.places if name.endswith(_EMBEDDINGS)]
    if len(found) != 1:
        raise InvalidInput(
            "the base's output embedding is tied, and its input embedding cannot be told among "
            f"its tensors ({', '.join(sorted(found)) or 'none is known by name'})."
        )
    return weights.entry(found[0])


def _is_transposed(module: str, config: Mapping[str, Any]) -> bool:
    leaf = module.rsplit(".", 1)[-1]
    return config["model_type"] in _CONV1D_MODELS and leaf in _CONV1D_LAYERS


def _check_complete(weights: Weights, adapter: Adapter, claims: Mapping[str, TensorPlan]) -> None:
    """Every matrix that the configuration targets must have got its LoRA."""
    if not adapter.all_layers or adapter.targets == "all-linear":
        return
    for name in weights.places:
        module = name.removesuffix(".weight")
        if name in claims or module == name or len(weights.entry(name).shape) != 2:
            continue
        if adapter.targets_module(module):
            raise InvalidInput(
                f"the adapter targets {module}, and holds no LoRA of it: the file is incomplete."
            )


def _shards(
    weights: Weights, claims: Mapping[str, TensorPlan], dtype: str | None
) -> tuple[ShardPlan, ...]:
    """The base's files and the order of their tensors, kept."""
    # Tensors the base keeps in another type than most are so on purpose, and stay.
    main = _main_dtype(weights)
    shards: dict[str, list[TensorPlan]] = {}
    for file, header in weights.shards.items():
        shards[file] = [
            claims.get(name)
            or TensorPlan(
                name=name,
                source=entry,
                base_file=file,
                dtype=dtype if dtype and entry.dtype == main else entry.dtype,
            )
            for name, entry in header.tensors.items()
        ]
    for name, tensor in claims.items():
        if name not in weights.places:
            # An untied head goes beside the embedding it starts from.
            shards[tensor.base_file].append(tensor)
    return tuple(
        ShardPlan(name=file, tensors=tuple(tensors), metadata=weights.shards[file].metadata)
        for file, tensors in shards.items()
    )


def _main_dtype(weights: Weights) -> str | None:
    """The floating type most of the base's bytes are in."""
    sizes = dict.fromkeys(sorted(FLOATS), 0)
    for header in weights.shards.values():
        for entry in header.tensors.values():
            if entry.dtype in sizes:
                sizes[entry.dtype] += entry.size
    return max(sizes, key=lambda dtype: sizes[dtype])


def _config_changes(
    config: Mapping[str, Any], *, untied: bool, dtype: str | None
) -> tuple[ConfigChange, ...]:
    changes: dict[str, Any] = {}
    if untied:
        changes["tie_word_embeddings"] = False
    if dtype is not None:
        # Both spellings are in the field; the one a reader goes by must not be left behind.
        spellings = [key for key in ("dtype", "torch_dtype") if key in config] or ["dtype"]
        changes |= dict.fromkeys(spellings, dtype)
    if "auto_map" in config:
        # It names code to run, which is not part of the result.
        changes["auto_map"] = None
    return tuple(
        ConfigChange(key=key, before=config.get(key), after=value)
        for key, value in changes.items()
        if config.get(key) != value
    )
