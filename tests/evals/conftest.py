"""A tiny real tokenizer, a stand-in completions server with faults, and a real registry."""

from __future__ import annotations

import asyncio
import itertools
import json
import threading
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from evals.suites import Suite, parse
from evals.targets import Codec, Served
from registry import Kind, NewVersion, Origin, Registry, VersionView

TEMPLATE = (
    "<|im_start|>system\nAnswer with the number only.<|im_end|>\n"
    "<|im_start|>user\n{question}<|im_end|>\n<|im_start|>assistant\n"
)


@pytest.fixture(scope="session")
def tokenizer_json() -> str:
    """A byte-level BPE tokenizer with chat tokens: any text survives a round trip."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=400,
        special_tokens=["<|im_start|>", "<|im_end|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(["Answer with the number only. What is 12 + 34?"] * 4, trainer)
    return tokenizer.to_str()


@pytest.fixture
def codec(tokenizer_json: str, tmp_path: Path) -> Codec:
    path = tmp_path / "tokenizer.json"
    path.write_text(tokenizer_json)
    return Codec(path)


def make_spec(size: int = 8, /, **changes: Any) -> dict[str, Any]:
    """A valid suite of sums; item i asks for 10+i plus i."""
    return {
        "format": 1,
        "name": "sums",
        "template": TEMPLATE,
        "decoding": {"max_tokens": 16, "temperature": 0.0, "stop": ["<|im_end|>"]},
        "grader": {"kind": "numeric"},
        "items": [
            {"id": f"sums-{i}", "question": f"What is {10 + i} + {i}?", "answer": str(10 + 2 * i)}
            for i in range(size)
        ],
        **changes,
    }


@pytest.fixture
def spec() -> Callable[..., dict[str, Any]]:
    return make_spec


@pytest.fixture
def suite() -> Suite:
    return parse(make_spec())


@dataclass(kw_only=True)
class StandIn:
    """An OpenAI-compatible completions server that answers as it is told."""

    codec: Tokenizer
    answer: Callable[[str, str], str] = lambda model, question: str(solve(question))
    """From a model's name and a question to the answer."""
    finish: Callable[[str], str] = lambda question: "stop"
    score: Callable[[str, list[int]], list[float | None]] = lambda model, ids: (
        [None] + [-1.0] * (len(ids) - 1)
    )
    fault: Callable[[str, int], Response | None] = lambda question, attempt: None
    """From a question and how often it was asked before to a response that goes wrong."""
    delay: Callable[[str], float] = lambda question: 0.0
    url: str = ""
    requests: list[dict[str, Any]] = field(default_factory=list)
    asked: Counter[str] = field(default_factory=Counter)
    in_flight: int = 0
    peak: int = 0

    async def completions(self, request: Request) -> Response:
        body = await request.json()
        self.requests.append(body)
        ids = body["prompt"]
        if body.get("echo"):
            scores = [*self.score(body["model"], ids), *[-0.5] * body["max_tokens"]]
            choice = {"text": "", "finish_reason": "length"}
            return JSONResponse({"choices": [choice | {"logprobs": {"token_logprobs": scores}}]})
        prompt = self.codec.decode(ids, skip_special_tokens=False)
        question = prompt.split("<|im_start|>user\n")[1].split("<|im_end|>")[0]
        attempt = self.asked[question]
        self.asked[question] += 1
        self.in_flight += 1
        self.peak = max(self.peak, self.in_flight)
        try:
            await asyncio.sleep(self.delay(question))
        finally:
            self.in_flight -= 1
        if (wrong := self.fault(question, attempt)) is not None:
            return wrong
        text = self.answer(body["model"], question)
        choice = {
            "text": text,
            "token_ids": self.codec.encode(text, add_special_tokens=False).ids,
            "finish_reason": self.finish(question),
        }
        # By hand: JSON may carry what Starlette's strict encoder refuses, lone surrogates.
        return Response(json.dumps({"choices": [choice]}), media_type="application/json")


def solve(question: str) -> int:
    """The right answer to one of the suite's questions."""
    a, b = question.removeprefix("What is ").rstrip("?").split(" + ")
    return int(a) + int(b)


@pytest.fixture
def stand_in(tokenizer_json: str) -> Iterator[StandIn]:
    server_state = StandIn(codec=Tokenizer.from_str(tokenizer_json))
    app = Starlette(routes=[Route("/v1/completions", server_state.completions, methods=["POST"])])
    config = uvicorn.Config(
        app, host="127.0.0.1", port=0, log_level="error", lifespan="off", ws="none", loop="asyncio"
    )
    server = uvicorn.Server(config)
    thread = threading.Thread(target=server.run)
    thread.start()
    deadline = time.monotonic() + 20
    while not server.started:
        assert time.monotonic() < deadline, "the stand-in server did not start"
        time.sleep(0.01)
    port = server.servers[0].sockets[0].getsockname()[1]
    server_state.url = f"http://127.0.0.1:{port}"
    yield server_state
    server.should_exit = True
    thread.join()


@dataclass(kw_only=True)
class Provider:
    """Serves every version from the stand-in server, under its reference as model name."""

    stand_in: StandIn
    engine: dict[str, Any] = field(
        default_factory=lambda: {"name": "stand-in", "version": "1", "dtype": "float32"}
    )
    held: list[str] = field(default_factory=list)
    kept: list[str] = field(default_factory=list)
    started: list[str] = field(default_factory=list)

    @asynccontextmanager
    async def serve(self, version: VersionView, *, keep: bool) -> AsyncIterator[Served]:
        self.started.append(version.reference)
        self.held.append(version.reference)
        try:
            yield Served(
                target_url=self.stand_in.url,
                model=version.reference,
                engine=dict(self.engine),
                fingerprint=json.dumps(self.engine, sort_keys=True),
                replica_id=f"replica-{len(self.started)}",
            )
            if keep:
                self.kept.append(version.reference)
        finally:
            self.held.remove(version.reference)


@pytest.fixture
def provider(stand_in: StandIn) -> Provider:
    return Provider(stand_in=stand_in)


@pytest.fixture
def registry(tmp_path: Path) -> Iterator[Registry]:
    opened = Registry.open(f"sqlite:///{tmp_path / 'slipway.db'}", tmp_path / "store")
    opened.db.create_all()
    yield opened
    opened.db.close()


@pytest.fixture
def tenant(registry: Registry) -> str:
    return registry.tenants.ensure_tenant("default")


@pytest.fixture
def add_version(registry: Registry, tenant: str, tokenizer_json: str) -> Callable[..., VersionView]:
    """Registers a version of given files; every one has bytes of its own."""
    serial = itertools.count()

    def add(
        group: str = "sums",
        *,
        kind: Kind = Kind.MERGED,
        origin: Origin = Origin.MERGE,
        files: dict[str, bytes] | None = None,
        parents: tuple[str, ...] = (),
        tokenizer: bool = True,
        tenant_id: str = tenant,
    ) -> VersionView:
        staged = registry.store.stage()
        (staged / "weights.bin").write_bytes(str(next(serial)).encode())
        if tokenizer:
            (staged / "tokenizer.json").write_text(tokenizer_json)
        for name, data in (files or {}).items():
            (staged / name).write_bytes(data)
        new = NewVersion(
            tenant_id=tenant_id,
            group=group,
            kind=kind,
            origin=origin,
            base_model="tiny",
            base_digest="sha256:" + "0" * 64,
            parents=parents,
        )
        return registry.versions.register(new, registry.store.publish(staged))

    return add
