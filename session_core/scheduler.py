"""The engine's one thread: training operations and sampling take turns on it.

Training operations run in the order they came; each run's owner sends one at a time, so
runs take turns too. Between two of them sampling gets as long as the last one took, and
without any waiting it goes on step by step, so neither starves behind a flood of the other.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from concurrent.futures import Future
from dataclasses import dataclass

from registry.errors import NotFound
from session_core.engine import Engine
from session_core.operations import UNLOAD_SAMPLER, Operation, Result
from session_core.sampler import Decoder

MIN_SLICE = 0.25
MAX_SLICE = 5.0
"""Seconds of sampling between two training operations that wait, at least and at most."""


@dataclass(frozen=True, kw_only=True)
class _Work:
    owner: str  # a run's id, or a sampler's
    operation: Operation
    future: Future[Result]


class Scheduler:
    """Feeds one engine from any thread."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._changed = threading.Condition()
        self._training: deque[_Work] = deque()
        self._sampling: deque[_Work] = deque()
        self._leaving: dict[str, _Work] = {}
        self._decoders: dict[str, Decoder] = {}
        self._closed = False
        self._thread = threading.Thread(target=self._loop, name="engine", daemon=True)
        self._thread.start()

    def execute(self, run_id: str, operation: Operation) -> Future[Result]:
        """Queue an operation of a run, or one that loads or unloads a sampler."""
        return self._queue(self._training, run_id, operation)

    def sample(self, sampler_id: str, operation: Operation) -> Future[Result]:
        """Queue a sample operation."""
        return self._queue(self._sampling, sampler_id, operation)

    def close(self) -> None:
        """Stop after the piece of work at hand; what waits is abandoned."""
        with self._changed:
            self._closed = True
            self._changed.notify()
        self._thread.join()

    def _queue(self, queue: deque[_Work], owner: str, operation: Operation) -> Future[Result]:
        work = _Work(owner=owner, operation=operation, future=Future())
        with self._changed:
            queue.append(work)
            self._changed.notify()
        return work.future

    def _loop(self) -> None:
        budget = MIN_SLICE
        while True:
            with self._changed:
                while not (self._training or self._sampling or self._decoders or self._closed):
                    self._changed.wait()
                if self._closed:
                    return
                work = self._training.popleft() if self._training else None
            # A future that runs can no longer be cancelled by a caller who went away.
            if work is not None and work.future.set_running_or_notify_cancel():
                started = time.monotonic()
                self._train(work)
                budget = min(MAX_SLICE, max(MIN_SLICE, time.monotonic() - started))
            self._sample_for(budget)

    def _train(self, work: _Work) -> None:
        if work.operation.kind == UNLOAD_SAMPLER:
            self._admit()  # requests that came before it
            sampler_id = str(work.operation.params.get("sampler_id"))
            if sampler_id in self._decoders:
                # Its last requests are still decoding; it goes when they are done.
                self._leaving[sampler_id] = work
                return
        try:
            work.future.set_result(self._engine.execute(work.owner, work.operation))
        except Exception as error:
            work.future.set_exception(error)

    def _sample_for(self, budget: float) -> None:
        end = time.monotonic() + budget
        while not self._closed:
            self._admit()
            if not self._decoders:
                return
            for sampler_id, decoder in list(self._decoders.items()):
                self._step(sampler_id, decoder)
            if self._training and time.monotonic() >= end:
                return

    def _admit(self) -> None:
        while self._sampling:
            work = self._sampling.popleft()
            if not work.future.set_running_or_notify_cancel():
                continue
            try:
                decoder = self._decoders.get(work.owner)
                if decoder is None:
                    decoder = Decoder(self._engine, work.owner)
                elif work.owner in self._leaving:
                    raise NotFound(f"Sampler {work.owner} is not loaded.")
                decoder.submit(work.operation, tag=work.future)
                self._decoders[work.owner] = decoder
            except Exception as error:
                work.future.set_exception(error)

    def _step(self, sampler_id: str, decoder: Decoder) -> None:
        try:
            for job in decoder.step():
                job.tag.set_result(job.result())
        except Exception as error:
            for job in decoder.jobs:
                job.tag.set_exception(error)
            decoder.jobs = []
        if not decoder.jobs:
            del self._decoders[sampler_id]
            leaving = self._leaving.pop(sampler_id, None)
            if leaving is not None:
                self._train(leaving)
