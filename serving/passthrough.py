"""One request through the gateway: find its replica, pass it on, stream the answer back.

The version that answers is settled when the request is admitted; a change of routes later does
not touch it. When the client goes away, the connection to the replica is closed at once, which
is how an engine learns to stop generating.
"""

from __future__ import annotations

import json
import logging
import re
import time
import uuid
from collections.abc import AsyncIterator
from typing import Any

import anyio
import httpx
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.types import Message, Receive, Scope, Send

from serving.openai_errors import error_body, error_response, unknown_model
from serving.routes import Route, RoutesFile

_REQUEST_ID = re.compile(r"^[\w.\-]{1,128}$", re.ASCII)
_RETRY_AFTER = {"retry-after": "2"}
_log = logging.getLogger(__name__)


class Passthrough:
    """Forwards completions to the replica of the endpoint that `model` names.

    `max_body`: bytes. `client` speaks to the replicas; `close` closes it.
    """

    def __init__(self, routes: RoutesFile, client: httpx.AsyncClient, *, max_body: int) -> None:
        self._routes = routes
        self._client = client
        self._max_body = max_body

    async def close(self) -> None:
        """Close the connections to the replicas."""
        await self._client.aclose()

    async def respond(self, request: Request) -> Response:
        """Answer one completion request, or say in OpenAI's shape why not."""
        try:
            raw = await self._body(request)
        except ClientDisconnect:
            return Response(status_code=499)
        if raw is None:
            limit = self._max_body // 1024
            return error_response(
                413, f"The request body is larger than {limit} KiB.", code="request_too_large"
            )
        try:
            body = json.loads(raw)
        except (ValueError, RecursionError):
            return error_response(400, "The request body is not JSON.", code="invalid_json")
        model = body.get("model") if isinstance(body, dict) else None
        if not isinstance(model, str) or not model:
            message = "The request body must be an object with a string 'model'."
            return error_response(400, message, code="missing_model", param="model")
        route = self._find(request, model)
        return route if isinstance(route, Response) else _Forward(self, request, body, route)

    def _find(self, request: Request, model: str) -> Route | Response:
        if model.startswith("tinker://"):
            return error_response(
                400,
                "tinker:// paths belong to the training session and are not served here; "
                "merge and deploy the version, and give its endpoint's name as model.",
                code="model_not_supported",
                param="model",
            )
        tenant_id = request.state.tenant_id
        routes = self._routes.current()
        route = routes.find(tenant_id, model)
        if route is None:
            return unknown_model(model, routes.of(tenant_id))
        return route if route.url is not None else not_serving(route)

    async def _body(self, request: Request) -> bytes | None:
        """The request's body, or None when it is larger than allowed."""
        declared = request.headers.get("content-length", "")
        if declared.isdecimal() and int(declared) > self._max_body:
            return None
        raw = bytearray()
        async for chunk in request.stream():
            raw += chunk
            if len(raw) > self._max_body:
                return None
        return bytes(raw)

    def moved(self, route: Route) -> Route | None:
        """Where the endpoint of `route` is served now, if that is somewhere else."""
        now = self._routes.current().find(route.tenant_id, route.name)
        return now if now is not None and now.url not in (None, route.url) else None

    def post(self, path: str, route: Route, body: dict[str, Any], request_id: str) -> Any:
        """A streaming POST to the replica, as a context manager."""
        return self._client.stream(
            "POST",
            f"{route.url}{path}",
            content=json.dumps({**body, "model": route.model}).encode(),
            headers={
                "content-type": "application/json",
                "accept-encoding": "identity",  # the model's name is rewritten on the way back
                "x-request-id": request_id,
            },
        )


