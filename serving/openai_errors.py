"""Errors in the shape that OpenAI's clients parse."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from starlette.responses import JSONResponse

from serving.routes import Route

_TYPES = {401: "authentication_error", 403: "permission_error", 429: "rate_limit_error"}


def error_body(
    status: int, message: str, *, code: str | None, param: str | None = None
) -> dict[str, Any]:
    """The JSON value of an error."""
    kind = _TYPES.get(status, "server_error" if status >= 500 else "invalid_request_error")
    return {"error": {"message": message, "type": kind, "param": param, "code": code}}


def error_response(
    status: int,
    message: str,
    *,
    code: str | None,
    param: str | None = None,
    headers: Mapping[str, str] | None = None,
) -> JSONResponse:
    """An error as a response."""
    body = error_body(status, message, code=code, param=param)
    return JSONResponse(body, status_code=status, headers=headers)


def unknown_model(name: str, exists: Sequence[Route]) -> JSONResponse:
    """404 that names what the caller could have meant; only the caller's own endpoints."""
    served = ", ".join(route.name for route in exists) or "none yet"
    return error_response(
        404,
        f"The model {name!r} does not exist. Endpoints here: {served}.",
        code="model_not_found",
        param="model",
    )
