"""The README's own words, run as they stand."""

from __future__ import annotations

import json
import re
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


def test_the_make_targets_it_names_exist():
    targets = set(re.findall(r"^(\w+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    named = set(re.findall(r"\bmake (\w+)", README))
    assert named
    assert named <= targets


def test_every_page_it_links_to_exists():
    for link in re.findall(r"\]\(([^)#]+)\)", README):
        assert (ROOT / link).exists(), link
