from __future__ import annotations

from pathlib import Path

import pytest

from registry import InvalidInput
from slipway.settings import Settings


@pytest.fixture(autouse=True)
def _clean(monkeypatch):
    for name in ("HOME", "CACHE", "DEVICE", "BASE_MODEL", "DATABASE_URL", "THREADS"):
        monkeypatch.delenv(f"SLIPWAY_{name}", raising=False)


def test_options_go_before_the_environment_and_that_before_the_defaults(monkeypatch):
    monkeypatch.setenv("SLIPWAY_HOME", "/srv/slipway")
    assert Settings.read().home == Path("/srv/slipway")
    assert Settings.read(home=None).home == Path("/srv/slipway")
    assert Settings.read(home=Path("/other")).home == Path("/other")
    assert Settings.read().device == "cpu"


def test_a_variable_set_to_nothing_is_not_set(monkeypatch):
    monkeypatch.setenv("SLIPWAY_HOME", "")
    monkeypatch.setenv("SLIPWAY_DEVICE", "")
    assert Settings.read() == Settings.read(home=Path("~/.slipway"), device="cpu")


def test_a_wrong_variable_is_named_and_not_quoted(monkeypatch):
    monkeypatch.setenv("SLIPWAY_DEVICE", "tpu-hunter2")
    monkeypatch.setenv("SLIPWAY_THREADS", "-1")
    with pytest.raises(InvalidInput, match=r"SLIPWAY_DEVICE: .*; SLIPWAY_THREADS: ") as caught:
        Settings.read()
    assert "hunter2" not in caught.value.message


def test_the_engine_command_is_taken_apart_as_a_shell_would():
    settings = Settings.read(engine_command="'/a b/python' serve.py {port}")
    assert settings.engine_words() == ["/a b/python", "serve.py", "{port}"]
    assert Settings.read().engine_words() is None
