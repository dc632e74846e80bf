from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable, Iterator
from typing import Any

import httpx
import psutil
import pytest
from sqlmodel import select

from registry.errors import Corrupt, Unavailable
from serving import ReplicaStatus, fingerprint
from serving.engines import Engine
from serving.launch import free_port
from serving.models import Replica
from serving.processes import ProcessId
from serving.replicas import KEPT

Make = Callable[..., Any]


def rows(stack: Any) -> list[Replica]:
    with stack.registry.db.read() as session:
        found = session.exec(select(Replica).order_by(Replica.started_at)).all()
        session.expunge_all()
        return list(found)


def alive(row: Replica) -> list[int]:
    """The recorded processes of a replica that still live, the leader first."""
    recorded = [ProcessId(pid=int(pid), created=created) for pid, created in row.processes]
    return [one.pid for one in recorded if one.find() is not None]


def test_a_version_is_served_while_the_block_runs(stack: Make) -> None:
    async def story() -> None:
        async with stack() as s:
            version = s.version(says="hello there")
            async with s.replicas.serve(version, keep=False) as served:
                async with httpx.AsyncClient(base_url=served.target_url) as client:
                    answer = await client.post(
                        "/v1/completions", json={"model": served.model, "prompt": [1, 2]}
                    )
                assert answer.json()["choices"][0]["text"] == "hello there"
                digest = version.digest.removeprefix("sha256:")
                assert served.model == f"g--{digest[:12]}"
                assert served.fingerprint == fingerprint(served.engine)
                (row,) = rows(s)
                assert row.status == ReplicaStatus.READY
                assert row.id == served.replica_id
                assert row.engine_fingerprint == served.fingerprint
                assert row.ready_at is not None
                assert len(row.processes) == 2
            (row,) = rows(s)
            assert row.status == ReplicaStatus.STOPPED
            assert not alive(row)

    asyncio.run(story())


def test_the_engine_is_really_the_described_one(stand_in: type[Engine], stack: Make) -> None:
    async def story() -> None:
        async with stack(engine=stand_in(variables={"MARK": "7"})) as s:  # type: ignore[call-arg]
            async with s.replicas.serve(s.version(), keep=False) as served:
                stats = httpx.get(f"{served.target_url}/stats").json()
            assert stats["environment"]["MARK"] == "7"
            assert "one" not in stats["environment"]

    asyncio.run(story())


def test_those_who_ask_for_one_digest_share_a_replica(stack: Make) -> None:
    async def story() -> None:
        async with stack() as s:
            version, twin = s.version(), s.version("other")
            assert version.digest == twin.digest

            async def use(one: Any) -> str:
                async with s.replicas.serve(one, keep=False) as served:
                    await asyncio.sleep(0.3)
                    return str(served.replica_id)

            used = await asyncio.gather(use(version), use(twin), use(version))
            assert len(set(used)) == 1
            assert [row.status for row in rows(s)] == [ReplicaStatus.STOPPED]

    asyncio.run(story())


def test_a_kept_replica_stays_until_another_is_kept(stack: Make) -> None:
    async def story() -> None:
        async with stack() as s:
            first, second = s.version(says="1"), s.version(says="2")
            async with s.replicas.serve(first, keep=True) as one:
                pass
            assert one.replica_id in s.replicas.living()
            async with s.replicas.serve(first, keep=True) as again:
                assert again.replica_id == one.replica_id
            async with s.replicas.serve(second, keep=True) as two:
                assert s.replicas.living() == {one.replica_id, two.replica_id}
            assert s.replicas.living() == {two.replica_id}
            await s.replicas.release(two.replica_id, KEPT)
            assert s.replicas.living() == frozenset()

    asyncio.run(story())


def test_a_block_that_raises_keeps_nothing(stack: Make) -> None:
    async def story() -> None:
        async with stack() as s:
            with pytest.raises(ZeroDivisionError):
                async with s.replicas.serve(s.version(), keep=True):
                    raise ZeroDivisionError
            assert s.replicas.living() == frozenset()

    asyncio.run(story())


@pytest.mark.parametrize(
    ("mode", "reason"),
    [
        ("crash", r"ValueError: no room for the KV cache \(exit code 1; see logs/replica-"),
        ("refuse", r"error: argument --dtype: invalid choice \(exit code 2"),
        ("hang", r"no token within 1 s \(no answer: ConnectError\): loading for ever"),
        ("dead", r"no token within 1 s \(no answer: ReadTimeout\)"),
        ("tokenless", r"no token within 1 s \(answers without a token\)"),
    ],
)
def test_a_start_that_fails_says_why_and_leaves_nothing(
    stack: Make, mode: str, reason: str
) -> None:
    async def story() -> None:
        async with stack(start_timeout=1.4) as s:
            version = s.version(mode=mode)
            with pytest.raises(Unavailable, match=rf"g/1 could not be served: .*{reason}"):
                async with s.replicas.serve(version, keep=True):
                    raise AssertionError("not reached")
            (row,) = rows(s)
            assert row.status == ReplicaStatus.FAILED
            assert row.error is not None
            assert "could not be served" in row.error
            assert not alive(row)
            assert s.replicas.living() == frozenset()

    asyncio.run(story())


