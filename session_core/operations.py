"""What a training run is asked to do, what comes of it, and their bytes.

An operation is the unit of order, durability and replay: the dialects make them, the log
keeps their bytes, the engine executes them. One codec serves the log and the worker's wire:
safetensors bytes whose metadata holds the kind and the JSON parameters, so that nothing but
numbers and JSON is ever read back.

Operation kinds, their ``params`` and the result's:

    create_run         rank, seed=0, alpha=32, train_attn=True, train_mlp=True,
                       train_unembed=True,                  -> rank, alpha, seed, train_*,
                       loraplus_lr_ratio=1                     loraplus_lr_ratio
    load_run           folder, optimizer: bool, and optionally rank, alpha, train_* to be
                       checked against the package, and     -> rank, alpha, seed, train_*,
                       loraplus_lr_ratio instead of its own    loraplus_lr_ratio, step
    forward            loss_fn, loss_fn_config={}; datums   -> metrics; logprobs
    forward_backward   the same                             -> metrics; logprobs
    optim_step         learning_rate=1e-4, beta1=0.9, beta2=0.95, eps=1e-12,
                       weight_decay=0, grad_clip_norm=0     -> metrics, step
    save_checkpoint    folder: a package that resumes       -> tokens_trained, step, last_loss,
                       training; base_model=None: the          rank, alpha, seed, train_*
                       base's name in the adapter's config;
                       evidence=True: with the probe and
                       the training data's fingerprints
    save_weights       the same, without the optimizer      -> the same
    snapshot, restore  folder: a run's whole state, for
                       recovery from a crash                -> step
    unload_run         -                                    -> {}
    load_sampler       sampler_id, folder or None for base  -> {}
    unload_sampler     sampler_id                           -> {}
    sample             max_tokens, temperature=1, top_k=-1, top_p=1, seed=None, stop=None,
                       num_samples=1, prompt_logprobs=False,
                       top_prompt=0, top_sample=0, alternatives=0,
                       last_scored=None; arrays ``tokens``
                       and ``prompt_targets`` [P - 1, K]    -> stop_reasons; sequences

Datums are ragged, so every per-datum array travels flat beside its offsets: ``tokens``
(int32 [total]) and ``tokens.offsets`` (int64 [n + 1]), each loss input as ``input.<name>``
with its offsets, and the result's ``logprobs`` with its offsets. Inputs of more than one
dimension (targets [N, K]) are ragged along the first. A sample's result has ``tokens``
(int32) and ``logprobs`` (float32), ragged over its sequences, and where asked for
``prompt_logprobs`` (float32 [prompt], NaN at position 0); see `session_core.prompts` for the
rest.
"""

from __future__ import annotations

import json
import math
import struct
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any, Final

import numpy as np
from safetensors import SafetensorError
from safetensors.numpy import load, save

from registry.errors import InvalidInput

_HEAD: Final = "slipway"

CREATE_RUN: Final = "create_run"
LOAD_RUN: Final = "load_run"
FORWARD: Final = "forward"
FORWARD_BACKWARD: Final = "forward_backward"
OPTIM_STEP: Final = "optim_step"
SAVE_CHECKPOINT: Final = "save_checkpoint"
SAVE_WEIGHTS: Final = "save_weights"
SNAPSHOT: Final = "snapshot"
RESTORE: Final = "restore"
UNLOAD_RUN: Final = "unload_run"
LOAD_SAMPLER: Final = "load_sampler"
UNLOAD_SAMPLER: Final = "unload_sampler"
SAMPLE: Final = "sample"

ALPHA: Final = 32
"""The LoRA alpha of every run: fixed, recorded in each package, and checked on load."""

Array = np.ndarray[Any, np.dtype[Any]]
JSON = Any


@dataclass(frozen=True, kw_only=True)
class Operation:
    """One request to the engine: a kind, JSON parameters, and named arrays."""

    kind: str
    params: Mapping[str, JSON] = field(default_factory=dict)
    arrays: Mapping[str, Array] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class Refused:
    """A request that can never be an operation: it fails when its turn comes.

    Fields:
        kind: of the operation it would have been.
        message: what is wrong with it.
    """

    kind: str
    message: str


@dataclass(frozen=True, kw_only=True)
class Result:
    """What an operation that succeeded gives back."""

    params: Mapping[str, JSON] = field(default_factory=dict)
    arrays: Mapping[str, Array] = field(default_factory=dict)


