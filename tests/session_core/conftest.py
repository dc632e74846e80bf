"""A base model small enough to make on the spot, and datums for it."""

from __future__ import annotations

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import settings
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

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
