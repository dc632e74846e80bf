from __future__ import annotations

import asyncio
import json
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import pytest
from sqlmodel import select

from registry.errors import InvalidInput, NotFound
from serving import GatewayProcess, snapshot_path
from serving.models import Replica
from serving.processes import ProcessId, end_session

Make = Callable[..., Any]


def test_the_evaluated_replica_becomes_the_endpoint(stack: Make) -> None:
    async def story() -> None:
        async with stack() as s:
            version = s.version()
            async with s.replicas.serve(version, keep=True) as served:
                pass
            job = await s.deploy("chat", "g/1")
            assert job.status == "done"
            assert job.result["replica_id"] == served.replica_id
            assert job.result["engine_fingerprint"] == served.fingerprint
            assert job.result["version"] == "g/1"
            assert job.result["status"] == "ready"
            # The endpoint holds it now; another kept one does not push it out.
            async with s.replicas.serve(s.version(says="2"), keep=True):
                pass
            assert served.replica_id in s.replicas.living()
            await s.endpoints.delete(s.tenant, "chat")
            assert served.replica_id not in s.replicas.living()

    asyncio.run(story())


def test_an_alias_is_resolved(stack: Make) -> None:
    async def story() -> None:
        async with stack() as s:
            version = s.version()
            s.registry.aliases.move(
                s.tenant, "g", "staging", version.id, expected=None, moved_by="test"
            )
            job = await s.deploy("chat", "g@staging")
            assert (job.result["version"], job.result["reference"]) == ("g/1", "g@staging")

    asyncio.run(story())


@pytest.mark.parametrize("name", ["", "Chat", "a b", "-a", "tinker://x", "a" * 64, "a/b"])
def test_bad_names(stack: Make, name: str) -> None:
    async def story() -> None:
        async with stack() as s:
            s.version()
            with pytest.raises(InvalidInput, match="cannot name an endpoint"):
                await s.endpoints.deploy(s.tenant, name, "g/1")

    asyncio.run(story())


def test_an_adapter_must_be_merged_first(stack: Make) -> None:
    async def story() -> None:
        async with stack() as s:
            s.version(kind="weights")
            with pytest.raises(InvalidInput, match="slipway merge g/1"):
                await s.endpoints.deploy(s.tenant, "chat", "g/1")
            with pytest.raises(NotFound):
                await s.endpoints.deploy(s.tenant, "chat", "g/9")
            with pytest.raises(NotFound, match="no endpoint is called 'chat'"):
                await s.endpoints.get(s.tenant, "chat")
            with pytest.raises(NotFound):
                await s.endpoints.delete(s.tenant, "chat")

    asyncio.run(story())


def test_a_new_version_takes_the_route_and_the_old_replica_goes(stack: Make) -> None:
    async def story() -> None:
        async with stack(gateway=True) as s, s.client() as client:
            s.version(says="old " * 30, delay=0.02)
            s.version(says="new")
            old = await s.deploy("chat", "g/1")
            await s.routed(lambda content: bool(content["keys"]))
            stream = await client.completions.create(model="chat", prompt="x", stream=True)
            await anext(aiter(stream))
            new = await s.deploy("chat", "g/2")
            assert new.status == "done"
            assert s.replicas.living() == {new.result["replica_id"]}
            assert old.result["replica_id"] != new.result["replica_id"]
            said = "".join([chunk.choices[0].text async for chunk in stream])
            assert said == "old " * 29  # to its end, by the version that began it
            answer = await client.completions.create(model="chat", prompt="x")
            assert answer.choices[0].text == "new"

    asyncio.run(story())


def test_no_request_fails_while_versions_change(stack: Make) -> None:
    async def story() -> None:
        async with stack(gateway=True) as s, s.client() as client:
            for number in range(1, 4):
                s.version(says=f"g/{number}", delay=0.05)
            await s.deploy("chat", "g/1")
            await s.routed(lambda content: bool(content["keys"]))
            done = asyncio.Event()
            answers: list[tuple[str, str]] = []

            async def load() -> None:
                while not done.is_set():
                    answer = await client.completions.with_raw_response.create(
                        model="chat", prompt="x"
                    )
                    text = answer.parse().choices[0].text
                    answers.append((text, answer.headers["x-slipway-version"]))

            load_tasks = [asyncio.create_task(load()) for _ in range(8)]
            for number in (2, 3, 1):
                assert (await s.deploy("chat", f"g/{number}")).status == "done"
            done.set()
            await asyncio.gather(*load_tasks)
            assert all(text == version for text, version in answers)
            assert {text for text, _ in answers} == {"g/1", "g/2", "g/3"}

    asyncio.run(story())


def test_a_failed_deployment_leaves_the_old_version_serving(stack: Make) -> None:
    async def story() -> None:
        async with stack(gateway=True) as s, s.client() as client:
            s.version(says="fine")
            s.version(mode="crash")
            await s.deploy("chat", "g/1")
            await s.routed(lambda content: bool(content["keys"]))
            job = await s.deploy("chat", "g/2")
            assert job.status == "failed"
            assert "ValueError: no room for the KV cache" in job.error
            view = await s.endpoints.get(s.tenant, "chat")
            assert (view.status, view.version, view.reference) == ("ready", "g/1", "g/1")
            assert "no room for the KV cache" in (view.error or "")
            answer = await client.completions.create(model="chat", prompt="x")
            assert answer.choices[0].text == "fine"
            assert (await s.deploy("chat", "g/1")).status == "done"
            assert (await s.endpoints.get(s.tenant, "chat")).error is None

    asyncio.run(story())


