"""The commands that docs/ shows, run as they stand."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest

DOCS = Path(__file__).resolve().parents[2] / "docs"


def commands(text: str) -> list[list[str]]:
    """Every `slipway` command in a text's shell blocks, in words."""
    blocks = re.findall(r"^```sh\n(.*?)^```", text, re.MULTILINE | re.DOTALL)
    lines = [line for block in blocks for line in block.splitlines()]
    return [shlex.split(line, comments=True)[1:] for line in lines if line.startswith("slipway ")]


@pytest.mark.parametrize("page", ["administering.md"])
def test_every_command_runs(page, running):
    shown = commands((DOCS / page).read_text())
    assert len(shown) > 10
    for words in shown:
        done = running.slipway(*words)
        assert done.returncode == 0, (words, done.stderr)
