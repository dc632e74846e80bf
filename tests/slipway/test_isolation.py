"""To another tenant, whatever is not its own is as if it were not there: every route, walked."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import httpx
import numpy as np
import pytest
import tinker
from tinker.proto import tinker_public_pb2 as pb

from registry import Kind, NewVersion, Origin, Registry

SUITE = {
    "format": 1,
    "name": "private-sevens",
    "template": "Q: {question}\nA:",
    "decoding": {"max_tokens": 8, "temperature": 0.0, "stop": ["\n"]},
    "grader": {"kind": "numeric"},
    "items": [{"id": f"i{n}", "question": f"{n}?", "answer": "7"} for n in range(6)],
}
SESSION = "00000000-0000-0000-0000-000000000000"
UNKNOWN = {
    "session": SESSION,
    "run": f"{SESSION}:train:0",
    "sampler": f"{SESSION}:sample:0",
    "path": f"tinker://{SESSION}:train:0/weights/kept",
    "sampler_path": f"tinker://{SESSION}:train:0/sampler_weights/served",
    "request": "11111111-0000-0000-0000-000000000000",
    "sample": "22222222-0000-0000-0000-000000000000",
    "key": "33333333-0000-0000-0000-000000000000",
    "group": "nothing-here",
    "version": "nothing-here/1",
    "suite": "no-suite",
    "eval": "44444444-0000-0000-0000-000000000000",
    "gate": "55555555-0000-0000-0000-000000000000",
    "job": "66666666-0000-0000-0000-000000000000",
    "endpoint": "no-endpoint",
}

# What fills a path's parameter, by the route's beginning where one name means two things.
PARAMETERS = {
    "key_id": "key",
    "group": "group",
    "name_or_digest": "suite",
    "run_id": "run",
    "gate_id": "gate",
    "job_id": "job",
    "session_id": "session",
    "sampler_id": "sampler",
    "name": "endpoint",
}
CONSTANT = {"alias": "production", "kind": "weights"}
CHECKPOINT = "/api/v1/training_runs/{run_id}/checkpoints/{kind}/{name}"

# The bodies of routes that name things in them, or need one to be looked at at all.
ADAM = {"learning_rate": 0.1}
PROMPT = {"chunks": [{"type": "encoded_text", "tokens": [5, 6]}]}
BODIES: dict[tuple[str, str], Any] = {
    ("POST", "/api/v1/session_heartbeat"): {"session_id": "{session}"},
    ("POST", "/api/v1/create_model"): {
        "session_id": "{session}",
        "model_seq_id": 7,
        "base_model": "org/tiny",
    },
    ("POST", "/api/v1/get_info"): {"model_id": "{run}"},
    ("POST", "/api/v1/optim_step"): {"model_id": "{run}", "seq_id": 9, "adam_params": ADAM},
    ("POST", "/api/v1/save_weights"): {"model_id": "{run}", "seq_id": 9},
    ("POST", "/api/v1/save_weights_for_sampler"): {
        "model_id": "{run}",
        "seq_id": 9,
        "path": "x",
    },
    ("POST", "/api/v1/save_weights_external"): {"model_id": "{run}", "seq_id": 9, "path": "x"},
    ("POST", "/api/v1/load_weights"): {
        "model_id": "{run}",
        "seq_id": 9,
        "path": "{path}",
        "optimizer": True,
    },
    ("POST", "/api/v1/create_sampling_session"): {
        "session_id": "{session}",
        "sampling_session_seq_id": 7,
        "base_model": "org/tiny",
    },
    ("POST", "/api/v1/join_sampling_session"): {"sampling_session_id": "{sampler}"},
    ("POST", "/api/v1/asample"): {
        "sampling_session_id": "{sampler}",
        "prompt": PROMPT,
        "sampling_params": {"max_tokens": 1},
    },
    ("POST", "/api/v1/retrieve_future"): {"request_id": "{request}"},
    ("POST", "/api/v1/cancel_future"): {"request_id": "{sample}"},
    ("POST", "/api/v1/weights_info"): {"tinker_path": "{path}"},
    ("POST", "/api/v1/copy_weights"): {"source_path": "{path}", "destination_project_id": "mine"},
    ("PUT", "/api/v1/sessions/{session_id}/project"): {"project_id": "mine"},
    ("PUT", CHECKPOINT + "/ttl"): {"ttl_seconds": 7200},
    ("POST", "/slipway/v1/merges"): {"version": "{version}"},
    ("POST", "/slipway/v1/evals"): {"version": "{version}", "suite": "{suite}"},
    ("POST", "/slipway/v1/gates"): {
        "candidate": "{version}",
        "baseline": "tiny/1",
        "suite": "{suite}",
    },
    ("POST", "/slipway/v1/endpoints"): {"name": "mine", "version": "{version}"},
    ("PUT", "/slipway/v1/groups/{group}/aliases/{alias}"): {"version": "{version}"},
    ("POST", "/slipway/v1/live/completions"): {"model": "{sampler_path}", "prompt": [5, 6]},
    ("POST", "/slipway/v1/live/chat/completions"): {
        "model": "{sampler}",
        "messages": [{"role": "user", "content": "x"}],
    },
}
FURTHER: list[tuple[str, str, Any]] = [
    ("POST", "/api/v1/load_weights", {"session_id": "{session}", "model_seq_id": 7,
     "path": "{path}", "optimizer": False}),
    ("POST", "/api/v1/retrieve_future", {"request_id": "{sample}"}),
    ("POST", "/api/v1/cancel_future", {"request_id": "{request}"}),
    ("GET", "/slipway/v1/resolve?reference={version}", None),
    ("GET", "/slipway/v1/resolve?reference={group}@production", None),
    ("GET", "/slipway/v1/evals?version={version}", None),
    ("GET", "/slipway/v1/evals?suite={suite}", None),
    ("GET", "/slipway/v1/gates?version={version}", None),
]  # fmt: skip

# Routes that name nothing: what they answer with is the caller's own, and is looked through.
OWN = {
    ("GET", f"/slipway/v1/{name}")
    for name in ("groups", "versions?limit=200", "aliases", "suites", "evals", "gates", "jobs")
} | {
    ("GET", f"/slipway/v1/{name}")
    for name in ("endpoints", "replicas", "sessions", "quotas", "keys", "usage?by=session")
}
OWN |= {
    ("GET", f"/api/v1/{name}")
    for name in ("training_runs", "checkpoints", "sessions", "auth/apikey/me", "audit")
}
OWN |= {
    ("GET", "/api/v1/billing/usage/checkpoints/current"),
    ("GET", "/api/v1/billing/usage/events?starting_on={hour}&ending_before={next_hour}"),
    ("POST", "/api/v1/sessions/search"),
}
# Others name nothing either: they make something of the caller's own, are the same to all,
# are refused to all, or are an administrator's (see `test_app`).
NAMELESS = {
    ("POST", "/slipway/v1/suites"),
    ("POST", "/slipway/v1/keys"),
    ("GET", "/slipway/v1/prices"),
    ("POST", "/api/v1/create_session"),
    ("GET", "/api/v1/healthz"),
    ("POST", "/api/v1/client/config"),
    ("POST", "/api/v1/client/dynamic_config"),
    ("POST", "/api/v1/telemetry"),
    ("GET", "/api/v1/get_server_capabilities"),
    ("POST", "/api/v1/create_custom_loss"),
    ("POST", "/api/v1/retrieve_futures"),
    ("DELETE", "/api/v1/auth/apikey/me"),
}
ADMINISTRATORS = {
    ("GET", "/slipway/v1/tenants"),
    ("POST", "/slipway/v1/tenants"),
    ("PUT", "/slipway/v1/prices"),
    ("PUT", "/slipway/v1/quotas/{tenant}"),
    ("DELETE", "/slipway/v1/quotas/{tenant}"),
}
PROTOBUF = ("POST", "/api/v1/forward_backward")
CATCH_ALL = "/api/v1/{path}"


@dataclass(frozen=True)
class Hall:
    """What one tenant has, and the connections of that tenant and of another."""

    owner: httpx.Client
    stranger: httpx.Client
    ids: dict[str, str]


@pytest.fixture(scope="module")
def hall(running: Any, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Hall]:
    path = tmp_path_factory.mktemp("suite") / "suite.json"
    path.write_text(json.dumps(SUITE))
    running.json("suites", "add", str(path))
    exports = running.json("env")
    running.json("tenants", "create", "stranger")
    theirs = running.json("keys", "create", "theirs", "--tenant", "stranger")["secret"]
    kept = running.json("keys", "create", "mine")
    service = tinker.ServiceClient(
        base_url=exports["TINKER_BASE_URL"],
        api_key=exports["TINKER_API_KEY"],
        user_metadata={"model_package_group": "private"},
    )
    url = exports["TINKER_BASE_URL"]
    with (
        service,
        httpx.Client(base_url=url, headers={"X-API-Key": kept["secret"]}, timeout=60) as owner,
        httpx.Client(base_url=url, headers={"X-API-Key": theirs}, timeout=60) as stranger,
    ):
        client = service.create_lora_training_client(
            "org/tiny", rank=2, train_unembed=False
        ).result()
        datum = tinker.types.Datum(
            model_input=tinker.types.ModelInput.from_ints([5, 6]),
            loss_fn_inputs={"target_tokens": np.array([6, 7]), "weights": np.ones(2, np.float32)},
        )
        client.forward_backward([datum], "cross_entropy").result()
        client.optim_step(tinker.types.AdamParams(learning_rate=0.1)).result()
        kept_path = client.save_state("kept").result().path
        served = client.save_weights_for_sampler("served").result().path
        running.json("merge", "private/2")
        version = imported(running)
        sampler = service.create_sampling_client(model_path=served).result()
        sampler.sample(
            tinker.types.ModelInput.from_ints([5, 6]), 1, tinker.types.SamplingParams(max_tokens=2)
        ).result()
        run = running.json("eval", "run", version, "--suite", "private-sevens")
        running.json("eval", "run", "tiny/1", "--suite", "private-sevens")
        sides = ["--candidate", version, "--baseline", "tiny/1"]
        gate = json.loads(
            running.slipway("gate", "run", *sides, "--suite", "private-sevens", "--json").stdout
        )
        running.json("promote", version, "--override", "for the test")
        running.json("deploy", "private@production", "--name", "private-end")
        (session,) = owner.get("/slipway/v1/sessions").json()
        body = {
            "sampling_session_id": f"{session['id']}:sample:0",
            "prompt": PROMPT,
            "sampling_params": {"max_tokens": 1},
        }
        sample = owner.post("/api/v1/asample", json=body).json()["request_id"]
        step = {"model_id": client.model_id, "seq_id": 5, "adam_params": ADAM}
        yield Hall(
            owner=owner,
            stranger=stranger,
            ids={
                "session": session["id"],
                "run": client.model_id,
                "sampler": f"{session['id']}:sample:0",
                "path": kept_path,
                "sampler_path": served,
                "request": owner.post("/api/v1/optim_step", json=step).json()["request_id"],
                "sample": sample,
                "key": kept["key"]["id"],
                "group": "private",
                "version": version,
                "suite": "private-sevens",
                "eval": run["id"],
                "gate": gate["id"],
                "job": owner.get("/slipway/v1/jobs").json()[0]["id"],
                "endpoint": "private-end",
            },
        )


def imported(running: Any) -> str:
    """A version of the group with the base's weights: the stand-in answers as they should be."""
    home = running.home
    registry = Registry.open(f"sqlite:///{home / 'slipway.db'}", home / "store")
    tenant = registry.tenants.ensure_tenant("default")
    base = registry.versions.get(tenant, "tiny/1")
    staged = registry.store.stage()
    shutil.copytree(registry.store.path(base.digest), staged, dirs_exist_ok=True)
    (staged / "manifest.json").unlink()
    (staged / "NOTES.md").write_text("another version than the base's own")
    manifest = registry.store.publish(staged)
    made = registry.versions.register(
        NewVersion(
            tenant_id=tenant,
            group="private",
            kind=Kind.MERGED,
            origin=Origin.IMPORT,
            base_model=base.base_model,
            base_digest=base.base_digest,
        ),
        manifest,
    )
    registry.db.close()
    return made.reference


