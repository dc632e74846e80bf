"""Model folders: what is wrong with one is said by name."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from merge import content_files, validate_model_folder
from merge.folder import read_weights
from registry import InvalidInput

INDEX = "model.safetensors.index.json"


@pytest.fixture
def sharded(bases, tmp_path):
    return Path(shutil.copytree(bases(shard_size="60KB"), tmp_path / "sharded"))


def first_shard(folder: Path) -> Path:
    return min(folder.glob("*.safetensors"))


def test_whole_folders_pass(bases):
    for options in ({}, {"shard_size": "60KB"}, {"tied": True}):
        validate_model_folder(bases(**options))


def test_its_content_is_the_model_and_nothing_else(sharded):
    shards = sorted(path.name for path in sharded.glob("*.safetensors"))
    for stray in ("README.md", "pytorch_model.bin", "modeling.py", "onnx.json", ".gitattributes"):
        (sharded / stray).write_text("stray")
    (sharded / "additional_chat_templates").mkdir()
    (sharded / "additional_chat_templates" / "tools.jinja").write_text("{{ tools }}")
    (sharded / "additional_chat_templates" / "stray.txt").write_text("stray")
    expected = [
        "additional_chat_templates/tools.jinja",
        "chat_template.jinja",
        "config.json",
        "generation_config.json",
        *shards,
        INDEX,
        "tokenizer.json",
        "tokenizer_config.json",
    ]
    assert content_files(sharded) == sorted(expected)


def truncate(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-100])


@pytest.mark.parametrize(
    ("harm", "said"),
    [
        (lambda f: (f / "config.json").unlink(), "config.json is missing"),
        (lambda f: (f / "config.json").write_text("{"), "config.json is no JSON"),
        (lambda f: (f / "config.json").write_text("[]"), "config.json is no JSON object"),
        (lambda f: (f / "config.json").write_text("{}"), "names no model_type"),
        (lambda f: (f / "generation_config.json").write_text("{"), "generation_config.json is no"),
        (lambda f: (f / "tokenizer.json").unlink(), "has no tokenizer"),
        (lambda f: (f / "tokenizer.json").write_bytes(b"\xff"), "tokenizer.json is no JSON"),
        (
            lambda f: truncate(first_shard(f)),
            r"model-00001-of-.*safetensors is truncated.*promises",
        ),
        (lambda f: first_shard(f).unlink(), r"model-00001-of-.*safetensors is missing"),
        (lambda f: (f / INDEX).write_text("no"), f"{INDEX} is no JSON"),
        (lambda f: (f / INDEX).write_text('{"weight_map": {}}'), "has no weight_map"),
        (lambda f: (f / INDEX).write_text('{"weight_map": [1]}'), "has no weight_map"),
        (lambda f: (f / INDEX).unlink(), "holds neither"),
    ],
)
def test_what_is_broken_is_named(harm, said, sharded):
    harm(sharded)
    with pytest.raises(InvalidInput, match=said):
        validate_model_folder(sharded)


@pytest.mark.parametrize(
    "name", ["../secret.safetensors", "/etc/passwd", "a/b.safetensors", "..", "a\\b", "", 7]
)
def test_an_index_leads_nowhere_else(name, sharded):
    (sharded / INDEX).write_text(json.dumps({"weight_map": {"x": name}}))
    with pytest.raises(InvalidInput, match="outside the folder"):
        read_weights(sharded)


def test_an_index_and_its_files_must_agree(sharded):
    index = json.loads((sharded / INDEX).read_text())
    places = index["weight_map"]
    files = list(places.values())
    # One whose file holds others too, so that the file is still named.
    tensor = next(name for name, file in places.items() if files.count(file) > 1)
    (sharded / INDEX).write_text(
        json.dumps({"weight_map": {name: file for name, file in places.items() if name != tensor}})
    )
    with pytest.raises(InvalidInput, match=f"holds the tensor {tensor}, which"):
        read_weights(sharded)
    (sharded / INDEX).write_text(json.dumps({"weight_map": {**places, "ghost": places[tensor]}}))
    with pytest.raises(InvalidInput, match="lacks the tensor ghost"):
        read_weights(sharded)


def test_a_folder_must_be_one(tmp_path):
    with pytest.raises(InvalidInput, match="is no folder"):
        validate_model_folder(tmp_path / "nowhere")
    with pytest.raises(InvalidInput, match=r"config\.json is missing"):
        validate_model_folder(tmp_path)
