"""Sampling with one adapter: a batch that requests join and leave as they come and end.

Prompts are padded at the left, so that every row's newest token is in the last column. A
request's samples share the prefill of its prompt; new rows join the running batch, finished
ones leave it at once. One `step` is one bounded piece of work (a prefill or one token for
all rows), so that whoever drives it can do other things in between.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from transformers.cache_utils import DynamicCache, DynamicLayer

from session_core.choose import choose, stream
from session_core.engine import Engine
from session_core.operations import Array, Operation, Result, ragged
from session_core.passes import prompt_logprobs
from session_core.requests import SampleRequest, read_request

MAX_ROWS = 64
"""Sequences decoded at once."""

PREFILL_TOKENS = 4096
"""Padded prompt tokens in one prefill, at most, unless one prompt alone is longer."""


@dataclass(kw_only=True, eq=False)
class Job:
    """A request on its way: its sequences, and its prompt's logprobs if it wants them."""

    request: SampleRequest
    tag: Any = None
    sequences: list[Sequence] = field(default_factory=list)
    prompt_logprobs: Array | None = None

    @property
    def done(self) -> bool:
        """Whether all that was asked for is there."""
        scored = self.prompt_logprobs is not None or not self.request.prompt_logprobs
        return scored and all(sequence.stop_reason for sequence in self.sequences)

    def result(self) -> Result:
        """The sample operation's result."""
        tokens, offsets = ragged([np.array(s.tokens, np.int32) for s in self.sequences])
        logprobs, _ = ragged([np.array(s.logprobs, np.float32) for s in self.sequences])
        arrays = {
            "tokens": tokens,
            "tokens.offsets": offsets,
            "logprobs": logprobs,
            "logprobs.offsets": offsets,
        }
        if self.prompt_logprobs is not None:
            arrays["prompt_logprobs"] = self.prompt_logprobs
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
    stream: np.random.Generator
    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    stop_reason: str = ""

    @property
    def length(self) -> int:
        """Tokens of prompt and sample."""
        return len(self.job.request.tokens) + len(self.tokens)


@dataclass(kw_only=True)
class _Rows:
    """Rows under way: their sequences, the keys and values so far, and the mask [B, T]."""

    sequences: list[Sequence]
    cache: Any
    mask: torch.Tensor


