"""The gateway's door: no key, no entry, whatever the path."""

from __future__ import annotations

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send

from registry.auth import key_of
from serving.openai_errors import error_response
from serving.routes import RoutesFile


class KeyMiddleware:
    """Default-deny: every path outside `public` needs a key of the snapshot.

    The key comes as `X-API-Key` or as `Authorization: Bearer`. The tenant it belongs to is put
    into `request.state.tenant_id`, and it into `request.state.key`. A refusal tells nothing of
    what exists behind it.
    """

    def __init__(self, app: ASGIApp, *, routes: RoutesFile, public: frozenset[str]) -> None:
        self._app = app
        self._routes = routes
        self._public = public

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan" or scope.get("path") in self._public:
            await self._app(scope, receive, send)
            return
        if scope["type"] != "http":  # there are no websocket routes
            await send({"type": "websocket.close", "code": 1008})
            return
        key = key_of(Headers(scope=scope))
        tenant_id = self._routes.current().tenant(key) if key is not None else None
        if tenant_id is None:
            refusal = error_response(
                401,
                "A valid API key is required.",
                code="invalid_api_key",
                headers={"www-authenticate": "Bearer"},
            )
            await refusal(scope, receive, send)
            return
        scope.setdefault("state", {}).update(tenant_id=tenant_id, key=key)
        await self._app(scope, receive, send)
