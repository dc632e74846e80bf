"""A small OpenAI-compatible server that stands in for vLLM, run as a real child process.

    python stand_in.py FOLDER MODEL PORT

What it does wrong, if anything, is written in FOLDER/config.json as "mode":

    ok          serves
    crash       prints a traceback as vLLM does and ends
    refuse      ends with a line on standard error that is no exception
    hang        never listens
    dead        listens and is healthy, but no token ever comes
    tokenless   answers completions with no token in them

Answers are made of the words in config.json's "says", one a token, `delay` seconds apart.
"""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

CRASH = """\
(APIServer pid=41) INFO 12-01 12:01:16 [api_utils.py:286] non-default args: {}
(EngineCore pid=42) ERROR 12-01 12:01:45 [core.py:402] EngineCore failed to start.
(EngineCore pid=42) ERROR 12-01 12:01:45 [core.py:402] Traceback (most recent call last):
(EngineCore pid=42) ERROR 12-01 12:01:45 [core.py:402]   File "weights.py", line 1, in load
(EngineCore pid=42) ERROR 12-01 12:01:45 [core.py:402] ValueError: no room for the KV cache
(APIServer pid=41) Traceback (most recent call last):
(APIServer pid=41)   File "api_server.py", line 1, in <module>
(APIServer pid=41) RuntimeError: Engine core initialization failed. See root cause above. \
Failed core proc(s): {}
"""


def main() -> None:
    folder, model, port = Path(sys.argv[1]), sys.argv[2], int(sys.argv[3])
    config = json.loads((folder / "config.json").read_text())
    mode = config.get("mode", "ok")
    # vLLM has children too; this one ignores being asked nicely.
    subprocess.Popen(
        [
            sys.executable,
            "-c",
            "import signal, time; signal.signal(15, signal.SIG_IGN); time.sleep(600)",
        ]
    )
    if mode == "crash":
        sys.stderr.write(CRASH)
        raise SystemExit(1)
    if mode == "refuse":
        sys.stderr.write("api_server: error: argument --dtype: invalid choice\n")
        raise SystemExit(2)
    if mode == "hang":
        sys.stderr.write("loading for ever\n")
        sys.stderr.flush()
        asyncio.run(asyncio.sleep(600))
    serve(model, port, config, mode)


def serve(model: str, port: int, config: dict[str, Any], mode: str) -> None:
    import uvicorn
    from starlette.applications import Starlette
    from starlette.requests import Request
    from starlette.responses import JSONResponse, Response, StreamingResponse
    from starlette.routing import Route

    words = config.get("says", "one two three").split()
    delay = float(config.get("delay", 0.0))
    stats = {"started": 0, "cancelled": 0, "finished": 0}
    seen: list[dict[str, Any]] = []

    async def complete(request: Request) -> Response:
        body = await request.json()
        seen.append({"path": request.url.path, "body": body, "headers": dict(request.headers)})
        if body["model"] != model:
            message = f"The model `{body['model']}` does not exist."
            return JSONResponse({"error": {"message": message}}, status_code=404)
        if body.get("temperature") == 99:
            message = f"temperature is wrong for {model}"
            return JSONResponse({"error": {"message": message}}, status_code=400)
        if mode == "dead":
            await asyncio.sleep(600)
        chat = request.url.path.endswith("chat/completions")
        said = words[: body.get("max_tokens") or len(words)]
        stats["started"] += 1
        head = {"id": "cmpl-1", "created": 1, "model": model}
        if body.get("stream"):
            return StreamingResponse(events(head, chat, said), media_type="text/event-stream")
        try:
            # Polls, as vLLM does, for the client's going away.
            for _ in said:
                await asyncio.sleep(delay)
                if await request.is_disconnected():
                    raise asyncio.CancelledError
        except asyncio.CancelledError:
            stats["cancelled"] += 1
            raise
        stats["finished"] += 1
        count = 0 if mode == "tokenless" else len(said)
        usage = {"prompt_tokens": 1, "completion_tokens": count, "total_tokens": 1 + count}
        text = " ".join(said)
        if chat:
            message = {"role": "assistant", "content": text}
            choice: dict[str, Any] = {"index": 0, "message": message, "finish_reason": "stop"}
            head["object"] = "chat.completion"
        else:
            choice = {"index": 0, "text": text, "finish_reason": "stop", "logprobs": None}
            head["object"] = "text_completion"
            if body.get("return_token_ids"):
                choice["token_ids"] = list(range(len(said)))
        return JSONResponse({**head, "choices": [choice], "usage": usage})

    async def events(head: dict[str, Any], chat: bool, said: list[str]) -> AsyncIterator[bytes]:
        done = False
        try:
            for word in said:
                await asyncio.sleep(delay)
                if chat:
                    choice: dict[str, Any] = {"index": 0, "delta": {"content": word + " "}}
                    kind = "chat.completion.chunk"
                else:
                    choice, kind = {"index": 0, "text": word + " "}, "text_completion"
                choice["finish_reason"] = None
                event = json.dumps({**head, "object": kind, "choices": [choice]})
                # In two pieces, so that the name of the model may be cut anywhere.
                raw = f"data: {event}\n\n".encode()
                middle = raw.find(model.encode()) + 3
                yield raw[:middle]
                await asyncio.sleep(0)
                yield raw[middle:]
            yield b"data: [DONE]\n\n"
            done = True
        finally:
            stats["finished" if done else "cancelled"] += 1

    async def get_stats(request: Request) -> Response:
        return JSONResponse({**stats, "seen": seen, "environment": dict(os.environ)})

    async def health(request: Request) -> Response:
        return Response(status_code=200)

    app = Starlette(
        routes=[
            Route("/v1/completions", complete, methods=["POST"]),
            Route("/v1/chat/completions", complete, methods=["POST"]),
            Route("/stats", get_stats),
            Route("/health", health),
        ]
    )
    uvicorn.run(app, host="127.0.0.1", port=port, log_level="warning")


if __name__ == "__main__":
    main()
