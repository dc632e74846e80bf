"""From two versions to a verdict, and from the verdict to the alias and the endpoint."""

from __future__ import annotations

import json
import shutil

SUITE = {
    "format": 1,
    "name": "sevens",
    "template": "Q: {question}\nA:",
    "decoding": {"max_tokens": 8, "temperature": 0.0, "stop": ["\n"]},
    "grader": {"kind": "numeric"},
    "items": [
        {"id": f"i{n}", "question": f"what is {n} less than {7 + n}?", "answer": "7"}
        for n in range(12)
    ],
}


def test_only_what_was_shown_better_reaches_the_alias(tmp_path, tiny_base, another):
    path = tmp_path / "suite.json"
    path.write_text(json.dumps(SUITE))
    worse = shutil.copytree(tiny_base, tmp_path / "org--worse")
    config = worse / "config.json"
    config.write_text(json.dumps({**json.loads(config.read_text()), "says": "the answer 8"}))

    # A base model is a version: the same home serves one after the other.
    up = another(tmp_path / "home", base=worse)
    up.start()
    up.wait_ready()
    up.json("suites", "add", str(path))
    baseline = up.json("eval", "run", "worse/1", "--suite", "sevens")
    assert baseline["correct"] == 0
    sides = ["--candidate", "tiny/1", "--baseline", "worse/1", "--suite", "sevens"]
    assert "tiny" in up.slipway("gate", "run", *sides).stderr
    assert up.stop() == 0
    up = another(tmp_path / "home")
    up.start()
    up.wait_ready()
    # Without evidence there is no verdict, and the message says what to do first.
    undecided = up.slipway("gate", "run", *sides)
    assert undecided.returncode == 1
    assert "slipway eval run" in undecided.stderr
    run = up.json("eval", "run", "tiny/1", "--suite", "sevens", "--keep")
    assert run["correct"] == 12

    assert up.slipway("promote", "tiny/1").returncode == 1
    passed = up.json("gate", "run", *sides)
    assert passed["verdict"] == "pass"
    assert (passed["statistics"]["gained"], passed["statistics"]["lost"]) == (12, 0)
    assert passed["statistics"]["p"] == 0.5**12
    shown = up.slipway("gate", "show", passed["id"]).stdout
    for said in ("12 of 12", "100.0%", "12 gained, 0 lost", "p = 0.000244", "pass"):
        assert said in shown, shown
    assert up.json("gate", "show", passed["id"]) == passed

    # The other way round the answer is JSON all the same, and the exit code says no.
    reverse = ["--candidate", "worse/1", "--baseline", "tiny/1", "--suite", "sevens"]
    done = up.slipway("gate", "run", *reverse, "--json")
    assert done.returncode == 3
    assert json.loads(done.stdout)["verdict"] == "fail"
    assert done.stderr == ""
    assert up.slipway("gate", "run", *reverse).returncode == 3
    refused = up.slipway("promote", "worse/1")
    assert (refused.returncode, refused.stdout) == (1, "")
    assert up.slipway("gate", "run", *sides, "--alpha", "7").returncode == 1

    moved = up.json("promote", "tiny/1")
    assert (moved["to_reference"], moved["gate_id"]) == ("tiny/1", passed["id"])
    assert "tiny@production" in up.slipway("alias", "list").stdout
    endpoint = up.json("deploy", "tiny@production", "--name", "sevens", "--wait")
    assert endpoint["version"] == "tiny/1"
    assert endpoint["digest"] == run["version_digest"]
    assert endpoint["replica_id"] == run["engine"]["replica_id"]
    assert up.stop() == 0
