"""What a completion request may hold.

A parameter that would change the answer and is not served is refused by name: an answer that
silently leaves it out would be a wrong one.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from pydantic import BaseModel, ConfigDict, Field, model_validator

from session_core.requests import MAX_SAMPLES

MAX_PROMPTS = 64
MAX_LOGPROBS = 20
DEFAULT_MAX_TOKENS = 16
"""Of a completion of a text, as OpenAI has it; a chat goes on to the end of the context."""
# Labels, and hints to a scheduler or cache that is not here: they change no answer.
_LABELS = frozenset(
    {
        "user",
        "metadata",
        "store",
        "service_tier",
        "safety_identifier",
        "prompt_cache_key",
        "parallel_tool_calls",
    }
)
# Taken at the values that ask for nothing.
_NEUTRAL: Mapping[str, tuple[Any, ...]] = MappingProxyType(
    {
        "presence_penalty": (0,),
        "frequency_penalty": (0,),
        "repetition_penalty": (1,),
        "logit_bias": ({},),
        "min_p": (0,),
        "suffix": ("",),
        "best_of": (1,),
        "tools": ([],),
        "tool_choice": ("none", "auto"),
        "functions": ([],),
        "response_format": ({"type": "text"},),
        "modalities": (["text"],),
        "skip_special_tokens": (True,),
        "include_stop_str_in_output": (False,),
    }
)


class StreamOptions(BaseModel):
    """How an answer is streamed."""

    model_config = ConfigDict(extra="forbid")

    include_usage: bool = False


class _Body(BaseModel):
    model_config = ConfigDict(extra="forbid")

    model: str
    n: int = Field(default=1, ge=1, le=MAX_SAMPLES)
    temperature: float | None = Field(default=None, ge=0)
    top_p: float | None = Field(default=None, gt=0, le=1)
    top_k: int | None = Field(default=None, ge=-1)
    seed: int | None = None
    stop: str | list[str] | None = None
    stop_token_ids: list[int] | None = None
    ignore_eos: bool = False
    stream: bool = False
    stream_options: StreamOptions | None = None
    return_token_ids: bool = False

    @model_validator(mode="before")
    @classmethod
    def _only_what_is_served(cls, value: Any) -> Any:
        if not isinstance(value, dict):
            return value
        kept = {}
        for name, given in value.items():
            if name in _LABELS or (given is None and name != "model"):
                continue
            if name in _NEUTRAL:
                if given not in _NEUTRAL[name]:
                    raise ValueError(
                        f"{name} is not served on a live session: leave it out, or merge and "
                        "deploy the version and ask its endpoint"
                    )
                continue
            kept[name] = given
        return kept

    @property
    def wants_usage(self) -> bool:
        """Whether a stream ends with the token counts."""
        return self.stream_options is not None and self.stream_options.include_usage

    def stops(self) -> tuple[str, ...]:
        """The texts that end an answer and are cut off it."""
        given = [self.stop] if isinstance(self.stop, str) else self.stop or []
        return tuple(text for text in given if text)

    def params(self) -> dict[str, Any]:
        """A sample operation's parameters, but for those that differ by kind of request."""
        stops = list(self.stops())
        return {
            "num_samples": self.n,
            "temperature": self.temperature,
            "top_p": self.top_p,
            "top_k": self.top_k,
            "seed": self.seed,
            "stop": stops,
            "stop_token_ids": self.stop_token_ids,
            # Clients of text expect an answer to end where the model ends it.
            "stop_at_end": not self.ignore_eos,
        }


class CompletionBody(_Body):
    """``POST /v1/completions``: one prompt or several, as texts or as token ids."""

    prompt: str | list[int] | list[str] | list[list[int]]
    max_tokens: int = Field(default=DEFAULT_MAX_TOKENS, ge=0)
    logprobs: int | None = Field(default=None, ge=0, le=MAX_LOGPROBS)
    echo: bool = False

    @model_validator(mode="after")
    def _consistent(self) -> CompletionBody:
        if self.echo and self.stream:
            raise ValueError("echo is not served with stream: ask for one or the other")
        if not self.max_tokens and not self.echo:
            raise ValueError("max_tokens is 0: only an echo of the prompt can be that short")
        count = len(self.prompts())
        if not 1 <= count <= MAX_PROMPTS:
            raise ValueError(f"prompt holds {count} prompts: 1 to {MAX_PROMPTS} are taken at once")
        return self

    def prompts(self) -> list[str] | list[list[int]]:
        """Every prompt. A list of numbers is one prompt."""
        prompt = self.prompt
        if isinstance(prompt, str):
            return [prompt]
        if prompt and isinstance(prompt[0], int):
            return [prompt]
        return prompt  # type: ignore[return-value]

    def params(self) -> dict[str, Any]:
        """As `_Body.params`. One token is sampled where none is wanted, and left out."""
        scored = self.logprobs is not None
        return {
            **super().params(),
            "max_tokens": max(1, self.max_tokens),
            "top_sample": self.logprobs or 0,
            "prompt_logprobs": self.echo and scored,
            "top_prompt": (self.logprobs or 0) if self.echo else 0,
        }


class TextPart(BaseModel):
    """A part of a message; texts alone are served."""

    model_config = ConfigDict(extra="forbid")

    type: str
    text: str


class Message(BaseModel):
    """A turn of a chat; what else it holds is the chat template's to use."""

    model_config = ConfigDict(extra="allow")

    role: str
    content: str | list[TextPart] | None = None

    def rendered(self) -> dict[str, Any]:
        """As chat templates take it: the content as one text."""
        content = self.content
        if isinstance(content, list):
            content = "".join(part.text for part in content)
        return {**(self.model_extra or {}), "role": self.role, "content": content or ""}


class ChatBody(_Body):
    """``POST /v1/chat/completions``."""

    messages: list[Message] = Field(min_length=1)
    max_tokens: int | None = Field(default=None, ge=1)
    max_completion_tokens: int | None = Field(default=None, ge=1)
    logprobs: bool = False
    top_logprobs: int | None = Field(default=None, ge=0, le=MAX_LOGPROBS)
    chat_template_kwargs: dict[str, Any] | None = None

    @model_validator(mode="after")
    def _consistent(self) -> ChatBody:
        if self.top_logprobs and not self.logprobs:
            raise ValueError("top_logprobs needs logprobs to be true")
        own = {"tokenizer", "messages"} & set(self.chat_template_kwargs or {})
        if own:
            raise ValueError(f"chat_template_kwargs cannot hold {', '.join(sorted(own))}")
        return self

    def chat(self) -> dict[str, Any]:
        """What is rendered into the prompt."""
        messages = [message.rendered() for message in self.messages]
        return {**(self.chat_template_kwargs or {}), "messages": messages}

    def params(self) -> dict[str, Any]:
        """As `_Body.params`."""
        most = self.max_completion_tokens or self.max_tokens
        top = self.top_logprobs or 0
        return {**super().params(), "max_tokens": most, "top_sample": top}