class _Forward(Response):
    """The replica's answer, streamed. Nothing is sent before its first byte has come."""

    def __init__(
        self, gateway: Passthrough, request: Request, body: dict[str, Any], route: Route
    ) -> None:
        self._gateway = gateway
        self._body = body
        self._route = route
        asked = request.headers.get("x-request-id", "")
        self._id = asked if _REQUEST_ID.match(asked) else f"req-{uuid.uuid4().hex}"
        self._status = 499  # until the replica has answered: the client went away
        self.background = None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        began = time.monotonic()
        try:
            async with anyio.create_task_group() as group:

                async def watch() -> None:
                    while (await receive())["type"] != "http.disconnect":
                        pass
                    group.cancel_scope.cancel()

                group.start_soon(watch)
                await self._forward(scope, receive, send)
                group.cancel_scope.cancel()
        finally:
            _log.info(
                "%s %s %s %s %d %.0f ms",
                self._id,
                scope["path"],
                self._route.name,
                self._route.version,
                self._status,
                (time.monotonic() - began) * 1e3,
            )

    async def _forward(self, scope: Scope, receive: Receive, send: Send) -> None:
        for last in (False, True):
            try:
                post = self._gateway.post(scope["path"], self._route, self._body, self._id)
                async with post as upstream:
                    await self._relay(upstream, send)
                return
            except httpx.ConnectError:
                # Nothing was sent. The endpoint may have moved since the route was looked up.
                route = self._gateway.moved(self._route)
                if route is not None and not last:
                    self._route = route
                    continue
                break
            except httpx.HTTPError as error:
                _log.warning("%s: the replica broke off: %r", self._id, error)
                break
        self._status = 503
        await not_serving(self._route, self._marks())(scope, receive, send)

    async def _relay(self, upstream: httpx.Response, send: Send) -> None:
        self._status = upstream.status_code
        media_type = upstream.headers.get("content-type", "application/json")
        if media_type.startswith("text/event-stream"):
            await send(self._start(media_type))
            try:
                async for event in _lines(upstream):
                    chunk = self._rename(event)
                    await send({"type": "http.response.body", "body": chunk, "more_body": True})
            except httpx.HTTPError as error:
                _log.warning("%s: the replica broke off in a stream: %r", self._id, error)
                self._status = 503
                message = f"The replica of {self._route.name} ended in the middle of its answer."
                problem = json.dumps(error_body(503, message, code="replica_died"))
                chunk = f"data: {problem}\n\n".encode()
                await send({"type": "http.response.body", "body": chunk, "more_body": True})
            await send({"type": "http.response.body", "body": b"", "more_body": False})
            return
        body = self._rename(await upstream.aread())
        if upstream.status_code >= 400:  # errors name the model in prose
            body = body.replace(self._route.model.encode(), self._route.name.encode())
        await send(self._start(media_type, length=len(body)))
        await send({"type": "http.response.body", "body": body, "more_body": False})

    def _rename(self, text: bytes) -> bytes:
        """`"model": <the engine's name>` becomes the endpoint's name.

        Inside a generated text the quotes would be escaped, so nothing else can match.
        """
        return re.sub(
            rb'("model"\s*:\s*)' + re.escape(json.dumps(self._route.model).encode()),
            lambda match: match[1] + json.dumps(self._route.name).encode(),
            text,
        )

    def _start(self, media_type: str, length: int | None = None) -> Message:
        headers = {"content-type": media_type, "cache-control": "no-store", **self._marks()}
        if length is not None:
            headers["content-length"] = str(length)
        return {
            "type": "http.response.start",
            "status": self._status,
            "headers": [(k.encode(), v.encode()) for k, v in headers.items()],
        }

    def _marks(self) -> dict[str, str]:
        return {
            "x-request-id": self._id,
            "x-slipway-version": self._route.version,
            "x-slipway-digest": self._route.digest,
        }


def not_serving(route: Route, headers: dict[str, str] | None = None) -> Response:
    """503 for an endpoint that exists but whose replica is starting, or dead."""
    return error_response(
        503,
        f"The endpoint {route.name!r} ({route.version}) is not serving now; try again shortly. "
        "`slipway endpoints` shows its state.",
        code="endpoint_unavailable",
        headers={**(headers or {}), **_RETRY_AFTER},
    )


async def _lines(upstream: httpx.Response) -> AsyncIterator[bytes]:
    """The body in pieces that end at a line's end, so that no name is cut in two."""
    rest = b""
    async for chunk in upstream.aiter_raw():
        whole, newline, rest_of_chunk = chunk.rpartition(b"\n")
        if newline:
            yield rest + whole + newline
            rest = rest_of_chunk
        else:
            rest += chunk
    if rest:
        yield rest