class Decoder:
    """Samples with one adapter of an engine, or with its bare base model."""

    def __init__(self, engine: Engine, sampler_id: str) -> None:
        """Raises NotFound when the sampler is not loaded."""
        self._engine = engine
        self._base = engine.base
        self._slot = engine.sampler_slot(sampler_id)
        self._waiting: deque[Sequence] = deque()
        self._to_score: deque[Job] = deque()
        self._rows: _Rows | None = None
        self.jobs: list[Job] = []

    def submit(self, operation: Operation, tag: Any = None) -> Job:
        """Queue a sample operation. Raises InvalidInput for a wrong one."""
        base = self._base
        request = read_request(
            operation, vocabulary=base.vocabulary, context=base.context, eos=base.eos
        )
        job = Job(request=request, tag=tag)
        for index in range(request.num_samples):
            job.sequences.append(Sequence(job=job, stream=stream(request, index)))
        self._waiting.extend(job.sequences)
        if request.prompt_logprobs:
            self._to_score.append(job)
        self.jobs.append(job)
        return job

    @torch.no_grad()
    def step(self) -> list[Job]:
        """One piece of work; returns the jobs it completed."""
        self._engine.adapters.use(self._slot)
        if self._to_score:
            job = self._to_score.popleft()
            (job.prompt_logprobs,) = prompt_logprobs(
                self._base, self._engine.adapters, self._slot, [job.request.tokens]
            )
        elif self._waiting and self._room() > 0:
            self._join(self._prefill(self._next_group(self._room())))
        elif self._rows is not None:
            self._rows = self._advance(self._rows)
        done = [job for job in self.jobs if job.done]
        if done:
            self.jobs = [job for job in self.jobs if not job.done]
        return done

    def _room(self) -> int:
        if self._rows is None:
            return MAX_ROWS
        plain = all(type(layer) is DynamicLayer for layer in self._rows.cache.layers)
        # Keys in a window or a state cannot be shifted to make rows of one length.
        return MAX_ROWS - len(self._rows.sequences) if plain else 0

    def _next_group(self, room: int) -> list[Sequence]:
        """The first waiting sequences that fit in one prefill; at least one."""
        group: list[Sequence] = []
        prompts: set[int] = set()
        longest = 0
        while self._waiting and len(group) < room:
            job = self._waiting[0].job
            width = max(longest, len(job.request.tokens))
            if group and width * len(prompts | {id(job)}) > PREFILL_TOKENS:
                break
            prompts.add(id(job))
            longest = width
            group.append(self._waiting.popleft())
        return group

    def _prefill(self, group: list[Sequence]) -> _Rows | None:
        """Compute the prompts of a group and take each sequence's first token."""
        jobs = list({id(sequence.job): sequence.job for sequence in group}.values())
        index = {id(job): row for row, job in enumerate(jobs)}
        longest = max(len(job.request.tokens) for job in jobs)
        tokens = np.zeros((len(jobs), longest), np.int64)
        mask = np.zeros((len(jobs), longest), np.int64)
        for row, job in enumerate(jobs):
            count = len(job.request.tokens)
            tokens[row, longest - count :] = job.request.tokens
            mask[row, longest - count :] = 1
        device = self._base.device
        on_device = torch.from_numpy(mask).to(device)
        cache = DynamicCache(config=self._base.model.config)
        positions = (on_device.cumsum(dim=-1) - 1).clamp(min=0)
        logits = self._forward(torch.from_numpy(tokens).to(device), on_device, positions, cache)
        rows = torch.tensor([index[id(sequence.job)] for sequence in group], device=device)
        self._take(logits[rows], group)
        alive = [row for row, sequence in enumerate(group) if not sequence.stop_reason]
        if not alive:
            return None
        kept = rows[alive]
        cache.batch_select_indices(kept)
        return _Rows(sequences=[group[row] for row in alive], cache=cache, mask=on_device[kept])

    def _join(self, new: _Rows | None) -> None:
        """Put new rows under those that are running."""
        old = self._rows
        if new is None or old is None:
            self._rows = new or old
            return
        width = max(old.mask.shape[1], new.mask.shape[1])
        for mine, theirs in zip(old.cache.layers, new.cache.layers, strict=True):
            mine.keys = torch.cat([_widen(mine.keys, width), _widen(theirs.keys, width)])
            mine.values = torch.cat([_widen(mine.values, width), _widen(theirs.values, width)])
        masks = [
            torch.nn.functional.pad(mask, (width - mask.shape[1], 0))
            for mask in (old.mask, new.mask)
        ]
        self._rows = _Rows(
            sequences=old.sequences + new.sequences, cache=old.cache, mask=torch.cat(masks)
        )

    def _advance(self, rows: _Rows) -> _Rows | None:
        """One more token for every row; rows that end leave."""
        device = self._base.device
        last = torch.tensor([[s.tokens[-1]] for s in rows.sequences], device=device)
        positions = torch.tensor([[s.length - 1] for s in rows.sequences], device=device)
        mask = torch.nn.functional.pad(rows.mask, (0, 1), value=1)
        logits = self._forward(last, mask, positions, rows.cache)
        self._take(logits, rows.sequences)
        alive = [row for row, sequence in enumerate(rows.sequences) if not sequence.stop_reason]
        if len(alive) == len(rows.sequences):
            return _Rows(sequences=rows.sequences, cache=rows.cache, mask=mask)
        if not alive:
            return None
        kept = torch.tensor(alive, device=device)
        rows.cache.batch_select_indices(kept)
        mask = mask[kept]
        if all(type(layer) is DynamicLayer for layer in rows.cache.layers):
            # Columns that only rows now gone had filled.
            empty = int(mask.argmax(dim=-1).min())
            mask = mask[:, empty:]
            for layer in rows.cache.layers:
                layer.keys = layer.keys[..., empty:, :]
                layer.values = layer.values[..., empty:, :]
        return _Rows(sequences=[rows.sequences[row] for row in alive], cache=rows.cache, mask=mask)

    def _forward(
        self, tokens: torch.Tensor, mask: torch.Tensor, positions: torch.Tensor, cache: Any
    ) -> torch.Tensor:
        """Logits [B, V] of the last column, float32."""
        output = self._base.model(
            input_ids=tokens,
            attention_mask=None if bool(mask.all()) else mask,
            position_ids=positions,
            past_key_values=cache,
            use_cache=True,
            logits_to_keep=1,
        )
        logits: torch.Tensor = output.logits[:, -1].float()
        return logits

    def _take(self, logits: torch.Tensor, sequences: list[Sequence]) -> None:
        """Choose each row's next token and see whether it ends there."""
        tokens, logprobs = choose(
            logits,
            [sequence.job.request for sequence in sequences],
            [sequence.stream for sequence in sequences],
        )
        for sequence, token, logprob in zip(sequences, tokens, logprobs, strict=True):
            sequence.tokens.append(token)
            sequence.logprobs.append(logprob)
            request = sequence.job.request
            if token in request.stop_tokens or self._ends_in_stop_text(sequence):
                sequence.stop_reason = "stop"
            elif len(sequence.tokens) >= request.max_tokens:
                sequence.stop_reason = "length"

    def _ends_in_stop_text(self, sequence: Sequence) -> bool:
        texts = sequence.job.request.stop_texts
        if not texts:
            return False
        # A token is at least a byte, so a stop text cannot reach back further than this.
        reach = max(len(text.encode()) for text in texts) + 4
        tail = self._base.tokenizer.decode(
            sequence.tokens[-reach:],
            skip_special_tokens=False,
            clean_up_tokenization_spaces=False,
        )
        return any(text in tail for text in texts)


def sample_all(engine: Engine, sampler_id: str, operations: list[Operation]) -> list[Result]:
    """Sample a list of operations to the end, in one batch."""
    decoder = Decoder(engine, sampler_id)
    jobs = [decoder.submit(operation) for operation in operations]
    while decoder.jobs:
        decoder.step()
    return [job.result() for job in jobs]


def _widen(tensor: torch.Tensor, width: int) -> torch.Tensor:
    """Keys or values [B, heads, T, D], zeros put before them to make T = width."""
    return torch.nn.functional.pad(tensor, (0, 0, width - tensor.shape[-2], 0))
