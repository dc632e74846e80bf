"""Authentication, default-deny: a path that is not named public needs a key.

Below one prefix it needs a signed link in place of a key, and a key is of no use there.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from typing import Annotated, Any

from fastapi import Depends, FastAPI, Request
from fastapi.concurrency import run_in_threadpool
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from starlette.datastructures import Headers
from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Receive, Scope, Send

from registry.errors import Forbidden, LinkExpired, SlipwayError, TooMany, Unauthorized
from registry.tenants import Principal

log = logging.getLogger(__name__)

ADMIN_ONLY = (
    "this needs an administrator's key: the one `slipway up` made, or one made with "
    "`slipway keys create NAME --role admin`"
)
TOO_LARGE = 413
RETRY_SECONDS = "2"
# A message may quote what was sent, and that may be long.
LONGEST_MESSAGE = 2000
LINKS = "/api/v1/download/"
"""Below it a signed link's token stands in place of a key."""
DENIED = "this needs a valid API key, in X-API-Key or as a bearer token"


def error_response(status: int, code: str, message: str) -> JSONResponse:
    """The one shape of an error: ``{"error": {"code", "message"}}``, cut where it is too long."""
    if len(message) > LONGEST_MESSAGE:
        message = message[:LONGEST_MESSAGE] + " ..."
    # Half a surrogate pair may have come in with a request, and goes out in no encoding.
    message = message.encode(errors="replace").decode()
    return JSONResponse({"error": {"code": code, "message": message}}, status_code=status)


def key_of(headers: Headers) -> str | None:
    """The API key a request carries, if any."""
    if key := headers.get("x-api-key"):
        return key
    scheme, _, token = headers.get("authorization", "").partition(" ")
    return token.strip() or None if scheme.lower() == "bearer" else None


class AuthMiddleware:
    """Lets a request through only with a key that is known, or to a public path.

    The answer to a request without a key, with a wrong one, or to a path that does not exist
    is the same, so it tells nothing.

    Args:
        links: reads the token of a signed link: ``GET <LINKS>TOKEN/...`` is let through with a
            good one and nothing else, and its claim is then in ``request.state.claim``.
    """

    def __init__(
        self,
        app: ASGIApp,
        *,
        authenticate: Callable[[str], Principal],
        public: frozenset[str],
        links: Callable[[str], Mapping[str, str]] | None = None,
    ) -> None:
        self._app = app
        self._authenticate = authenticate
        self._public = public
        self._links = links

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan" or (
            scope["type"] == "http" and scope["path"] in self._public
        ):
            await self._app(scope, receive, send)
            return
        if scope["type"] != "http":
            await send({"type": "websocket.close", "code": 1008})
            return
        try:
            if scope["path"].startswith(LINKS):
                known: dict[str, Any] = {"claim": self._claim(scope)}
            else:
                key = key_of(Headers(scope=scope))
                if key is None:
                    raise Unauthorized(DENIED)
                known = {"principal": await run_in_threadpool(self._authenticate, key)}
        except Unauthorized as error:
            response = error_response(error.status, error.code, DENIED)
            response.headers["WWW-Authenticate"] = "Bearer"
            await response(scope, receive, send)
            return
        except LinkExpired as error:
            response = error_response(error.status, error.code, error.message)
            await response(scope, receive, send)
            return
        scope.setdefault("state", {}).update(known)
        await self._app(scope, receive, send)

    def _claim(self, scope: Scope) -> Mapping[str, str]:
        if self._links is None or scope["method"] != "GET":
            raise Unauthorized(DENIED)
        token = scope["path"].removeprefix(LINKS).partition("/")[0]
        return self._links(token)


def principal(request: Request) -> Principal:
    """FastAPI dependency: who the request comes from."""
    who: Principal = request.state.principal
    return who


Caller = Annotated[Principal, Depends(principal)]
"""Annotate a route's parameter with it to know who is calling."""


def administrator(request: Request) -> Principal:
    """FastAPI dependency: an administrator.

    Raises:
        Forbidden: if the caller is none; the same to all, so that it tells nothing else.
    """
    who = principal(request)
    if not who.is_admin:
        raise Forbidden(ADMIN_ONLY)
    return who


Admin = Annotated[Principal, Depends(administrator)]
"""Annotate a route's parameter with it to let administrators in and nobody else."""


def install_error_handlers(app: FastAPI) -> None:
    """Answer every error in one shape; an unforeseen one reveals nothing but is logged."""

    async def known(_: Request, error: Exception) -> JSONResponse:
        assert isinstance(error, SlipwayError)
        response = error_response(error.status, error.code, error.message)
        if isinstance(error, TooMany):
            response.headers["Retry-After"] = RETRY_SECONDS
        return response

    async def invalid(_: Request, error: Exception) -> JSONResponse:
        assert isinstance(error, RequestValidationError)
        faults = "; ".join(
            f"{'.'.join(str(part) for part in fault['loc'])}: {fault['msg']}"
            for fault in error.errors()
        )
        return error_response(422, "invalid_input", faults)

    async def http(_: Request, error: Exception) -> JSONResponse:
        assert isinstance(error, HTTPException)
        code = "too_large" if error.status_code == TOO_LARGE else "http_error"
        return error_response(error.status_code, code, str(error.detail))

    async def unforeseen(request: Request, error: Exception) -> JSONResponse:
        log.error("%s %s failed", request.method, request.url.path, exc_info=error)
        return error_response(500, "error", "the server failed; its log says how")

    app.add_exception_handler(SlipwayError, known)
    app.add_exception_handler(RequestValidationError, invalid)
    app.add_exception_handler(HTTPException, http)
    app.add_exception_handler(Exception, unforeseen)
