"""A base model small enough to make on the spot, and datums for it."""

from __future__ import annotations

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")

import contextlib
import json
import shutil
import signal
import socket
import sqlite3
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import psutil
import pytest
import tinker
import torch
from hypothesis import settings
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from registry import Kind, NewVersion, Origin, Registry
from session_core.engine import Engine
from session_core.model import Base, open_base
from session_core.operations import Operation, datum_arrays

# A busy machine is no failure.
settings.register_profile("patient", deadline=None)
settings.load_profile("patient")

CHAT_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n"
    "{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
VOCABULARY = 384
CONTEXT = 256


def write_tiny_base(folder: Path, *, tied: bool = True, seed: int = 0) -> Path:
    """A randomly initialised Llama of some 100 k parameters with a tokenizer."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY,
        special_tokens=["<|endoftext|>", "<|im_start|>", "<|im_end|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    corpus = ["what is one plus two? the answer is three.", "user assistant system number"] * 20
    tokenizer.train_from_iterator(corpus, trainer)
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token="<|im_start|>",
        eos_token="<|im_end|>",
        pad_token="<|im_end|>",
        unk_token="<|endoftext|>",
    )
    fast.chat_template = CHAT_TEMPLATE
    fast.save_pretrained(folder)
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=48,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=CONTEXT,
        tie_word_embeddings=tied,
        bos_token_id=1,
        eos_token_id=2,
        pad_token_id=2,
        # Large enough that logits differ clearly from token to token.
        initializer_range=0.2,
    )
    LlamaForCausalLM(config).save_pretrained(folder)
    return folder


@pytest.fixture(scope="session")
def tiny_base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a tiny Llama (tied embeddings), its tokenizer and a chat template."""
    return write_tiny_base(tmp_path_factory.mktemp("base") / "tiny-llama")


@pytest.fixture(scope="session")
def base(tiny_base: Path) -> Base:
    """The tiny base model in memory; engines put adapters on it."""
    torch.set_num_threads(1)
    return open_base(tiny_base)


@pytest.fixture
def engine(tiny_base: Path) -> Engine:
    """An engine of one's own."""
    torch.set_num_threads(1)
    return Engine(open_base(tiny_base))


