"""Saving, resuming and recovering, to the last bit."""

from __future__ import annotations

import errno
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from peft import PeftModel
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from registry.errors import Corrupt, InvalidInput, StorageFull
from registry.files import Files
from session_core import snapshots
from session_core.engine import Engine
from session_core.model import open_base
from session_core.operations import Operation

Make = Callable[..., Any]


class Trainer:
    """A run on an engine, driven step by step."""

    def __init__(self, engine: Engine, run: str = "run") -> None:
        self.engine = engine
        self.run = run

    def do(self, kind: str, arrays: Any = None, **params: Any) -> dict[str, Any]:
        operation = Operation(kind=kind, params=params, arrays=arrays or {})
        return dict(self.engine.execute(self.run, operation).params)

    def create(self, **params: Any) -> Trainer:
        self.do("create_run", rank=4, seed=11, **params)
        return self

    def backward(self, arrays: Any) -> float:
        metrics = self.do("forward_backward", arrays, loss_fn="cross_entropy")["metrics"]
        return float(metrics["loss:sum"])

    def step(self) -> None:
        self.do("optim_step", learning_rate=1e-2)

    def losses(self, datums: Make, turns: range) -> list[float]:
        found = []
        for turn in turns:
            found.append(self.backward(datums(seed=turn)))
            self.step()
        return found

    def save(self, folder: Path, kind: str = "save_checkpoint", **params: Any) -> Path:
        folder.mkdir()
        self.do(kind, folder=str(folder), **params)
        return folder

    def state(self) -> dict[str, Any]:
        run = self.engine._runs[self.run]
        return {
            "adapter": dict(self.engine.adapters.parameters(run.slot)),
            "moments": run.optimizer.tensors(),
            "gradients": run.gradients,
            "trainer": run.trainer_state(),
            "data": run.data,
        }


def same(one: dict[str, Any], two: dict[str, Any]) -> bool:
    for key in ("adapter", "moments", "gradients"):
        if set(one[key]) != set(two[key]):
            return False
        if not all(torch.equal(one[key][name], two[key][name]) for name in one[key]):
            return False
    return bool(one["trainer"] == two["trainer"] and one["data"] == two["data"])


def names_in(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir()}


@pytest.fixture
def trainer(engine: Engine) -> Trainer:
    return Trainer(engine).create()


@pytest.fixture
def other(tiny_base: Path) -> Trainer:
    """A run's place in another process, as far as state goes."""
    return Trainer(Engine(open_base(tiny_base)), "elsewhere")


def test_resuming_three_ways(
    trainer: Trainer, other: Trainer, datums: Make, tmp_path: Path
) -> None:
    trainer.losses(datums, range(3))
    folder = trainer.save(tmp_path / "saved")
    uninterrupted = trainer.losses(datums, range(3, 8))
    loaded = other.do("load_run", folder=str(folder), optimizer=True)
    assert loaded["step"] == 3
    assert other.losses(datums, range(3, 8)) == uninterrupted
    assert same(trainer.state(), other.state())
    cold = Trainer(other.engine, "cold")
    assert cold.do("load_run", folder=str(folder), optimizer=False)["step"] == 0
    without = cold.losses(datums, range(3, 8))
    assert without[0] == uninterrupted[0], "the adapter is the same"
    assert without[1:] != uninterrupted[1:], "the moments are not"


@pytest.mark.parametrize("pending", [0, 1, 2])
def test_a_snapshot_restores_every_bit(
    trainer: Trainer, other: Trainer, datums: Make, tmp_path: Path, pending: int
) -> None:
    trainer.losses(datums, range(2))
    for turn in range(pending):
        trainer.backward(datums(seed=50 + turn))
    folder = trainer.save(tmp_path / "snapshot", "snapshot")
    assert (folder / snapshots.GRADIENTS).exists() == bool(pending)
    other.do("restore", folder=str(folder))
    assert same(trainer.state(), other.state())
    for one in (trainer, other):
        one.backward(datums(seed=60))
        one.step()
    assert same(trainer.state(), other.state())


def test_a_snapshot_before_the_first_step_restores(
    trainer: Trainer, other: Trainer, datums: Make, tmp_path: Path
) -> None:
    folder = trainer.save(tmp_path / "snapshot", "snapshot")
    other.do("restore", folder=str(folder))
    assert trainer.losses(datums, range(2)) == other.losses(datums, range(2))


