"""A request for samples, checked."""

from __future__ import annotations

import math
import secrets
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from registry.errors import InvalidInput
from session_core.operations import Array, Operation

MAX_SAMPLES = 1024
MAX_TOP = 256
"""The most tokens a position is answered with."""
MAX_TARGETS = 2**22
"""The most tokens that can be asked for along a prompt."""
_KNOWN = frozenset(
    {
        "max_tokens",
        "temperature",
        "top_k",
        "top_p",
        "seed",
        "stop",
        "stop_token_ids",
        "stop_at_end",
        "num_samples",
        "prompt_logprobs",
        "top_prompt",
        "top_sample",
        "last_scored",
        "alternatives",
    }
)
# Apart from every sample's own stream, whose numbers are below.
_ALTERNATIVES = 2**32


@dataclass(frozen=True, kw_only=True, eq=False)
class SampleRequest:
    """What to sample.

    Fields:
        tokens: the prompt, int64 [1..context].
        max_tokens: at most so many new tokens; never past the context.
        temperature: 0 is greedy.
        top_k, top_p: filters on the tempered distribution, k first; 0 and 1 mean none.
        stop_tokens, stop_texts: any of them ends a sequence, and stays in it.
        prompt_logprobs: whether the prompt's logprobs are wanted.
        top_prompt, top_sample: how many of the likeliest tokens are wanted at each position
            of the prompt, and of a sample.
        last_scored: only so many tokens at the prompt's end are scored; 0 means all.
        alternatives: tokens drawn at every position of the prompt after the first.
        prompt_targets: int64 [prompt - 1, K], tokens to be scored at those; -1 asks nothing.
    """

    tokens: Array
    max_tokens: int
    temperature: float
    top_k: int
    top_p: float
    seed: int
    stop_tokens: frozenset[int]
    stop_texts: tuple[str, ...]
    num_samples: int
    prompt_logprobs: bool = False
    top_prompt: int = 0
    top_sample: int = 0
    last_scored: int = 0
    alternatives: int = 0
    prompt_targets: Array | None = None

    @property
    def scores_prompt(self) -> bool:
        """Whether anything is asked of the prompt itself."""
        asked = self.prompt_logprobs or self.top_prompt or self.alternatives
        return bool(asked) or self.prompt_targets is not None

    def stream_of(self, index: int) -> np.random.Generator:
        """The random stream of sample number `index`."""
        return np.random.Generator(np.random.PCG64(np.random.SeedSequence([self.seed, index])))

    def stream_of_alternatives(self) -> np.random.Generator:
        """The random stream of what is drawn along the prompt."""
        return self.stream_of(_ALTERNATIVES)


