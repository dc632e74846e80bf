"""Kills a process at a chosen point of its work, as the power or the kernel may.

``kill.json`` in the home says where: ``{"point", "when": "before" or "after", "nth", "both"}``.
It is taken away as it is carried out, so that each kill happens once. ``both`` kills the parent
along with the process itself.
"""

from __future__ import annotations

import functools
import json
import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any


class Killer:
    """Counts how often points are reached in this process, and ends it at the chosen one."""

    def __init__(self, home: Path) -> None:
        self._order = home / "kill.json"
        self._counts: dict[tuple[str, str], int] = {}
        self._of = ""

    def watch(self, owner: Any, *names: str) -> None:
        """Have methods, or functions of a module, be points: ``<owner>.<name>``."""
        for name in names:
            point = f"{owner.__name__.rpartition('.')[2]}.{name}"
            setattr(owner, name, self._wrapped(point, getattr(owner, name)))

    def _wrapped(self, point: str, function: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(function)
        def call(*args: Any, **kwargs: Any) -> Any:
            self.reached(point, "before")
            result = function(*args, **kwargs)
            self.reached(point, "after")
            return result

        return call

    def reached(self, point: str, when: str) -> None:
        """Die here, if this is where."""
        try:
            text = self._order.read_text()
        except FileNotFoundError:
            return
        order = json.loads(text)
        if order["point"] != point or order["when"] != when:
            return
        if text != self._of:
            self._of, self._counts = text, {}
        self._counts[point, when] = count = self._counts.get((point, when), 0) + 1
        if count < order["nth"]:
            return
        self._order.rename(self._order.with_name("killed.json"))
        if order["both"]:
            os.kill(os.getppid(), signal.SIGKILL)
        os.kill(os.getpid(), signal.SIGKILL)
