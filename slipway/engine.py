"""An engine that a setting names: any program with the OpenAI completions routes."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any


@dataclass(frozen=True, kw_only=True)
class CommandEngine:
    """A command whose words may hold ``{folder}``, ``{model}`` and ``{port}``."""

    words: tuple[str, ...]
    name: str = "command"

    def command(self, folder: Path, model: str, port: int) -> list[str]:
        """The words with their places filled."""
        places = {"folder": str(folder), "model": model, "port": str(port)}
        return [word.format(**places) for word in self.words]

    def environment(self) -> dict[str, str]:
        """Nothing beside what the server has."""
        return {}

    def describe(self) -> dict[str, Any]:
        """The program; what it runs on is its own affair."""
        return {"name": self.name, "program": Path(self.words[0]).name, "dtype": "auto"}
