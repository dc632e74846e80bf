"""The benchmark of the session core runs, as docs/performance.md shows it, on a small model."""

from __future__ import annotations

import json
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PYTHON = ".venv/bin/python "


def shown() -> list[list[str]]:
    """The words of every command that the page shows."""
    text = (ROOT / "docs" / "performance.md").read_text()
    (block,) = re.findall(r"```sh\n(.*?)```", text, re.DOTALL)
    lines = block.splitlines()
    assert all(line.startswith(PYTHON) for line in lines)
    return [shlex.split(line.removeprefix(PYTHON), comments=True) for line in lines]


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_every_command_of_the_page_measures_its_parts():
    for words in shown():
        done = subprocess.run(
            [sys.executable, *words, "--small", "--rounds", "1"],
            cwd=ROOT,
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == 0, done.stderr[-2000:]
        lines = [json.loads(line) for line in done.stdout.splitlines()]
        parts = [word for word in words[1:] if word.isalpha()]
        assert [line["part"] for line in lines] == (parts or ["sft", "chat", "sample", "overhead"])
        assert all(line["ratio"] > 0 for line in lines)


def test_an_unknown_part_is_refused_by_name():
    script = ROOT / "scripts" / "bench" / "session.py"
    done = subprocess.run(
        [sys.executable, str(script), "speed"], capture_output=True, text=True, check=False
    )
    assert done.returncode == 2
    assert "there is no part speed: expected sft, chat, sample, overhead" in done.stderr
