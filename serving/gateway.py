"""The gateway: the OpenAI routes in front of the replicas, a process of its own.

    python -m serving.gateway --routes FILE --host 127.0.0.1 --port 8001 [--live URL]

It reads which endpoints and keys there are from a snapshot file (`routes.py`) and needs no
database and no control plane to serve; live sessions alone are the control plane's, which
`--live` names. Only the routes listed in `create_app` exist, and all
but `/healthz` demand a key.
"""

from __future__ import annotations

import argparse
import logging
import signal
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import uvicorn
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route as HttpRoute

from serving.gateway_auth import KeyMiddleware
from serving.openai_errors import error_response, unknown_model
from serving.passthrough import Passthrough
from serving.routes import Route, RoutesFile
from serving.targets import Targets

MAX_BODY_BYTES = 8 * 1024 * 1024
# Below the 5 s after which the replicas' server closes idle connections, so that a request is
# never written to one that is being closed.
_KEEPALIVE_S = 2.0
_DRAIN_S = 10


def create_app(
    routes: Path, *, live: str | None = None, max_body: int = MAX_BODY_BYTES
) -> Starlette:
    """The gateway's application, reading the snapshot at `routes`.

    `live`: the address of the control plane that has the live sessions, if there is one.
    `max_body`: the largest request body in bytes; more is answered with 413.
    """
    table = RoutesFile(routes)
    passthrough = Passthrough(Targets(table, live=live), _client(), max_body=max_body)

    async def healthz(_: Request) -> Response:
        return JSONResponse({"status": "ok"})

    async def models(request: Request) -> Response:
        served = [_card(r) for r in table.current().of(request.state.tenant_id) if r.url]
        return JSONResponse({"object": "list", "data": served})

    async def model(request: Request) -> Response:
        tenant_id, name = request.state.tenant_id, request.path_params["name"]
        route = table.current().find(tenant_id, name)
        if route is None or route.url is None:
            return unknown_model(name, table.current().of(tenant_id))
        return JSONResponse(_card(route))

    @asynccontextmanager
    async def lifespan(_: Starlette) -> AsyncIterator[None]:
        yield
        await passthrough.close()

    app = Starlette(
        routes=[
            HttpRoute("/healthz", healthz, methods=["GET"]),
            HttpRoute("/v1/models", models, methods=["GET"]),
            HttpRoute("/v1/models/{name}", model, methods=["GET"]),
            HttpRoute("/v1/chat/completions", passthrough.respond, methods=["POST"]),
            HttpRoute("/v1/completions", passthrough.respond, methods=["POST"]),
        ],
        exception_handlers={HTTPException: _http_error, Exception: _internal_error},
        lifespan=lifespan,
    )
    app.add_middleware(KeyMiddleware, routes=table, public=frozenset({"/healthz"}))
    return app


def _client() -> httpx.AsyncClient:
    return httpx.AsyncClient(
        # A long answer that is not streamed sends nothing until it is complete.
        timeout=httpx.Timeout(connect=5.0, read=None, write=60.0, pool=None),
        limits=httpx.Limits(max_connections=None, keepalive_expiry=_KEEPALIVE_S),
        trust_env=False,  # no proxy stands between us and loopback
    )


def _card(route: Route) -> dict[str, Any]:
    return {
        "id": route.name,
        "object": "model",
        "created": route.created,
        "owned_by": "slipway",
        "version": route.version,
        "digest": route.digest,
    }


async def _http_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    message = f"{request.method} {request.url.path}: {error.detail}"
    return error_response(error.status_code, message, code="invalid_request")


async def _internal_error(_: Request, __: Exception) -> Response:
    return error_response(500, "the gateway failed; its log says why", code="internal_error")


def main() -> None:
    """Serve until SIGTERM or SIGINT; streams in flight get ten seconds to finish."""
    parser = argparse.ArgumentParser(prog="python -m serving.gateway", description="The gateway.")
    parser.add_argument("--routes", type=Path, required=True, help="the routes snapshot file")
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, default=8001)
    parser.add_argument("--live", help="the control plane's address, for live sessions")
    arguments = parser.parse_args()
    logging.basicConfig(level="INFO", format="%(asctime)s %(levelname)s %(name)s %(message)s")
    logging.getLogger("httpx").setLevel("WARNING")
    config = uvicorn.Config(
        create_app(arguments.routes, live=arguments.live),
        host=arguments.host,
        port=arguments.port,
        access_log=False,
        log_config=None,
        timeout_graceful_shutdown=_DRAIN_S,
        server_header=False,
    )
    # uvicorn raises the signal again once it has shut down; by then it has been obeyed.
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: None)
    server = uvicorn.Server(config)
    server.run()
    if not server.started:
        raise SystemExit(1)


if __name__ == "__main__":
    main()
