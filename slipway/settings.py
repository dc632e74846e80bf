"""Settings, read once from the environment: ``SLIPWAY_HOME`` and its like."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import Literal

from pydantic import Field
from pydantic_settings import BaseSettings, SettingsConfigDict

DEFAULT_MODEL = "HuggingFaceTB/SmolLM2-135M-Instruct"


class Settings(BaseSettings):
    """What a server and the command line need to know."""

    model_config = SettingsConfigDict(env_prefix="SLIPWAY_", frozen=True)

    home: Path = Path("~/.slipway")
    """Database, artifact store, logs, the API key."""
    cache: Path = Path("~/.cache/slipway")
    """Base models."""
    device: Literal["cpu", "cuda"] = "cpu"
    base_model: str = DEFAULT_MODEL
    """A hub id or a folder."""
    database_url: str | None = None
    """A SQLAlchemy URL; SQLite in the home by default."""
    threads: int = Field(default=0, ge=0)
    """The training engine's; 0 leaves the choice to torch."""
    engine_command: str | None = None
    """Another OpenAI-compatible server than vLLM: a command with {folder}, {model} and {port}."""

    def engine_words(self) -> list[str] | None:
        """The engine's command taken apart, as a shell would."""
        return shlex.split(self.engine_command) if self.engine_command else None
