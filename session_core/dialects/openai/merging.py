"""Several streams as one."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from typing import TypeVar

T = TypeVar("T")
_MOST_WAITING = 64


async def merged(
    streams: Sequence[AsyncGenerator[T, None]],
) -> AsyncGenerator[tuple[int, T], None]:
    """Every item of every stream with the stream's number, as they come.

    The first error is raised, and ends the others; so does closing this.
    """
    items: asyncio.Queue[tuple[int, T] | Exception | None] = asyncio.Queue(_MOST_WAITING)

    async def pump(number: int, stream: AsyncGenerator[T, None]) -> None:
        try:
            async with aclosing(stream):
                async for item in stream:
                    await items.put((number, item))
        except Exception as error:
            await items.put(error)
        else:
            await items.put(None)

    pumps = [asyncio.create_task(pump(n, stream)) for n, stream in enumerate(streams)]
    running = len(pumps)
    try:
        while running:
            item = await items.get()
            if item is None:
                running -= 1
            elif isinstance(item, Exception):
                raise item
            else:
                yield item
    finally:
        for task in pumps:
            task.cancel()
        await asyncio.gather(*pumps, return_exceptions=True)
