"""A control plane of sessions alone, as a process that tests can kill.

    python serve.py HOME BASE PORT

``full`` in HOME makes every write of a save fail as on a full disk; ``clock-ahead`` says how
many seconds the server's clock is ahead of the machine's. Further orders are obeyed with
``SERVE_OPTIONS`` (JSON) saying so: ``{"killable": true}``, see `killing` and `killable_worker`;
its other items are the limits'.
"""

from __future__ import annotations

import errno
import json
import os
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from datetime import datetime, timedelta
from pathlib import Path

import uvicorn
from fastapi import FastAPI
from killing import Killer

from registry import (
    AuthMiddleware,
    Files,
    LimitMiddleware,
    Registry,
    Store,
    Versions,
    install_error_handlers,
    utc_now,
)
from session_core import Limits, SessionService
from session_core.dialects import openai, tinker
from session_core.log import OperationLog
from session_core.recovery import Snapshots
from session_core.saved import SavedPaths


class FullWhenAsked(Files):
    """The disk is full while a marker file is there."""

    def __init__(self, marker: Path) -> None:
        self._marker = marker

    def sync(self, path: Path) -> None:
        if self._marker.exists():
            raise OSError(errno.ENOSPC, "No space left on device", str(path))
        super().sync(path)


def make_killable(home: Path) -> None:
    """Have the writes of this process be points to die at, and start such an engine."""
    killer = Killer(home)
    killer.watch(OperationLog, "append", "_settle", "add_sampler", "count_death")
    killer.watch(Snapshots, "begin", "commit")
    killer.watch(Store, "stage", "publish")
    killer.watch(Versions, "register")
    killer.watch(SavedPaths, "put")
    killer.watch(Files, "rename", "sync")
    here = str(Path(__file__).parent)
    known = os.environ.get("PYTHONPATH")
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, (here, known)))
    os.environ["SERVE_HOME"] = str(home)


def main() -> None:
    home, port = Path(sys.argv[1]), int(sys.argv[3])

    def clock() -> datetime:
        ahead = home / "clock-ahead"
        return utc_now() + timedelta(seconds=float(ahead.read_text()) if ahead.exists() else 0)

    options: dict[str, float] = {
        "gap_seconds": 2.0,
        "snapshot_steps": 4,
        **json.loads(os.environ.get("SERVE_OPTIONS", "{}")),
    }
    killable = options.pop("killable", False)
    if killable:
        make_killable(home)
    registry = Registry.open(
        f"sqlite:///{home / 'slipway.db'}",
        home / "store",
        files=FullWhenAsked(home / "full"),
        clock=clock,
    )
    registry.store.sweep()
    tenant = registry.tenants.ensure_tenant("default")
    base = registry.versions.get(tenant, "tiny/1")
    service = SessionService(
        registry=registry,
        home=home / "sessions",
        base=base,
        base_name="org/tiny",
        logs=home / "logs",
        threads=1,
        engine_module="killable_worker" if killable else "session_core.worker",
        limits=Limits(**options),  # type: ignore[arg-type]
        reap_seconds=1.0,
        idle=timedelta(days=1),
    )

    # Small enough that most results are announced by their size first, and polls end early.
    dialect = tinker.Options(poll_seconds=1.0, inline_bytes=256)

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        await service.start()
        yield
        await service.stop()
        registry.db.close()

    app = FastAPI(lifespan=lifespan)
    app.include_router(openai.router(service))
    app.include_router(tinker.router(service, dialect))
    app.add_middleware(LimitMiddleware, larger=tinker.LARGER)
    app.add_middleware(
        AuthMiddleware,
        authenticate=registry.tenants.authenticate,
        public=frozenset({"/api/v1/healthz"}),
        links=service.signer.claim,
    )
    install_error_handlers(app)
    uvicorn.run(app, host="127.0.0.1", port=port, log_level="warning")


if __name__ == "__main__":
    main()
