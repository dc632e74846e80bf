"""The README's own words, run as they stand."""

from __future__ import annotations

import json
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
README = (ROOT / "README.md").read_text()


def block(language: str, containing: str) -> str:
    """The one fenced block of a language that contains a text."""
    blocks = re.findall(rf"^```{language}\n(.*?)^```", README, re.MULTILINE | re.DOTALL)
    (found,) = [text for text in blocks if containing in text]
    return found


@pytest.mark.slow
def test_the_training_script_and_the_commands_after_it(server, tmp_path):
    script = tmp_path / "train.py"
    script.write_text(block("python", "import tinker"))
    printed = server.run(sys.executable, str(script)).splitlines()

    losses = [float(line.split()[1]) for line in printed[:-1]]
    assert len(losses) == 10
    assert losses[-1] < losses[0] / 2
    assert re.fullmatch(r"tinker://.+/weights/ten-steps", printed[-1])

    commands = block("sh", "packages list").splitlines()
    for command in commands:
        server.run("sh", "-c", command)
    listed = json.loads(server.run("slipway", "packages", "list", "--group", "greetings", "--json"))
    assert {version["kind"] for version in listed} == {"checkpoint", "merged"}
    assert len(block("python", "import tinker").strip().splitlines()) <= 25


def commands(text: str) -> list[list[str]]:
    """Every `slipway` command in a text's shell blocks, in words."""
    blocks = re.findall(r"^```sh\n(.*?)^```", text, re.MULTILINE | re.DOTALL)
    lines = [line for block in blocks for line in block.splitlines()]
    return [shlex.split(line, comments=True) for line in lines if line.startswith("slipway ")]


def test_every_command_it_shows_exists_with_its_options():
    shown = commands(README)
    assert len(shown) >= 8
    for words in shown:
        group = [word for word in words[1:3] if re.fullmatch(r"[a-z]+", word)]
        asked = [sys.executable, "-m", "slipway", *group, "--help"]
        done = subprocess.run(asked, capture_output=True, text=True, check=False)
        assert done.returncode == 0, words
        for option in (word for word in words if word.startswith("--")):
            assert option in done.stdout, words


def test_the_make_targets_it_names_exist():
    targets = set(re.findall(r"^(\w+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    named = set(re.findall(r"\bmake (\w+)", README))
    assert named
    assert named <= targets


def test_every_page_it_links_to_exists():
    for link in re.findall(r"\]\(([^)#]+)\)", README):
        assert (ROOT / link).exists(), link