@pytest.mark.parametrize("unembed", [True, False])
@pytest.mark.filterwarnings("ignore:Model has `tie_word_embeddings=True`:UserWarning")
def test_peft_loads_a_save_and_computes_the_same(
    engine: Engine, tiny_base: Path, datums: Make, tmp_path: Path, unembed: bool
) -> None:
    trainer = Trainer(engine).create(train_unembed=unembed)
    trainer.losses(datums, range(3))
    folder = trainer.save(tmp_path / "saved", "save_weights", base_model="tiny")
    config = json.loads((folder / "adapter_config.json").read_text())
    assert config["base_model_name_or_path"] == "tiny"
    assert (config["r"], config["lora_alpha"]) == (4, 32)
    assert ("lm_head" in config["target_modules"]) == unembed
    model = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(tiny_base), folder)
    tokens = torch.arange(3, 40)[None]
    with torch.no_grad():
        expected = model(input_ids=tokens).logits
        engine.adapters.use(engine._runs["run"].slot)
        mine = engine.base.logits(tokens)
        engine.adapters.use(None)
        assert not torch.allclose(engine.base.logits(tokens), expected, atol=0.1)
    torch.testing.assert_close(mine, expected, rtol=1e-4, atol=1e-4)


def test_what_a_save_holds(trainer: Trainer, datums: Make, tmp_path: Path) -> None:
    trainer.losses(datums, range(2))
    trainer.backward(datums(seed=9))
    checkpoint = trainer.save(tmp_path / "checkpoint")
    assert names_in(checkpoint) == {
        "adapter_config.json",
        "adapter_model.safetensors",
        "optimizer.safetensors",
        "trainer_state.json",
        "probe.json",
        "training-data.json",
    }
    weights = trainer.save(tmp_path / "weights", "save_weights")
    assert {path.name for path in checkpoint.iterdir()} - {
        path.name for path in weights.iterdir()
    } == {"optimizer.safetensors"}
    bare = trainer.save(tmp_path / "bare", "save_weights", evidence=False)
    assert names_in(weights) - names_in(bare) == {"probe.json", "training-data.json"}
    state = json.loads((checkpoint / "trainer_state.json").read_text())
    assert state["step"] == 2
    assert state["seed"] == 11
    assert state["tokens_trained"] > 0
    assert state["adam"]["learning_rate"] == 1e-2
    names = set(load_file(checkpoint / "adapter_model.safetensors"))
    assert all(name.startswith("base_model.model.") for name in names)
    assert set(load_file(checkpoint / "optimizer.safetensors")) == {
        f"{moment}.{name}" for moment in ("exp_avg", "exp_avg_sq") for name in names
    }


def test_equal_states_give_equal_bytes(
    trainer: Trainer, other: Trainer, datums: Make, tmp_path: Path
) -> None:
    other.create()
    for one in (trainer, other):
        one.losses(datums, range(2))
    first, second = trainer.save(tmp_path / "a"), other.save(tmp_path / "b")
    for path in first.iterdir():
        assert path.read_bytes() == (second / path.name).read_bytes(), path.name


def test_the_probe_tells_the_adapter_from_the_base(
    trainer: Trainer, tiny_base: Path, datums: Make, tmp_path: Path
) -> None:
    trainer.losses(datums, range(3))
    folder = trainer.save(tmp_path / "saved")
    probe = json.loads((folder / "probe.json").read_text())
    assert len(probe["prompts"]) == 4
    assert {len(row) for key in ("prompts", "base", "adapter") for row in probe[key]} == {32}
    assert all(row[0] is None for row in probe["base"] + probe["adapter"])
    model = AutoModelForCausalLM.from_pretrained(tiny_base)
    tokens = torch.tensor(probe["prompts"])
    with torch.no_grad():
        scores = model(input_ids=tokens).logits.log_softmax(-1)[:, :-1]
    expected = scores.gather(2, tokens[:, 1:, None])[..., 0].numpy()
    np.testing.assert_allclose([row[1:] for row in probe["base"]], expected, atol=1e-4)
    gap = np.abs(np.array([row[1:] for row in probe["adapter"]]) - expected).mean()
    assert gap > 0.1


def test_training_data_is_inherited(
    trainer: Trainer, other: Trainer, datums: Make, tmp_path: Path
) -> None:
    trainer.backward(datums(seed=1))
    seen = set(trainer.state()["data"].exact)
    folder = trainer.save(tmp_path / "saved", "save_weights")
    other.do("load_run", folder=str(folder))
    other.backward(datums(seed=2))
    assert seen < other.state()["data"].exact


