"""A server that answers a forward pass at once and does nothing: what the SDK and HTTP cost.

python idle.py PORT READY_FILE
"""

from __future__ import annotations

import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import numpy as np
import uvicorn
from fastapi import FastAPI, Request, Response

from session_core.dialects.tinker.options import Options
from session_core.dialects.tinker.protobuf import MEDIA_TYPE, forward_backward_output, pb
from session_core.operations import Result


def create_app(ready: Path) -> FastAPI:
    """The routes that a forward pass goes through, and their answers."""

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        ready.touch()
        yield

    app = FastAPI(lifespan=lifespan)
    options = Options()
    lengths: dict[str, int] = {}

    @app.get("/api/v1/healthz")
    async def healthz() -> dict[str, str]:
        return {"status": "ok"}

    @app.post("/api/v1/client/config")
    async def config() -> dict[str, Any]:
        return options.client_config

    @app.post("/api/v1/create_session")
    async def create_session() -> dict[str, str]:
        return {"session_id": "s", "type": "create_session"}

    @app.post("/api/v1/create_model")
    async def create_model() -> dict[str, str]:
        return {"request_id": "created", "model_id": "s:train:0"}

    @app.post("/api/v1/get_info")
    async def get_info() -> dict[str, Any]:
        return {"type": "get_info", "model_id": "s:train:0", "model_data": {"model_name": "idle"}}

    @app.post("/api/v1/forward_backward")
    async def forward_backward(request: Request) -> dict[str, str]:
        message = pb.ForwardBackwardRequest()
        message.ParseFromString(await request.body())
        request_id = f"operation-{message.seq_id}"
        lengths[request_id] = sum(
            len(chunk.encoded_text.tokens) // 4
            for datum in message.data
            for chunk in datum.model_input
        )
        return {"request_id": request_id, "model_id": "s:train:0"}

    @app.post("/api/v1/retrieve_future")
    async def retrieve_future(body: dict[str, Any]) -> Response:
        if body["request_id"] == "created":
            return Response(
                '{"model_id": "s:train:0", "type": "create_model"}', media_type="application/json"
            )
        count = lengths.pop(body["request_id"])
        result = Result(
            params={"metrics": {"loss:sum": 0.0, "tokens:sum": float(count)}},
            arrays={
                "logprobs": np.zeros(count, np.float32),
                "logprobs.offsets": np.array([0, count]),
            },
        )
        return Response(forward_backward_output(result), media_type=MEDIA_TYPE)

    @app.api_route("/{path:path}", methods=["GET", "POST"])
    async def rest(path: str) -> dict[str, str]:
        return {"type": path}

    return app


if __name__ == "__main__":
    uvicorn.run(
        create_app(Path(sys.argv[2])),
        host="127.0.0.1",
        port=int(sys.argv[1]),
        log_level="warning",
    )
