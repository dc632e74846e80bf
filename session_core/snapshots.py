"""A run's state as a folder: what is saved, resumed from, and replayed from.

    adapter_config.json         PEFT's own format,
    adapter_model.safetensors   read by any tool that reads adapters
    trainer_state.json          step, seed, tokens trained, last loss, Adam's last parameters
    optimizer.safetensors       both moments of each parameter        (checkpoint, snapshot)
    gradients.safetensors       what optim_step has not yet consumed  (snapshot)
    probe.json                  logprobs by which the adapter is told (named saves)
    training-data.json          fingerprints of every datum           (named saves, snapshot)

Equal states give equal bytes: no file holds a time, a path or an id. Each file is fsynced
and so is the folder; that a folder is complete is for its owner to record.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save

from registry.errors import Corrupt, InvalidInput
from registry.files import Files, full_disk_named

ADAPTER_CONFIG = "adapter_config.json"
ADAPTER = "adapter_model.safetensors"
OPTIMIZER = "optimizer.safetensors"
GRADIENTS = "gradients.safetensors"
TRAINER_STATE = "trainer_state.json"
PROBE = "probe.json"
TRAINING_DATA = "training-data.json"

_FORMAT = 1
Tensors = Mapping[str, torch.Tensor]


@dataclass(frozen=True, kw_only=True)
class TrainerState:
    """What a run knows of itself beside its tensors.

    `last_loss` is the mean over weighted tokens of the last forward_backward, None before;
    `loraplus_lr_ratio` the learning rate of the B matrices over that of A.
    """

    step: int = 0
    seed: int = 0
    tokens_trained: int = 0
    last_loss: float | None = None
    adam: Mapping[str, float] | None = None
    loraplus_lr_ratio: float = 1.0


@dataclass(frozen=True, kw_only=True)
class Saved:
    """A folder's contents, read. Tensors that are not in it are None."""

    config: Mapping[str, Any]
    adapter: Tensors
    state: TrainerState
    optimizer: Tensors | None
    gradients: Tensors | None
    training_data: bytes | None


def write_state(
    folder: Path,
    *,
    config: Mapping[str, Any],
    adapter: Tensors,
    state: TrainerState,
    optimizer: Tensors | None = None,
    gradients: Tensors | None = None,
    extra: Mapping[str, bytes] | None = None,
    files: Files,
) -> None:
    """Write a run's state into an existing folder.

    Raises StorageFull when the disk has no room; the folder is for its owner to drop then.
    """
    contents: dict[str, bytes] = {
        ADAPTER_CONFIG: _json(config),
        ADAPTER: _tensors(adapter),
        TRAINER_STATE: _json({"format": _FORMAT, **asdict(state)}),
        **(extra or {}),
    }
    if optimizer is not None:
        contents[OPTIMIZER] = _tensors(optimizer)
    if gradients is not None:
        contents[GRADIENTS] = _tensors(gradients)
    with full_disk_named("the save"):
        for name, data in contents.items():
            files.write(folder / name, data)
        files.sync(folder)


def read_state(folder: Path) -> Saved:
    """Read a folder. Raises InvalidInput without an adapter, Corrupt when a file is broken."""
    if not (folder / ADAPTER_CONFIG).is_file() or not (folder / ADAPTER).is_file():
        raise InvalidInput(f"No adapter there: {ADAPTER_CONFIG} and {ADAPTER} are needed.")
    adapter = _read_tensors(folder / ADAPTER)
    assert adapter is not None
    data = folder / TRAINING_DATA
    return Saved(
        config=_read_json(folder / ADAPTER_CONFIG),
        adapter=adapter,
        state=_read_trainer_state(folder / TRAINER_STATE),
        optimizer=_read_tensors(folder / OPTIMIZER),
        gradients=_read_tensors(folder / GRADIENTS),
        training_data=data.read_bytes() if data.is_file() else None,
    )


def _read_trainer_state(path: Path) -> TrainerState:
    if not path.is_file():
        return TrainerState()
    raw = _read_json(path)
    try:
        if raw.pop("format") != _FORMAT:
            raise Corrupt(f"{path.name} is of a format this version does not know.")
        return TrainerState(**raw)
    except (KeyError, TypeError) as error:
        raise Corrupt(f"{path.name} cannot be read: {error}") from None


def _read_json(path: Path) -> dict[str, Any]:
    try:
        raw = json.loads(path.read_bytes())
    except ValueError as error:
        raise Corrupt(f"{path.name} is not JSON: {error}") from None
    if not isinstance(raw, dict):
        raise Corrupt(f"{path.name} is not a JSON object.")
    return raw


def _read_tensors(path: Path) -> Tensors | None:
    if not path.is_file():
        return None
    try:
        tensors: dict[str, torch.Tensor] = load_file(path)
    except (SafetensorError, ValueError) as error:
        raise Corrupt(f"{path.name} is not a whole safetensors file: {error}") from None
    return tensors


def _json(value: Mapping[str, Any]) -> bytes:
    return json.dumps(value, indent=2, sort_keys=True, allow_nan=False).encode() + b"\n"


def _tensors(tensors: Tensors) -> bytes:
    held = {name: tensor.detach().to("cpu").contiguous() for name, tensor in tensors.items()}
    data: bytes = save(held, metadata={"format": "pt"})
    return data