def every_route(client: httpx.Client) -> set[tuple[str, str]]:
    paths = client.get("/slipway/v1/openapi").json()["paths"]
    return {(method.upper(), path) for path, methods in paths.items() for method in methods}


def filled(template: Any, ids: dict[str, str]) -> Any:
    """A body or an address with ids in place of their names."""
    text = json.dumps(template)
    return json.loads(re.sub(r"\{(\w+)\}", lambda found: ids[found[1]], text))


def address(path: str, ids: dict[str, str]) -> str:
    """A path with ids in place of its parameters."""
    here = dict(ids)
    if path.startswith("/slipway/v1/evals"):
        here["run"] = ids["eval"]
    if path.startswith(CHECKPOINT):
        here["endpoint"] = "kept"
    names = {name: here[key] for name, key in PARAMETERS.items()} | CONSTANT
    names["number"] = ids["version"].rpartition("/")[2]
    return re.sub(r"\{(\w+)\}", lambda found: names[found[1]], path)


def ask(client: httpx.Client, method: str, path: str, ids: dict[str, str], body: Any) -> Any:
    """The status, and the body without what was asked with."""
    sent = {"json": filled(body, ids)} if body is not None else {}
    answer = client.request(method, path, **sent)
    text = answer.text
    # Longest first: an id may be part of another.
    for value in sorted({*ids.values(), ids["eval"]}, key=len, reverse=True):
        text = text.replace(value, "ID")
    return answer.status_code, text


