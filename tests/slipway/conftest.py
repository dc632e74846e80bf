"""`slipway up` as a real process: a tiny base model, and a stand-in where vLLM would be."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

STAND_IN = Path(__file__).resolve().parents[1] / "serving" / "stand_in.py"
SLIPWAY = str(Path(sys.executable).with_name("slipway"))


@pytest.fixture(scope="session")
def tiny_base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a tiny Llama and its tokenizer."""
    folder = tmp_path_factory.mktemp("base") / "org--tiny"
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=300,
        special_tokens=["<|endoftext|>", "<|im_start|>", "<|im_end|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(["one and two"], trainer)
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token="<|im_end|>", pad_token="<|im_end|>"
    ).save_pretrained(folder)
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=300,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=1,
        max_position_embeddings=128,
        tie_word_embeddings=True,
        eos_token_id=2,
        pad_token_id=2,
    )
    LlamaForCausalLM(config).save_pretrained(folder)
    # The stand-in says this, whatever it is asked.
    path = folder / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "says": "the answer 7"}))
    return folder


def free_port() -> int:
    """A port nothing listens on."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


class Up:
    """One `slipway up`, started and watched."""

    def __init__(self, home: Path, base: Path, *words: str) -> None:
        self.home = home
        self.port, self.gateway_port = free_port(), free_port()
        known = {k: v for k, v in os.environ.items() if not k.startswith(("SLIPWAY_", "TINKER_"))}
        self.environment = {
            **known,
            "SLIPWAY_HOME": str(home),
            "SLIPWAY_THREADS": "1",
            "SLIPWAY_ENGINE_COMMAND": f"{sys.executable} {STAND_IN} {{folder}} {{model}} {{port}}",
            "COLUMNS": "200",
        }
        ports = ["--port", str(self.port), "--gateway-port", str(self.gateway_port)]
        self.command = [SLIPWAY, "up", "--base-model", str(base), *ports, *words]
        self.log = home.with_name(f"{home.name}.log")
        self.process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        """Start it and return at once."""
        with self.log.open("w") as sink:
            self.process = subprocess.Popen(
                self.command, env=self.environment, stdout=sink, stderr=subprocess.STDOUT
            )

    def wait_ready(self) -> None:
        """Wait until it says that it is ready."""
        assert self.process is not None
        deadline = time.monotonic() + 90
        while not (self.home / "server.json").exists():
            assert self.process.poll() is None, self.log.read_text()
            assert time.monotonic() < deadline, self.log.read_text()
            time.sleep(0.05)

    def family(self) -> list[psutil.Process]:
        """Every process below it."""
        assert self.process is not None
        return psutil.Process(self.process.pid).children(recursive=True)

    def stop(self, sig: signal.Signals = signal.SIGTERM) -> int:
        """Ask it to stop; its exit code, once nothing of it is left."""
        assert self.process is not None
        family = self.family() if self.process.poll() is None else []
        self.process.send_signal(sig)
        code = self.process.wait(timeout=60)
        _, alive = psutil.wait_procs(family, timeout=5)
        for process in alive:
            process.kill()
        assert alive == [], self.log.read_text()
        return code

    def slipway(self, *words: str, **more: str) -> subprocess.CompletedProcess[str]:
        """Run a command against it."""
        return subprocess.run(
            [SLIPWAY, *words],
            env={**self.environment, **more},
            capture_output=True,
            text=True,
            check=False,
        )

    def json(self, *words: str) -> Any:
        """A command's JSON; it must succeed."""
        done = self.slipway(*words, "--json")
        assert done.returncode == 0, done.stderr
        return json.loads(done.stdout)


@pytest.fixture
def up(tmp_path: Path, tiny_base: Path) -> Iterator[Up]:
    """A server that is not started yet."""
    made = Up(tmp_path / "home", tiny_base)
    yield made
    if made.process is not None and made.process.poll() is None:
        made.process.kill()
        made.process.wait()


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory, tiny_base: Path) -> Iterator[Up]:
    """A server shared by the tests of a module."""
    made = Up(tmp_path_factory.mktemp("running") / "home", tiny_base)
    made.start()
    made.wait_ready()
    yield made
    assert made.stop() == 0


@pytest.fixture
def another(tiny_base: Path):
    """Makes further servers: (home, *words)."""
    return lambda home, *words, base=tiny_base: Up(home, base, *words)
