from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import httpx
from fastapi import FastAPI
from fastapi.routing import APIRoute

from registry.auth import AuthMiddleware, install_error_handlers
from serving.api import router

Make = Callable[..., Any]


def app_of(s: Any) -> FastAPI:
    app = FastAPI()
    app.include_router(router(s.endpoints))
    install_error_handlers(app)
    app.add_middleware(
        AuthMiddleware, authenticate=s.registry.tenants.authenticate, public=frozenset()
    )
    return app


def client_of(s: Any, key: str | None) -> httpx.AsyncClient:
    return httpx.AsyncClient(
        transport=httpx.ASGITransport(app_of(s)),
        base_url="http://slipway/slipway/v1",
        headers={"x-api-key": key} if key else {},
    )


def test_an_endpoints_life_over_http(stack: Make) -> None:
    async def story() -> None:
        async with stack() as s, client_of(s, s.key) as client:
            s.version()
            assert (await client.get("/endpoints")).json() == []
            answer = await client.post("/endpoints", json={"name": "chat", "version": "g/1"})
            assert answer.status_code == 202
            assert (await s.finished(answer.json()["id"])).status == "done"
            (shown,) = (await client.get("/endpoints")).json()
            assert shown == (await client.get("/endpoints/chat")).json()
            assert (shown["name"], shown["status"], shown["version"]) == ("chat", "ready", "g/1")
            (replica,) = (await client.get("/replicas")).json()
            assert replica["id"] == shown["replica_id"]
            assert replica["engine"]["name"] == "stand-in"
            assert (await client.delete("/endpoints/chat")).json()["name"] == "chat"
            assert (await client.get("/endpoints/chat")).status_code == 404

    asyncio.run(story())


def test_faults_are_answered_as_such(stack: Make) -> None:
    async def story() -> None:
        async with stack() as s, client_of(s, s.key) as client:
            s.version(kind="weights")
            for body, status in (
                ({"name": "chat", "version": "g/1"}, 400),
                ({"name": "chat", "version": "g/9"}, 404),
                ({"name": "chat", "version": "no such thing"}, None),
                ({"name": "CHAT", "version": "g/1"}, 400),
                ({"name": "chat"}, 422),
                ({"name": "chat", "version": "g/1", "x": 1}, 422),
            ):
                answer = await client.post("/endpoints", json=body)
                assert 400 <= answer.status_code < 500
                assert status in (None, answer.status_code), answer.text
                assert set(answer.json()["error"]) >= {"code", "message"}

    asyncio.run(story())


def test_tenants_do_not_see_each_other(stack: Make) -> None:
    async def story() -> None:
        async with stack() as s:
            s.version()
            await s.deploy("chat", "g/1")
            other = s.registry.tenants.ensure_tenant("other")
            _, key = s.registry.tenants.create_key(other, "theirs")
            async with client_of(s, key) as client:
                assert (await client.get("/endpoints")).json() == []
                assert (await client.get("/replicas")).json() == []
                assert (await client.get("/endpoints/chat")).status_code == 404
                assert (await client.delete("/endpoints/chat")).status_code == 404
                answer = await client.post("/endpoints", json={"name": "x", "version": "g/1"})
                assert answer.status_code == 404

    asyncio.run(story())


def test_every_route_needs_a_key(stack: Make) -> None:
    async def story() -> None:
        async with stack() as s, client_of(s, None) as client:
            routes = [r for r in router(s.endpoints).routes if isinstance(r, APIRoute)]
            assert len(routes) == 5
            for route in routes:
                for method in route.methods:
                    path = route.path.removeprefix("/slipway/v1").replace("{name}", "chat")
                    answer = await client.request(method, path)
                    assert answer.status_code == 401, (method, path)

    asyncio.run(story())
