from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest


@pytest.fixture
def module(recipe):
    return recipe("demo_processes")


@pytest.fixture
def processes(module):
    before = signal.getsignal(signal.SIGINT)
    with module.Processes(environment=dict(os.environ)) as made:
        yield made
    signal.signal(signal.SIGINT, before)


def python(code: str, *words: str) -> list[str]:
    return [sys.executable, "-c", code, *words]


# A parent that leaves a child in a session of its own, as an engine does.
PARENT = """
import subprocess, sys, time
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
open(sys.argv[1], "w").write(str(child.pid))
time.sleep(60)
"""


def test_run_returns_what_was_printed(processes):
    assert processes.run(python("print('hello')")) == "hello\n"


def test_a_failure_carries_the_last_line_and_the_output(module, processes):
    code = "import sys; print('{}'); sys.stderr.write('first\\nError: the reason\\n'); sys.exit(3)"
    with pytest.raises(module.CommandFailed) as caught:
        processes.run(python(code))
    assert caught.value.message == "the reason"
    assert caught.value.output == "{}\n"


INTERRUPTED = """
import os, sys
sys.path.insert(0, sys.argv[1])
from demo_processes import Processes
child = "import os, sys, time; open(sys.argv[1], 'w').write(str(os.getpid())); time.sleep(60)"
with Processes(environment=dict(os.environ)) as processes:
    processes.run([sys.executable, "-c", child, sys.argv[2]], show=sys.argv[3] == "show")
"""


@pytest.mark.parametrize("show", ["show", "hide"])
def test_interrupted_while_a_command_runs_it_ends_the_command_at_once(module, tmp_path, show):
    pid_file = tmp_path / "pid"
    folder = str(Path(module.__file__).parent)
    demo = subprocess.Popen(
        python(INTERRUPTED, folder, str(pid_file), show),
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )
    while not (pid_file.exists() and pid_file.read_text()):
        time.sleep(0.05)
    time.sleep(0.3)
    began = time.monotonic()
    demo.send_signal(signal.SIGINT)
    demo.wait(timeout=30)
    assert time.monotonic() - began < 10
    assert not psutil.pid_exists(int(pid_file.read_text()))


def test_run_until_kills_the_whole_family(processes, tmp_path):
    pid_file = tmp_path / "pid"

    def reached() -> bool:
        return pid_file.exists() and pid_file.read_text() != ""

    processes.run_until(python(PARENT, str(pid_file)), reached)
    assert not psutil.pid_exists(int(pid_file.read_text()))


def test_run_until_says_when_the_command_ended_by_itself(module, processes):
    with pytest.raises(module.CommandFailed, match="ended by itself, exit code 4"):
        processes.run_until(python("raise SystemExit(4)"), lambda: False)


def test_leaving_stops_everything(module, tmp_path):
    ready, log = tmp_path / "pid", tmp_path / "log"
    before = signal.getsignal(signal.SIGINT)
    with module.Processes(environment=dict(os.environ)) as processes:
        processes.start_server(python(PARENT, str(ready)), log=log, ready=ready)
    signal.signal(signal.SIGINT, before)
    assert not psutil.pid_exists(int(ready.read_text() or "0"))


def test_a_server_that_dies_at_start_shows_its_last_line(module, processes, tmp_path):
    with pytest.raises(module.CommandFailed, match="port 8000 is taken"):
        processes.start_server(
            python("print('starting'); print('port 8000 is taken'); raise SystemExit(1)"),
            log=tmp_path / "log",
            ready=tmp_path / "never",
        )


def test_exports_are_adopted(processes):
    code = "print('export SLIPWAY_URL=\\'http://127.0.0.1:1/a b\\''); print('# a comment')"
    processes.adopt_environment(python(code))
    assert processes.environment["SLIPWAY_URL"] == "http://127.0.0.1:1/a b"


def test_leftovers_are_ended_only_when_they_serve_this_home(module, processes, tmp_path):
    home = tmp_path / "home"
    home.mkdir()
    sleep = "import time; time.sleep(60)"
    mine = subprocess.Popen(python(sleep, str(home)))
    other = subprocess.Popen(python(sleep, "elsewhere"))
    try:
        for process, ended in ((other, False), (mine, True)):
            (home / "server.json").write_text(json.dumps({"pid": process.pid}))
            processes.stop_leftovers(home)
            time.sleep(0.1)
            assert (process.poll() is not None) is ended
    finally:
        for process in (mine, other):
            process.kill()
            process.wait()


def test_a_record_that_makes_no_sense_is_left_alone(processes, tmp_path):
    (tmp_path / "server.json").write_text("{")
    processes.stop_leftovers(tmp_path)
    processes.stop_leftovers(tmp_path / "missing")


def test_a_taken_port_is_not_handed_out(module):
    with socket.socket() as holder:
        holder.bind(("127.0.0.1", 0))
        taken = holder.getsockname()[1]
        assert module.free_port(taken) != taken
