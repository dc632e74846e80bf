"""A sample as it is made, line by line, and how a failure is told."""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import AsyncGenerator, Callable
from typing import Any

import numpy as np
import torch

from registry.errors import SlipwayError
from session_core.operations import Operation, Result
from session_core.scheduler import Scheduler
from session_core.sequences import Sequence
from session_core.text import TextStream, token_text

_log = logging.getLogger("session_core.worker")


async def stream_sample(
    scheduler: Scheduler, tokenizer: Any, sampler_id: str, operation: Operation, *, tenant: str
) -> AsyncGenerator[str, None]:
    """Lines of JSON: one a token, then what was asked of the prompt and the result's
    parameters, or the failure. Closing it gives the request up.
    """
    loop = asyncio.get_running_loop()
    events: asyncio.Queue[tuple[int, int, float, list[Any], str] | None] = asyncio.Queue()

    def listen(sequence: Sequence) -> None:
        # On the engine's thread: what may change is taken out of the sequence here.
        top = [array.tolist() for array in sequence.top[-1]] if sequence.top else []
        event = (
            sequence.index,
            sequence.tokens[-1],
            sequence.logprobs[-1],
            list(zip(*top, strict=True)),
            sequence.stop_reason,
        )
        loop.call_soon_threadsafe(events.put_nowait, event)

    future = scheduler.sample(sampler_id, operation, tenant=tenant, listener=listen)
    future.add_done_callback(lambda _: loop.call_soon_threadsafe(events.put_nowait, None))
    texts: dict[int, TextStream] = {}
    try:
        while (event := await events.get()) is not None:
            index, token, logprob, top, reason = event
            stream = texts.setdefault(index, TextStream(tokenizer))
            text = stream.step(token) + (stream.end() if reason else "")
            named = [(token_text(tokenizer, other), score) for other, score in top]
            yield _line(
                {
                    "index": index,
                    "token": token,
                    "token_text": token_text(tokenizer, token),
                    "text": text,
                    "logprob": logprob,
                    "top": named,
                    "stop_reason": reason,
                }
            )
        yield _line(_ending(future.result, operation, tokenizer))
    finally:
        scheduler.give_up(future)


def _ending(result: Callable[[], Result], operation: Operation, tokenizer: Any) -> dict[str, Any]:
    try:
        done = result()
    except Exception as error:
        return {"failure": describe_failure(error)}
    return {"prompt": _prompt(done, operation, tokenizer), "result": dict(done.params)}


def _prompt(result: Result, operation: Operation, tokenizer: Any) -> dict[str, Any]:
    """The prompt's text, and its tokens with their logprobs (None for the first)."""
    tokens = operation.arrays["tokens"].tolist()
    text = tokenizer.decode(tokens, skip_special_tokens=True, clean_up_tokenization_spaces=False)
    logprobs = result.arrays.get("prompt_logprobs")
    if logprobs is None:
        return {"text": text, "tokens": []}
    nothing = np.zeros((len(tokens), 0))
    ids = result.arrays.get("prompt_top.ids", nothing).tolist()
    scores = result.arrays.get("prompt_top.logprobs", nothing).tolist()
    scored = [
        {
            "token": token,
            "token_text": token_text(tokenizer, token),
            "logprob": float(logprobs[place]) if place else None,
            "top": [
                (token_text(tokenizer, other), score)
                for other, score in zip(ids[place], scores[place], strict=True)
                if place
            ],
        }
        for place, token in enumerate(tokens)
    ]
    return {"text": text, "tokens": scored}


def _line(value: dict[str, Any]) -> str:
    return json.dumps(value, separators=(",", ":")) + "\n"


def describe_failure(error: Exception) -> dict[str, str]:
    """A failure's message and whose fault it was."""
    if isinstance(error, SlipwayError):
        category = "user" if error.status < 500 else "server"
        message = error.message
    else:
        category = "server"
        message = _describe(error)
        _log.error("operation failed", exc_info=error)
    return {"message": message, "category": category}


def _describe(error: Exception) -> str:
    text = str(error)
    out = isinstance(error, MemoryError | torch.OutOfMemoryError)
    if out or "allocate memory" in text or "out of memory" in text.lower():
        return (
            "The engine ran out of memory; the run is as it was before the operation. Send "
            "fewer or shorter datums in one call, or give the machine more memory."
        )
    return f"The engine failed: {type(error).__name__}: {text}"