def test_an_engine_that_is_not_there(stack: Make, stand_in: Any) -> None:
    class Missing(stand_in):  # type: ignore[misc]
        def command(self, *_: Any) -> list[str]:
            return ["/nowhere/engine"]

    async def story() -> None:
        async with stack(engine=Missing()) as s:
            with pytest.raises(Unavailable, match="/nowhere/engine: No such file"):
                async with s.replicas.serve(s.version(), keep=False):
                    pass

    asyncio.run(story())


def test_a_file_that_was_cut_short_is_named(stack: Make) -> None:
    async def story() -> None:
        async with stack() as s:
            version = s.version(says="one two three")
            file = s.registry.store.path(version.digest) / "config.json"
            file.chmod(0o644)
            file.write_text("{}")
            with pytest.raises(Corrupt, match=r"config\.json has 2 bytes instead of"):
                await s.replicas.claim(version, "me")
            file.unlink()
            with pytest.raises(Corrupt, match=r"config\.json is missing"):
                await s.replicas.claim(version, "me")

    asyncio.run(story())


@pytest.fixture
def taken_port() -> Iterator[int]:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        yield listener.getsockname()[1]


def test_another_port_is_tried_when_one_is_taken(stack: Make, taken_port: int) -> None:
    ports = iter([taken_port, free_port()])

    async def story() -> None:
        async with stack(choose_port=lambda: next(ports)) as s:
            replica = await s.replicas.claim(s.version(), "me")
            assert str(taken_port) not in replica.url

    asyncio.run(story())


def test_another_replica_on_the_port_is_not_mistaken_for_ours(stack: Make) -> None:
    ports: list[int] = []

    def choose() -> int:
        ports.append(ports[0] if len(ports) == 1 else free_port())
        return ports[-1]

    async def story() -> None:
        async with stack(choose_port=choose) as s:
            first = await s.replicas.claim(s.version(says="1"), "me")
            second = await s.replicas.claim(s.version(says="2"), "me")
            assert len(ports) == 3
            assert first.url != second.url

    asyncio.run(story())


def test_a_port_that_stays_taken_is_reported(stack: Make, taken_port: int) -> None:
    async def story() -> None:
        async with stack(choose_port=lambda: taken_port) as s:
            with pytest.raises(Unavailable, match="address already in use"):
                await s.replicas.claim(s.version(), "me")

    asyncio.run(story())


def test_one_of_two_who_wait_may_go(stack: Make) -> None:
    async def story() -> None:
        async with stack() as s:
            version = s.version()
            stays = asyncio.create_task(s.replicas.claim(version, "stays"))
            goes = asyncio.create_task(s.replicas.claim(version, "goes"))
            await asyncio.sleep(0.2)
            goes.cancel()
            with pytest.raises(asyncio.CancelledError):
                await goes
            replica = await stays
            assert s.replicas.living() == {replica.id}
            await s.replicas.release(replica.id, "stays")
            assert s.replicas.living() == frozenset()

    asyncio.run(story())


def test_the_last_who_waits_takes_the_start_along(stack: Make) -> None:
    async def story() -> None:
        async with stack() as s:
            only = asyncio.create_task(s.replicas.claim(s.version(mode="hang"), "only"))
            await asyncio.sleep(0.6)
            (row,) = rows(s)
            assert alive(row)
            only.cancel()
            with pytest.raises(asyncio.CancelledError):
                await only
            (row,) = rows(s)
            assert row.status == ReplicaStatus.STOPPED
            assert not alive(row)

    asyncio.run(story())


def test_stop_all_ends_what_runs_and_what_starts(stack: Make) -> None:
    async def story() -> None:
        async with stack() as s:
            ready = await s.replicas.claim(s.version(), "me")
            starts = asyncio.create_task(s.replicas.claim(s.version(mode="hang"), "me"))
            await asyncio.sleep(0.5)
            await s.replicas.stop_all()
            with pytest.raises(Unavailable, match="stopped while it started"):
                await starts
            with pytest.raises(Unavailable, match="server is stopping"):
                await s.replicas.claim(ready.version, "me")
            assert [row.status for row in rows(s)] == [ReplicaStatus.STOPPED] * 2
            assert not any(alive(row) for row in rows(s))

    asyncio.run(story())


def test_a_replica_that_dies_is_noticed(stack: Make) -> None:
    async def story() -> None:
        async with stack() as s:
            told: list[tuple[str, str]] = []
            noticed = asyncio.Event()

            async def tell(replica_id: str, reason: str) -> None:
                told.append((replica_id, reason))
                noticed.set()

            s.replicas.on_death(tell)
            version = s.version()
            replica = await s.replicas.claim(version, "me")
            psutil.Process(alive(rows(s)[0])[0]).kill()
            await asyncio.wait_for(noticed.wait(), 10)
            assert told[0][0] == replica.id
            assert "the replica of g/1 died" in told[0][1]
            assert "ended by SIGKILL" in told[0][1]
            (row,) = rows(s)
            assert row.status == ReplicaStatus.FAILED
            assert not alive(row)
            again = await s.replicas.claim(version, "me")
            assert again.id != replica.id

    asyncio.run(story())