def encode(item: Operation | Result) -> bytes:
    """Bytes of an operation or a result; equal items give equal bytes.

    Raises InvalidInput for parameters that JSON cannot carry (NaN and infinity among them).
    """
    head: dict[str, JSON] = {"params": dict(item.params)}
    if isinstance(item, Operation):
        head["kind"] = item.kind
    try:
        text = json.dumps(head, sort_keys=True, separators=(",", ":"), allow_nan=False)
    except (TypeError, ValueError) as error:
        for name, value in _floats("", item.params):
            if not math.isfinite(value):
                raise InvalidInput(f"{name} is {value}: it must be finite") from None
        raise InvalidInput(f"Operation parameters must be plain finite JSON: {error}") from None
    arrays = {name: np.ascontiguousarray(array) for name, array in item.arrays.items()}
    return save(arrays, metadata={_HEAD: text})


def decode(data: bytes) -> Operation:
    """The operation whose bytes these are. Raises InvalidInput when they are not one."""
    head, arrays = _parse(data)
    kind = head.get("kind")
    if not isinstance(kind, str):
        raise InvalidInput("Not an operation: its header names no kind.")
    return Operation(kind=kind, params=head["params"], arrays=arrays)


def decode_result(data: bytes) -> Result:
    """The result whose bytes these are. Raises InvalidInput when they are not one."""
    head, arrays = _parse(data)
    return Result(params=head["params"], arrays=arrays)


def ragged(arrays: Sequence[Array]) -> tuple[Array, Array]:
    """Join arrays along their first axis: (flat, int64 offsets [n + 1]).

    All must agree in their other dimensions; raises InvalidInput where they do not.
    """
    offsets = np.zeros(len(arrays) + 1, dtype=np.int64)
    np.cumsum([len(array) for array in arrays], out=offsets[1:])
    if not arrays:
        return np.zeros(0, dtype=np.int32), offsets
    if len({array.shape[1:] for array in arrays}) > 1:
        raise InvalidInput("Arrays of one name must agree in all dimensions but the first.")
    return np.concatenate(list(arrays)), offsets


def split(flat: Array, offsets: Array) -> list[Array]:
    """The inverse of ragged: views into `flat`, one a datum. Raises InvalidInput when the
    offsets do not divide it."""
    good = offsets.ndim == 1 and len(offsets) >= 1 and flat.ndim >= 1
    if not good or offsets[0] != 0 or offsets[-1] != len(flat) or (np.diff(offsets) < 0).any():
        raise InvalidInput("Offsets must rise from 0 to the length of the array they divide.")
    bounds = offsets.tolist()
    return [flat[start:end] for start, end in pairwise(bounds)]


def datum_arrays(
    tokens: Sequence[Array], inputs: Mapping[str, Sequence[Array]]
) -> dict[str, Array]:
    """The arrays of a forward or forward_backward operation.

    `tokens` has one int array a datum; `inputs` maps each loss input's name to as many.
    """
    arrays: dict[str, Array] = {}
    flat, offsets = ragged([np.asarray(row, dtype=np.int32) for row in tokens])
    arrays["tokens"], arrays["tokens.offsets"] = flat, offsets
    for name, rows in inputs.items():
        arrays[f"input.{name}"], arrays[f"input.{name}.offsets"] = ragged(list(rows))
    return arrays


def _floats(prefix: str, params: Mapping[str, JSON]) -> Iterator[tuple[str, float]]:
    """Every number among the parameters, named as it is reached."""
    for name, value in params.items():
        if isinstance(value, Mapping):
            yield from _floats(f"{prefix}{name}.", value)
        elif isinstance(value, float):
            yield f"{prefix}{name}", value


def _parse(data: bytes) -> tuple[dict[str, JSON], dict[str, Array]]:
    try:
        arrays: dict[str, Array] = load(data)
        (length,) = struct.unpack_from("<Q", data)
        header = json.loads(data[8 : 8 + length])
        head = json.loads(header["__metadata__"][_HEAD])
    except (SafetensorError, struct.error, KeyError, TypeError, ValueError) as error:
        raise InvalidInput(f"Not the bytes of an operation: {error}") from None
    if not isinstance(head, dict) or not isinstance(head.get("params"), dict):
        raise InvalidInput("Not the bytes of an operation: its header has no parameters.")
    return head, arrays
