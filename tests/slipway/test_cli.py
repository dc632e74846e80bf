from __future__ import annotations

import json
import subprocess
import sys

import httpx
import numpy as np
import openai
import pytest
import tinker

SUITE = {
    "format": 1,
    "name": "sevens",
    "template": "Q: {question}\nA:",
    "decoding": {"max_tokens": 8, "temperature": 0.0, "stop": ["\n"]},
    "grader": {"kind": "numeric"},
    "items": [
        {"id": f"i{n}", "question": f"what is {n} and {7 - n}?", "answer": "7" if n < 4 else "8"}
        for n in range(6)
    ],
}


def test_importing_the_command_line_is_cheap():
    heavy = "{'torch', 'transformers', 'vllm', 'scipy'}"
    code = f"import sys, slipway.cli; sys.exit(bool({heavy} & set(sys.modules)))"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


@pytest.mark.parametrize(
    "words",
    [
        ["up"],
        ["env"],
        ["status"],
        ["packages", "list"],
        ["packages", "show"],
        ["alias", "list"],
        ["alias", "history"],
        ["alias", "rollback"],
        ["suites", "add"],
        ["suites", "list"],
        ["merge"],
        ["eval", "run"],
        ["eval", "show"],
        ["gate", "run"],
        ["gate", "show"],
        ["promote"],
        ["deploy"],
        ["endpoints", "list"],
        ["endpoints", "delete"],
        ["tenants", "create"],
        ["tenants", "list"],
        ["keys", "create"],
        ["keys", "list"],
        ["keys", "revoke"],
        ["sessions", "list"],
        ["sessions", "stop"],
        ["quotas", "list"],
        ["quotas", "set"],
        ["quotas", "reset"],
        ["usage"],
        ["prices", "show"],
        ["prices", "set"],
        ["jobs"],
    ],
)
def test_every_command_explains_itself(words):
    command = [sys.executable, "-m", "slipway", *words, "--help"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0
    assert "--home" in done.stdout
    assert ("--json" in done.stdout) == (words != ["up"])


def test_mistakes_are_one_clear_line(running, tmp_path):
    bad = tmp_path / "bad.json"
    bad.write_text("{")
    for words, said in (
        (["packages", "show", "none/1"], "none/1"),
        (["packages", "show", "none"], "none"),
        (["suites", "add", str(bad)], "no JSON"),
        (["suites", "add", str(tmp_path / "missing.json")], "cannot be read"),
        (["eval", "run", "tiny/1", "--suite", "nothing"], "slipway suites add"),
        (["merge", "tiny/1"], "only an adapter"),
        (["deploy", "tiny@production", "--name", "x"], "promote one first"),
        (["keys", "revoke", "nothing"], "no key"),
        (["sessions", "stop", "nothing"], "no session"),
        (["endpoints", "delete", "nothing"], "nothing"),
    ):
        done = running.slipway(*words)
        assert done.returncode == 1, (words, done.stdout)
        assert done.stderr.startswith("Error: "), done.stderr
        assert done.stderr.count("\n") == 1, done.stderr
        assert said in done.stderr, done.stderr


def test_keys(running):
    made = running.json("keys", "create", "laptop")
    assert running.slipway("status", SLIPWAY_API_KEY=made["secret"]).returncode == 0
    listed = running.slipway("keys", "list").stdout
    assert "laptop" in listed
    assert made["secret"] not in listed
    running.json("keys", "revoke", made["key"]["id"])
    assert running.slipway("status", SLIPWAY_API_KEY=made["secret"]).returncode == 1


def test_tenants_and_roles(running):
    made = running.json("tenants", "create", "team-b")
    assert running.slipway("tenants", "create", "team-b").returncode == 1
    assert [t["name"] for t in running.json("tenants", "list")] == ["default", "team-b"]
    assert made["keys"] == 0
    key = running.json("keys", "create", "theirs", "--tenant", "team-b")
    assert key["key"]["role"] == "member"
    assert "member" in running.slipway("keys", "list", "--tenant", "team-b").stdout
    assert "admin" in running.slipway("keys", "list").stdout
    member = {"SLIPWAY_API_KEY": key["secret"]}
    # The base model is theirs as well, and nothing else is.
    listed = json.loads(running.slipway("packages", "list", "--json", **member).stdout)
    assert [(v["reference"], v["kind"]) for v in listed] == [("tiny/1", "merged")]
    for words in (
        ["tenants", "list"],
        ["tenants", "create", "more"],
        ["keys", "list", "--tenant", "default"],
        ["keys", "create", "x", "--role", "admin"],
        ["keys", "create", "x", "--tenant", "nobody"],
    ):
        done = running.slipway(*words, **member)
        assert done.returncode == 1, words
        assert "administrator" in done.stderr
        assert done.stderr.count("\n") == 1
    assert running.slipway("keys", "create", "second", **member).returncode == 0
    running.json("keys", "revoke", key["key"]["id"], "--tenant", "team-b")
    assert running.slipway("keys", "list", **member).returncode == 1


def test_quotas(running):
    running.json("tenants", "create", "team-q")
    made = running.json("quotas", "set", "team-q", "--sessions", "2", "--operations", "none")
    assert (made["sessions"], made["operations"], made["samples"]) == (2, None, 20_000)
    assert made["set_by_hand"] == ["operations", "sessions"]
    shown = running.slipway("quotas", "list").stdout
    assert "0 of 2" in shown
    assert "default" in shown
    key = running.json("keys", "create", "theirs", "--tenant", "team-q")["secret"]
    member = {"SLIPWAY_API_KEY": key}
    (own,) = json.loads(running.slipway("quotas", "list", "--json", **member).stdout)
    assert own["tenant"] == "team-q"
    for words, said in (
        (["quotas", "set", "team-q", "--sessions", "many"], "--sessions is 'many'"),
        (["quotas", "set", "team-q", "--context", "-1"], "context is -1"),
        (["quotas", "set", "team-q"], "at least one limit"),
        (["quotas", "set", "nobody", "--sessions", "1"], "no tenant nobody"),
        (["quotas", "reset", "nobody"], "no tenant nobody"),
    ):
        done = running.slipway(*words)
        assert done.returncode == 1, words
        assert said in done.stderr
    for words in (["quotas", "set", "team-q", "--sessions", "9"], ["quotas", "reset", "team-q"]):
        assert "administrator" in running.slipway(*words, **member).stderr
    assert running.json("quotas", "reset", "team-q")["sessions"] is None


def test_sessions_of_another_tenant(running):
    running.json("tenants", "create", "team-s")
    exports = running.json("env")
    key = running.json("keys", "create", "theirs", "--tenant", "team-s")["secret"]
    with httpx.Client(base_url=exports["TINKER_BASE_URL"], headers={"X-API-Key": key}) as theirs:
        opened = theirs.post("/api/v1/create_session", json={"tags": []}).json()["session_id"]
        (session,) = running.json("sessions", "list", "--active", "--tenant", "team-s")
        assert session["id"] == opened
        assert session["id"] not in running.slipway("sessions", "list").stdout
        assert running.slipway("sessions", "stop", session["id"]).returncode == 1
        stop = ["sessions", "stop", session["id"], "--tenant", "team-s"]
        assert running.json(*stop)["status"] == running.json(*stop)["status"] == "stopped"
        assert running.json("sessions", "list", "--active", "--tenant", "team-s") == []
        assert len(running.json("sessions", "list", "--tenant", "team-s")) == 1


def test_what_is_empty_says_so(running):
    assert "No sessions yet" in running.slipway("sessions", "list").stdout
    assert running.json("usage") == []
    assert running.json("sessions", "list") == []


def test_from_suite_to_endpoint(running, tmp_path):
    path = tmp_path / "suite.json"
    path.write_text(json.dumps({**SUITE, "items": [*SUITE["items"], SUITE["items"][0]]}))
    assert "i0" in running.slipway("suites", "add", str(path)).stderr
    path.write_text(json.dumps(SUITE))
    suite = running.json("suites", "add", str(path))
    assert suite["items"] == 6
    assert [s["digest"] for s in running.json("suites", "list")] == [suite["digest"]]

    run = running.json("eval", "run", "tiny/1", "--suite", "sevens", "--keep")
    assert (run["correct"], run["items"]) == (4, 6)
    assert run["interval"][0] < 4 / 6 < run["interval"][1]
    items = running.json("eval", "show", run["id"], "--items")
    assert [item["outcome"] for item in items] == ["correct"] * 4 + ["wrong"] * 2
    assert "66.7%" in running.slipway("eval", "show", run["id"]).stdout

    # A version is no evidence for itself, and without a gate production is closed.
    sides = ["--candidate", "tiny/1", "--baseline", "tiny/1", "--suite", "sevens"]
    assert running.slipway("gate", "run", *sides).returncode == 1
    refused = running.slipway("promote", "tiny/1")
    assert refused.returncode == 1
    assert "none was run" in refused.stderr
    assert running.json("alias", "list") == []
    running.json("promote", "tiny/1", "--override", "for the test")
    (line,) = running.json("alias", "history", "tiny@production")
    assert line["override_reason"] == "for the test"

    endpoint = running.json("deploy", "tiny@production", "--name", "sevens")
    assert endpoint["replica_id"] == run["engine"]["replica_id"]
    exports = running.json("env")
    client = openai.OpenAI(base_url=exports["OPENAI_BASE_URL"], api_key=exports["OPENAI_API_KEY"])
    with client:
        answer = client.chat.completions.create(
            model="sevens", messages=[{"role": "user", "content": "3 and 4?"}]
        )
    assert "7" in answer.choices[0].message.content
    assert "sevens" in running.slipway("endpoints").stdout
    assert len(running.json("jobs")) >= 2
    running.json("endpoints", "delete", "sevens")
    assert running.json("endpoints") == []


def test_a_server_that_does_not_serve_what_it_should_is_found_out(running, tmp_path):
    path = tmp_path / "suite.json"
    path.write_text(json.dumps({**SUITE, "name": "others"}))
    running.json("suites", "add", str(path))
    exports = running.json("env")
    service = tinker.ServiceClient(
        base_url=exports["TINKER_BASE_URL"],
        api_key=exports["TINKER_API_KEY"],
        user_metadata={"model_package_group": "trained"},
    )
    with service:
        client = service.create_lora_training_client("org/tiny", rank=4).result()
        datum = tinker.types.Datum(
            model_input=tinker.types.ModelInput.from_ints([5, 6, 7]),
            loss_fn_inputs={
                "target_tokens": np.array([6, 7, 8]),
                "weights": np.ones(3, dtype=np.float32),
            },
        )
        for _ in range(3):
            client.forward_backward([datum], "cross_entropy")
            client.optim_step(tinker.types.AdamParams(learning_rate=1e-2)).result()
        client.save_state("three").result()
    merged = running.json("merge", "trained/1")
    assert merged["reference"] == "trained/2"
    assert running.json("merge", "trained/1")["id"] == merged["id"]
    shown = running.slipway("packages", "show", "trained/2").stdout
    assert "trained/1" in shown
    assert "tiny/1" in shown
    # The stand-in answers, but not with this model's probabilities.
    done = running.slipway("eval", "run", "trained/2", "--suite", "others")
    assert done.returncode == 1
    assert "logprobs" in done.stderr
    (used,) = [u for u in running.json("usage") if u["kind"] == "train"]
    assert used["tokens"] == 9
    running.json("prices", "set", "train", "1.5")
    assert "1.5" in running.slipway("prices", "show").stdout
    for by, said in (("kind", "train"), ("key", "home"), ("day", "20"), ("session", "train")):
        shown = running.slipway("usage", "--by", by, "--since", "2026-01-01").stdout
        assert said in shown
        assert " 9 " in shown
    assert "Nothing used" in running.slipway("usage", "--since", "2999-01-01").stdout
    assert running.slipway("prices", "set", "train", "much").returncode == 1
    running.json("prices", "set", "train", "none")
