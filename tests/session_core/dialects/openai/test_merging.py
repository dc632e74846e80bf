"""Several streams as one."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator

import pytest

from session_core.dialects.openai.merging import merged


class Source:
    """A stream that says whether it was closed."""

    def __init__(
        self, count: int, *, error: Exception | None = None, endless: bool = False
    ) -> None:
        self.count, self.error, self.endless = count, error, endless
        self.closed = False

    async def items(self) -> AsyncGenerator[int, None]:
        try:
            for number in range(self.count):
                await asyncio.sleep(0)
                yield number
            if self.error is not None:
                raise self.error
            while self.endless:
                await asyncio.sleep(10)
        finally:
            self.closed = True


def test_every_item_comes_in_its_streams_order() -> None:
    async def story() -> None:
        sources = [Source(3), Source(0), Source(200)]
        said = [item async for item in merged([source.items() for source in sources])]
        for number, source in enumerate(sources):
            assert [i for n, i in said if n == number] == list(range(source.count))
            assert source.closed

    asyncio.run(story())


def test_an_error_ends_the_others() -> None:
    async def story() -> None:
        sources = [Source(1, endless=True), Source(2, error=ValueError("broken"))]
        with pytest.raises(ValueError, match="broken"):
            async for _ in merged([source.items() for source in sources]):
                pass
        assert all(source.closed for source in sources)

    asyncio.run(story())


def test_closing_it_closes_them() -> None:
    async def story() -> None:
        sources = [Source(1, endless=True), Source(100_000)]
        stream = merged([source.items() for source in sources])
        await anext(stream)
        await stream.aclose()
        assert all(source.closed for source in sources)

    asyncio.run(story())
