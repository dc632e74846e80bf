"""Text to tokens and back, for clients that speak text: chats, prompts, streams."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import jinja2
from tokenizers.decoders import DecodeStream

from registry.errors import InvalidInput


def render_chat(tokenizer: Any, messages: Sequence[Mapping[str, Any]], **extra: Any) -> list[int]:
    """Token ids of a chat, up to where the assistant is to go on.

    Args:
        extra: what the template may use besides, such as ``tools``.

    Raises:
        InvalidInput: if the model has no chat template, or it refuses the messages.
    """
    if tokenizer.chat_template is None:
        raise InvalidInput("This base model has no chat template: use /v1/completions.")
    try:
        tokens: list[int] = tokenizer.apply_chat_template(
            list(messages), add_generation_prompt=True, tokenize=True, return_dict=False, **extra
        )
    except (jinja2.TemplateError, TypeError, ValueError, KeyError) as error:
        raise InvalidInput(f"The chat template cannot render these messages: {error}") from None
    return tokens


def tokens_of(tokenizer: Any, text: str) -> list[int]:
    """Token ids of a text, with the special tokens the model puts around one."""
    tokens: list[int] = tokenizer.encode(text)
    return tokens


class TextStream:
    """The text of a sequence, piece by piece: a character comes when all its bytes have."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self._stream = DecodeStream(skip_special_tokens=True)
        self._tokens: list[int] = []
        self._said = ""

    def step(self, token: int) -> str:
        """What one more token adds; empty while a character is incomplete."""
        self._tokens.append(token)
        added = self._stream.step(self._tokenizer.backend_tokenizer, token) or ""
        self._said += added
        return added

    def end(self) -> str:
        """What is left once no more tokens come: the mark of a character that is incomplete."""
        whole: str = self._tokenizer.decode(
            self._tokens, skip_special_tokens=True, clean_up_tokenization_spaces=False
        )
        return whole[len(self._said) :] if whole.startswith(self._said) else ""


def token_text(tokenizer: Any, token: int) -> str:
    """One token as text, special tokens included."""
    text: str = tokenizer.decode([token], clean_up_tokenization_spaces=False)
    return text
