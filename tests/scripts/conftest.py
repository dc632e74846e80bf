from __future__ import annotations

import importlib
import sys
from pathlib import Path

import pytest

SCRIPTS = Path(__file__).resolve().parents[2] / "scripts"


@pytest.fixture
def recipe(monkeypatch):
    """Import a script by name, as Python would when it is run."""

    def load(name: str):
        monkeypatch.syspath_prepend(str(SCRIPTS))
        monkeypatch.syspath_prepend(str(SCRIPTS / "recipes"))
        sys.modules.pop(name, None)
        return importlib.import_module(name)

    return load
