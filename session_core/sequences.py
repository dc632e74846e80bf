"""A request for samples on its way: its sequences, and what was asked about its prompt."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from session_core.operations import Array, Result, ragged
from session_core.prompts import PromptScores
from session_core.requests import SampleRequest

Listener = Callable[["Sequence"], None]
"""Told of a sequence each time it has one token more."""


@dataclass(frozen=True, kw_only=True)
class Prefilled:
    """A computed prompt, kept while samples of it wait: it is computed once for all.

    Fields:
        row: where it was in the batch it was computed in.
        layers: keys and values [1, heads, P, width] a layer.
        logits: of the first token to sample, float32 [V].
    """

    row: int
    layers: list[tuple[torch.Tensor, torch.Tensor]]
    logits: torch.Tensor


@dataclass(kw_only=True, eq=False)
class Job:
    """A request, its progress, and in the end its result or its error.

    Fields:
        slot: the adapter's, None for the base model.
        tenant: whose it is; tenants share the rows.
        tag: the caller's own.
        waiting: sequences that have not begun.
    """

    request: SampleRequest
    sampler_id: str
    slot: str | None
    tenant: str = ""
    tag: Any = None
    listener: Listener | None = None
    sequences: list[Sequence] = field(default_factory=list)
    waiting: int = 0
    prefilled: Prefilled | None = None
    scores: PromptScores | None = None
    places: Array | None = None
    """Where sparse targets of the prompt stood; handed back beside their logprobs."""
    error: Exception | None = None

    @property
    def done(self) -> bool:
        """Whether all that was asked for is there, or never will be."""
        return self.error is not None or all(s.stop_reason for s in self.sequences)

    def result(self) -> Result:
        """The sample operation's result. Raises the error, if there is one."""
        if self.error is not None:
            raise self.error
        tokens, offsets = ragged([np.array(s.tokens, np.int32) for s in self.sequences])
        logprobs, _ = ragged([np.array(s.logprobs, np.float32) for s in self.sequences])
        arrays = {
            "tokens": tokens,
            "tokens.offsets": offsets,
            "logprobs": logprobs,
            "logprobs.offsets": offsets,
        }
        if self.request.top_sample:
            arrays["top.ids"] = np.stack([i for s in self.sequences for i, _ in s.top])
            arrays["top.logprobs"] = np.stack([v for s in self.sequences for _, v in s.top])
        if self.scores is not None:
            arrays.update(self.scores.arrays())
        if self.places is not None:
            arrays["prompt_targets.places"] = self.places
        return Result(
            params={
                "stop_reasons": [s.stop_reason for s in self.sequences],
                "prompt_tokens": len(self.request.tokens),
                "seed": self.request.seed,
            },
            arrays=arrays,
        )


@dataclass(kw_only=True, eq=False)
class Sequence:
    """One sample in the making. `stop_reason` is empty until it ends: stop or length."""

    job: Job
    index: int
    stream: np.random.Generator
    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    top: list[tuple[Array, Array]] = field(default_factory=list)
    """The likeliest ids int32 [k] and their logprobs float32 [k], a token, where asked for."""
    stop_reason: str = ""

    @property
    def length(self) -> int:
        """Tokens of prompt and sample."""
        return len(self.job.request.tokens) + len(self.tokens)
