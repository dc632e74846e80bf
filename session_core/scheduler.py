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

from registry.errors import InvalidInput
from session_core.engine import Engine
from session_core.operations import UNLOAD_SAMPLER, Operation, Result
from session_core.sampler import Decoder
from session_core.sequences import Job, Listener

MIN_SLICE = 0.25
MAX_SLICE = 5.0
"""Seconds of sampling between two training operations that wait, at least and at most."""


@dataclass(frozen=True, kw_only=True, eq=False)
class _Work:
    owner: str  # a run's id, or a sampler's
    operation: Operation
    future: Future[Result]
    tenant: str = ""
    listener: Listener | None = None


class Scheduler:
    """Feeds one engine from any thread."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._changed = threading.Condition()
        self._training: deque[_Work] = deque()
        self._sampling: deque[_Work] = deque()
        self._given_up: set[Future[Result]] = set()
        self._decoder = Decoder(engine)
        self._closed = False
        self._working = False
        self._progress = time.monotonic()
        engine.progress = self._note_progress
        self._thread = threading.Thread(target=self._loop, name="engine", daemon=True)
        self._thread.start()

    def execute(self, run_id: str, operation: Operation) -> Future[Result]:
        """Queue an operation of a run, or one that loads or unloads a sampler."""
        return self._queue(
            self._training, _Work(owner=run_id, operation=operation, future=Future())
        )

    def sample(
        self,
        sampler_id: str,
        operation: Operation,
        *,
        tenant: str = "",
        listener: Listener | None = None,
    ) -> Future[Result]:
        """Queue a sample operation.

        Args:
            tenant: whose it is: tenants share the rows that are decoded.
            listener: called on the engine's thread with a sequence that has a token more.
        """
        work = _Work(
            owner=sampler_id,
            operation=operation,
            future=Future(),
            tenant=tenant,
            listener=listener,
        )
        return self._queue(self._sampling, work)

    def give_up(self, future: Future[Result]) -> None:
        """Stop sampling what nobody waits for any more."""
        if future.cancel() or future.done():
            return
        with self._changed:
            self._given_up.add(future)
            self._changed.notify()

    def stalled_for(self) -> float:
        """Seconds since the last sign of progress; 0 when there is nothing to do."""
        return time.monotonic() - self._progress if self._working else 0.0

    def _note_progress(self) -> None:
        self._progress = time.monotonic()

    def close(self) -> None:
        """Stop after the piece of work at hand; what waits is abandoned."""
        with self._changed:
            self._closed = True
            self._changed.notify()
        self._thread.join()

    def _queue(self, queue: deque[_Work], work: _Work) -> Future[Result]:
        with self._changed:
            queue.append(work)
            self._changed.notify()
        return work.future

    def _loop(self) -> None:
        budget = MIN_SLICE
        while True:
            with self._changed:
                while not (self._training or self._sampling or self._decoder.jobs or self._closed):
                    self._working = False
                    self._changed.wait()
                self._note_progress()
                self._working = True
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
        try:
            if work.operation.kind == UNLOAD_SAMPLER:
                self._admit()  # requests that came before it
                sampler_id = str(work.operation.params.get("sampler_id"))
                if self._decoder.in_use(sampler_id):
                    raise InvalidInput(f"Sampler {sampler_id} is in use.")
            work.future.set_result(self._engine.execute(work.owner, work.operation))
        except Exception as error:
            work.future.set_exception(error)

    def _sample_for(self, budget: float) -> None:
        end = time.monotonic() + budget
        while not self._closed:
            self._note_progress()
            self._drop_given_up()
            self._admit()
            if not self._decoder.jobs:
                return
            for job in self._decoder.step():
                _settle(job)
            if self._training and time.monotonic() >= end:
                return

    def _admit(self) -> None:
        while self._sampling:
            work = self._sampling.popleft()
            if not work.future.set_running_or_notify_cancel():
                continue
            try:
                self._decoder.submit(
                    work.owner,
                    work.operation,
                    tenant=work.tenant,
                    tag=work.future,
                    listener=work.listener,
                )
            except Exception as error:
                work.future.set_exception(error)

    def _drop_given_up(self) -> None:
        if not self._given_up:
            return
        with self._changed:
            unwanted, self._given_up = self._given_up, set()
        for job in [job for job in self._decoder.jobs if job.tag in unwanted]:
            self._decoder.cancel(job)
            job.tag.set_exception(InvalidInput("The request was given up."))


def _settle(job: Job) -> None:
    try:
        job.tag.set_result(job.result())
    except Exception as error:
        job.tag.set_exception(error)