def test_a_first_deployment_that_fails_is_shown(stack: Make) -> None:
    async def story() -> None:
        async with stack() as s:
            s.version(mode="crash")
            job = await s.deploy("chat", "g/1")
            assert job.status == "failed"
            view = await s.endpoints.get(s.tenant, "chat")
            assert view.status == "failed"
            assert "ValueError: no room for the KV cache" in (view.error or "")
            (replica,) = await s.endpoints.replicas(s.tenant)
            assert replica.status == "failed"

    asyncio.run(story())


def test_deleting_cancels_a_deployment(stack: Make) -> None:
    async def story() -> None:
        async with stack() as s:
            s.version(mode="hang")
            job = await s.endpoints.deploy(s.tenant, "chat", "g/1")
            await asyncio.sleep(0.5)
            assert (await s.endpoints.get(s.tenant, "chat")).status == "starting"
            await s.endpoints.delete(s.tenant, "chat")
            assert (await s.finished(job.id)).status == "cancelled"
            assert await s.endpoints.list(s.tenant) == []
            (replica,) = await s.endpoints.replicas(s.tenant)
            assert replica.status == "stopped"

    asyncio.run(story())


def test_two_endpoints_share_a_replica(stack: Make) -> None:
    async def story() -> None:
        async with stack() as s:
            s.version()
            one, two = await s.deploy("a", "g/1"), await s.deploy("b", "g/1")
            assert one.result["replica_id"] == two.result["replica_id"]
            await s.endpoints.delete(s.tenant, "a")
            assert s.replicas.living() == {two.result["replica_id"]}
            assert [view.name for view in await s.endpoints.list(s.tenant)] == ["b"]

    asyncio.run(story())


def test_endpoints_come_back_with_the_server(stack: Make) -> None:
    async def story() -> None:
        async with stack() as s:
            s.version()
            await s.deploy("chat", "g/1")
        async with stack() as s:
            (job,) = s.restoring
            assert (await s.finished(job.id)).status == "done"
            assert (await s.endpoints.get(s.tenant, "chat")).status == "ready"
        async with stack(restore=False) as s:
            assert s.restoring == []
            view = await s.endpoints.get(s.tenant, "chat")
            assert view.status == "failed"
            assert "deploy it again" in (view.error or "")

    asyncio.run(story())


class Abandoned:
    """A control plane killed with SIGKILL while it served an endpoint."""

    def __init__(self, home: Path) -> None:
        script = Path(__file__).with_name("abandon.py")
        with subprocess.Popen(
            [sys.executable, str(script), str(home)], stdout=subprocess.PIPE, text=True
        ) as process:
            assert process.stdout is not None
            told = json.loads(process.stdout.readline())
            process.send_signal(signal.SIGKILL)
        self.url, self.headers = told["gateway"], {"x-api-key": told["key"]}

    def ask(self) -> str:
        body = {"model": "chat", "prompt": "x"}
        answer = httpx.post(f"{self.url}/v1/completions", json=body, headers=self.headers)
        text: str = answer.json()["choices"][0]["text"]
        return text


def test_a_killed_control_plane_serves_on_until_the_next_one_takes_over(
    stack: Make, home: Path
) -> None:
    abandoned = Abandoned(home)
    assert abandoned.ask() == "still here"

    async def story() -> None:
        async with stack(gateway=True) as s:
            assert s.leftovers == 2
            with pytest.raises(httpx.ConnectError):
                abandoned.ask()
            (job,) = s.restoring
            assert (await s.finished(job.id)).status == "done"
            old, new = sorted(await s.endpoints.replicas(s.tenant), key=lambda r: r.started_at)
            assert (old.status, new.status) == ("stopped", "ready")
            assert "ended without stopping it" in (old.error or "")

    asyncio.run(story())


def test_a_pid_that_is_someone_elses_now_is_left_alone(
    stack: Make, home: Path, registry_at: Callable[[Path], Any]
) -> None:
    Abandoned(home)
    registry = registry_at(home)
    with registry.db.write() as session:
        # As if the replica had ended long ago and its pids had been given out again.
        row = session.exec(select(Replica)).one()
        real, url = row.processes, row.url
        row.processes = [[pid, created - 1000] for pid, created in real]
        session.add(row)
    registry.db.close()

    async def story() -> None:
        async with stack(restore=False) as s:
            assert s.leftovers == 0
            (replica,) = await s.endpoints.replicas(s.tenant)
            assert replica.status == "stopped"
        assert httpx.get(f"{url}/health").status_code == 200
        leader, *rest = [ProcessId(pid=int(pid), created=created) for pid, created in real]
        assert await end_session(leader, grace=1, known=rest)
        assert await GatewayProcess(home=home).end_leftover()

    asyncio.run(story())


def test_the_snapshot_lists_endpoints_that_start_without_an_address(stack: Make) -> None:
    async def story() -> None:
        async with stack() as s:
            s.version(mode="hang")
            await s.endpoints.deploy(s.tenant, "chat", "g/1")
            await s.routed(lambda content: bool(content["routes"]))
            (route,) = json.loads(snapshot_path(s.home).read_text())["routes"]
            assert route["url"] is None

    asyncio.run(story())
