"""What a completion request may hold."""

from __future__ import annotations

from typing import Any

import pytest
from pydantic import ValidationError

from session_core.dialects.openai.bodies import ChatBody, CompletionBody


def text(**fields: Any) -> CompletionBody:
    return CompletionBody.model_validate({"model": "m", "prompt": "x", **fields})


def chat(**fields: Any) -> ChatBody:
    messages = [{"role": "user", "content": "x"}]
    return ChatBody.model_validate({"model": "m", "messages": messages, **fields})


@pytest.mark.parametrize(
    ("prompt", "prompts"),
    [
        ("a", ["a"]),
        (["a", "b"], ["a", "b"]),
        ([1, 2], [[1, 2]]),
        ([[1], [2, 3]], [[1], [2, 3]]),
    ],
)
def test_prompts(prompt: Any, prompts: Any) -> None:
    assert text(prompt=prompt).prompts() == prompts


@pytest.mark.parametrize(
    ("fields", "fault"),
    [
        ({"prompt": []}, "holds 0 prompts"),
        ({"prompt": ["a"] * 65}, "holds 65 prompts"),
        ({"presence_penalty": 0.5}, "presence_penalty is not served"),
        ({"logit_bias": {"5": 1}}, "logit_bias is not served"),
        ({"best_of": 3}, "best_of is not served"),
        ({"guided_json": {}}, "guided_json"),
        ({"echo": True, "stream": True}, "echo is not served with stream"),
        ({"max_tokens": 0}, "max_tokens is 0"),
        ({"temperature": -1}, "temperature"),
        ({"top_p": 0}, "top_p"),
        ({"logprobs": 21}, "logprobs"),
        ({"n": 0}, "n"),
    ],
)
def test_what_is_refused_is_named(fields: dict[str, Any], fault: str) -> None:
    with pytest.raises(ValidationError, match=fault):
        text(**fields)


@pytest.mark.parametrize(
    ("fields", "fault"),
    [
        ({"messages": []}, "messages"),
        ({"tools": [{"type": "function"}]}, "tools is not served"),
        ({"response_format": {"type": "json_object"}}, "response_format is not served"),
        ({"top_logprobs": 3}, "top_logprobs needs logprobs"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "text"),
        ({"chat_template_kwargs": {"tokenizer": 1}}, "cannot hold tokenizer"),
    ],
)
def test_what_a_chat_cannot_have_is_named(fields: dict[str, Any], fault: str) -> None:
    with pytest.raises(ValidationError, match=fault):
        chat(**fields)


def test_what_asks_for_nothing_is_let_through() -> None:
    body = text(user="me", presence_penalty=0, repetition_penalty=1.0, suffix=None, best_of=1)
    assert body.params()["max_tokens"] == 16
    assert chat(tools=[], tool_choice="auto", response_format={"type": "text"}).params()


def test_an_answer_ends_where_the_model_ends_it_unless_asked_not_to() -> None:
    assert text().params()["stop_at_end"] is True
    assert text(ignore_eos=True).params() == {**text().params(), "stop_at_end": False}
    assert text(stop=["", "b"]).stops() == ("b",)
    assert text(stop="b").params()["stop"] == ["b"]


def test_an_echo_asks_for_the_prompts_logprobs_only_with_logprobs() -> None:
    assert text(echo=True).params()["prompt_logprobs"] is False
    asked = text(echo=True, logprobs=2, max_tokens=0).params()
    assert asked["prompt_logprobs"] is True
    assert asked["top_prompt"] == 2
    assert asked["max_tokens"] == 1


def test_messages_are_rendered_as_texts() -> None:
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    body = chat(messages=[{"role": "user", "content": parts, "name": "n"}, {"role": "assistant"}])
    assert body.chat() == {
        "messages": [
            {"role": "user", "content": "ab", "name": "n"},
            {"role": "assistant", "content": ""},
        ]
    }
    assert chat(max_tokens=3, max_completion_tokens=5).params()["max_tokens"] == 5
