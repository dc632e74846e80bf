"""Tiny random models of several architectures, adapters for them, and PEFT's own merge."""

from __future__ import annotations

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")

import json
import shutil
import uuid
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import transformers
from hypothesis import HealthCheck, settings
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer, models
from transformers import AutoModelForCausalLM
from transformers.utils import logging

from merge.folder import read_weights
from registry import Kind, NewVersion, Origin, Registry, VersionView

settings.register_profile(
    "patient",
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture],
)
settings.load_profile("patient")
logging.disable_progress_bar()

VOCABULARY = 96
# Unequal sizes throughout: no two matrices of a layer could be taken for each other.
_SIZES = {
    "vocab_size": VOCABULARY,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 2,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 2,
}
_GPT2 = {
    "vocab_size": VOCABULARY,
    "n_embd": 48,
    "n_layer": 2,
    "n_head": 4,
    "n_positions": 64,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
CONFIGS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("LlamaConfig", _SIZES),
    "qwen2": ("Qwen2Config", _SIZES),
    "qwen3": ("Qwen3Config", {**_SIZES, "head_dim": 16}),
    "mistral": ("MistralConfig", _SIZES),
    "gemma": ("GemmaConfig", {**_SIZES, "head_dim": 16}),
    "gemma2": ("Gemma2Config", {**_SIZES, "head_dim": 16}),
    "phi3": ("Phi3Config", _SIZES),
    "gpt2": ("GPT2Config", _GPT2),
}
TARGETS = {
    "phi3": ["qkv_proj", "o_proj", "gate_up_proj", "down_proj"],
    "gpt2": ["c_attn", "c_proj", "c_fc"],
}
LLAMA_TARGETS = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]


def targets_of(architecture: str) -> list[str]:
    return TARGETS.get(architecture, LLAMA_TARGETS)


def write_base(
    folder: Path,
    architecture: str = "llama",
    *,
    tied: bool = False,
    dtype: torch.dtype = torch.float32,
    shard_size: str = "1GB",
    seed: int = 0,
) -> Path:
    """A randomly initialised model with a tokenizer, weights large enough to matter."""
    torch.manual_seed(seed)
    name, sizes = CONFIGS[architecture]
    config = getattr(transformers, name)(**sizes, tie_word_embeddings=tied)
    model = AutoModelForCausalLM.from_config(config)
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.2)
    model.to(dtype).save_pretrained(folder, max_shard_size=shard_size)
    words = {f"w{index}": index for index in range(VOCABULARY)}
    Tokenizer(models.WordLevel(words, unk_token="w0")).save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(
        json.dumps({"tokenizer_class": "PreTrainedTokenizerFast", "unk_token": "w0"})
    )
    (folder / "chat_template.jinja").write_text("{{ messages[0]['content'] }}")
    return folder


def write_adapter(folder: Path, base: Path, *, seed: int = 1, **lora: Any) -> Path:
    """An adapter with random A and B, saved by PEFT."""
    model = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    lora.setdefault("target_modules", targets_of(model.config.model_type))
    lora.setdefault("r", 4)
    config = LoraConfig(task_type="CAUSAL_LM", **lora)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        adapted = get_peft_model(model, config)
        generator = torch.Generator().manual_seed(seed)
        with torch.no_grad():
            for name, parameter in adapted.named_parameters():
                if "lora_" in name:
                    parameter.normal_(std=0.2, generator=generator)
        adapted.save_pretrained(folder)
    return folder


def peft_merge(base: Path, adapter: Path) -> dict[str, torch.Tensor]:
    """PEFT's own merge in float32: the oracle."""
    model = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    if model.config.tie_word_embeddings:
        model.lm_head.weight = torch.nn.Parameter(model.lm_head.weight.detach().clone())
        model.config.tie_word_embeddings = False
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        merged = PeftModel.from_pretrained(model, adapter).merge_and_unload(safe_merge=True)
    return {name: tensor.clone() for name, tensor in merged.state_dict().items()}


def read_all(folder: Path) -> dict[str, torch.Tensor]:
    """Every tensor of a model folder."""
    shards = [load_file(folder / name) for name in read_weights(folder).shards]
    return {name: tensor for shard in shards for name, tensor in shard.items()}


