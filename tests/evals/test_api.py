from __future__ import annotations

import time

import pytest
from fastapi import FastAPI
from fastapi.testclient import TestClient

import evals
from evals.api import router
from evals.service import EvalService
from registry import AuthMiddleware, Jobs, Origin, install_error_handlers, random_id, utc_now
from session_core.training_data import TrainingData


@pytest.fixture
def jobs():
    return Jobs(utc_now, random_id)


@pytest.fixture
def client(registry, tenant, provider, jobs):
    _, key = registry.tenants.create_key(tenant, "test")
    app = FastAPI()
    app.include_router(router(EvalService(registry, jobs, provider, backoff_s=0.001)))
    install_error_handlers(app)
    guarded = AuthMiddleware(app, authenticate=registry.tenants.authenticate, public=frozenset())
    with TestClient(guarded, headers={"x-api-key": key}) as client:
        yield client


def finished(jobs, tenant, job):
    for _ in range(1000):
        view = jobs.get(tenant, job["id"])
        if view.status != "running":
            return view
        time.sleep(0.02)
    raise AssertionError("the job does not end")


def test_from_a_suite_to_a_verdict(client, jobs, tenant, stand_in, spec, add_version):
    base = add_version("base", origin=Origin.IMPORT)
    tuned = add_version(files={"training-data.json": TrainingData().dump()})
    right = stand_in.answer
    stand_in.answer = lambda model, q: right(model, q) if model == tuned.reference else "1"
    suite = client.post("/slipway/v1/suites", json=spec())
    assert (suite.status_code, suite.json()["items"]) == (201, 8)
    for version in (base, tuned):
        body = {"version": version.reference, "suite": "sums", "keep": True}
        job = client.post("/slipway/v1/evals", json=body)
        assert job.status_code == 202
        view = finished(jobs, tenant, job.json())
        assert (view.status, view.error) == ("done", None)
    body = {"candidate": tuned.reference, "baseline": base.reference, "suite": "sums"}
    gate = client.post("/slipway/v1/gates", json=body)
    assert (gate.status_code, gate.json()["verdict"]) == (201, "pass")
    strict = client.post("/slipway/v1/gates", json=body | {"alpha": 0.001})
    assert strict.json()["verdict"] == "inconclusive"


@pytest.mark.parametrize(
    ("path", "body", "status", "telling"),
    [
        ("suites", {"name": "x"}, 400, "items is missing"),
        ("suites", [], 422, ""),
        ("evals", {"version": "a/1", "suite": "s"}, 404, "a/1"),
        ("evals", {"version": "a/1"}, 422, "suite"),
        ("evals", {"version": "a/1", "suite": "s", "url": "http://x"}, 422, "url"),
        ("gates", {"candidate": "a/1", "baseline": "a/2", "suite": "s"}, 404, "a/1"),
        ("gates", {"candidate": "a/1", "baseline": "b", "suite": "s", "alpha": 2}, 400, "alpha"),
    ],
)
def test_a_bad_request_says_what_is_wrong(client, path, body, status, telling):
    found = client.post(f"/slipway/v1/{path}", json=body)
    assert found.status_code == status
    assert telling in found.json()["error"]["message"]


@pytest.mark.parametrize("path", ["suites", "evals", "gates"])
def test_every_route_needs_a_key(client, path):
    found = client.post(f"/slipway/v1/{path}", json={}, headers={"x-api-key": "wrong"})
    assert found.status_code == 401


def test_what_is_exported_is_there_once():
    assert len(evals.__all__) == len(set(evals.__all__))
    assert all(hasattr(evals, name) for name in evals.__all__)