def make_datums(
    count: int = 5, *, seed: int = 0, kind: str = "cross_entropy", longest: int = 24
) -> dict[str, np.ndarray[Any, Any]]:
    """The arrays of a batch of random datums of uneven lengths."""
    generator = np.random.default_rng(seed)
    lengths = generator.integers(3, longest, size=count)
    rows = [generator.integers(3, VOCABULARY, size=length + 1) for length in lengths]
    targets = [row[1:] for row in rows]
    inputs: dict[str, list[np.ndarray[Any, Any]]] = {"target_tokens": targets}
    if kind == "cross_entropy":
        weights = [generator.random(length).astype(np.float32) for length in lengths]
        for row in weights:
            row[: len(row) // 2] = 0  # a prompt
        inputs["weights"] = weights
    else:
        inputs["logprobs"] = [
            (-6 + generator.standard_normal(length)).astype(np.float32) for length in lengths
        ]
        inputs["advantages"] = [
            generator.standard_normal(length).astype(np.float32) for length in lengths
        ]
    return datum_arrays([row[:-1] for row in rows], inputs)


@pytest.fixture
def datums() -> Callable[..., dict[str, np.ndarray[Any, Any]]]:
    """Makes arrays of random datums: (count, seed=, kind=, longest=)."""
    return make_datums


@pytest.fixture
def operation() -> Callable[..., Operation]:
    """Makes an operation: (kind, arrays=None, **params)."""

    def make(
        kind: str, arrays: dict[str, np.ndarray[Any, Any]] | None = None, **params: Any
    ) -> Operation:
        return Operation(kind=kind, params=params, arrays=arrays or {})

    return make


class SessionServer:
    """A control plane of sessions in a process of its own, on the tiny base model."""

    def __init__(self, home: Path, base_folder: Path) -> None:
        self.home = home
        self.registry = Registry.open(f"sqlite:///{home / 'slipway.db'}", home / "store")
        self.registry.db.create_all()
        self.tenant_id = self.registry.tenants.ensure_tenant("default")
        self.key = self.registry.tenants.create_key(self.tenant_id, "test")[1]
        staged = self.registry.store.stage()
        for path in base_folder.iterdir():
            shutil.copy(path, staged)
        manifest = self.registry.store.publish(staged)
        self.base = self.registry.versions.register(
            NewVersion(
                tenant_id=self.tenant_id,
                group="tiny",
                kind=Kind.MERGED,
                origin=Origin.IMPORT,
                base_model="org/tiny",
                base_digest=manifest.digest,
            ),
            manifest,
        )
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self.port = probe.getsockname()[1]
        self.url = f"http://127.0.0.1:{self.port}"
        self.headers = {"X-API-Key": self.key}
        self.options: dict[str, float] = {}
        """Of `serve.py`, at the next start."""
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        """Start it and wait until it answers."""
        script = Path(__file__).with_name("serve.py")
        with (self.home / "serve.log").open("ab") as log:
            self._process = subprocess.Popen(
                [sys.executable, str(script), str(self.home), "tiny", str(self.port)],
                stdout=log,
                stderr=log,
                env={**os.environ, "SERVE_OPTIONS": json.dumps(self.options)},
            )
        deadline = time.monotonic() + 120
        while True:
            assert self._process.poll() is None, (self.home / "serve.log").read_text()
            assert time.monotonic() < deadline, (self.home / "serve.log").read_text()
            try:
                httpx.get(f"{self.url}/api/v1/healthz", timeout=5)
                return
            except httpx.TransportError:
                time.sleep(0.1)

    def engine_pid(self) -> int:
        """The engine's process id."""
        assert self._process is not None
        (engine,) = psutil.Process(self._process.pid).children()
        return engine.pid

    def kill_engine(self) -> None:
        """SIGKILL to the engine alone."""
        os.kill(self.engine_pid(), signal.SIGKILL)

    def kill_everything(self) -> None:
        """SIGKILL to the control plane and its engine."""
        engine = self.engine_pid()
        assert self._process is not None
        self._process.kill()
        self._process.wait()
        with contextlib.suppress(ProcessLookupError):
            os.kill(engine, signal.SIGKILL)
        self._process = None

    def kill_at(self, point: str, when: str, *, nth: int = 1, both: bool = False) -> None:
        """Have a process killed as it comes to a point of its work; see `killing.Killer`."""
        (self.home / "killed.json").unlink(missing_ok=True)
        order = {"point": point, "when": when, "nth": nth, "both": both}
        partial = self.home / "kill.partial"
        partial.write_text(json.dumps(order))
        partial.rename(self.home / "kill.json")

    @contextlib.contextmanager
    def kept_up(self) -> Iterator[None]:
        """Started again whenever it is found dead, as a service manager would."""
        ended = threading.Event()

        def watch() -> None:
            while not ended.wait(0.05):
                assert self._process is not None
                if self._process.poll() is not None:
                    self.start()

        with ThreadPoolExecutor(1) as pool:
            watching = pool.submit(watch)
            try:
                yield
            finally:
                ended.set()
            watching.result()

    def restart(self, **options: float) -> None:
        """Stop it in order and start it with other options of `serve.py`."""
        self.stop()
        self.options = options
        self.start()

    def stop(self) -> None:
        """An orderly stop; fine if it has stopped."""
        if self._process is not None:
            self._process.terminate()
            self._process.wait(timeout=30)
            self._process = None

    def client(self, **options: Any) -> tinker.ServiceClient:
        """The official SDK's client on this server."""
        return tinker.ServiceClient(base_url=self.url, api_key=self.key, **options)

    def key_of_a_stranger(self) -> str:
        """A key of another tenant."""
        stranger = self.registry.tenants.ensure_tenant("stranger")
        return self.registry.tenants.create_key(stranger, "test")[1]

    def pass_time(self, seconds: float) -> None:
        """Set the server's clock ahead of the machine's."""
        partial = self.home / "clock-ahead.partial"
        partial.write_text(str(seconds))
        partial.rename(self.home / "clock-ahead")

    @staticmethod
    def wait_until(done: Callable[[], bool], *, seconds: float) -> None:
        """Wait until something is so."""
        deadline = time.monotonic() + seconds
        while not done():
            assert time.monotonic() < deadline
            time.sleep(0.1)

    @contextlib.contextmanager
    def full_disk(self) -> Iterator[None]:
        """The artifact store's disk is full meanwhile."""
        marker = self.home / "full"
        marker.touch()
        yield
        marker.unlink()

    @contextlib.contextmanager
    def broken_results(self) -> Iterator[None]:
        """The database refuses every result meanwhile."""
        with sqlite3.connect(self.home / "slipway.db", timeout=20) as database:
            database.execute(
                "CREATE TRIGGER broken BEFORE UPDATE ON training_operation "
                "BEGIN SELECT RAISE(ABORT, 'broken for the test'); END"
            )
        database.close()
        yield
        with sqlite3.connect(self.home / "slipway.db", timeout=20) as database:
            database.execute("DROP TRIGGER broken")
        database.close()


@pytest.fixture
def server(
    tmp_path: Path, tiny_base: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[SessionServer]:
    """A running server of sessions; see `SessionServer`."""
    monkeypatch.setenv("TINKER_TELEMETRY", "0")
    made = SessionServer(tmp_path, tiny_base)
    made.start()
    yield made
    made.stop()
    made.registry.db.close()
