"""The sockets that the server listens on."""

from __future__ import annotations

import asyncio
import socket
from pathlib import Path

import pytest

from registry.errors import Conflict
from slipway.home import Home
from slipway.server import Listen, bind


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def test_answers_do_not_wait_for_acknowledgements(tmp_path: Path) -> None:
    """Nagle's algorithm is off on what asyncio accepts: it would cost each answer 40 ms."""
    listen = Listen(host="127.0.0.1", port=free_port(), gateway_port=free_port())
    listener = bind(listen, Home(tmp_path))
    heard: list[int] = []

    async def accept_one() -> None:
        def connected(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            accepted = writer.get_extra_info("socket")
            heard.append(accepted.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY))
            writer.close()

        server = await asyncio.start_server(connected, sock=listener)
        async with server:
            reader, writer = await asyncio.open_connection("127.0.0.1", listen.port)
            await reader.read()
            writer.close()
            await writer.wait_closed()

    asyncio.run(accept_one())
    assert heard
    assert all(heard)


def test_a_taken_port_is_named_with_the_option_that_chooses_another(tmp_path: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        listen = Listen(host="127.0.0.1", port=port, gateway_port=free_port())
        with pytest.raises(Conflict, match=rf"port {port} .* choose another with --port"):
            bind(listen, Home(tmp_path))
