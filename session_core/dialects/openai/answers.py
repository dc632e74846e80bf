"""Answers in OpenAI's shapes, whole and in chunks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from session_core.dialects.openai.pieces import Piece, Scored


@dataclass(kw_only=True)
class Choice:
    """One answer as far as it has come."""

    index: int
    prompt: list[Scored] = field(default_factory=list)
    """The prompt's tokens where the answer begins with them."""
    prompt_text: str = ""
    text: str = ""
    scored: list[Scored] = field(default_factory=list)
    finish_reason: str | None = None

    def add(self, piece: Piece) -> None:
        """Take a piece in."""
        self.text += piece.text
        self.scored.append(piece.scored)
        self.finish_reason = piece.finish_reason

    def clear(self) -> None:
        """Forget what was sampled: the prompt alone was asked for."""
        self.text, self.scored, self.finish_reason = "", [], "length"


@dataclass(frozen=True, kw_only=True)
class Answer:
    """What all chunks of an answer have in common.

    Fields:
        chat: whether messages are answered, or a text.
        logprobs, token_ids: whether they are told.
    """

    id: str
    created: int
    model: str
    chat: bool
    logprobs: bool
    token_ids: bool

    def whole(self, choices: Sequence[Choice], usage: dict[str, int]) -> dict[str, Any]:
        """The answer at once."""
        kind = "chat.completion" if self.chat else "text_completion"
        return {**self._head(kind), "choices": [self._whole(c) for c in choices], "usage": usage}

    def opening(self, index: int) -> dict[str, Any]:
        """The chunk that says who speaks; chats begin with it."""
        delta = {"role": "assistant", "content": ""}
        return self._chunk({"index": index, "delta": delta, "logprobs": None}, None)

    def chunk(self, piece: Piece, *, offset: int) -> dict[str, Any]:
        """A piece as a chunk; ``offset`` is where its token begins in the text."""
        choice: dict[str, Any] = {"index": piece.choice, "logprobs": None}
        if self.chat:
            choice["delta"] = {"content": piece.text}
        else:
            choice["text"] = piece.text
        if self.logprobs:
            choice["logprobs"] = self._scores([piece.scored], offset=offset)
        if self.token_ids:
            choice["token_ids"] = [piece.scored.token]
        return self._chunk(choice, piece.finish_reason)

    def closing(self, usage: dict[str, int]) -> dict[str, Any]:
        """The chunk that holds the token counts and nothing else."""
        return {**self._head(self._chunk_kind), "choices": [], "usage": usage}

    @property
    def _chunk_kind(self) -> str:
        return "chat.completion.chunk" if self.chat else "text_completion"

    def _head(self, kind: str) -> dict[str, Any]:
        return {"id": self.id, "object": kind, "created": self.created, "model": self.model}

    def _chunk(self, choice: dict[str, Any], finish_reason: str | None) -> dict[str, Any]:
        choice["finish_reason"] = finish_reason
        return {**self._head(self._chunk_kind), "choices": [choice]}

    def _whole(self, choice: Choice) -> dict[str, Any]:
        said: dict[str, Any] = {
            "index": choice.index,
            "finish_reason": choice.finish_reason,
            "logprobs": None,
        }
        if self.chat:
            said["message"] = {"role": "assistant", "content": choice.text, "refusal": None}
        else:
            said["text"] = choice.prompt_text + choice.text
        if self.logprobs:
            said["logprobs"] = self._scores([*choice.prompt, *choice.scored], offset=0)
        if self.token_ids:
            said["token_ids"] = [scored.token for scored in choice.scored]
        return said

    def _scores(self, scored: Sequence[Scored], *, offset: int) -> dict[str, Any]:
        if self.chat:
            return {"content": [_chat_score(one) for one in scored], "refusal": None}
        offsets = []
        for one in scored:
            offsets.append(offset)
            offset += len(one.text)
        return {
            "tokens": [one.text for one in scored],
            "token_logprobs": [one.logprob for one in scored],
            "top_logprobs": [_top(one) for one in scored],
            "text_offset": offsets,
        }


def usage_of(prompt_tokens: int, completion_tokens: int) -> dict[str, int]:
    """Token counts; a prompt counts once, however many samples share it."""
    return {
        "prompt_tokens": prompt_tokens,
        "completion_tokens": completion_tokens,
        "total_tokens": prompt_tokens + completion_tokens,
    }


def _top(scored: Scored) -> dict[str, float] | None:
    """The likeliest tokens and the one that was taken; None for a prompt's first token."""
    if scored.logprob is None:
        return None
    return {**dict(scored.top), scored.text: scored.logprob}


def _chat_score(scored: Scored) -> dict[str, Any]:
    top = [_named(text, score) for text, score in scored.top]
    return {**_named(scored.text, scored.logprob), "top_logprobs": top}


def _named(text: str, logprob: float | None) -> dict[str, Any]:
    # A token that is part of a character has no text of its own, and so no bytes to tell.
    known = None if "\ufffd" in text else list(text.encode())
    return {"token": text, "logprob": logprob, "bytes": known}
