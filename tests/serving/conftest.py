"""A whole serving stack on a stand-in engine: real processes, a real database, a real store."""

from __future__ import annotations

import asyncio
import hashlib
import json
import sys
import uuid
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import openai
import psutil
import pytest

from registry import Jobs, Kind, NewVersion, Origin, Registry, VersionView
from serving import Endpoints, GatewayProcess, Replicas, snapshot_path
from serving.launch import free_port

STAND_IN = Path(__file__).with_name("stand_in.py")


@dataclass(frozen=True, kw_only=True)
class StandInEngine:
    """Runs `stand_in.py`; what it does is in the version's config.json."""

    version: str = "1"
    variables: dict[str, str] = field(default_factory=dict)
    name: str = "stand-in"

    def command(self, folder: Path, model: str, port: int) -> list[str]:
        return [sys.executable, str(STAND_IN), str(folder), model, str(port)]

    def environment(self) -> dict[str, str]:
        return dict(self.variables)

    def describe(self) -> dict[str, Any]:
        return {"name": self.name, "version": self.version, "device": "cpu", "dtype": "float32"}


def now() -> datetime:
    return datetime.now(UTC)


def new_id() -> str:
    return str(uuid.uuid4())


@dataclass(kw_only=True)
class Stack:
    """The parts of a server that serving is about, at `home`."""

    home: Path
    registry: Registry
    tenant: str
    key: str
    replicas: Replicas
    endpoints: Endpoints
    jobs: Jobs
    gateway: GatewayProcess | None = None
    leftovers: int = 0
    restoring: list[Any] = field(default_factory=list)

    def version(self, group: str = "g", *, kind: str = "merged", **config: Any) -> VersionView:
        """Register a version whose stand-in behaves as `config` says."""
        return add_version(self.registry, self.tenant, group, kind, config)

    async def deploy(self, name: str, reference: str) -> Any:
        """Deploy and wait for the job's end."""
        job = await self.endpoints.deploy(self.tenant, name, reference)
        return await self.finished(job.id)

    async def finished(self, job_id: str) -> Any:
        while (job := await self.jobs.wait(self.tenant, job_id, 30)).status == "running":
            pass
        return job

    def client(self, key: str | None = None) -> openai.AsyncOpenAI:
        assert self.gateway is not None
        return openai.AsyncOpenAI(
            base_url=f"{self.gateway.url}/v1", api_key=key or self.key, max_retries=0, timeout=30
        )

    async def routed(self, check: Callable[[dict[str, Any]], bool]) -> None:
        """Wait until the snapshot file satisfies `check`."""
        for _ in range(200):
            path = snapshot_path(self.home)
            if path.exists() and check(json.loads(path.read_text())):
                return
            await asyncio.sleep(0.05)
        raise AssertionError("the snapshot never came")

    async def stats(self, name: str) -> dict[str, Any]:
        """What the stand-in behind an endpoint has seen."""
        route = next(
            r
            for r in json.loads(snapshot_path(self.home).read_text())["routes"]
            if r["name"] == name
        )
        async with httpx.AsyncClient() as client:
            result: dict[str, Any] = (await client.get(f"{route['url']}/stats")).json()
            return result


def add_version(
    registry: Registry, tenant: str, group: str, kind: str, config: dict[str, Any]
) -> VersionView:
    staged = registry.store.stage()
    (staged / "config.json").write_text(json.dumps(config))
    manifest = registry.store.publish(staged)
    return registry.versions.register(
        NewVersion(
            tenant_id=tenant,
            group=group,
            kind=Kind(kind),
            origin=Origin.IMPORT,
            base_model="tiny",
            base_digest="sha256:" + hashlib.sha256(b"tiny").hexdigest(),
        ),
        manifest,
    )


def open_registry(home: Path) -> Registry:
    registry = Registry.open(
        f"sqlite:///{home}/slipway.db", home / "store", clock=now, new_id=new_id
    )
    registry.db.create_all()
    return registry


@asynccontextmanager
async def open_stack(
    home: Path,
    *,
    engine: Any = None,
    gateway: bool = False,
    restore: bool = True,
    **options: Any,
) -> AsyncIterator[Stack]:
    """The parts of a server; all is ended at the block's end. `options` are `Replicas`'."""
    registry = open_registry(home)
    tenant = registry.tenants.ensure_tenant("default")
    _, key = registry.tenants.create_key(tenant, "test")
    jobs = Jobs(clock=now, new_id=new_id)
    replicas = Replicas(
        registry=registry,
        engine=engine or StandInEngine(),
        home=home,
        clock=now,
        new_id=new_id,
        **{"start_timeout": 30.0, "grace": 2.0, "drain": 2.0, **options},
    )
    endpoints = Endpoints(
        registry=registry,
        replicas=replicas,
        jobs=jobs,
        routes=snapshot_path(home),
        refresh=0.1,
    )
    made = Stack(
        home=home,
        registry=registry,
        tenant=tenant,
        key=key,
        replicas=replicas,
        endpoints=endpoints,
        jobs=jobs,
    )
    try:
        made.leftovers = await replicas.open()
        made.restoring = await endpoints.open(restore=restore)
        if gateway:
            made.gateway = GatewayProcess(home=home, port=free_port())
            await made.gateway.start()
        yield made
    finally:
        await jobs.stop()
        await endpoints.close()
        await replicas.stop_all()
        if made.gateway is not None:
            await made.gateway.stop()
        registry.db.close()


@pytest.fixture
def home(tmp_path: Path) -> Path:
    folder = tmp_path / "home"
    folder.mkdir()
    return folder


@pytest.fixture
def stack(home: Path) -> Callable[..., Any]:
    """`async with stack(...) as s:` is `open_stack` at this test's home."""
    return partial(open_stack, home)


@pytest.fixture
def registry_at() -> Callable[[Path], Registry]:
    """Opens the registry of a home that no server uses."""
    return open_registry


@pytest.fixture
def stand_in() -> type[StandInEngine]:
    """The stand-in engine's class."""
    return StandInEngine


@pytest.fixture(autouse=True)
def nothing_is_left(home: Path) -> Iterator[None]:
    """No test may leave a process behind that was started for its home."""
    yield
    left = [
        process
        for process in psutil.process_iter(["cmdline"])
        if any(str(home) in part for part in process.info["cmdline"] or ())
    ]
    for process in left:
        process.kill()
    assert not left