def test_every_route_is_walked_below(hall):
    named = {(method, path) for method, path in every_route(hall.owner) if "{" in path}
    known = (
        set(BODIES)
        | {(method, re.sub(r"\?.*", "", path)) for method, path in OWN}
        | NAMELESS
        | ADMINISTRATORS
        | {PROTOBUF, ("GET", "/slipway/v1/resolve")}
    )
    for method, path in every_route(hall.owner) - named - known:
        raise AssertionError(f"{method} {path} is in no table of this test: add it to one")
    assert len(named) > 25


def test_what_is_anothers_is_answered_as_what_does_not_exist(hall):
    walked = 0
    for method, path in sorted(every_route(hall.owner)):
        # A signed link is a key of its own, see `test_downloads`.
        if path == CATCH_ALL or "{token}" in path or (method, path) in ADMINISTRATORS:
            continue
        if "{" not in path and (method, path) not in BODIES:
            continue
        body = BODIES.get((method, path))
        answers = [
            ask(hall.stranger, method, address(path, ids), ids, body) for ids in (hall.ids, UNKNOWN)
        ]
        assert answers[0] == answers[1], (method, path)
        # Looked at, and not refused for its form.
        assert answers[0][0] in (404, 410), (method, path, answers[0])
        walked += 1
    assert walked > 40
    for method, path, body in FURTHER:
        answers = [
            ask(hall.stranger, method, filled(path, ids), ids, body) for ids in (hall.ids, UNKNOWN)
        ]
        assert answers[0] == answers[1], (method, path)
        assert answers[0][0] in (404, 410), (method, path, answers[0])


