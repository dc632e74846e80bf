"""The engine's process, which can be made to die at a point of its work, to hang, or to have
no more memory than it has.

``SERVE_HOME`` names the folder where orders are left: ``kill.json`` (see `killing`), ``hang``
(a training pass begins and never ends, once) and ``no-memory`` (allocations of more than a
megabyte fail in a training pass, while it is there).
"""

from __future__ import annotations

import os
import resource
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import torch
from killing import Killer

from registry import Files
from session_core import engine, snapshots, worker
from session_core.engine import Engine
from session_core.optimizer import Adam

SPARE = 2**20


def hanging(home: Path, function: Callable[..., Any]) -> Callable[..., Any]:
    def call(*args: Any, **kwargs: Any) -> Any:
        if (home / "hang").exists():
            (home / "hang").unlink()
            threading.Event().wait()
        return function(*args, **kwargs)

    return call


def starved(home: Path, function: Callable[..., Any]) -> Callable[..., Any]:
    def call(*args: Any, **kwargs: Any) -> Any:
        unlimited = (resource.RLIM_INFINITY, resource.RLIM_INFINITY)
        if (home / "no-memory").exists():
            limit = psutil.Process().memory_info().vms + SPARE
            resource.setrlimit(resource.RLIMIT_AS, (limit, resource.RLIM_INFINITY))
        try:
            return function(*args, **kwargs)
        finally:
            resource.setrlimit(resource.RLIMIT_AS, unlimited)

    return call


def main() -> None:
    home = Path(os.environ["SERVE_HOME"])
    engine.train_pass = starved(home, hanging(home, engine.train_pass))  # type: ignore[assignment]
    killer = Killer(home)
    killer.watch(Engine, "execute")
    killer.watch(torch.autograd, "backward")
    killer.watch(torch.optim.AdamW, "step")
    killer.watch(Adam, "step")
    killer.watch(Files, "write", "sync")
    killer.watch(snapshots, "write_state")
    worker.main()


if __name__ == "__main__":
    main()
