"""Every route the official SDK knows is served, or refused by a name of its own."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any, cast

import pytest
import tinker
from starlette.routing import Match, Route

from session_core.dialects.tinker import router

SDK = Path(tinker.__file__).parent
METHODS = {"post": "POST", "get": "GET", "put": "PUT", "delete": "DELETE"}
# The SDK asks for it only of servers whose client/config says pjwt_auth_enabled.
LEFT_TO_THE_REST = {"/api/v1/auth/token"}


def filled_in(path: str) -> str:
    """A path with something in place of its variables; a checkpoint's id holds a slash."""
    path = re.sub(r"\{[^}]*checkpoint_id[^}]*\}", "weights/x", path)
    return re.sub(r"\{[^}]*\}", "x", path)


def asked_for() -> set[tuple[str, str]]:
    """(method, path) of everything the SDK's source asks a server for."""
    found = set()
    call = re.compile(
        r"\b_?(post|get|put|delete|request)\(\s*(?:\"([A-Z]+)\",\s*)?f?\"(/api/v1/[^\"?]+)"
    )
    for file in SDK.rglob("*.py"):
        if file.stem.endswith("_test"):
            continue
        for verb, method, path in call.findall(file.read_text()):
            found.add((method or METHODS[verb], filled_in(path)))
    return found


def test_the_sources_are_read_right() -> None:
    paths = {path for _, path in asked_for()}
    assert len(paths) >= 40
    quoted = {
        filled_in(path)
        for file in SDK.rglob("*.py")
        if not file.stem.endswith("_test")
        for path in re.findall(r"\"(/api/v1/[^\"?`]+)\"", file.read_text())
    }
    assert quoted - paths <= {"/api/v1/x"}, "a call that is written in another way"


@pytest.mark.parametrize(("method", "path"), sorted(asked_for()))
def test_a_route_of_its_own(method: str, path: str) -> None:
    routes = router(cast(Any, _Anything())).routes
    scope = {"type": "http", "method": method, "path": path, "root_path": ""}
    named = [
        route
        for route in routes
        if isinstance(route, Route)
        and route.matches(scope)[0] is Match.FULL
        and "{path:path}" not in route.path
    ]
    assert bool(named) != (path in LEFT_TO_THE_REST)


class _Anything:
    """Stands where the service would: routes are looked at, and none is called."""

    def __getattr__(self, name: str) -> Any:
        return _Anything()

    def __call__(self, *_: Any, **__: Any) -> Any:
        return _Anything()
