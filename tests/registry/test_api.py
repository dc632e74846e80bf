from __future__ import annotations

import asyncio
import subprocess
import sys

import httpx
import pytest
from fastapi import FastAPI
from fastapi.routing import APIRoute

from registry import (
    AuthMiddleware,
    Entry,
    Jobs,
    NewGate,
    NewRun,
    Role,
    UsageKind,
    install_error_handlers,
    random_id,
    utc_now,
)
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


def test_administration_over_http(bench, call):
    tenants = bench.registry.tenants
    boss = {"X-API-Key": tenants.create_key(bench.tenant, "boss", role=Role.ADMIN)[1]}
    made = call("POST", "/slipway/v1/tenants", json={"name": "team-b"}, headers=boss)
    assert made.status_code == 201
    again = call("POST", "/slipway/v1/tenants", json={"name": "team-b"}, headers=boss)
    assert again.status_code == 422
    body = {"name": "theirs", "role": "admin"}
    key = call("POST", "/slipway/v1/keys?tenant=team-b", json=body, headers=boss).json()
    (listed,) = call("GET", "/slipway/v1/keys?tenant=team-b", headers=boss).json()
    assert (listed["id"], listed["role"]) == (key["key"]["id"], "admin")
    names = [t["name"] for t in call("GET", "/slipway/v1/tenants", headers=boss).json()]
    assert names == ["mine", "stranger", "team-b"]

    refused = set()
    for method, path, body in (
        ("GET", "tenants", None),
        ("POST", "tenants", {"name": "more"}),
        ("POST", "keys", {"name": "x", "role": "admin"}),
    ):
        answer = call(method, f"/slipway/v1/{path}", json=body)
        assert answer.status_code == 403, path
        refused.add(answer.content)
    assert len(refused) == 1
    assert "slipway keys create NAME --role admin" in refused.pop().decode()
    for method, path in (
        ("GET", "keys?tenant=team-b"),
        ("POST", "keys?tenant=team-b"),
        ("DELETE", f"keys/{key['key']['id']}?tenant=team-b"),
        ("GET", "keys?tenant=nobody"),
    ):
        answer = call(method, f"/slipway/v1/{path}", json={"name": "x"})
        assert answer.status_code == 403, path
    path, price = "/slipway/v1/prices", {"kind": "train", "per_million": "2.50"}
    assert call("PUT", path, json=price).status_code == 403
    assert call("PUT", path, json=price, headers=boss).json()["per_million"] == "2.50"
    for wrong in ("-1", "NaN", "1e10", "many", "0.0000000001"):
        answer = call("PUT", path, json={**price, "per_million": wrong}, headers=boss)
        assert answer.status_code in (400, 422), wrong
    assert [p["per_million"] for p in call("GET", "/slipway/v1/prices").json()] == ["2.50"]
    used = Entry(
        tenant_id=tenants.named("team-b"), operation="one", kind=UsageKind.TRAIN, tokens=400_000
    )
    bench.registry.usage.record(used)
    assert call("GET", "/slipway/v1/usage?tenant=team-b").status_code == 403
    for by in ("kind", "day", "session", "key"):
        (row,) = call("GET", f"/slipway/v1/usage?tenant=team-b&by={by}", headers=boss).json()
        assert (row["tokens"], float(row["cost"])) == (400_000, 1.0)
    future = call("GET", "/slipway/v1/usage?tenant=team-b&since=2999-01-01", headers=boss)
    assert future.json() == []
    assert call("GET", "/slipway/v1/usage?by=colour").status_code == 422
    gone = call("DELETE", f"/slipway/v1/keys/{key['key']['id']}?tenant=team-b", headers=boss)
    assert gone.json()["revoked_at"] is not None


def evidence_of(bench, version):
    """A suite, a run of it on a version, and a verdict on that version against itself."""
    evidence = bench.registry.evidence
    suite = evidence.add_suite(bench.tenant, "suite", {"items": [{"id": "1"}]})
    run = evidence.add_run(
        NewRun(
            tenant_id=bench.tenant,
            version_id=version.id,
            version_digest=version.digest,
            suite_name=suite.name,
            suite_digest=suite.digest,
            engine={"name": "test"},
            engine_fingerprint="f",
            counts={"correct": 1},
            items=({"id": "1", "raw": "2"},),
        )
    )
    verdict = NewGate(
        tenant_id=bench.tenant,
        candidate_run=run,
        baseline_run=run,
        verdict="pass",
        reason="measured",
        statistics={},
    )
    return suite, run, evidence.add_gate(verdict)


