"""The engine's process: `python -m session_core.worker --base-model DIR --socket PATH`.

A small HTTP application on a Unix domain socket. Bodies are the bytes of operations and
results; a failed operation is a JSON body `{"message", "category"}` where the category says
whose fault it was: user (status 400) or server (status 500). Torch runs on one thread of
its own, so the socket answers while it computes.

    POST /execute?owner=RUN       an operation of a run, or of the samplers
    POST /sample?owner=SAMPLER&tenant=TENANT
                                  a sample operation; given up when the caller goes away
    POST /stream?owner=...        the same, answered by a line of JSON for every token:
                                  {"index", "token", "token_text", "text", "logprob", "top",
                                  "stop_reason"},
                                  and in the end {"prompt": {...}, "result": {...}}
                                  or {"failure": {...}}
    POST /tokens                  {"messages": [...]} or {"text"} -> {"tokens": [...]}
    GET  /health                  what is loaded, and how long nothing went on: "stalled"

The process ends when its standard input does, that is when its parent is gone, however it
went.
"""

from __future__ import annotations

import argparse
import asyncio
import logging
import os
import sys
import threading
from concurrent.futures import Future
from pathlib import Path

import torch
import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from registry.errors import InvalidInput, SlipwayError
from session_core.engine import Engine
from session_core.model import open_base
from session_core.operations import Result, decode, encode
from session_core.responses import GeneratedResponse
from session_core.scheduler import Scheduler
from session_core.streaming import describe_failure, stream_sample
from session_core.text import render_chat, tokens_of

_log = logging.getLogger("session_core.worker")
_SERVER_FAULT = 500


def create_app(engine: Engine, scheduler: Scheduler) -> Starlette:
    """The application over an engine and its scheduler."""

    async def execute(request: Request) -> Response:
        operation = decode(await request.body())
        return await _answer(scheduler.execute(request.query_params["owner"], operation))

    async def sample(request: Request) -> Response:
        operation = decode(await request.body())
        future = scheduler.sample(
            request.query_params["owner"],
            operation,
            tenant=request.query_params.get("tenant", ""),
        )
        gone = asyncio.ensure_future(_gone(request))
        gone.add_done_callback(lambda _: scheduler.give_up(future))
        try:
            return await _answer(future)
        finally:
            gone.cancel()

    async def stream(request: Request) -> Response:
        operation = decode(await request.body())
        lines = stream_sample(
            scheduler,
            engine.base.tokenizer,
            request.query_params["owner"],
            operation,
            tenant=request.query_params.get("tenant", ""),
        )
        return GeneratedResponse(lines, media_type="application/x-ndjson")

    async def tokens(request: Request) -> Response:
        body = await request.json()
        tokenizer = engine.base.tokenizer
        if "messages" in body:
            found = await asyncio.to_thread(render_chat, tokenizer, **body)
        else:
            found = await asyncio.to_thread(tokens_of, tokenizer, body["text"])
        return JSONResponse({"tokens": found})

    async def health(request: Request) -> Response:
        del request
        base = engine.base
        return JSONResponse(
            {
                "vocabulary": base.vocabulary,
                "context": base.context,
                "eos": sorted(base.eos),
                "device": str(base.device),
                "threads": torch.get_num_threads(),
                "stalled": scheduler.stalled_for(),
            }
        )

    def failed(request: Request, error: Exception) -> Response:
        del request
        return failure(error)

    return Starlette(
        routes=[
            Route("/execute", execute, methods=["POST"]),
            Route("/sample", sample, methods=["POST"]),
            Route("/stream", stream, methods=["POST"]),
            Route("/tokens", tokens, methods=["POST"]),
            Route("/health", health),
        ],
        exception_handlers={SlipwayError: failed},
    )


async def _answer(future: Future[Result]) -> Response:
    try:
        result = await asyncio.wrap_future(future)
    except asyncio.CancelledError:
        if not future.cancelled():
            raise
        return failure(InvalidInput("The request was given up."))
    except Exception as error:
        return failure(error)
    return Response(encode(result), media_type="application/octet-stream")


async def _gone(request: Request) -> None:
    """Return when the caller has closed its connection."""
    while (await request.receive())["type"] != "http.disconnect":
        pass


def failure(error: Exception) -> Response:
    """The response that tells of a failed operation."""
    body = describe_failure(error)
    return JSONResponse(body, status_code=400 if body["category"] == "user" else _SERVER_FAULT)


def _end_with_parent() -> None:
    """End this process when its standard input is closed."""

    def watch() -> None:
        # Unbuffered: a buffered reader's lock would be in the way of an orderly exit.
        while os.read(sys.stdin.fileno(), 4096):
            pass
        os._exit(0)

    threading.Thread(target=watch, name="parent-watch", daemon=True).start()


def main(arguments: list[str] | None = None) -> None:
    """Load the base model, then serve until the parent goes."""
    parser = argparse.ArgumentParser(prog="session_core.worker")
    parser.add_argument("--base-model", type=Path, required=True)
    parser.add_argument("--socket", type=Path, required=True)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--threads", type=int, default=0, help="0: as many as torch chooses")
    options = parser.parse_args(arguments)
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(name)s %(message)s")
    _end_with_parent()
    os.umask(0o077)
    if options.threads:
        # The number of threads decides how sums are split, and so their last bits.
        torch.set_num_threads(options.threads)
    engine = Engine(open_base(options.base_model, device=options.device))
    app = create_app(engine, Scheduler(engine))
    _log.info("serving %s with %d threads", options.base_model, torch.get_num_threads())
    uvicorn.run(app, uds=str(options.socket), log_level="warning", access_log=False)


if __name__ == "__main__":
    main()
