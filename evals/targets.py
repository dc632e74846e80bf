"""What can be measured: anything that continues token ids and scores them.

Evidence for a gate is made on token ids, never on chat messages: the suite's template is
rendered and tokenised on our side, so its digest freezes what the model is really given.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import httpx
from tokenizers import Tokenizer

from evals.suites import Decoding
from registry.errors import InvalidInput, SlipwayError, Unavailable
from registry.views import VersionView

REQUEST_TIMEOUT_S = 600.0
"""How long one answer may take; a small machine with many questions at once is slow."""


@dataclass(frozen=True, kw_only=True)
class Completion:
    """What a model wrote after a prompt."""

    text: str
    """Without special tokens and without the stop text."""
    token_ids: tuple[int, ...]
    finish_reason: str
    """`stop`, or `length` when the token limit was reached."""


class Target(Protocol):
    """A model that can be measured."""

    async def generate(self, token_ids: Sequence[int], decoding: Decoding) -> Completion:
        """Continue a prompt. Raises TargetError."""
        ...

    async def logprobs(self, token_ids: Sequence[int]) -> list[float | None]:
        """The natural-log probability of each token given those before; None for the first.

        Raises TargetError.
        """
        ...


@dataclass(frozen=True, kw_only=True)
class Served:
    """A version that answers at an address for as long as it is held."""

    target_url: str
    """An OpenAI-compatible server, without `/v1`."""
    model: str
    """The version's name in that server."""
    engine: dict[str, Any]
    """Name, version, dtype, device: all that may change an answer."""
    fingerprint: str
    """A digest of `engine`; runs are compared only when it is equal."""
    replica_id: str


class TargetProvider(Protocol):
    """Serves versions; `serving` implements it."""

    def serve(self, version: VersionView, *, keep: bool) -> AbstractAsyncContextManager[Served]:
        """Serve `version` while the block runs, and with `keep` afterwards too."""
        ...


class TargetError(SlipwayError):
    """The server did not answer a request; `retryable` when trying again may help."""

    status = Unavailable.status
    code = Unavailable.code

    def __init__(self, message: str, *, retryable: bool) -> None:
        super().__init__(message)
        self.retryable = retryable


class Codec:
    """Text to token ids and back, by a `tokenizer.json`; adds no special tokens of its own."""

    def __init__(self, tokenizer_file: Path) -> None:
        try:
            self._tokenizer = Tokenizer.from_str(tokenizer_file.read_text(encoding="utf-8"))
        except FileNotFoundError:
            raise InvalidInput(
                f"there is no {tokenizer_file.name} in the version: only a merged version can be "
                "measured; merge it first with: slipway merge"
            ) from None
        except Exception as error:  # the tokenizers library raises plain Exception
            raise InvalidInput(f"{tokenizer_file.name} cannot be read: {error}") from None
        # Settings of the file that would silently cut or fill up a prompt.
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()

    def encode(self, text: str) -> list[int]:
        """Token ids; special tokens written out in the text become themselves."""
        return list(self._tokenizer.encode(text, add_special_tokens=False).ids)

    def decode(self, token_ids: Sequence[int]) -> str:
        """The text, special tokens left out."""
        return str(self._tokenizer.decode(list(token_ids), skip_special_tokens=True))


class CompletionsTarget:
    """A server with OpenAI's `/v1/completions` that takes prompts as token ids."""

    def __init__(
        self, *, base_url: str, model: str, codec: Codec, client: httpx.AsyncClient
    ) -> None:
        """`base_url` with or without `/v1`; `codec` of the version; `client` stays the caller's."""
        self._url = base_url.rstrip("/").removesuffix("/v1") + "/v1/completions"
        self._model = model
        self._client = client
        self._codec = codec

    async def generate(self, token_ids: Sequence[int], decoding: Decoding) -> Completion:
        """Continue a prompt, greedily. Raises TargetError."""
        choice = await self._ask(
            token_ids,
            max_tokens=decoding.max_tokens,
            stop=decoding.stop,
            # vLLM's extension; a server without it is asked for nothing it does not know.
            return_token_ids=True,
        )
        text, finish = choice.get("text"), choice.get("finish_reason")
        if not isinstance(text, str) or not isinstance(finish, str):
            raise TargetError("the answer has no text or no finish_reason", retryable=True)
        if finish not in ("stop", "length"):
            # vLLM ends requests with "abort" or "error" when it stops or fails.
            raise TargetError(f"the answer was broken off: {finish!r}", retryable=True)
        ids = choice.get("token_ids")
        if not isinstance(ids, list):
            ids = self._codec.encode(text)
        # Lone surrogates are legal in JSON and cannot be stored.
        text = text.encode("utf-8", "replace").decode("utf-8")
        return Completion(text=text, token_ids=tuple(ids), finish_reason=finish)

    async def logprobs(self, token_ids: Sequence[int]) -> list[float | None]:
        """Score a sequence by echo. Raises TargetError."""
        # One token is asked for and thrown away: not every server takes max_tokens=0.
        choice = await self._ask(token_ids, max_tokens=1, echo=True, logprobs=1)
        scores = choice.get("logprobs")
        values = scores.get("token_logprobs") if isinstance(scores, dict) else None
        if not isinstance(values, list) or len(values) < len(token_ids):
            raise TargetError(
                "the server does not return the prompt's logprobs (echo with logprobs)",
                retryable=False,
            )
        kept = values[: len(token_ids)]
        if any(not isinstance(value, int | float) for value in kept[1:]):
            raise TargetError("the server left out logprobs of the prompt", retryable=False)
        return [None, *(float(value) for value in kept[1:])]

    async def _ask(self, token_ids: Sequence[int], **options: Any) -> dict[str, Any]:
        body = {
            "model": self._model,
            "prompt": list(token_ids),
            "temperature": 0,
            "seed": 0,
            # A model folder's generation_config.json must not change the suite's decoding.
            "repetition_penalty": 1.0,
            **options,
        }
        try:
            response = await self._client.post(self._url, json=body)
        except httpx.HTTPError as error:
            raise TargetError(
                f"no answer: {type(error).__name__} {error}".rstrip(), retryable=True
            ) from None
        if response.status_code != 200:
            # Too many requests and timeouts pass; other 4xx come back the same every time.
            status = response.status_code
            raise TargetError(
                f"status {status}: {response.text[:300]}",
                retryable=status >= 500 or status in (408, 429),
            )
        try:
            choice = response.json()["choices"][0]
        except (json.JSONDecodeError, UnicodeDecodeError, KeyError, IndexError, TypeError):
            raise TargetError(
                f"the answer is not a completion: {response.text[:120]!r}", retryable=True
            ) from None
        if not isinstance(choice, dict):
            raise TargetError("the answer is not a completion", retryable=True)
        return choice
