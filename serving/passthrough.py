"""One request through the gateway: read it, find where it goes, pass it on.

The version that answers is settled when the request is admitted; a change of routes later does
not touch it.
"""

from __future__ import annotations

import json

import httpx
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response

from serving.forwarding import Forward
from serving.openai_errors import error_response
from serving.targets import Targets


class Passthrough:
    """Forwards completions to what `model` names.

    `max_body`: bytes. `client` speaks to the targets; `close` closes it.
    """

    def __init__(self, targets: Targets, client: httpx.AsyncClient, *, max_body: int) -> None:
        self._targets = targets
        self._client = client
        self._max_body = max_body

    async def close(self) -> None:
        """Close the connections to the targets."""
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
        target = self._targets.find(
            tenant_id=request.state.tenant_id, key=request.state.key, model=model
        )
        if isinstance(target, Response):
            return target
        return Forward(request, body, target, targets=self._targets, client=self._client)

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
