"""Model folders as files: which belong to a model, and whether they are all there.

Nothing here imports torch, so it is cheap and may run in the control plane.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any

from merge.headers import Header, TensorEntry, read_header
from registry.errors import InvalidInput

CONFIG = "config.json"
GENERATION_CONFIG = "generation_config.json"
WEIGHTS = "model.safetensors"
INDEX = "model.safetensors.index.json"

# Any one of these makes a tokenizer.
TOKENIZERS = ("tokenizer.json", "tokenizer.model", "spiece.model", "vocab.json", "vocab.txt")
TOKENIZER_FILES = (
    *TOKENIZERS,
    "merges.txt",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "chat_template.jinja",
    "chat_template.json",
)
# Whole folders, as transformers writes several templates.
TEMPLATE_FOLDER = "additional_chat_templates"


@dataclass(frozen=True, kw_only=True)
class Weights:
    """The weight files of a model folder.

    Fields:
        shards: headers by file name, sorted by name.
        places: the file name each tensor is in.
        index: the index's document where the model is sharded, else None.
    """

    shards: Mapping[str, Header]
    places: Mapping[str, str]
    index: Mapping[str, Any] | None

    def entry(self, name: str) -> TensorEntry:
        """A tensor's entry."""
        return self.shards[self.places[name]].tensors[name]


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object in a file.

    Raises:
        InvalidInput: naming the file, if it is missing or holds something else.
    """
    try:
        document = json.loads(path.read_bytes())
    except FileNotFoundError:
        raise InvalidInput(f"{path.name} is missing from {path.parent}. Fetch it again.") from None
    except (ValueError, RecursionError) as error:
        raise InvalidInput(f"{path.name} is no JSON ({error}). Fetch the file again.") from None
    if not isinstance(document, dict):
        raise InvalidInput(f"{path.name} is no JSON object. Fetch the file again.")
    return document


def read_weights(folder: Path) -> Weights:
    """The headers of a model folder's weights, checked against its index.

    Raises:
        InvalidInput: naming the file that is missing, truncated or not what it should be.
    """
    if not (folder / INDEX).exists():
        if not (folder / WEIGHTS).exists():
            raise InvalidInput(
                f"{folder} holds neither {WEIGHTS} nor {INDEX}: a base model must be a folder of "
                "safetensors weights. Fetch it again, or convert it to safetensors."
            )
        header = read_header(folder / WEIGHTS)
        only = dict.fromkeys(header.tensors, WEIGHTS)
        return Weights(shards={WEIGHTS: header}, places=only, index=None)
    index = read_json(folder / INDEX)
    places: Any = index.get("weight_map")
    if not isinstance(places, dict) or not places:
        raise InvalidInput(f"{INDEX} has no weight_map. Fetch the file again.")
    for name in places.values():
        # A name from a file must never lead out of the folder.
        plain = isinstance(name, str) and PurePosixPath(name).name == name and "\\" not in name
        if not plain or name in ("", ".."):
            raise InvalidInput(f"{INDEX} names a file outside the folder: {name!r}")
    shards = {name: read_header(folder / name) for name in sorted(set(places.values()))}
    for tensor, name in places.items():
        if tensor not in shards[name].tensors:
            raise InvalidInput(
                f"{name} lacks the tensor {tensor}, which {INDEX} says is in it. "
                "Fetch both files again."
            )
    for name, header in shards.items():
        for tensor in header.tensors:
            if places.get(tensor) != name:
                raise InvalidInput(
                    f"{name} holds the tensor {tensor}, which {INDEX} does not say. "
                    "Fetch both files again."
                )
    return Weights(shards=shards, places=places, index=index)


def has_tokenizer(folder: Path) -> bool:
    """Whether any tokenizer file is there."""
    return any((folder / name).is_file() for name in TOKENIZERS)


def validate_model_folder(folder: Path) -> None:
    """Check that a folder is a complete model, from its headers and JSON alone.

    Raises:
        InvalidInput: naming the file that is missing, truncated (with the bytes expected and
            seen) or unreadable, and what to do.
    """
    if not folder.is_dir():
        raise InvalidInput(f"{folder} is no folder: name a folder with a model in it.")
    config = read_json(folder / CONFIG)
    if not isinstance(config.get("model_type"), str):
        raise InvalidInput(f"{CONFIG} names no model_type. Fetch the file again.")
    for name in (GENERATION_CONFIG, "tokenizer_config.json", "tokenizer.json"):
        if (folder / name).exists():
            read_json(folder / name)
    if not has_tokenizer(folder):
        raise InvalidInput(
            f"{folder} has no tokenizer: none of {', '.join(TOKENIZERS)} is there. "
            "Fetch the model with its tokenizer."
        )
    read_weights(folder)


def text_files(folder: Path) -> list[str]:
    """Names of the tokenizer and template files in a folder, sorted, as POSIX paths."""
    found = [name for name in TOKENIZER_FILES if (folder / name).is_file()]
    templates = folder / TEMPLATE_FOLDER
    if templates.is_dir():
        found += [f"{TEMPLATE_FOLDER}/{path.name}" for path in templates.glob("*.jinja")]
    return sorted(found)


def content_files(folder: Path) -> list[str]:
    """Names of the files that make up a model folder, sorted, as POSIX paths.

    Anything else in the folder (read-me files, other weight formats, code) is not part of it.

    Raises:
        InvalidInput: as `read_weights` does.
    """
    weights = read_weights(folder)
    found = [CONFIG, *weights.shards, *text_files(folder)]
    found += [name for name in (GENERATION_CONFIG, INDEX) if (folder / name).is_file()]
    return sorted(set(found))
