"""Samples from the base model and its adapters, many sequences at a time.

Requests may come at any moment: their prompts are computed together and their sequences join
those that are running, whichever adapter they sample with. The keys and values of a prompt
are computed once for all its samples. One call of `step` does one piece of work (a prefill,
or one token for all rows), so that whoever drives it can do other things in between.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from typing import Any

import numpy as np
import torch
from transformers.cache_utils import DynamicCache

from session_core.choose import choose
from session_core.engine import Engine
from session_core.operations import Operation, Result
from session_core.prompts import score_prompt
from session_core.requests import read_request
from session_core.rows import fill_holes, row_cache, rows_can_join
from session_core.sequences import Job, Listener, Prefilled, Sequence
from session_core.waiting import Waiting

MAX_ROWS = 64
"""Sequences decoded at once."""

PREFILL_TOKENS = 4096
"""Padded prompt tokens in one prefill, at most, unless one prompt alone is longer."""


class Decoder:
    """Decodes everything that is sampled from one engine."""

    def __init__(
        self, engine: Engine, *, rows: int = MAX_ROWS, prefill_tokens: int = PREFILL_TOKENS
    ) -> None:
        self._engine = engine
        self._base = engine.base
        self._most_rows = rows
        self._prefill_tokens = prefill_tokens
        self._waiting: Waiting[Sequence] = Waiting()
        self._rows: list[Sequence] = []
        self._cache: Any = None
        self._columns = 0  # tokens in the cache, of the longest row
        self._joinable = rows_can_join(self._base.model.config)
        self.jobs: list[Job] = []

    def submit(
        self,
        sampler_id: str,
        operation: Operation,
        *,
        tenant: str = "",
        tag: Any = None,
        listener: Listener | None = None,
    ) -> Job:
        """Queue a sample operation.

        Raises InvalidInput for a wrong one, NotFound when the sampler is not loaded.
        """
        base = self._base
        request = read_request(
            operation, vocabulary=base.vocabulary, context=base.context, eos=base.eos
        )
        job = Job(
            request=request,
            sampler_id=sampler_id,
            slot=self._engine.sampler_slot(sampler_id),
            tenant=tenant,
            tag=tag,
            listener=listener,
            waiting=request.num_samples,
            places=operation.arrays.get("prompt_targets.places"),
        )
        job.sequences = [
            Sequence(job=job, index=index, stream=request.stream_of(index))
            for index in range(request.num_samples)
        ]
        self._waiting.push(tenant, job.sequences)
        self.jobs.append(job)
        return job

    def cancel(self, job: Job) -> None:
        """Give a job up; its rows are free for others."""
        self._drop(job)
        self.jobs = [other for other in self.jobs if other is not job]

    def in_use(self, sampler_id: str) -> bool:
        """Whether anything is being sampled from a sampler."""
        return any(job.sampler_id == sampler_id for job in self.jobs)

    @torch.no_grad()
    def step(self) -> list[Job]:
        """One piece of work; returns the jobs that ended with it, some perhaps in error."""
        group = self._next_group()
        jobs = {id(s.job): s.job for s in group or self._rows}
        try:
            if group:
                self._begin(group)
            elif self._rows:
                self._advance()
        except Exception as error:
            # What failed is these jobs' computation and nobody else's.
            self._fail(jobs.values(), error)
            if self._cache is not None and self._joinable:
                halfway = any(layer.rows != len(self._rows) for layer in self._cache.layers)
                if halfway:
                    self._fail({id(s.job): s.job for s in self._rows}.values(), error)
        ended = [job for job in self.jobs if job.done]
        if ended:
            self.jobs = [job for job in self.jobs if not job.done]
        return ended

    def _fail(self, jobs: Iterable[Job], error: Exception) -> None:
        for job in jobs:
            job.error = error
            self._drop(job)

    def _next_group(self) -> list[Sequence]:
        """The waiting sequences that begin now: as there is room, and fit in one prefill."""
        room = self._most_rows - len(self._rows)
        if self._rows and not self._joinable:
            return []
        alike = not self._engine.adapters.mixable
        slots = {sequence.job.slot for sequence in self._rows}
        group: list[Sequence] = []
        prompts: set[int] = set()
        longest = 0
        if room <= 0:
            return group
        for sequence in self._waiting.draw(Counter(s.job.tenant for s in self._rows)):
            job = sequence.job
            fresh = job.prefilled is None
            width = max(longest, len(job.request.tokens)) if fresh else longest
            many = len(prompts | {id(job)}) if fresh else len(prompts)
            too_large = bool(prompts) and fresh and width * many > self._prefill_tokens
            if too_large or (alike and slots and job.slot not in slots):
                self._waiting.put_back(job.tenant, sequence)
                break
            if fresh:
                prompts.add(id(job))
            longest = width
            slots.add(job.slot)
            group.append(sequence)
            if len(group) == room:
                break
        return group

    def _begin(self, group: list[Sequence]) -> None:
        """Compute the prompts of a group, take first tokens, and let the rows join."""
        fresh = list({id(s.job): s.job for s in group if s.job.prefilled is None}.values())
        if fresh:
            self._prefill(fresh)
        for sequence in group:
            sequence.job.waiting -= 1
        computed = [self._prefilled(sequence.job) for sequence in group]
        self._take(torch.stack([prompt.logits for prompt in computed]), group)
        going = [row for row, sequence in enumerate(group) if not sequence.stop_reason]
        if going:
            self._join([group[row] for row in going], [computed[row] for row in going])
        for sequence in group:
            if not sequence.job.waiting or not self._joinable:
                sequence.job.prefilled = None

    @staticmethod
    def _prefilled(job: Job) -> Prefilled:
        assert job.prefilled is not None
        return job.prefilled

    def _prefill(self, jobs: list[Job]) -> None:
        """Compute prompts, and what was asked about them."""
        device = self._base.device
        lengths = [len(job.request.tokens) for job in jobs]
        longest = max(lengths)
        tokens = np.zeros((len(jobs), longest), np.int64)
        mask = np.zeros((len(jobs), longest), np.int64)
        for row, job in enumerate(jobs):
            tokens[row, longest - lengths[row] :] = job.request.tokens
            mask[row, longest - lengths[row] :] = 1
        on_device = torch.from_numpy(mask).to(device)
        # Plain layers where rows are to be joined: a window's keys alone cannot be shifted.
        cache = DynamicCache() if self._joinable else DynamicCache(config=self._base.model.config)
        asked = [job.request.scores_prompt for job in jobs]
        self._engine.adapters.use_rows([job.slot for job in jobs])
        positions = self._base.prompt_positions(
            torch.from_numpy(tokens).to(device),
            on_device,
            (on_device.cumsum(dim=-1) - 1).clamp(min=0),
            cache,
            whole=any(asked),
        )
        last = self._base.position_logits(positions[:, -1])
        for row, job in enumerate(jobs):
            if not asked[row]:
                continue
            begin = longest - lengths[row]

            def logits_at(start: int, end: int, row: int = row, begin: int = begin) -> torch.Tensor:
                self._engine.adapters.use_rows([jobs[row].slot] * (end - start))
                return self._base.position_logits(positions[row, begin + start : begin + end])

            job.scores = score_prompt(
                job.request, logits_at, vocabulary=self._base.vocabulary, device=device
            )
        if not self._joinable:
            self._cache, self._columns = cache, longest
        for row, job in enumerate(jobs):
            layers = []
            if self._joinable:
                begin = longest - lengths[row]
                layers = [
                    (layer.keys[row : row + 1, :, begin:], layer.values[row : row + 1, :, begin:])
                    for layer in cache.layers
                ]
            job.prefilled = Prefilled(row=row, layers=layers, logits=last[row].float())

    def _join(self, sequences: list[Sequence], prompts: list[Prefilled]) -> None:
        if not self._joinable:
            # What has just been computed is the cache.
            self._cache.batch_select_indices(torch.tensor([prompt.row for prompt in prompts]))
            self._rows = sequences
            return
        if self._cache is None:
            self._cache = row_cache(len(prompts[0].layers))
        longest = max(len(s.job.request.tokens) for s in sequences)
        self._columns = max(self._columns, longest)
        for number, layer in enumerate(self._cache.layers):
            keys, values = (
                torch.cat([_widen(prompt.layers[number][side], longest) for prompt in prompts])
                for side in (0, 1)
            )
            layer.join(keys, values)
        self._rows = self._rows + sequences

    def _advance(self) -> None:
        """One more token for every row; rows that end leave."""
        device = self._base.device
        rows = self._rows
        lengths = torch.tensor([sequence.length for sequence in rows])
        self._columns += 1
        columns, mask = self._columns, None
        if int(lengths.min()) < columns:
            mask = (torch.arange(columns)[None] >= columns - lengths[:, None]).long().to(device)
        self._engine.adapters.use_rows([sequence.job.slot for sequence in rows])
        logits = self._base.next_logits(
            torch.tensor([[sequence.tokens[-1]] for sequence in rows], device=device),
            mask,
            (lengths[:, None] - 1).to(device),
            self._cache,
        )
        self._take(logits, rows)
        self._leave([not sequence.stop_reason for sequence in rows])

    def _leave(self, alive: list[bool]) -> None:
        """Keep the living rows."""
        if all(alive):
            return
        if not any(alive):
            self._rows, self._cache, self._columns = [], None, 0
            return
        if not self._joinable:
            kept = [row for row, lives in enumerate(alive) if lives]
            self._cache.batch_select_indices(torch.tensor(kept))
            self._rows = [self._rows[row] for row in kept]
            return
        order, moves = fill_holes(alive)
        self._rows = [self._rows[row] for row in order]
        # The newest token of a row has no keys yet.
        self._columns = max(sequence.length for sequence in self._rows) - 1
        for layer in self._cache.layers:
            layer.keep(moves, len(order), self._columns)

    def _drop(self, job: Job) -> None:
        """Take a job's sequences out of the line and out of the rows."""
        self._waiting.remove(job.tenant, lambda sequence: sequence.job is job)
        self._leave([sequence.job is not job for sequence in self._rows])

    def _take(self, logits: torch.Tensor, sequences: list[Sequence]) -> None:
        """Choose each row's next token and see whether it ends there."""
        tokens, logprobs = choose(
            logits,
            [sequence.job.request for sequence in sequences],
            [sequence.stream for sequence in sequences],
        )
        for row, sequence in enumerate(sequences):
            request = sequence.job.request
            sequence.tokens.append(tokens[row])
            sequence.logprobs.append(logprobs[row])
            if request.top_sample:
                best = torch.log_softmax(logits[row], dim=-1).topk(request.top_sample)
                ids, values = best.indices.cpu().numpy(), best.values.cpu().numpy()
                sequence.top.append((ids.astype(np.int32), values))
            if tokens[row] in request.stop_tokens or self._ends_in_stop_text(sequence):
                sequence.stop_reason = "stop"
            elif len(sequence.tokens) >= request.max_tokens:
                sequence.stop_reason = "length"
            if sequence.job.listener is not None:
                sequence.job.listener(sequence)

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


def sample_all(
    engine: Engine, sampler_id: str, operations: list[Operation], **limits: int
) -> list[Result]:
    """Sample a list of operations to the end, in one batch; `limits` are the Decoder's."""
    decoder = Decoder(engine, **limits)
    jobs = [decoder.submit(sampler_id, operation) for operation in operations]
    while decoder.jobs:
        decoder.step()
    return [job.result() for job in jobs]


def _widen(tensor: torch.Tensor, width: int) -> torch.Tensor:
    """Keys or values [B, heads, T, D], zeros put before them to make T = width."""
    return torch.nn.functional.pad(tensor, (0, 0, width - tensor.shape[-2], 0))
