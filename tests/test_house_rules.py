"""Rules of the house that no linter knows."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
PACKAGES = ("registry", "merge", "session_core", "evals", "serving", "slipway", "scripts")
SOURCES = sorted(path for package in PACKAGES for path in (ROOT / package).rglob("*.py"))


def unsafe(tree: ast.AST) -> list[str]:
    """Ways of running code that came with weights."""
    found = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found += [a.name for a in node.names if a.name.split(".")[0] in ("pickle", "dill")]
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "pickle":
            found.append("pickle")
        if isinstance(node, ast.Attribute) and ast.unparse(node) == "torch.load":
            found.append("torch.load")
        if isinstance(node, ast.keyword) and node.arg == "trust_remote_code":
            refused = isinstance(node.value, ast.Constant) and node.value.value is False
            found += [] if refused else ["trust_remote_code"]
    return found


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: str(path.relative_to(ROOT)))
def test_weights_are_data_and_never_code(path):
    assert unsafe(ast.parse(path.read_text())) == []


@pytest.mark.parametrize(
    "code",
    [
        "import pickle",
        "from pickle import loads",
        "import torch\ntorch.load('x')",
        "f(trust_remote_code=True)",
        "f(trust_remote_code=flag)",
    ],
)
def test_the_rule_would_notice(code):
    assert unsafe(ast.parse(code)) != []


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: str(path.relative_to(ROOT)))
def test_a_room_is_no_larger_than_one_can_read(path):
    assert len(path.read_text().splitlines()) <= 500


def test_every_package_is_here():
    assert {path.relative_to(ROOT).parts[0] for path in SOURCES} == set(PACKAGES)