def edit_json(path: Path, **changes: Any) -> None:
    """Change keys of a JSON file; None removes one."""
    document = json.loads(path.read_text()) | changes
    path.write_text(json.dumps({k: v for k, v in document.items() if v is not None}))


def edit_tensors(path: Path, change: Callable[[dict[str, torch.Tensor]], None]) -> None:
    """Change the tensors of a safetensors file."""
    tensors = load_file(path)
    change(tensors)
    save_file(tensors, path, metadata={"format": "pt"})


@pytest.fixture(scope="session")
def bases(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """Bases by their arguments, made once; not to be changed."""
    made: dict[Any, Path] = {}

    def base(architecture: str = "llama", **options: Any) -> Path:
        key = (architecture, *sorted(options.items(), key=lambda item: item[0]))
        if key not in made:
            made[key] = write_base(tmp_path_factory.mktemp("base"), architecture, **options)
        return made[key]

    return base


@pytest.fixture
def base(bases: Callable[..., Path], tmp_path: Path) -> Path:
    """A Llama of one's own, to be changed at will."""
    return Path(shutil.copytree(bases(), tmp_path / "base"))


@pytest.fixture(scope="session")
def shared_adapter(bases: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_adapter(tmp_path_factory.mktemp("adapter"), bases())


@pytest.fixture
def adapter(shared_adapter: Path, tmp_path: Path) -> Path:
    """An adapter for `base`, to be changed at will."""
    return Path(shutil.copytree(shared_adapter, tmp_path / "adapter"))


@pytest.fixture
def output(tmp_path: Path) -> Path:
    folder = tmp_path / "output"
    folder.mkdir()
    return folder


@dataclass(frozen=True, kw_only=True)
class World:
    """A registry with a tenant, a base and an adapter trained on it."""

    registry: Registry
    tenant_id: str
    base: VersionView
    adapter: VersionView

    def staging(self) -> list[Path]:
        return list((self.registry.store.root / ".staging").iterdir())

    def packages(self) -> set[str]:
        return {path.name for path in (self.registry.store.root / "packages").iterdir()}

    def register(self, folder: Path, kind: Kind, **fields: Any) -> VersionView:
        return register(self.registry, self.tenant_id, folder, kind, **fields)


def register(
    registry: Registry, tenant_id: str, folder: Path, kind: Kind, **fields: Any
) -> VersionView:
    """Put a folder's files into the store and make a version of them."""
    staged = registry.store.stage()
    shutil.copytree(folder, staged, dirs_exist_ok=True)
    manifest = registry.store.publish(staged)
    fields = {"base_digest": manifest.digest, "group": "sums", **fields}
    new = NewVersion(
        tenant_id=tenant_id,
        kind=kind,
        origin=Origin.IMPORT if kind is Kind.MERGED else Origin.SESSION,
        base_model="tiny/base",
        **fields,
    )
    return registry.versions.register(new, manifest)


@pytest.fixture
def world(tmp_path: Path, bases: Callable[..., Path], shared_adapter: Path) -> World:
    registry = Registry.open(
        f"sqlite:///{tmp_path / 'test.db'}",
        tmp_path / "store",
        clock=lambda: datetime.now(UTC),
        new_id=lambda: str(uuid.uuid4()),
    )
    registry.db.create_all()
    tenant_id = registry.tenants.ensure_tenant("me")
    base = register(registry, tenant_id, bases(), Kind.MERGED, group="tiny")
    adapter = register(
        registry,
        tenant_id,
        shared_adapter,
        Kind.CHECKPOINT,
        base_digest=base.digest,
        lora={"r": 4},
        provenance={"run": "run-1"},
        user_metadata={"owner": "me"},
        parents=(base.id,),
    )
    return World(registry=registry, tenant_id=tenant_id, base=base, adapter=adapter)


@pytest.fixture(scope="session")
def tiny() -> SimpleNamespace:
    """The helpers above, for the tests."""
    return SimpleNamespace(
        base=write_base,
        adapter=write_adapter,
        merge=peft_merge,
        read=read_all,
        edit_json=edit_json,
        edit_tensors=edit_tensors,
        targets=LLAMA_TARGETS,
        vocabulary=VOCABULARY,
    )
