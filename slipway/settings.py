"""Settings, read once from the environment: ``SLIPWAY_HOME`` and its like."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import Any, Literal, Self

from pydantic import Field, ValidationError
from pydantic_settings import BaseSettings, SettingsConfigDict

from registry.errors import InvalidInput

DEFAULT_MODEL = "HuggingFaceTB/SmolLM2-135M-Instruct"
PREFIX = "SLIPWAY_"


class Settings(BaseSettings):
    """What a server and the command line need to know."""

    # A variable that is set to nothing is as good as not set.
    model_config = SettingsConfigDict(
        env_prefix=PREFIX, frozen=True, env_ignore_empty=True, env_parse_none_str="none"
    )

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

    # What a tenant may have that has no limits of its own; "none" is no limit.
    quota_sessions: int | None = Field(default=None, ge=0)
    """Sessions active at once."""
    quota_operations: int | None = Field(default=10_000, ge=0)
    """Training operations that wait at once."""
    quota_samples: int | None = Field(default=20_000, ge=0)
    """Sequences being sampled at once."""
    quota_tokens_per_day: int | None = Field(default=None, ge=0)
    """Tokens trained on, read and sampled in a UTC day."""
    quota_context: int | None = Field(default=None, ge=0)
    """Tokens of a datum, and of a prompt with what is sampled after it."""

    @classmethod
    def read(cls, **given: Any) -> Self:
        """The settings of the environment, except for those given (and not None).

        Raises:
            InvalidInput: naming the variables that are wrong. Their values are left out: one
                may hold a password.
        """
        try:
            return cls(**{name: value for name, value in given.items() if value is not None})
        except ValidationError as error:
            faults = [
                f"{PREFIX}{'_'.join(map(str, fault['loc'])).upper()}: {fault['msg']}"
                for fault in error.errors()
            ]
            raise InvalidInput("; ".join(faults)) from None

    def engine_words(self) -> list[str] | None:
        """The engine's command taken apart, as a shell would."""
        return shlex.split(self.engine_command) if self.engine_command else None
