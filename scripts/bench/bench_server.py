"""What benchmarks run against: `slipway up` in a scratch home, and a server that does nothing."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
import torch
from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM

SCRIPTS = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(SCRIPTS))

from demo_processes import Processes, free_port  # noqa: E402


def write_small_model(folder: Path, *, tokenizer_of: Path) -> Path:
    """A Llama of random weights and little to compute, with the tokenizer of another folder."""
    torch.manual_seed(0)
    tokenizer = AutoTokenizer.from_pretrained(tokenizer_of)
    tokenizer.save_pretrained(folder)
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=1,
        max_position_embeddings=2048,
        tie_word_embeddings=True,
    )
    LlamaForCausalLM(config).save_pretrained(folder)
    return folder


@contextmanager
def slipway_server(
    scratch: Path, *, base: Path, environment: dict[str, str]
) -> Iterator[dict[str, str]]:
    """A server on a base model; the environment by which the SDK finds it."""
    home = scratch / "home"
    binary = str(Path(sys.executable).with_name("slipway"))
    ports = ["--port", str(free_port(8000)), "--gateway-port", str(free_port(8001))]
    with Processes(environment=environment) as processes:
        processes.start_server(
            [binary, "up", "--home", str(home), "--base-model", str(base), *ports],
            log=scratch / "server.log",
            ready=home / "server.json",
        )
        processes.adopt_environment([binary, "env", "--home", str(home)])
        yield processes.environment


@contextmanager
def idle_server(scratch: Path, *, environment: dict[str, str]) -> Iterator[str]:
    """The address of a server that answers the SDK at once and does nothing."""
    port = free_port(8002)
    script = str(Path(__file__).with_name("idle.py"))
    with Processes(environment=environment) as processes:
        processes.start_server(
            [sys.executable, script, str(port), str(scratch / "idle-ready")],
            log=scratch / "idle.log",
            ready=scratch / "idle-ready",
        )
        url = f"http://127.0.0.1:{port}"
        # It says that it is ready a moment before it listens.
        with httpx.Client(transport=httpx.HTTPTransport(retries=5)) as client:
            client.get(f"{url}/api/v1/healthz").raise_for_status()
        yield url