def read_request(
    operation: Operation, *, vocabulary: int, context: int, eos: frozenset[int]
) -> SampleRequest:
    """Check a sample operation. Raises InvalidInput naming what is wrong.

    `stop` None stops at the end-of-text tokens; a list, even an empty one, takes their
    place, unless `stop_at_end` keeps them beside it. `stop_token_ids` come on top. Without a
    seed one is drawn. A prompt must leave room for one token.
    """
    params = operation.params
    unknown = sorted(set(params) - _KNOWN)
    if unknown:
        raise InvalidInput(f"Unknown sampling parameters: {', '.join(unknown)}.")
    tokens = np.asarray(operation.arrays.get("tokens", ()))
    if tokens.ndim != 1 or len(tokens) == 0 or tokens.dtype.kind not in "iu":
        raise InvalidInput("The prompt must be a list of at least one token id.")
    tokens = tokens.astype(np.int64)
    if int(tokens.min()) < 0 or int(tokens.max()) >= vocabulary:
        raise InvalidInput(f"The prompt holds tokens outside the vocabulary of {vocabulary}.")
    if len(tokens) >= context:
        raise InvalidInput(
            f"The prompt has {len(tokens)} tokens; with one token sampled, the context of "
            f"{context} holds {context - 1}."
        )
    room = context - len(tokens)
    max_tokens = _whole(params, "max_tokens", room, 1, None)
    stop_tokens, stop_texts = _stops(params.get("stop"), eos)
    more_tokens, _ = _stops(params.get("stop_token_ids") or (), eos)
    stop_tokens |= more_tokens | (eos if params.get("stop_at_end") else frozenset())
    most = min(MAX_TOP, vocabulary)
    prompt_logprobs = bool(params.get("prompt_logprobs", False))
    last_scored = _whole(params, "last_scored", 0, 1, None)
    if last_scored and not prompt_logprobs:
        raise InvalidInput("prompt_logprobs_last_n needs prompt_logprobs.")
    if last_scored > max(1, len(tokens) - 1):
        raise InvalidInput(
            f"prompt_logprobs_last_n is {last_scored}; of a prompt of {len(tokens)} tokens "
            f"{len(tokens) - 1} can be scored."
        )
    return SampleRequest(
        tokens=tokens,
        max_tokens=min(max_tokens, room),
        temperature=_real(params, "temperature", 1.0, 0.0, math.inf),
        top_k=max(0, _whole(params, "top_k", -1, -1, None)),
        top_p=_real(params, "top_p", 1.0, 0.0, 1.0),
        seed=_whole(params, "seed", secrets.randbits(62), None, None) % 2**64,
        stop_tokens=stop_tokens,
        stop_texts=stop_texts,
        num_samples=_whole(params, "num_samples", 1, 1, MAX_SAMPLES),
        prompt_logprobs=prompt_logprobs,
        top_prompt=_whole(params, "top_prompt", 0, 0, most),
        top_sample=_whole(params, "top_sample", 0, 0, most),
        last_scored=last_scored,
        alternatives=_whole(params, "alternatives", 0, 0, most),
        prompt_targets=_targets(operation, len(tokens), vocabulary),
    )


def _targets(operation: Operation, length: int, vocabulary: int) -> Array | None:
    if "prompt_targets" not in operation.arrays:
        return None
    targets = np.asarray(operation.arrays["prompt_targets"])
    fits = targets.ndim == 2 and len(targets) == length - 1 and targets.dtype.kind in "iu"
    if not fits or targets.size > MAX_TARGETS:
        raise InvalidInput(
            f"target_prompt_logprobs must hold token ids of shape [{length - 1}, K], at most "
            f"{MAX_TARGETS} in all, for a prompt of {length} tokens; its shape is "
            f"{list(targets.shape)}."
        )
    targets = targets.astype(np.int64)
    if targets.size and (int(targets.min()) < -1 or int(targets.max()) >= vocabulary):
        raise InvalidInput(
            "target_prompt_logprobs holds tokens outside the vocabulary of "
            f"{vocabulary} (-1 asks nothing)."
        )
    return targets


def _stops(stop: Any, eos: frozenset[int]) -> tuple[frozenset[int], tuple[str, ...]]:
    if stop is None:
        return eos, ()
    items = [stop] if isinstance(stop, str) else stop
    if not isinstance(items, list | tuple):
        raise InvalidInput("stop must be a text, a list of texts, or a list of token ids.")
    if all(isinstance(item, int) and not isinstance(item, bool) for item in items):
        return frozenset(items), ()
    if all(isinstance(item, str) and item for item in items):
        return frozenset(), tuple(items)
    raise InvalidInput("stop must hold either token ids or texts that are not empty.")


def _whole(
    params: Mapping[str, Any], name: str, default: int, low: int | None, high: int | None
) -> int:
    value = params.get(name)
    if value is None:
        return default
    if isinstance(value, bool) or not isinstance(value, int):
        raise InvalidInput(f"{name} must be a whole number, not {value!r}.")
    if (low is not None and value < low) or (high is not None and value > high):
        raise InvalidInput(f"{name} must be {low} {f'to {high}' if high else 'or more'}.")
    return value


def _real(params: Mapping[str, Any], name: str, default: float, low: float, high: float) -> float:
    value = params.get(name)
    if value is None:
        return default
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        raise InvalidInput(f"{name} must be a finite number, not {value!r}.")
    if not low <= value <= high or (name == "top_p" and value == 0):
        limit = "above 0 and at most 1" if name == "top_p" else "0 or more"
        raise InvalidInput(f"{name} must be {limit}, not {value}.")
    return float(value)