def test_a_batch_for_anothers_run_is_answered_as_one_for_none(hall):
    answers = []
    for ids in (hall.ids, UNKNOWN):
        message = pb.ForwardBackwardRequest(model_id=ids["run"], seq_id=9, loss_fn="cross_entropy")
        datum = message.data.add()
        tokens = np.array([5, 6], "<i4").tobytes()
        datum.model_input.add().encoded_text.tokens = tokens
        answer = hall.stranger.post(
            "/api/v1/forward_backward",
            content=message.SerializeToString(),
            headers={"Content-Type": "application/x-protobuf"},
        )
        answers.append((answer.status_code, answer.text.replace(ids["run"], "ID")))
    assert answers[0] == answers[1]
    assert answers[0][0] == 404


def test_lists_hold_nothing_of_anothers(hall):
    secrets = {value for name, value in hall.ids.items() if name not in ("version", "group")}
    hours = {"hour": "2020-01-01T00:00:00Z", "next_hour": "2020-01-02T00:00:00Z"}
    for method, path in sorted(OWN):
        answer = hall.stranger.request(
            method, filled(path, hours), **({"json": {}} if method == "POST" else {})
        )
        assert answer.status_code == 200 or "audit" in path, (path, answer.text)
        for secret in secrets:
            assert secret not in answer.text, (path, secret)
    assert "private" not in hall.stranger.get("/slipway/v1/groups").text
    assert "private" in hall.owner.get("/slipway/v1/groups").text


def test_nothing_was_changed_by_asking(hall):
    """The stranger's requests above included deletes, stops and moves of all of it."""
    owner, ids = hall.owner, hall.ids
    session = owner.get(f"/slipway/v1/sessions/{ids['session']}").json()
    assert session["status"] == "active"
    assert owner.get(f"/slipway/v1/endpoints/{ids['endpoint']}").status_code == 200
    assert owner.get(f"/slipway/v1/resolve?reference={ids['group']}@production").status_code == 200
    run = owner.get(f"/api/v1/training_runs/{ids['run']}/checkpoints").json()
    assert {row["tinker_path"] for row in run["checkpoints"]} == {ids["path"], ids["sampler_path"]}
    assert owner.get(f"/slipway/v1/evals/{ids['eval']}").status_code == 200
    assert owner.post("/api/v1/retrieve_future", json={"request_id": ids["request"]}).is_success


def test_no_key_is_in_the_database_or_in_any_log(hall, running):
    keys = [client.headers["X-API-Key"] for client in (hall.owner, hall.stranger)]
    keys.append(running.json("env")["TINKER_API_KEY"])
    looked_at = 0
    for path in [*running.home.rglob("*"), running.log]:
        if not path.is_file() or path.is_relative_to(running.home / "store"):
            continue
        data = path.read_bytes()
        looked_at += 1
        for key in keys:
            if key.encode() in data:
                # The one place that is for it, and nobody else's to read.
                assert path.name == "credentials.json", path
                assert path.stat().st_mode & 0o077 == 0
    assert looked_at > 5
