"""Where requests go, by what they name."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from starlette.responses import Response

from serving.routes import Route, Routes, RoutesFile, write
from serving.targets import Target, Targets


def route(**fields: Any) -> Route:
    known: dict[str, Any] = {
        "tenant_id": "t",
        "name": "chat",
        "url": "http://127.0.0.1:9",
        "model": "g--0123",
        "version": "g/1",
        "digest": "sha256:0123",
        "created": 1,
    }
    return Route(**{**known, **fields})


def targets(folder: Path, *routes: Route, live: str | None = "http://127.0.0.1:8/") -> Targets:
    path = folder / "routes.json"
    write(path, Routes(routes=routes))
    return Targets(RoutesFile(path), live=live)


def test_an_endpoint_is_found_by_its_name_and_gets_no_key(tmp_path: Path) -> None:
    found = targets(tmp_path, route()).find(tenant_id="t", key="tml-k", model="chat")
    assert isinstance(found, Target)
    assert (found.url, found.model, found.name) == ("http://127.0.0.1:9/v1", "g--0123", "chat")
    assert (found.version, found.digest) == ("g/1", "sha256:0123")
    assert "tml-k" not in repr(found)


@pytest.mark.parametrize("model", ["tinker://a:train:0/weights/one", "a-b:sample:12"])
def test_what_a_session_holds_goes_to_the_session_server_with_the_key(
    tmp_path: Path, model: str
) -> None:
    found = targets(tmp_path).find(tenant_id="t", key="tml-k", model=model)
    assert isinstance(found, Target)
    assert found.url == "http://127.0.0.1:8/slipway/v1/live"
    assert found.model == found.name == model
    assert found.headers == {"x-api-key": "tml-k"}
    assert targets(tmp_path).moved(found) is None


@pytest.mark.parametrize(
    "model", ["a:sample:", "a:sample:x", "sample:1", "x tinker://", "tinker:/"]
)
def test_other_names_are_endpoints_names(tmp_path: Path, model: str) -> None:
    refused = targets(tmp_path).find(tenant_id="t", key="tml-k", model=model)
    assert isinstance(refused, Response)
    assert refused.status_code == 404


def test_without_a_session_server_the_way_out_is_named(tmp_path: Path) -> None:
    refused = targets(tmp_path, live=None).find(
        tenant_id="t", key="k", model="tinker://a/weights/b"
    )
    assert isinstance(refused, Response)
    assert refused.status_code == 400
    assert "merge and deploy" in json.loads(bytes(refused.body))["error"]["message"]


def test_a_move_is_noticed(tmp_path: Path) -> None:
    known = targets(tmp_path, route())
    found = known.find(tenant_id="t", key="k", model="chat")
    assert isinstance(found, Target)
    assert known.moved(found) is None
    write(tmp_path / "routes.json", Routes(routes=(route(url="http://127.0.0.1:7"),)))
    moved = known.moved(found)
    assert moved is not None
    assert moved.url == "http://127.0.0.1:7/v1"
    write(tmp_path / "routes.json", Routes(routes=(route(url=None),)))
    assert known.moved(found) is None
    refused = known.find(tenant_id="t", key="k", model="chat")
    assert isinstance(refused, Response)
    assert refused.status_code == 503


def test_what_does_not_answer_says_what_it_was(tmp_path: Path) -> None:
    known = targets(tmp_path, route())
    for model, code in (("chat", "endpoint_unavailable"), ("a:sample:1", "session_unavailable")):
        found = known.find(tenant_id="t", key="k", model=model)
        assert isinstance(found, Target)
        answer = found.unavailable({"x-request-id": "r"})
        assert answer.status_code == 503
        assert answer.headers["retry-after"] == "2"
        assert json.loads(bytes(answer.body))["error"]["code"] == code
