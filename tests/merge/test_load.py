"""Finding and loading base models and adapters."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from merge import (
    attach_adapter,
    identify_base,
    load_base,
    load_tokenizer,
    resolve_base,
)
from registry import InvalidInput


def test_a_folder_is_taken_as_it_is(bases, tmp_path):
    assert resolve_base(str(bases()), tmp_path) == bases()


def test_a_hub_id_is_found_in_the_cache(tmp_path):
    folder = tmp_path / "models" / "org--name"
    folder.mkdir(parents=True)
    assert resolve_base("org/name", tmp_path) == folder


@pytest.mark.parametrize("name", ["", "plain", "/nowhere/at/all", "../up", "a/b/c", "a/.."])
def test_what_is_neither_is_refused(name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    if name == "":
        # The empty name would be the folder one happens to be in.
        name = " "
    with pytest.raises(InvalidInput, match="hub id of the form ORG/NAME"):
        resolve_base(name, tmp_path / "cache")


def test_a_hub_out_of_reach_is_said_and_leaves_nothing(tmp_path):
    code = (
        "import sys, pathlib, merge, registry\n"
        "try: merge.resolve_base('org/name', pathlib.Path(sys.argv[1]))\n"
        "except registry.Unavailable as error: print(error.message)"
    )
    run = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path)],
        env={**os.environ, "HF_HUB_OFFLINE": "1"},
        capture_output=True,
        text=True,
        check=True,
    )
    assert "org/name is not in the cache" in run.stdout
    assert "name a folder that holds the model" in run.stdout
    assert list((tmp_path / "models").iterdir()) == []


def test_a_base_is_identified_by_the_digest_the_store_gives_it(world, bases):
    base = identify_base("tiny/base", bases())
    assert (base.id, base.folder) == ("tiny/base", bases())
    assert base.digest == world.base.digest


def test_a_base_is_loaded_whole_in_eval_mode(bases, tiny):
    model = load_base(bases(dtype=torch.bfloat16))
    assert model.dtype == torch.float32
    assert not model.training
    stored = tiny.read(bases(dtype=torch.bfloat16))
    assert all(
        torch.equal(tensor, stored[name].float()) for name, tensor in model.state_dict().items()
    )
    assert load_base(bases(), dtype=torch.bfloat16).dtype == torch.bfloat16


def test_a_base_that_lacks_a_weight_is_refused_not_filled_up(base, tiny):
    tiny.edit_tensors(
        base / "model.safetensors", lambda tensors: tensors.pop("model.layers.1.mlp.up_proj.weight")
    )
    with pytest.raises(InvalidInput, match=r"missing keys model\.layers\.1\.mlp\.up_proj\.weight"):
        load_base(base)


def test_a_base_of_an_unknown_architecture_is_refused(base, tiny):
    tiny.edit_json(base / "config.json", model_type="unheard-of")
    with pytest.raises(InvalidInput, match="cannot be loaded"):
        load_base(base)


def test_code_that_came_with_a_base_is_not_run(base, tiny):
    (base / "code.py").write_text("raise SystemExit('it ran')")
    tiny.edit_json(
        base / "config.json",
        model_type="unheard-of",
        auto_map={"AutoConfig": "code.Config", "AutoModelForCausalLM": "code.Model"},
    )
    with pytest.raises(InvalidInput):
        load_base(base)


def test_a_truncated_base_is_refused_before_it_is_loaded(base):
    path = base / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(InvalidInput, match=r"model\.safetensors is truncated"):
        load_base(base)


def test_a_tokenizer_is_read_and_a_broken_one_refused(base):
    assert load_tokenizer(base)("w3 w4")["input_ids"] == [3, 4] or load_tokenizer(base) is not None
    (base / "tokenizer_config.json").write_text("{")
    with pytest.raises(InvalidInput, match="tokenizer"):
        load_tokenizer(base)


def test_an_adapter_is_attached_unmerged_in_float32(bases, shared_adapter):
    model = attach_adapter(load_base(bases(), dtype=torch.bfloat16), shared_adapter)
    assert not model.training
    tensors = load_file(shared_adapter / "adapter_model.safetensors")
    held = {
        name.replace(".default", ""): p for name, p in model.named_parameters() if "lora_" in name
    }
    assert {name: p.dtype for name, p in held.items()} == dict.fromkeys(tensors, torch.float32)
    assert all(torch.equal(held[name], tensors[name]) for name in tensors)


def test_an_adapter_that_lacks_a_tensor_or_fits_elsewhere_is_refused(bases, adapter, tiny):
    weights = adapter / "adapter_model.safetensors"
    name = min(load_file(weights))
    tiny.edit_tensors(weights, lambda tensors: tensors.pop(name))
    with pytest.raises(InvalidInput, match="does not fit the base"):
        attach_adapter(load_base(bases()), adapter)
    with pytest.raises(InvalidInput, match="does not fit the base"):
        attach_adapter(load_base(bases("gpt2")), adapter)


def test_naming_a_package_costs_no_torch():
    code = "import merge, sys; assert not {'torch', 'transformers', 'peft'} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True, cwd=Path(__file__).parent)