def test_evidence_lineage_usage_and_rollback(bench, call):
    base = bench.register()
    version = bench.register(text="two", parents=(base.id,))
    suite, run, verdict = evidence_of(bench, version)

    assert [s["digest"] for s in call("GET", "/slipway/v1/suites").json()] == [suite.digest]
    shown = call("GET", "/slipway/v1/suites/suite").json()
    assert (shown["digest"], shown["spec"]) == (suite.digest, {"items": [{"id": "1"}]})
    for query, ids in (
        ("", [run.id]),
        ("?version=sums/2&suite=suite", [run.id]),
        ("?version=sums/1", []),
    ):
        assert [r["id"] for r in call("GET", f"/slipway/v1/evals{query}").json()] == ids
    assert call("GET", f"/slipway/v1/evals/{run.id}").json()["reference"] == "sums/2"
    assert call("GET", f"/slipway/v1/evals/{run.id}/items").json() == [{"id": "1", "raw": "2"}]
    assert [g["id"] for g in call("GET", "/slipway/v1/gates?version=sums/2").json()] == [verdict.id]
    assert call("GET", "/slipway/v1/gates?version=sums/1").json() == []
    assert call("GET", f"/slipway/v1/gates/{verdict.id}").json()["verdict"] == "pass"

    lineage = call("GET", "/slipway/v1/versions/sums/1/lineage").json()
    assert [v["reference"] for v in lineage["descendants"]] == ["sums/2"]

    path = "/slipway/v1/groups/sums/aliases/staging"
    for number in (1, 2):
        assert call("PUT", path, json={"version": f"sums/{number}"}).status_code == 200
    assert call("POST", f"{path}/rollback").json()["to_reference"] == "sums/1"
    (alias,) = call("GET", "/slipway/v1/aliases?group=sums").json()
    assert (alias["alias"], alias["reference"]) == ("staging", "sums/1")

    bench.registry.usage.record(
        Entry(tenant_id=bench.tenant, operation="one", kind=UsageKind.TRAIN, tokens=5)
    )
    (total,) = call("GET", "/slipway/v1/usage").json()
    assert total == {
        "group": "train",
        "name": None,
        "kind": "train",
        "tokens": 5,
        "operations": 1,
        "cost": None,
    }


def test_nothing_of_one_tenant_is_shown_to_another(bench, call):
    version = bench.register()
    _, run, verdict = evidence_of(bench, version)
    bench.registry.aliases.move(bench.tenant, "sums", "staging", "sums/1", moved_by="me")
    key, theirs = bench.registry.tenants.create_key(bench.stranger, "theirs")
    headers = {"X-API-Key": theirs}
    for path in ("groups", "versions", "aliases", "suites", "evals", "gates", "usage", "jobs"):
        listed = call("GET", f"/slipway/v1/{path}", headers=headers).json()
        assert listed in ([], {"items": [], "cursor": None}), path
    own = bench.registry.tenants.keys(bench.tenant)[0].id
    for method, path in (
        ("GET", f"resolve?reference={version.id}"),
        ("GET", "resolve?reference=sums@staging"),
        ("GET", "versions/sums/1"),
        ("GET", "versions/sums/1/lineage"),
        ("POST", "versions/sums/1/verify"),
        ("GET", "suites/suite"),
        ("GET", f"evals/{run.id}"),
        ("GET", f"evals/{run.id}/items"),
        ("GET", "evals?version=sums/1"),
        ("GET", f"gates/{verdict.id}"),
        ("GET", "groups/sums/aliases/staging/history"),
        ("POST", "groups/sums/aliases/staging/rollback"),
        ("DELETE", f"keys/{own}"),
    ):
        answer = call(method, f"/slipway/v1/{path}", headers=headers)
        assert answer.status_code == 404, path
    body = {"version": "sums/1"}
    path = "/slipway/v1/groups/sums/aliases/staging"
    assert call("PUT", path, headers=headers, json=body).status_code == 404
    assert [k["id"] for k in call("GET", "/slipway/v1/keys", headers=headers).json()] == [key.id]
    # The key that was to be revoked still works.
    assert call("GET", "/slipway/v1/groups").status_code == 200


def test_jobs_over_http(bench):
    async def scenario() -> None:
        jobs = Jobs(utc_now, random_id)
        app = FastAPI()
        app.include_router(router(bench.registry, jobs))
        app.add_middleware(
            AuthMiddleware, authenticate=bench.registry.tenants.authenticate, public=PUBLIC
        )
        install_error_handlers(app)
        headers = {"X-API-Key": bench.registry.tenants.create_key(bench.tenant, "test")[1]}
        release = asyncio.Event()

        async def work(_):
            await release.wait()
            return {"made": 1}

        first, second, theirs = (
            jobs.start("merge", tenant, work)
            for tenant in (bench.tenant, bench.tenant, bench.stranger)
        )
        transport = httpx.ASGITransport(app)
        async with httpx.AsyncClient(
            transport=transport, base_url="http://test/slipway/v1", headers=headers
        ) as http:
            listed = (await http.get("/jobs")).json()
            assert [job["id"] for job in listed] == [second.id, first.id]
            assert (await http.get(f"/jobs/{theirs.id}")).status_code == 404
            assert (await http.delete(f"/jobs/{theirs.id}")).status_code == 404
            assert (await http.get(f"/jobs/{first.id}?wait=31")).status_code == 422
            assert (await http.get(f"/jobs/{first.id}?wait=0.01")).json()["status"] == "running"
            assert (await http.delete(f"/jobs/{first.id}")).json()["status"] == "cancelled"
            release.set()
            ended = (await http.get(f"/jobs/{second.id}?wait=5")).json()
            assert (ended["status"], ended["result"]) == ("done", {"made": 1})
        await jobs.stop()

    asyncio.run(scenario())


def test_a_websocket_is_closed_before_it_is_opened(app):
    sent = []

    async def send(message) -> None:
        sent.append(message)

    async def receive():
        return {"type": "websocket.connect"}

    scope = {"type": "websocket", "path": "/open", "headers": []}
    asyncio.run(app(scope, receive, send))
    assert [message["type"] for message in sent] == ["websocket.close"]


def test_the_registry_imports_no_torch():
    code = "import sys, registry, registry.api; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
