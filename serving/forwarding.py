"""An answer on its way through the gateway.

When the client goes away, the connection to what answers is closed at once, which is how an
engine learns to stop generating.
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
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Message, Receive, Scope, Send

from serving.openai_errors import error_body
from serving.targets import Target, Targets

_REQUEST_ID = re.compile(r"^[\w.\-]{1,128}$", re.ASCII)
_ERROR = 400
_UNPROCESSABLE = 422
# What a live session says of its answer; an endpoint's route says it beforehand.
_MARKS = ("x-slipway-version", "x-slipway-digest")
_log = logging.getLogger(__name__)


class Forward(Response):
    """A target's answer, streamed. Nothing is sent before its first byte has come."""

    def __init__(
        self,
        request: Request,
        body: dict[str, Any],
        target: Target,
        *,
        targets: Targets,
        client: httpx.AsyncClient,
    ) -> None:
        self._targets = targets
        self._client = client
        self._body = body
        self._target = target
        self._told: dict[str, str] = {}
        asked = request.headers.get("x-request-id", "")
        self._id = asked if _REQUEST_ID.match(asked) else f"req-{uuid.uuid4().hex}"
        self._status = 499  # until the target has answered: the client went away
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
                self._target.name,
                self._marks().get("x-slipway-version", "-"),
                self._status,
                (time.monotonic() - began) * 1e3,
            )

    async def _forward(self, scope: Scope, receive: Receive, send: Send) -> None:
        for last in (False, True):
            try:
                async with self._post(scope["path"]) as upstream:
                    await self._relay(upstream, send)
                return
            except httpx.ConnectError:
                # Nothing was sent. The endpoint may have moved since the route was looked up.
                target = self._targets.moved(self._target)
                if target is not None and not last:
                    self._target = target
                    continue
                break
            except httpx.HTTPError as error:
                _log.warning("%s: the replica broke off: %r", self._id, error)
                break
        self._status = 503
        await self._target.unavailable(self._marks())(scope, receive, send)

    def _post(self, path: str) -> Any:
        """A streaming POST to the target, as a context manager."""
        return self._client.stream(
            "POST",
            f"{self._target.url}{path.removeprefix('/v1')}",
            content=json.dumps({**self._body, "model": self._target.model}).encode(),
            headers={
                **self._target.headers,
                "content-type": "application/json",
                "accept-encoding": "identity",  # the model's name is rewritten on the way back
                "x-request-id": self._id,
            },
        )

    async def _relay(self, upstream: httpx.Response, send: Send) -> None:
        self._status = upstream.status_code
        self._told = {name: upstream.headers[name] for name in _MARKS if name in upstream.headers}
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
                message = f"The replica of {self._target.name} ended in the middle of its answer."
                problem = json.dumps(error_body(503, message, code="replica_died"))
                chunk = f"data: {problem}\n\n".encode()
                await send({"type": "http.response.body", "body": chunk, "more_body": True})
            await send({"type": "http.response.body", "body": b"", "more_body": False})
            return
        body = await upstream.aread()
        if self._status >= _ERROR and self._target.route is None:
            body = self._openai_error(body)
        else:
            body = self._rename(body)
            if self._status >= _ERROR:  # errors name the model in prose
                body = body.replace(self._target.model.encode(), self._target.name.encode())
        await send(self._start(media_type, length=len(body)))
        await send({"type": "http.response.body", "body": body, "more_body": False})

    def _openai_error(self, body: bytes) -> bytes:
        """A session server's error in OpenAI's shape."""
        if self._status == _UNPROCESSABLE:
            self._status = _ERROR
        try:
            error = json.loads(body)["error"]
            message, code = str(error["message"]), str(error["code"])
        except (ValueError, KeyError, TypeError):
            message, code = "the session server failed; its log says how", "error"
        return json.dumps(error_body(self._status, message, code=code)).encode()

    def _rename(self, text: bytes) -> bytes:
        """`"model": <the engine's name>` becomes the name the client gave.

        Inside a generated text the quotes would be escaped, so nothing else can match.
        """
        if self._target.model == self._target.name:
            return text
        return re.sub(
            rb'("model"\s*:\s*)' + re.escape(json.dumps(self._target.model).encode()),
            lambda match: match[1] + json.dumps(self._target.name).encode(),
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
        known = dict(zip(_MARKS, (self._target.version, self._target.digest), strict=True))
        said = {name: value for name, value in known.items() if value}
        return {"x-request-id": self._id, **said, **self._told}


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