def test_loading_into_a_run_in_place(trainer: Trainer, datums: Make, tmp_path: Path) -> None:
    trainer.losses(datums, range(2))
    folder = trainer.save(tmp_path / "saved")
    expected = trainer.losses(datums, range(2, 5))
    trainer.backward(datums(seed=99))
    trainer.do("load_run", folder=str(folder), optimizer=True)
    assert trainer.losses(datums, range(2, 5)) == expected


def test_a_version_that_does_not_fit_is_refused_by_name(
    trainer: Trainer, other: Trainer, datums: Make, tmp_path: Path
) -> None:
    trainer.losses(datums, range(1))
    checkpoint = str(trainer.save(tmp_path / "checkpoint"))
    weights = str(trainer.save(tmp_path / "weights", "save_weights"))
    for params, message in (
        ({"folder": weights, "optimizer": True}, "no optimizer state"),
        ({"folder": checkpoint, "rank": 8}, "trained with rank 4, the run asks for 8"),
        ({"folder": checkpoint, "train_mlp": False}, "train_mlp True, the run asks for False"),
        ({"folder": checkpoint, "alpha": 16}, "alpha 32, the run asks for 16"),
        ({"folder": str(tmp_path)}, "No adapter there"),
    ):
        with pytest.raises(InvalidInput, match=message):
            other.do("load_run", **params)
    assert not other.engine._runs
    assert other.do("load_run", folder=checkpoint, rank=4, optimizer=True)["rank"] == 4


def test_another_alpha_is_refused_by_name(trainer: Trainer, other: Trainer, tmp_path: Path) -> None:
    folder = trainer.save(tmp_path / "saved")
    config = json.loads((folder / "adapter_config.json").read_text())
    (folder / "adapter_config.json").write_text(json.dumps({**config, "lora_alpha": 64}))
    with pytest.raises(InvalidInput, match="lora_alpha is 64"):
        other.do("load_run", folder=str(folder))


@pytest.mark.parametrize(
    "name",
    [
        "adapter_model.safetensors",
        "optimizer.safetensors",
        "trainer_state.json",
        "adapter_config.json",
        "training-data.json",
    ],
)
def test_a_broken_file_is_named_and_nothing_is_loaded(
    trainer: Trainer, other: Trainer, tmp_path: Path, name: str
) -> None:
    folder = trainer.save(tmp_path / "saved")
    data = (folder / name).read_bytes()
    (folder / name).write_bytes(data[: len(data) // 2])
    with pytest.raises(Corrupt, match=name.split(".")[0]):
        other.do("load_run", folder=str(folder), optimizer=True)
    assert not other.engine._runs
    assert not any("lora_" in key for key, _ in other.engine.base.model.named_parameters())


def test_an_optimizer_of_another_adapter_is_refused(
    trainer: Trainer, other: Trainer, datums: Make, tmp_path: Path
) -> None:
    trainer.losses(datums, range(1))
    folder = trainer.save(tmp_path / "saved")
    held = load_file(folder / "optimizer.safetensors")
    held.pop(next(iter(held)))
    save_file(held, folder / "optimizer.safetensors")
    with pytest.raises(Corrupt, match="optimizer state does not fit"):
        other.do("load_run", folder=str(folder), optimizer=True)


class Watched(Files):
    """Notes what is made durable, and has no room when told so."""

    def __init__(self) -> None:
        self.durable: list[str] = []
        self.code = 0

    def write(self, path: Path, data: bytes) -> None:
        if self.code:
            raise OSError(self.code, os.strerror(self.code))
        super().write(path, data)
        self.durable.append(path.name)

    def sync(self, path: Path) -> None:
        super().sync(path)
        self.durable.append(path.name)


def test_every_file_is_durable_before_the_folder_is(tiny_base: Path, tmp_path: Path) -> None:
    files = Watched()
    trainer = Trainer(Engine(open_base(tiny_base), files=files)).create()
    folder = trainer.save(tmp_path / "saved")
    assert files.durable[-1] == "saved"
    assert set(files.durable[:-1]) == names_in(folder)


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EDQUOT])
def test_a_full_disk_is_told_and_the_run_goes_on(
    tiny_base: Path, datums: Make, tmp_path: Path, code: int
) -> None:
    files = Watched()
    trainer = Trainer(Engine(open_base(tiny_base), files=files)).create()
    trainer.losses(datums, range(1))
    files.code = code
    for kind in ("save_checkpoint", "save_weights", "snapshot"):
        with pytest.raises(StorageFull, match="the disk is full"):
            trainer.save(tmp_path / kind, kind)
    files.code = 0
    trainer.losses(datums, range(1, 2))
    trainer.save(tmp_path / "later")
