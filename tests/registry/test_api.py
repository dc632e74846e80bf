from __future__ import annotations

import asyncio
import subprocess
import sys

import httpx
import pytest
from fastapi import FastAPI
from fastapi.routing import APIRoute

from registry import AuthMiddleware, Jobs, install_error_handlers, random_id, utc_now
from registry.api import router

PUBLIC = frozenset({"/open"})


@pytest.fixture
def app(bench):
    made = FastAPI()
    made.include_router(router(bench.registry, Jobs(utc_now, random_id)))

    @made.get("/open")
    def public() -> str:
        return "open"

    @made.get("/broken")
    def broken() -> None:
        raise RuntimeError("secret detail")

    made.add_middleware(
        AuthMiddleware, authenticate=bench.registry.tenants.authenticate, public=PUBLIC
    )
    install_error_handlers(made)
    return made


@pytest.fixture
def call(app, bench):
    """Send a request; with the tenant's key unless headers say otherwise."""
    key = bench.registry.tenants.create_key(bench.tenant, "test")[1]

    def send(method: str, path: str, *, headers=None, **options) -> httpx.Response:
        async def once() -> httpx.Response:
            transport = httpx.ASGITransport(app, raise_app_exceptions=False)
            async with httpx.AsyncClient(transport=transport, base_url="http://test") as http:
                given = {"X-API-Key": key} if headers is None else headers
                return await http.request(method, path, headers=given, **options)

        return asyncio.run(once())

    send.key = key
    return send


def every_route(app):
    found = []
    stack = list(app.routes)
    while stack:
        route = stack.pop()
        if isinstance(route, APIRoute):
            found += [(method, route.path) for method in route.methods]
        elif hasattr(route, "methods"):
            found += [(method, route.path) for method in route.methods or ()]
        elif hasattr(route, "original_router"):
            stack += route.original_router.routes
    return sorted(set(found))


def test_every_route_but_the_public_ones_needs_a_key(app, call):
    routes = every_route(app)
    assert len(routes) > 25
    answers = set()
    for method, path in routes:
        if path in PUBLIC:
            continue
        filled = path.replace("{number}", "1").replace("{", "").replace("}", "")
        for headers in ({}, {"X-API-Key": "tml-wrong"}, {"Authorization": "Bearer tml-wrong"}):
            answer = call(method, filled, headers=headers)
            assert answer.status_code == 401, (method, path)
            answers.add(answer.content if method != "HEAD" else b"")
    answers.discard(b"")
    # An unknown path and a wrong method say just the same.
    answers.add(call("GET", "/no/such/path", headers={}).content)
    answers.add(call("PATCH", "/slipway/v1/groups", headers={}).content)
    assert len(answers) == 1
    assert call("GET", "/open", headers={}).status_code == 200


def test_both_ways_of_carrying_a_key(call):
    for headers in ({"X-API-Key": call.key}, {"Authorization": f"bearer {call.key}"}):
        assert call("GET", "/slipway/v1/groups", headers=headers).json() == []


def test_versions_and_aliases(bench, call):
    bench.register()
    version = bench.register(text="two")
    assert call("GET", "/slipway/v1/versions/sums/2").json()["id"] == version.id
    assert call("GET", "/slipway/v1/resolve?reference=sums/2").json()["id"] == version.id
    page = call("GET", "/slipway/v1/versions?limit=1").json()
    rest = call("GET", f"/slipway/v1/versions?limit=1&cursor={page['cursor']}").json()
    assert [page["items"][0]["number"], rest["items"][0]["number"]] == [2, 1]
    assert call("POST", "/slipway/v1/versions/sums/2/verify").json()["problems"] == []

    path = "/slipway/v1/groups/sums/aliases/production"
    refused = call("PUT", path, json={"version": "sums/2"})
    assert refused.status_code == 412
    assert "passing gate" in refused.json()["error"]["message"]
    body = {"version": "sums/2", "expected": None, "override_reason": "first"}
    assert call("PUT", path, json=body).json()["to_reference"] == "sums/2"
    assert call("PUT", path, json=body).status_code == 422
    (line,) = call("GET", f"{path}/history").json()
    assert line["override_reason"] == "first"
    assert line["moved_by"] == "test"


def test_mistakes_are_answered_in_one_shape(bench, call):
    for method, path, body, status in (
        ("GET", "/slipway/v1/versions/sums/9", None, 404),
        ("GET", "/slipway/v1/versions?limit=0", None, 422),
        ("GET", "/slipway/v1/resolve?reference=a/b/c", None, 400),
        ("PUT", "/slipway/v1/groups/g/aliases/a", {"versoin": "g/1"}, 422),
        ("POST", "/slipway/v1/keys", {}, 422),
        ("GET", "/slipway/v1/nothing", None, 404),
    ):
        answer = call(method, path, json=body)
        assert answer.status_code == status, (path, answer.text)
        assert set(answer.json()["error"]) == {"code", "message"}
    assert "versoin" in call("PUT", "/slipway/v1/groups/g/aliases/a", json={"versoin": 1}).text


def test_what_nobody_foresaw_is_a_500_that_reveals_nothing(call):
    answer = call("GET", "/broken")
    assert answer.status_code == 500
    assert "secret" not in answer.text


def test_keys_over_http(bench, call):
    made = call("POST", "/slipway/v1/keys", json={"name": "laptop"}).json()
    headers = {"X-API-Key": made["secret"]}
    assert call("GET", "/slipway/v1/groups", headers=headers).status_code == 200
    listed = call("GET", "/slipway/v1/keys")
    assert made["secret"] not in listed.text
    call("DELETE", f"/slipway/v1/keys/{made['key']['id']}")
    assert call("GET", "/slipway/v1/groups", headers=headers).status_code == 401


def test_the_registry_imports_no_torch():
    code = "import sys, registry, registry.api; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
