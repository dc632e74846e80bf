"""Runs to look at from the SDK's REST client and its command line."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from typing import Any

import httpx
import numpy as np
import pytest
import tinker
from tinker import types

PROMPT = [5, 6, 7, 8]


def make_datum(*answer: int) -> types.Datum:
    """A prompt and an answer; only the answer has weight."""
    tokens = [*PROMPT, *answer]
    weights = [0.0] * (len(PROMPT) - 1) + [1.0] * len(answer)
    return types.Datum(
        model_input=types.ModelInput.from_ints(tokens[:-1]),
        loss_fn_inputs={
            "target_tokens": np.array(tokens[1:], dtype=np.int64),
            "weights": np.array(weights, dtype=np.float32),
        },
    )


def train(client: tinker.TrainingClient, first: int, last: int) -> list[float]:
    """Train on some batches; the losses."""
    waiting = []
    for number in range(first, last):
        batch = [make_datum(9 + number, 20, 21), make_datum(30, 31 + number)]
        waiting.append(client.forward_backward(batch, "cross_entropy"))
        client.optim_step(types.AdamParams(learning_rate=5e-3, eps=1e-8, grad_clip_norm=1.0))
    return [future.result().metrics["loss:sum"] for future in waiting]


def new_run(service: tinker.ServiceClient, **options: Any) -> tinker.TrainingClient:
    """A training client on the tiny base model."""
    options = {"rank": 4, "seed": 1, **options}
    return service.create_lora_training_client("org/tiny", **options).result()


@pytest.fixture
def datum() -> Callable[..., types.Datum]:
    """Makes a datum of a fixed prompt and an answer: (*tokens)."""
    return make_datum


@pytest.fixture
def steps() -> Callable[..., list[float]]:
    """Trains a client on some fixed batches: (client, first, last) -> losses."""
    return train


@pytest.fixture
def run_of() -> Callable[..., tinker.TrainingClient]:
    """Makes a training client: (service, **options)."""
    return new_run


@pytest.fixture
def rest(server: Any) -> tinker.RestClient:
    """The SDK's REST client on the server."""
    return tinker.RestClient(base_url=server.url, api_key=server.key)


@pytest.fixture
def http(server: Any) -> Iterator[httpx.Client]:
    """Plain HTTP to the server, with its key."""
    with httpx.Client(base_url=server.url, headers=server.headers, timeout=60) as client:
        yield client


@pytest.fixture
def stranger(server: Any) -> Iterator[httpx.Client]:
    """Plain HTTP to the server, with another tenant's key."""
    headers = {"X-API-Key": server.key_of_a_stranger()}
    with httpx.Client(base_url=server.url, headers=headers, timeout=60) as client:
        yield client


@pytest.fixture
def cli(server: Any, tmp_path: Any) -> Callable[..., subprocess.CompletedProcess[str]]:
    """The SDK's own command line on the server: (*arguments)."""

    def run(*arguments: str) -> subprocess.CompletedProcess[str]:
        environment = {
            **os.environ,
            "TINKER_BASE_URL": server.url,
            "TINKER_API_KEY": server.key,
            "HOME": str(tmp_path),
        }
        return subprocess.run(
            [sys.executable, "-W", "ignore", "-m", "tinker.cli", *arguments],
            env=environment,
            cwd=tmp_path,
            capture_output=True,
            text=True,
            timeout=120,
        )

    return run
