"""Real vLLM on a tiny random model: the one test that proves the real engine fits."""

from __future__ import annotations

import asyncio
import json
import string
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import pytest

from serving import VllmEngine, fingerprint
from serving.engines import _installed_version

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(_installed_version(sys.executable) is None, reason="vLLM is missing"),
]

TEMPLATE = "{% for m in messages %}{{ m['content'] }}\n{% endfor %}"


def make_model(folder: Path) -> None:
    """A Llama of 150 thousand random weights that knows the printable characters."""
    import torch
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    characters = ["<unk>", "<s>", "</s>", *string.printable]
    tokenizer = Tokenizer(
        models.WordLevel({c: i for i, c in enumerate(characters)}, unk_token="<unk>")
    )
    tokenizer.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    tokenizer.decoder = decoders.Fuse()
    wrapped = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, unk_token="<unk>", bos_token="<s>", eos_token="</s>"
    )
    wrapped.chat_template = TEMPLATE
    wrapped.save_pretrained(folder)
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=128,
        hidden_size=128,
        intermediate_size=128,
        num_hidden_layers=1,
        num_attention_heads=2,  # of 64: vLLM's CPU attention has kernels for few sizes
        num_key_value_heads=1,
        max_position_embeddings=256,
        bos_token_id=1,
        eos_token_id=2,
    )
    LlamaForCausalLM(config).save_pretrained(folder)


def add_model(s: Any, group: str, *, truncate: bool = False) -> Any:
    from registry import Kind, NewVersion, Origin

    staged = s.registry.store.stage()
    make_model(staged)
    if truncate:
        weights = staged / "model.safetensors"
        weights.write_bytes(weights.read_bytes()[:-1000])
    manifest = s.registry.store.publish(staged)
    return s.registry.versions.register(
        NewVersion(
            tenant_id=s.tenant,
            group=group,
            kind=Kind.MERGED,
            origin=Origin.IMPORT,
            base_model="tiny",
            base_digest=manifest.digest,
        ),
        manifest,
    )


@pytest.mark.timeout(600)
def test_a_real_engine_behind_the_gateway(stack: Callable[..., Any]) -> None:
    engine = VllmEngine(max_model_len=256, max_num_seqs=8, kv_cache_gib=1)

    async def story() -> None:
        async with stack(
            engine=engine, gateway=True, start_timeout=280.0, grace=20.0, drain=30.0
        ) as s:
            version = add_model(s, "tiny")
            async with s.replicas.serve(version, keep=True) as served:
                await measured(served)
            done = await s.deploy("chat", "tiny/1")
            assert done.status == "done", done
            assert done.result["replica_id"] == served.replica_id
            assert done.result["engine_fingerprint"] == fingerprint(engine.describe())
            await s.routed(lambda content: bool(content["keys"]))
            async with s.client() as client:
                await spoken_to(client)

            # A model that cannot be loaded, while the other serves on.
            add_model(s, "broken", truncate=True)
            failed = await s.deploy("chat", "broken/1")
            assert failed.status == "failed"
            assert "SafetensorError" in failed.error, failed.error
            async with s.client() as client:
                await spoken_to(client)

    asyncio.run(story())


async def measured(served: Any) -> None:
    """What evaluation needs: token ids in, tokens and log-probabilities out, repeatably."""
    body = {
        "model": served.model,
        "prompt": [10, 11, 12],
        "max_tokens": 4,
        "temperature": 0,
        "ignore_eos": True,
        "echo": True,
        "logprobs": 1,
    }
    async with httpx.AsyncClient(base_url=served.target_url, timeout=120) as client:
        first, second = [
            (await client.post("/v1/completions", json=body)).json()["choices"][0] for _ in range(2)
        ]
    logprobs = first["logprobs"]["token_logprobs"]
    assert len(logprobs) == 7
    assert logprobs[0] is None
    assert all(value < 0 for value in logprobs[1:])
    assert first["text"] == second["text"]


async def spoken_to(client: Any) -> None:
    chat = await client.chat.completions.create(
        model="chat",
        messages=[{"role": "user", "content": "hello"}],
        max_tokens=5,
        temperature=0,
        extra_body={"ignore_eos": True},
    )
    assert chat.model == "chat"
    assert chat.usage.completion_tokens == 5
    stream = await client.completions.create(
        model="chat",
        prompt="hello",
        max_tokens=5,
        temperature=0,
        stream=True,
        extra_body={"ignore_eos": True},
    )
    chunks = [chunk async for chunk in stream]
    assert len(chunks) >= 2
    assert {chunk.model for chunk in chunks} == {"chat"}
    assert "--" not in json.dumps([chunk.model_dump() for chunk in chunks if chunk.model != "chat"])
