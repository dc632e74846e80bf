"""A control plane of sessions alone, as a process that tests can kill.

    python serve.py HOME BASE PORT

``full`` in HOME makes every write of a save fail as on a full disk; ``clock-ahead`` says how
many seconds the server's clock is ahead of the machine's.
"""

from __future__ import annotations

import errno
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from datetime import datetime, timedelta
from pathlib import Path

import uvicorn
from fastapi import FastAPI

from registry import (
    AuthMiddleware,
    Files,
    LimitMiddleware,
    Registry,
    install_error_handlers,
    utc_now,
)
from session_core import Limits, SessionService
from session_core.dialects import openai, tinker


class FullWhenAsked(Files):
    """The disk is full while a marker file is there."""

    def __init__(self, marker: Path) -> None:
        self._marker = marker

    def sync(self, path: Path) -> None:
        if self._marker.exists():
            raise OSError(errno.ENOSPC, "No space left on device", str(path))
        super().sync(path)


def main() -> None:
    home, port = Path(sys.argv[1]), int(sys.argv[3])

    def clock() -> datetime:
        ahead = home / "clock-ahead"
        return utc_now() + timedelta(seconds=float(ahead.read_text()) if ahead.exists() else 0)

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
        limits=Limits(gap_seconds=2.0, snapshot_steps=4),
        reap_seconds=1.0,
        idle=timedelta(days=1),
    )

    # Small enough that most results are announced by their size first, and polls end early.
    options = tinker.Options(poll_seconds=1.0, inline_bytes=256)

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        await service.start()
        yield
        await service.stop()
        registry.db.close()

    app = FastAPI(lifespan=lifespan)
    app.include_router(openai.router(service))
    app.include_router(tinker.router(service, options))
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
