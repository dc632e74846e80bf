"""The real gateway process, in front of stand-ins, spoken to by the official client."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from starlette.routing import Route
from starlette.testclient import TestClient

from serving.gateway import create_app
from serving.routes import Routes, write

Make = Callable[..., Any]


async def deployed(s: Any, name: str, **config: Any) -> Any:
    version = s.version(**config)
    job = await s.deploy(name, version.reference)
    assert job.status == "done", job
    await s.routed(lambda content: bool(content["keys"]))
    return version


def test_the_official_client_sees_an_openai_server(stack: Make) -> None:
    async def story() -> None:
        async with stack(gateway=True) as s, s.client() as client:
            version = await deployed(s, "chat", says="the sum is 4")
            answer = await client.chat.completions.with_raw_response.create(
                model="chat", messages=[{"role": "user", "content": "2+2?"}]
            )
            assert answer.headers["x-slipway-version"] == "g/1"
            assert answer.headers["x-slipway-digest"] == version.digest
            assert answer.headers["x-request-id"].startswith("req-")
            chat = answer.parse()
            assert chat.model == "chat"
            assert chat.choices[0].message.content == "the sum is 4"
            text = await client.completions.create(model="chat", prompt=[1, 2, 3], max_tokens=2)
            assert text.model == "chat"
            assert text.choices[0].text == "the sum"
            models = await client.models.list()
            assert [model.id for model in models.data] == ["chat"]
            assert (await client.models.retrieve("chat")).id == "chat"

    asyncio.run(story())


@pytest.mark.parametrize("chat", [True, False])
def test_streams_come_through_as_they_are_made(stack: Make, chat: bool) -> None:
    async def story() -> None:
        async with stack(gateway=True) as s, s.client() as client:
            await deployed(s, "chat", says="a b c", delay=0.2)
            loop = asyncio.get_running_loop()
            began, times, said, names = loop.time(), [], "", set()
            if chat:
                stream: Any = await client.chat.completions.create(
                    model="chat", messages=[{"role": "user", "content": "x"}], stream=True
                )
            else:
                stream = await client.completions.create(model="chat", prompt="x", stream=True)
            async for chunk in stream:
                choice = chunk.choices[0]
                said += choice.delta.content if chat else choice.text
                times.append(loop.time() - began)
                names.add(chunk.model)
            assert said == "a b c "
            assert names == {"chat"}
            assert times[-1] - times[0] > 0.3  # not all at once at the end

    asyncio.run(story())


def test_what_the_client_sends_arrives_but_for_the_key(stack: Make) -> None:
    async def story() -> None:
        async with stack(gateway=True) as s, s.client() as client:
            await deployed(s, "chat")
            await client.completions.create(
                model="chat",
                prompt="é",
                temperature=0,
                logprobs=3,
                extra_body={"ignore_eos": True},
                extra_headers={"x-request-id": "mine-1"},
            )
            seen = (await s.stats("chat"))["seen"][-1]
            assert seen["body"]["prompt"] == "é"
            assert seen["body"]["logprobs"] == 3
            assert seen["body"]["ignore_eos"] is True
            assert seen["headers"]["x-request-id"] == "mine-1"
            assert s.key not in json.dumps(seen)

    asyncio.run(story())


@pytest.mark.parametrize("stream", [True, False])
def test_a_client_that_goes_away_stops_the_engine(stack: Make, stream: bool) -> None:
    async def story() -> None:
        async with stack(gateway=True) as s:
            await deployed(s, "chat", says="word " * 500, delay=0.02)
            url = f"{s.gateway.url}/v1/completions"
            body = {"model": "chat", "prompt": "x", "stream": stream}
            headers = {"x-api-key": s.key}
            async with httpx.AsyncClient(timeout=0.5 if not stream else 30) as client:
                if stream:
                    async with client.stream("POST", url, json=body, headers=headers) as answer:
                        async for _ in answer.aiter_bytes():
                            break
                else:
                    with pytest.raises(httpx.ReadTimeout):
                        await client.post(url, json=body, headers=headers)
            for _ in range(60):
                stats = await s.stats("chat")
                if stats["cancelled"]:
                    break
                await asyncio.sleep(0.05)
            assert stats["cancelled"] == 1
            assert stats["finished"] == 1  # the probe's

    asyncio.run(story())


def test_an_unknown_model_names_what_exists_for_this_tenant(stack: Make) -> None:
    async def story() -> None:
        async with stack(gateway=True) as s, s.client() as client:
            await deployed(s, "chat")
            other = s.registry.tenants.ensure_tenant("other")
            _, key = s.registry.tenants.create_key(other, "theirs")
            await s.routed(lambda content: len(content["keys"]) == 2)
            with pytest.raises(openai.NotFoundError, match="Endpoints here: chat") as caught:
                await client.completions.create(model="chatt", prompt="x")
            assert caught.value.code == "model_not_found"
            async with s.client(key) as theirs:
                assert (await theirs.models.list()).data == []
                with pytest.raises(openai.NotFoundError, match="none yet"):
                    await theirs.completions.create(model="chat", prompt="x")
                with pytest.raises(openai.NotFoundError):
                    await theirs.models.retrieve("chat")

    asyncio.run(story())


def test_what_sessions_hold_is_refused_with_a_way_out_where_there_are_none(stack: Make) -> None:
    async def story() -> None:
        async with stack(gateway=True) as s, s.client() as client:
            await s.routed(lambda content: bool(content["keys"]))
            for model in ("tinker://run/weights/1", "0123:sample:4"):
                with pytest.raises(openai.BadRequestError, match="merge and deploy"):
                    await client.completions.create(model=model, prompt="x")

    asyncio.run(story())


def test_the_engines_own_errors_speak_of_the_endpoint(stack: Make) -> None:
    async def story() -> None:
        async with stack(gateway=True) as s, s.client() as client:
            await deployed(s, "chat")
            with pytest.raises(openai.BadRequestError, match="temperature is wrong for chat"):
                await client.completions.create(model="chat", prompt="x", temperature=99)

    asyncio.run(story())


def test_a_dead_replica_is_503_and_a_stream_that_breaks_off_says_so(stack: Make) -> None:
    async def story() -> None:
        async with stack(gateway=True) as s, s.client() as client:
            await deployed(s, "chat", says="word " * 500, delay=0.02)
            stream = await client.completions.create(model="chat", prompt="x", stream=True)
            await anext(aiter(stream))
            await end_replicas(s)
            with pytest.raises(openai.APIError, match="ended in the middle"):
                async for _ in stream:
                    pass
            with pytest.raises(openai.InternalServerError) as caught:
                await client.completions.create(model="chat", prompt="x")
            assert caught.value.status_code == 503
            assert caught.value.code == "endpoint_unavailable"
            assert caught.value.response.headers["retry-after"] == "2"
            await s.routed(lambda content: content["routes"][0]["url"] is None)
            with pytest.raises(openai.InternalServerError, match="not serving now"):
                await client.completions.create(model="chat", prompt="x")
            async with asyncio.timeout(10):
                while (await s.endpoints.get(s.tenant, "chat")).status != "failed":
                    await asyncio.sleep(0.05)

    asyncio.run(story())


async def end_replicas(s: Any) -> None:
    """Kill the replica behind the gateway the way an out-of-memory killer would."""
    import psutil

    (replica,) = await s.endpoints.replicas(s.tenant)
    for process in psutil.process_iter(["cmdline"]):
        if any("stand_in.py" in part for part in process.info["cmdline"] or ()) and any(
            replica.model in part for part in process.info["cmdline"]
        ):
            process.kill()


def test_new_keys_are_let_in_and_revoked_ones_are_not(stack: Make) -> None:
    async def story() -> None:
        async with stack(gateway=True) as s:
            view, key = s.registry.tenants.create_key(s.tenant, "second")
            await s.routed(lambda content: len(content["keys"]) == 2)
            async with s.client(key) as client:
                await client.models.list()
                s.registry.tenants.revoke(s.tenant, view.id)
                await s.routed(lambda content: len(content["keys"]) == 1)
                with pytest.raises(openai.AuthenticationError):
                    await client.models.list()
            log = (s.home / "logs" / "gateway.log").read_text()
            assert key not in log
            assert key not in (s.home / "gateway" / "routes.json").read_text()

    asyncio.run(story())


def test_bad_bodies(stack: Make) -> None:
    async def story() -> None:
        async with stack(gateway=True) as s:
            await s.routed(lambda content: bool(content["keys"]))
            async with httpx.AsyncClient(
                base_url=s.gateway.url, headers={"authorization": f"Bearer {s.key}"}
            ) as client:
                for content, status, code in (
                    (b"{", 400, "invalid_json"),
                    (b"[" * 100_000, 400, "invalid_json"),
                    (b"[]", 400, "missing_model"),
                    (b'{"model": 3}', 400, "missing_model"),
                    (b'{"model": "a", "prompt": "%s"}' % (b"x" * 9_000_000), 413, None),
                ):
                    answer = await client.post("/v1/completions", content=content)
                    assert answer.status_code == status
                    assert answer.json()["error"]["code"] == (code or "request_too_large")
                    assert set(answer.json()["error"]) == {"message", "type", "param", "code"}

                async def endless() -> Any:
                    for _ in range(20):
                        yield b"x" * 1_000_000

                answer = await client.post("/v1/completions", content=endless())
                assert answer.status_code == 413

    asyncio.run(story())


@pytest.mark.parametrize(
    "path", ["/metrics", "/load", "/v1/responses", "/tokenize", "/v1/load_lora_adapter", "/docs"]
)
def test_only_listed_paths_exist(tmp_path: Path, path: str) -> None:
    with TestClient(create_app(known(tmp_path)), headers={"x-api-key": "tml-k"}) as client:
        answer = client.post(path, json={})
        assert answer.status_code == 404
        assert answer.json()["error"]["type"] == "invalid_request_error"
        assert client.get("/v1/completions").status_code == 405


def test_every_route_but_health_refuses_without_a_key(tmp_path: Path) -> None:
    app = create_app(known(tmp_path))
    paths = [route.path for route in app.routes if isinstance(route, Route)]
    assert len(paths) == len(app.routes) == 5
    with TestClient(app) as client:
        assert client.get("/healthz").json() == {"status": "ok"}
        for path in (*(p for p in paths if p != "/healthz"), "/", "/nothing", "/healthz/x"):
            for headers in (
                {},
                {"x-api-key": "tml-wrong"},
                {"authorization": "Bearer tml-wrong"},
                {"authorization": "Basic tml-k"},
                {"authorization": ""},
            ):
                for method in ("GET", "POST"):
                    answer = client.request(method, path, headers=headers)
                    assert answer.status_code == 401, (method, path)
                    assert answer.json()["error"]["code"] == "invalid_api_key"
                    assert "tml-" not in answer.text
        assert client.get("/v1/models", headers={"x-api-key": "tml-k"}).status_code == 200
        bearer = {"authorization": "bearer tml-k"}
        assert client.get("/v1/models", headers=bearer).status_code == 200


def known(folder: Path) -> Path:
    """A snapshot with the one key `tml-k` and no endpoint."""
    import hashlib

    path = folder / "routes.json"
    write(path, Routes(keys={hashlib.sha256(b"tml-k").hexdigest(): "t"}))
    return path
