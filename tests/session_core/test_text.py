"""Text to tokens and back."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from transformers import AutoTokenizer

from registry.errors import InvalidInput
from session_core.text import TextStream, render_chat, token_text, tokens_of


@pytest.fixture(scope="module")
def tokenizer(tiny_base: Path) -> Any:
    return AutoTokenizer.from_pretrained(tiny_base)


@given(tokens=st.lists(st.integers(0, 280), max_size=30))
def test_a_stream_says_what_decoding_the_whole_says(tokenizer: Any, tokens: list[int]) -> None:
    stream = TextStream(tokenizer)
    said = "".join(stream.step(token) for token in tokens) + stream.end()
    assert said == tokenizer.decode(tokens, skip_special_tokens=True)


def test_a_character_comes_when_all_its_bytes_have(tokenizer: Any) -> None:
    tokens = tokenizer.encode("é€", add_special_tokens=False)
    assert len(tokens) == 5
    stream = TextStream(tokenizer)
    assert [stream.step(token) for token in tokens] == ["", "é", "", "", "€"]
    assert stream.end() == ""
    assert stream.step(tokens[0]) == ""
    assert stream.end() == "\ufffd"


def test_special_tokens_are_text_by_themselves_only(tokenizer: Any) -> None:
    end = tokenizer.convert_tokens_to_ids("<|im_end|>")
    assert token_text(tokenizer, end) == "<|im_end|>"
    assert TextStream(tokenizer).step(end) == ""


def test_a_chat_is_rendered_by_the_models_template(tokenizer: Any) -> None:
    messages = [{"role": "user", "content": "what is one"}]
    text = "<|im_start|>user\nwhat is one<|im_end|>\n<|im_start|>assistant\n"
    assert tokenizer.decode(render_chat(tokenizer, messages)) == text
    assert tokens_of(tokenizer, "what is one") == tokenizer.encode("what is one")


def test_what_a_template_cannot_render_is_the_callers_mistake(tokenizer: Any) -> None:
    template = tokenizer.chat_template
    try:
        tokenizer.chat_template = "{{ raise_exception('roles must alternate') }}"
        with pytest.raises(InvalidInput, match="roles must alternate"):
            render_chat(tokenizer, [{"role": "user", "content": "x"}])
        tokenizer.chat_template = None
        with pytest.raises(InvalidInput, match="no chat template"):
            render_chat(tokenizer, [{"role": "user", "content": "x"}])
    finally:
        tokenizer.chat_template = template
