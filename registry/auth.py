"""Authentication, default-deny: a path that is not named public needs a key."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Annotated

from fastapi import Depends, FastAPI, Request
from fastapi.concurrency import run_in_threadpool
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from starlette.datastructures import Headers
from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Receive, Scope, Send

from registry.errors import Forbidden, SlipwayError, Unauthorized
from registry.tenants import Principal

log = logging.getLogger(__name__)

ADMIN_ONLY = (
    "this needs an administrator's key: the one `slipway up` made, or one made with "
    "`slipway keys create NAME --role admin`"
)
DENIED = "this needs a valid API key, in X-API-Key or as a bearer token"


def error_response(status: int, code: str, message: str) -> JSONResponse:
    """The one shape of an error: ``{"error": {"code", "message"}}``."""
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
    """

    def __init__(
        self,
        app: ASGIApp,
        *,
        authenticate: Callable[[str], Principal],
        public: frozenset[str],
    ) -> None:
        self._app = app
        self._authenticate = authenticate
        self._public = public

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan" or (
            scope["type"] == "http" and scope["path"] in self._public
        ):
            await self._app(scope, receive, send)
            return
        if scope["type"] != "http":
            await send({"type": "websocket.close", "code": 1008})
            return
        key = key_of(Headers(scope=scope))
        try:
            if key is None:
                raise Unauthorized(DENIED)
            principal = await run_in_threadpool(self._authenticate, key)
        except Unauthorized as error:
            response = error_response(error.status, error.code, DENIED)
            response.headers["WWW-Authenticate"] = "Bearer"
            await response(scope, receive, send)
            return
        scope.setdefault("state", {})["principal"] = principal
        await self._app(scope, receive, send)


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
        return error_response(error.status, error.code, error.message)

    async def invalid(_: Request, error: Exception) -> JSONResponse:
        assert isinstance(error, RequestValidationError)
        faults = "; ".join(
            f"{'.'.join(str(part) for part in fault['loc'])}: {fault['msg']}"
            for fault in error.errors()
        )
        return error_response(422, "invalid_input", faults)

    async def http(_: Request, error: Exception) -> JSONResponse:
        assert isinstance(error, HTTPException)
        return error_response(error.status_code, "http_error", str(error.detail))

    async def unforeseen(request: Request, error: Exception) -> JSONResponse:
        log.error("%s %s failed", request.method, request.url.path, exc_info=error)
        return error_response(500, "error", "the server failed; its log says how")

    app.add_exception_handler(SlipwayError, known)
    app.add_exception_handler(RequestValidationError, invalid)
    app.add_exception_handler(HTTPException, http)
    app.add_exception_handler(Exception, unforeseen)
