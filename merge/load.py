"""The one loader of base models and adapters.

torch, transformers and PEFT are imported inside the functions that need them: finding and
checking a model costs neither their time nor their memory.
"""

from __future__ import annotations

import re
import shutil
import tempfile
import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from merge.folder import content_files as content_files
from merge.folder import validate_model_folder as validate_model_folder
from registry.errors import InvalidInput, Unavailable
from registry.store import ManifestFile, hash_file, manifest_of

if TYPE_CHECKING:
    import torch

_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]{0,95}/[A-Za-z0-9][\w.-]{0,95}")
# Weights other than safetensors, and code, are not even fetched.
_FETCHED = ["*.json", "*.safetensors", "*.model", "*.jinja", "merges.txt", "vocab.txt"]


@dataclass(frozen=True, kw_only=True)
class BaseModel:
    """A base model: the name it goes by, its folder, and the digest of its content.

    The digest is the one the artifact store gives the same files.
    """

    id: str
    folder: Path
    digest: str


def identify_base(model_id: str, folder: Path) -> BaseModel:
    """Check a model folder and compute its digest; reads every byte once.

    Raises:
        InvalidInput: as `validate_model_folder` does.
    """
    validate_model_folder(folder)
    files = [
        ManifestFile(
            path=name, size=(folder / name).stat().st_size, sha256=hash_file(folder / name)
        )
        for name in content_files(folder)
    ]
    return BaseModel(id=model_id, folder=folder, digest=manifest_of(files).digest)


def resolve_base(id_or_folder: str, cache: Path) -> Path:
    """The folder of a base model.

    A folder is taken as it is. A hub id is looked for in ``cache/models/<org>--<name>``, and
    fetched into it from the hub when it is not there.

    Raises:
        InvalidInput: if it is neither a folder nor a hub id, or the hub has no such model.
        Unavailable: if the hub cannot be reached.
    """
    folder = Path(id_or_folder).expanduser()
    if folder.is_dir():
        return folder
    if not _HUB_ID.fullmatch(id_or_folder):
        raise InvalidInput(
            f"{id_or_folder!r} is no folder here and no hub id of the form ORG/NAME: "
            "name one of the two as the base model."
        )
    target = cache / "models" / id_or_folder.replace("/", "--")
    if not target.is_dir():
        _fetch(id_or_folder, target)
    return target


def _fetch(model_id: str, target: Path) -> None:
    """Download beside the target and rename, so that no half a model is ever found there."""
    import httpx
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError

    target.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=target.parent, prefix=".fetch-") as scratch:
        built = Path(scratch) / "model"
        try:
            snapshot_download(model_id, local_dir=built, allow_patterns=_FETCHED)
        except HfHubHTTPError as error:
            # The hub answers 401 for what does not exist as well as for what is private.
            if error.response is not None and error.response.status_code < 500:
                raise InvalidInput(
                    f"the hub has no model {model_id} that can be read without a login: check the "
                    "id, or fetch it yourself and name the folder."
                ) from None
            raise _unreachable(model_id, target) from None
        except (LocalEntryNotFoundError, httpx.HTTPError, OSError):
            raise _unreachable(model_id, target) from None
        shutil.rmtree(built / ".cache", ignore_errors=True)
        validate_model_folder(built)
        built.rename(target)


def _unreachable(model_id: str, target: Path) -> Unavailable:
    return Unavailable(
        f"the base model {model_id} is not in the cache ({target}) and the hub cannot be reached: "
        "name a folder that holds the model, or put it there."
    )


def load_base(folder: Path, *, device: str = "cpu", dtype: torch.dtype | None = None) -> Any:
    """A causal language model from a folder, in eval mode.

    Args:
        dtype: of the weights in memory; by default float32 on CPU, where bfloat16 is many
            times slower, and bfloat16 elsewhere.

    Raises:
        InvalidInput: if the folder is not a complete model, or a weight has no value in it.
    """
    validate_model_folder(folder)
    import torch
    from transformers import AutoModelForCausalLM

    kind = torch.device(device)
    if dtype is None:
        dtype = torch.float32 if kind.type == "cpu" else torch.bfloat16
    try:
        model, report = AutoModelForCausalLM.from_pretrained(
            str(folder),
            dtype=dtype,
            local_files_only=True,
            trust_remote_code=False,
            use_safetensors=True,
            output_loading_info=True,
        )
    except ValueError as error:
        raise InvalidInput(f"{folder.name} cannot be loaded: {_first_line(error)}") from error
    # transformers gives such weights random values and goes on.
    for what in ("missing_keys", "mismatched_keys"):
        if report.get(what):
            names = ", ".join(str(name) for name in sorted(report[what], key=str)[:3])
            raise InvalidInput(
                f"{folder.name} does not fit its architecture, {type(model).__name__}: "
                f"{what.replace('_', ' ')} {names}. Fetch the model again."
            )
    return model.to(kind).eval()


def load_tokenizer(folder: Path) -> Any:
    """The tokenizer of a model folder.

    Raises:
        InvalidInput: if there is none that can be read.
    """
    from transformers import AutoTokenizer

    try:
        return AutoTokenizer.from_pretrained(
            str(folder), local_files_only=True, trust_remote_code=False
        )
    except (OSError, ValueError) as error:
        raise InvalidInput(
            f"the tokenizer in {folder.name} cannot be read: {_first_line(error)}"
        ) from error


def attach_adapter(model: Any, folder: Path) -> Any:
    """Put a PEFT adapter on a loaded base, unmerged; changes the model in place.

    Adapter weights are kept in float32, whatever the base is in. Returns the PEFT model, in
    eval mode.

    Raises:
        InvalidInput: if the adapter does not fit the model.
    """
    from peft import PeftModel

    try:
        with warnings.catch_warnings():
            # PEFT says that merging into tied embeddings is unsafe; nothing is merged here. A
            # tensor of the adapter with no place in the model, on the other hand, is fatal.
            warnings.filterwarnings("ignore", message=".*tie_word_embeddings.*")
            warnings.filterwarnings("error", message=".*missing adapter keys.*")
            adapted = PeftModel.from_pretrained(model, str(folder), autocast_adapter_dtype=True)
    except (ValueError, RuntimeError, UserWarning) as error:
        raise InvalidInput(f"the adapter does not fit the base: {_first_line(error)}") from error
    return adapted.eval()


def _first_line(error: BaseException) -> str:
    return str(error).strip().split("\n", 1)[0]
