"""A streamed response that ends what it streams from."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import aclosing

from starlette.responses import StreamingResponse
from starlette.types import Receive, Scope, Send


class GeneratedResponse(StreamingResponse):
    """Streams a generator, and closes it however the response ends.

    Left to the garbage collector, the generator of a client that went away would hold what it
    holds for who knows how long.
    """

    def __init__(self, generator: AsyncGenerator[str, None], **more: object) -> None:
        super().__init__(generator, **more)  # type: ignore[arg-type]
        self._generator = generator

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async with aclosing(self._generator):
            await super().__call__(scope, receive, send)
