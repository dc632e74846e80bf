from __future__ import annotations

import asyncio

import httpx
import pytest
from fastapi import FastAPI, Request

from registry import LimitMiddleware, install_error_handlers
from registry.limits import DRAINED, LARGEST_BODY

LARGER = 2 * LARGEST_BODY


@pytest.fixture
def app():
    """Two routes that say how much they were sent."""
    made = FastAPI()

    @made.post("/small")
    @made.post("/large")
    async def length(request: Request) -> int:
        return len(await request.body())

    @made.post("/json")
    async def parsed(body: dict[str, str]) -> int:
        return len(body)

    made.add_middleware(LimitMiddleware, larger={"/large": LARGER})
    install_error_handlers(made)
    return made


def post(app, path, content, **options):
    async def once():
        transport = httpx.ASGITransport(app=app)
        async with httpx.AsyncClient(transport=transport, base_url="http://slipway") as client:
            return await client.post(path, content=content, **options)

    return asyncio.run(once())


@pytest.mark.parametrize(("path", "limit"), [("/small", LARGEST_BODY), ("/large", LARGER)])
def test_a_body_may_be_as_large_as_its_limit_and_no_larger(app, path, limit):
    assert post(app, path, b"x" * limit).json() == limit
    answer = post(app, path, b"x" * (limit + 1))
    assert answer.status_code == 413
    assert answer.json()["error"]["code"] == "too_large"
    assert str(limit) in answer.json()["error"]["message"]


def test_a_parsed_body_is_limited_too(app):
    answer = post(app, "/json", b'{"a": "' + b"x" * LARGEST_BODY + b'"}')
    assert answer.status_code == 413


def test_a_body_of_unknown_length_is_given_up_where_it_is_too_large(app):
    sent = 0

    async def endless():
        nonlocal sent
        while True:
            sent += 2**20
            yield b"x" * 2**20

    assert post(app, "/small", endless()).status_code == 413
    # It was read for a while, for the sender's sake, and not for ever.
    assert LARGEST_BODY < sent <= (DRAINED + 2) * LARGEST_BODY


@pytest.mark.parametrize("address", ["/small%00", "/small?project=%00"])
def test_an_address_holds_no_nul(app, address):
    assert post(app, address, b"").status_code == 400
