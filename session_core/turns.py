"""Whose training operation goes next: tenants share the engine's time alike.

Start-time fair queueing (Goyal, Vin and Cheng, 1996) with a tenant's own seconds for the
length of what it asks for: what an operation will take is not known before it ran, so it is
charged after. A tenant that comes back from a pause begins where the others are, and has
saved up nothing.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field


@dataclass(kw_only=True, eq=False)
class _Tenant:
    spent: float  # seconds, with those it did not wait for
    waiting: deque[asyncio.Future[None]] = field(default_factory=deque)


class Turns:
    """One turn at a time. Belongs to one event loop.

    Args:
        clock: seconds, from any moment on.
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._tenants: dict[str, _Tenant] = {}
        self._busy = False
        self._now = 0.0  # what had been spent by the tenant whose turn it is, at its start

    @asynccontextmanager
    async def turn(self, tenant: str) -> AsyncIterator[None]:
        """Wait for a turn and have it: first of all tenants comes the one that had least, and
        of its own the one that waits for longest."""
        row = self._tenants.setdefault(tenant, _Tenant(spent=self._now))
        if not row.waiting:
            row.spent = max(row.spent, self._now)
        turn = asyncio.get_running_loop().create_future()
        row.waiting.append(turn)
        self._next()
        try:
            await turn
        except asyncio.CancelledError:
            if turn in row.waiting:
                row.waiting.remove(turn)
            elif not turn.cancelled():
                self._busy = False  # It came just as it was given up.
            self._next()
            raise
        started = self._clock()
        try:
            yield
        finally:
            row.spent += self._clock() - started
            self._busy = False
            self._next()

    def _next(self) -> None:
        if self._busy:
            return
        for row in self._tenants.values():
            # Given up, and not taken out of the line yet by whoever waited.
            while row.waiting and row.waiting[0].cancelled():
                row.waiting.popleft()
        waiting = [row for row in self._tenants.values() if row.waiting]
        if not waiting:
            # Nobody is ahead of anybody any more.
            self._tenants = {}
            self._now = 0.0
            return
        row = min(waiting, key=lambda row: row.spent)
        turn = row.waiting.popleft()
        self._busy, self._now = True, row.spent
        turn.set_result(None)
