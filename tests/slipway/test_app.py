from __future__ import annotations

import asyncio
import json
from datetime import timedelta

import httpx
import pytest
from starlette.routing import Route

from registry import LINKS, Signer, utc_now
from slipway.app import PUBLIC, create_app
from slipway.home import Home
from slipway.server import Listen, prepare
from slipway.settings import Settings


@pytest.fixture
def home(tmp_path):
    made = Home(tmp_path / "home")
    made.logs.mkdir(parents=True)
    return made


@pytest.fixture
def app(home, tiny_base):
    """The application as `slipway up` makes it, with nothing below it started."""
    settings = Settings.read(home=home.folder, base_model=str(tiny_base), engine_command="none")
    services = prepare(home, settings, Listen(), lambda line: None)
    yield create_app(services)
    services.registry.db.close()


def routes(app):
    """Every (method, path) there is, hidden ones too."""
    for route in app.routes:
        assert isinstance(route, Route), f"{route} is not walked by this test"
        for method in sorted(route.methods or {"GET"}):
            yield method, route.path


def ask(app, method, path, headers):
    async def once():
        transport = httpx.ASGITransport(app=app)
        async with httpx.AsyncClient(transport=transport, base_url="http://slipway") as client:
            return await client.request(method, path, headers=headers)

    return asyncio.run(once())


def test_only_the_health_of_the_server_is_public():
    assert frozenset({"/api/v1/healthz"}) == PUBLIC


def test_every_other_route_gives_the_same_401_without_a_key_and_with_a_wrong_one(app):
    answers = set()
    checked = 0
    for method, path in routes(app):
        if path in PUBLIC:
            continue
        filled = path.replace("{", "").replace("}", "").replace(":path", "")
        for headers in (
            {},
            {"X-API-Key": "tml-wrong"},
            {"Authorization": "Bearer tml-wrong"},
            {"Authorization": "Basic eDp5"},
        ):
            answer = ask(app, method, filled, headers)
            assert answer.status_code == 401, (method, path)
            if method != "HEAD":
                answers.add(answer.content)
        checked += 1
    assert checked > 80
    # One answer to all, also to what does not exist: it tells nothing.
    answers.add(ask(app, "GET", "/nowhere", {}).content)
    assert len(answers) == 1
    assert set(json.loads(answers.pop())["error"]) == {"code", "message"}


def test_a_link_s_route_is_open_to_a_signed_link_and_to_no_key(app, home):
    key = {"X-API-Key": home.key()}
    below = [(method, path) for method, path in routes(app) if path.startswith(LINKS)]
    assert below == [("GET", f"{LINKS}{{token}}/{{file:path}}")]
    denied = ask(app, "GET", "/nowhere", {})
    for path in (f"{LINKS}token/file", f"{LINKS}a.b/file", LINKS, f"{LINKS}%2e%2e/training_runs"):
        for headers in ({}, key):
            answer = ask(app, "GET", path, headers)
            assert (answer.status_code, answer.content) == (401, denied.content), path

    signer = Signer(home.sessions / "signing.key", utc_now)
    claim = {"tenant": "t", "path": "tinker://r/weights/n", "file": "f", "content": "c"}
    token, _ = signer.sign(claim, lives=timedelta(minutes=1))
    # Let in, and then there is nothing there.
    assert ask(app, "GET", f"{LINKS}{token}/f", {}).status_code == 404
    for method in ("POST", "PUT", "DELETE", "PATCH", "HEAD", "OPTIONS"):
        assert ask(app, method, f"{LINKS}{token}/f", {}).status_code == 401, method
    # It opens nothing else.
    for path in ("/api/v1/checkpoints", f"/api/v1/download{token}/f", f"/{token}"):
        assert ask(app, "GET", path, {"X-API-Key": token}).status_code == 401, path
    late, _ = signer.sign(claim, lives=timedelta(seconds=-1))
    expired = ask(app, "GET", f"{LINKS}{late}/f", {})
    assert (expired.status_code, "expired" in expired.text) == (403, True)


def test_a_path_that_looks_public_is_not(app):
    for path in ("/api/v1/healthz/", "/api/v1/healthz/../groups", "//api/v1/healthz", "/"):
        assert ask(app, "GET", path, {}).status_code == 401, path
    assert ask(app, "GET", "/api/v1/healthz", {}).status_code == 200


def test_the_home_s_key_opens_it(app, home):
    key = home.key()
    answer = ask(app, "GET", "/slipway/v1/groups", {"Authorization": f"Bearer {key}"})
    assert [group["name"] for group in answer.json()] == ["tiny"]
    assert ask(app, "GET", "/slipway/v1/docs", {"X-API-Key": key}).status_code == 200
    # What is not there is said in the one shape of an error.
    missing = ask(app, "GET", "/slipway/v1/nothing", {"X-API-Key": key})
    assert missing.status_code == 404
    assert set(missing.json()["error"]) == {"code", "message"}


def test_no_two_routes_answer_for_the_same(app):
    every = list(routes(app))
    assert len(set(every)) == len(every)
