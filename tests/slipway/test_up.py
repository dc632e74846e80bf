from __future__ import annotations

import json
import shlex
import shutil
import signal
import socket
import time

import httpx
import pytest


@pytest.mark.parametrize("sig", [signal.SIGINT, signal.SIGTERM])
def test_it_starts_says_so_and_stops_cleanly(up, sig):
    up.start()
    up.wait_ready()
    assert "Ready" in up.log.read_text()
    assert len(up.family()) >= 2  # the engine and the gateway
    exports = dict(
        line.removeprefix("export ").split("=", 1) for line in up.slipway("env").stdout.splitlines()
    )
    url = shlex.split(exports["SLIPWAY_URL"])[0]
    assert url == shlex.split(exports["TINKER_BASE_URL"])[0] == f"http://127.0.0.1:{up.port}"
    assert exports["OPENAI_BASE_URL"].strip("'").endswith(f":{up.gateway_port}/v1")
    assert exports["TINKER_API_KEY"] == exports["OPENAI_API_KEY"] == exports["SLIPWAY_API_KEY"]
    assert exports["TINKER_API_KEY"].strip("'").startswith("tml-")
    (base,) = up.json("packages", "list")
    assert base["reference"] == "tiny/1"
    assert base["base_model"] == "org/tiny"
    assert up.json("status")["url"] == url
    key = exports["SLIPWAY_API_KEY"].strip("'")
    assert up.stop(sig) == 0
    assert not (up.home / "server.json").exists()
    logs = "".join(path.read_text() for path in (up.home / "logs").iterdir())
    assert key not in logs + up.log.read_text()
    done = up.slipway("status")
    assert done.returncode == 1
    assert "start it with `slipway up`" in done.stderr

    # The same home again: the same key, and no second version of the base.
    up.start()
    up.wait_ready()
    assert key in up.slipway("env").stdout
    assert len(up.json("packages", "list")) == 1
    assert "Taking" not in up.log.read_text()
    assert up.stop() == 0


@pytest.mark.parametrize("option", ["--port", "--gateway-port"])
def test_a_taken_port_is_named_before_anything_starts(up, option):
    port = up.port if option == "--port" else up.gateway_port
    with socket.socket() as holder:
        holder.bind(("127.0.0.1", port))
        holder.listen()
        up.start()
        assert up.process.wait(timeout=60) == 1
    said = up.log.read_text().strip()
    assert len(said.splitlines()) == 1
    assert said.startswith(f"Error: port {port} ")
    assert option in said.split()
    assert not up.home.exists()


def test_one_port_cannot_be_both(another, tmp_path):
    up = another(tmp_path / "home")
    up.command = [*up.command, "--gateway-port", str(up.port)]
    up.start()
    assert up.process.wait(timeout=60) == 1
    assert up.log.read_text().count("\n") == 1


def test_a_killed_server_is_followed_by_one_on_the_same_ports(up):
    up.start()
    up.wait_ready()
    left = up.family()
    up.process.kill()
    up.process.wait()
    # The gateway outlives it, on purpose.
    assert httpx.get(f"http://127.0.0.1:{up.gateway_port}/healthz").status_code == 200
    # Its address is still there, and is no running server's.
    assert (up.home / "server.json").exists()
    done = up.slipway("env")
    assert (done.returncode, done.stdout) == (1, "")
    (up.home / "server.json").unlink()
    up.start()
    up.wait_ready()
    assert len(up.json("packages", "list")) == 1
    assert up.stop() == 0
    assert not [process for process in left if process.is_running()]


def test_a_second_server_on_one_home_is_refused(running, another):
    second = another(running.home)
    # On the very ports of the first, as one would by mistake.
    second.command = running.command
    second.log = second.log.with_name("second.log")
    second.start()
    assert second.process.wait(timeout=60) == 1
    said = second.log.read_text()
    assert f"process {running.process.pid}" in said
    assert "--home" in said
    assert running.json("status")["pid"] == running.process.pid


@pytest.mark.parametrize("name", ["model.safetensors", "config.json", "tokenizer.json"])
def test_a_damaged_base_model_is_named(tmp_path, tiny_base, another, name):
    folder = tmp_path / "org--cut"
    shutil.copytree(tiny_base, folder)
    whole = (folder / name).read_bytes()
    (folder / name).write_bytes(whole[: len(whole) // 2])
    up = another(tmp_path / "home", base=folder)
    up.start()
    assert up.process.wait(timeout=90) == 1
    said = up.log.read_text().strip().splitlines()[-1]
    assert name in said, said
    assert said.startswith("Error: ")
    assert not (up.home / "server.json").exists()


@pytest.mark.parametrize("after", [0.2, 1.2, 2.2, 3.5, 5.0])
def test_interrupted_while_starting_it_leaves_nothing_and_starts_again(up, after):
    up.start()
    time.sleep(after)
    assert up.stop(signal.SIGINT) in (0, 130, -signal.SIGINT)
    assert not (up.home / "server.json").exists()
    up.start()
    up.wait_ready()
    assert len(up.json("packages", "list")) == 1
    assert up.stop() == 0


def test_a_wrong_key_is_told_nothing(running):
    url = f"http://127.0.0.1:{running.port}"
    answers = {
        httpx.get(f"{url}{path}", headers=headers).content
        for path in ("/slipway/v1/groups", "/api/v1/training_runs", "/nowhere", "/slipway/v1/docs")
        for headers in ({}, {"X-API-Key": "tml-wrong"})
    }
    assert len(answers) == 1
    assert set(json.loads(answers.pop())["error"]) == {"code", "message"}
    assert httpx.get(f"{url}/api/v1/healthz").json() == {"status": "ok"}
    done = running.slipway("status", SLIPWAY_API_KEY="tml-wrong")
    assert done.returncode == 1
    assert done.stderr.count("\n") == 1


def test_every_route_of_the_whole_needs_a_key(running):
    url = f"http://127.0.0.1:{running.port}"
    key = json.loads((running.home / "credentials.json").read_text())["api_key"]
    document = httpx.get(f"{url}/slipway/v1/openapi", headers={"X-API-Key": key}).json()
    checked = 0
    for path, methods in document["paths"].items():
        for method in methods:
            if path == "/api/v1/healthz":
                continue
            filled = path.replace("{", "").replace("}", "")
            answer = httpx.request(method, url + filled, headers={"X-API-Key": "tml-wrong"})
            assert answer.status_code == 401, (method, path)
            checked += 1
    assert checked > 50
