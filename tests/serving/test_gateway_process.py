from __future__ import annotations

import asyncio
import json
import socket
import sys
from pathlib import Path

import httpx
import psutil
import pytest

from registry.errors import Conflict, Unavailable
from serving import GatewayProcess
from serving.launch import free_port


def test_it_answers_once_started_and_is_gone_once_stopped(home: Path) -> None:
    async def story() -> None:
        gateway = GatewayProcess(home=home, port=free_port())
        assert not gateway.alive()
        await gateway.start()
        assert gateway.alive()
        record = json.loads((home / "gateway" / "process.json").read_text())
        async with httpx.AsyncClient() as client:
            assert (await client.get(f"{gateway.url}/healthz")).status_code == 200
            # No snapshot has been written yet: no key is known.
            assert (await client.get(f"{gateway.url}/v1/models")).status_code == 401
        await gateway.stop()
        await gateway.stop()
        assert not gateway.alive()
        assert not psutil.pid_exists(record["pid"])
        assert not (home / "gateway" / "process.json").exists()

    asyncio.run(story())


def test_it_ends_in_good_order_when_asked_to(home: Path) -> None:
    async def story() -> int:
        gateway = GatewayProcess(home=home, port=free_port())
        await gateway.start()
        pid = json.loads((home / "gateway" / "process.json").read_text())["pid"]
        process = psutil.Process(pid)
        process.terminate()
        code = await asyncio.to_thread(process.wait, 10)
        await gateway.stop()
        return int(code)

    assert asyncio.run(story()) == 0


def test_a_taken_port_is_named(home: Path) -> None:
    async def story(port: int) -> None:
        with pytest.raises(Conflict, match=rf"127\.0\.0\.1:{port} \(Address already in use\)"):
            await GatewayProcess(home=home, port=port).start()

    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        asyncio.run(story(listener.getsockname()[1]))


def test_why_it_did_not_start_is_shown(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    script = home / "python"
    script.write_text("#!/bin/sh\necho 'ImportError: no such thing' >&2\nexit 3\n")
    script.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(script))

    async def story() -> None:
        gateway = GatewayProcess(home=home, port=free_port())
        with pytest.raises(Unavailable, match=r"ImportError: no such thing \(exit code 3"):
            await gateway.start()

    asyncio.run(story())


def test_the_gateway_of_a_killed_server_is_ended_first(home: Path) -> None:
    async def story() -> None:
        port = free_port()
        killed = GatewayProcess(home=home, port=port)
        await killed.start()
        old = json.loads((home / "gateway" / "process.json").read_text())["pid"]
        heir = GatewayProcess(home=home, port=port)
        await heir.start()
        assert heir.alive()
        assert not killed.alive()
        assert old != json.loads((home / "gateway" / "process.json").read_text())["pid"]
        await heir.stop()

    asyncio.run(story())


def test_a_record_of_someone_else_is_ignored(home: Path) -> None:
    record = home / "gateway" / "process.json"
    record.parent.mkdir()
    gateway = GatewayProcess(home=home, port=free_port())
    mine = psutil.Process()
    for content in (
        "{",
        "[]",
        '{"pid": "x", "created": 0}',
        json.dumps({"pid": mine.pid, "created": mine.create_time() - 50}),
    ):
        record.write_text(content)
        assert asyncio.run(gateway.end_leftover()) is False
