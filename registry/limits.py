"""What no request may bring, whatever its route: a body without end, or a NUL."""

from __future__ import annotations

from collections.abc import Mapping

from starlette.datastructures import Headers
from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from registry.auth import error_response

LARGEST_BODY = 8 * 2**20
"""Bytes of a body, unless a path may have more."""
DRAINED = 4
"""How many times its limit is read of a body that is too large, so that its sender gets to
read the answer; the connection of one that goes on is cut."""


class LimitMiddleware:
    """Gives up a body once it is too large, and keeps nothing of it.

    Args:
        larger: paths that may have more than `LARGEST_BODY`, and how many bytes.
    """

    def __init__(self, app: ASGIApp, *, larger: Mapping[str, int]) -> None:
        self._app = app
        self._larger = larger

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        # Databases differ in what they do about a NUL in a text; no id holds one.
        if b"%00" in scope.get("raw_path", b"") or b"%00" in scope["query_string"]:
            response = error_response(400, "invalid_input", "an address cannot hold a NUL")
            await response(scope, receive, send)
            return
        limit = self._larger.get(scope["path"], LARGEST_BODY)
        await self._app(scope, _Counted(receive, Headers(scope=scope), limit), send)


class _Counted:
    """A body's messages, until there are too many bytes in them."""

    def __init__(self, receive: Receive, headers: Headers, limit: int) -> None:
        self._receive = receive
        self._limit = limit
        self._length = 0
        announced = headers.get("content-length", "")
        self._announced = int(announced) if announced.isdecimal() else 0

    async def __call__(self) -> Message:
        message = await self._receive()
        self._count(message)
        if max(self._length, self._announced) <= self._limit:
            return message
        while message.get("more_body") and self._length < DRAINED * self._limit:
            message = await self._receive()
            self._count(message)
        raise HTTPException(413, f"the body is larger than {self._limit} bytes: send less at once")

    def _count(self, message: Message) -> None:
        self._length += len(message.get("body", b""))
