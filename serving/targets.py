"""Where a request goes: to the replica of an endpoint, or to a live session.

What `model` names decides: an endpoint's name, or the `tinker://` path of something saved, or
a sampler's id. The last two belong to sessions, and are the control plane's to answer.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field

from starlette.responses import Response

from serving.openai_errors import error_response, unknown_model
from serving.routes import Route, RoutesFile

LIVE_MODEL = re.compile(r"tinker://|[^/\s]+:sample:\d+$")
"""Names of what a session holds, told by how they begin, or by a sampler's number."""
_RETRY_AFTER = {"retry-after": "2"}


@dataclass(frozen=True, kw_only=True)
class Target:
    """Where one request goes, settled when it is admitted.

    Fields:
        name: what the client called the model, and what answers call it too.
        url: what stands there in place of the gateway's `/v1`.
        model: what it is called there.
        version, digest: what answers; empty where the answer itself says so.
        headers: what is sent along.
        route: the endpoint's; None for a live session.
    """

    name: str
    url: str
    model: str
    version: str = ""
    digest: str = ""
    headers: Mapping[str, str] = field(default_factory=dict)
    route: Route | None = None

    def unavailable(self, marks: Mapping[str, str]) -> Response:
        """503, saying what does not answer."""
        if self.route is not None:
            return not_serving(self.route, marks)
        return error_response(
            503,
            f"The session server behind {self.name!r} does not answer now; try again shortly.",
            code="session_unavailable",
            headers={**marks, **_RETRY_AFTER},
        )


class Targets:
    """Finds the target of a request.

    Args:
        live: the control plane's address, or None if there are no live sessions here.
    """

    def __init__(self, routes: RoutesFile, *, live: str | None) -> None:
        self._routes = routes
        self._live = live.rstrip("/") if live is not None else None

    def find(self, *, tenant_id: str, key: str, model: str) -> Target | Response:
        """The target of what `model` names for a tenant, or why there is none."""
        if LIVE_MODEL.match(model):
            return self._session(key, model)
        routes = self._routes.current()
        route = routes.find(tenant_id, model)
        if route is None:
            return unknown_model(model, routes.of(tenant_id))
        return _endpoint(route) or not_serving(route)

    def moved(self, target: Target) -> Target | None:
        """Where an endpoint is served now, if that is somewhere else."""
        if target.route is None:
            return None
        now = self._routes.current().find(target.route.tenant_id, target.name)
        if now is None or now.url == target.route.url:
            return None
        return _endpoint(now)

    def _session(self, key: str, model: str) -> Target | Response:
        if self._live is None:
            return error_response(
                400,
                f"{model!r} belongs to a live session, and this gateway has none behind it: "
                "merge and deploy the version, and give its endpoint's name as model.",
                code="model_not_supported",
                param="model",
            )
        # Whose session it is, is for the server that has it to say: it gets the caller's key.
        return Target(
            name=model,
            url=f"{self._live}/slipway/v1/live",
            model=model,
            headers={"x-api-key": key},
        )


def _endpoint(route: Route) -> Target | None:
    if route.url is None:
        return None
    return Target(
        name=route.name,
        url=f"{route.url}/v1",
        model=route.model,
        version=route.version,
        digest=route.digest,
        route=route,
    )


def not_serving(route: Route, headers: Mapping[str, str] | None = None) -> Response:
    """503 for an endpoint that exists but whose replica is starting, or dead."""
    return error_response(
        503,
        f"The endpoint {route.name!r} ({route.version}) is not serving now; try again shortly. "
        "`slipway endpoints` shows its state.",
        code="endpoint_unavailable",
        headers={**(headers or {}), **_RETRY_AFTER},
    )
