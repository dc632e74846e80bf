"""`slipway up`: one process that owns a home, and every process below it."""

from __future__ import annotations

import asyncio
import json
import logging
import os
import shutil
import signal
import socket
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import uvicorn

from evals import EvalService
from merge import MergeService, content_files, resolve_base, validate_model_folder
from registry import Conflict, Jobs, Kind, NewVersion, NotFound, Origin, Registry, VersionView
from serving import Endpoints, Engine, GatewayProcess, Replicas, VllmEngine, snapshot_path
from session_core import SessionService
from slipway.app import Services, create_app
from slipway.database import migrate
from slipway.engine import CommandEngine
from slipway.home import Address, Home
from slipway.settings import Settings

log = logging.getLogger(__name__)

TENANT = "default"


@dataclass(frozen=True, kw_only=True)
class Listen:
    """Where the control plane and the gateway listen."""

    host: str = "127.0.0.1"
    port: int = 8000
    gateway_port: int = 8001


def serve(settings: Settings, listen: Listen, say: Callable[[str], None]) -> None:
    """Serve until a signal asks to stop.

    Args:
        say: told the few things a person should read.

    Raises:
        Conflict: if the home or a port is taken; nothing was started then.
        InvalidInput: if the base model's folder is not whole.
        Unavailable: if a part does not come up.
    """
    home = Home(settings.home)
    check_ports(listen, home)
    with home.locked():
        logging.basicConfig(
            filename=home.logs / "server.log",
            level=logging.INFO,
            format="%(asctime)s %(levelname)s %(name)s %(message)s",
        )
        logging.getLogger("httpx").setLevel(logging.WARNING)
        asyncio.run(_serve(home, settings, listen, say))


def check_ports(listen: Listen, home: Home) -> None:
    """Raises: Conflict: naming the port that is taken."""
    if listen.port == listen.gateway_port:
        raise Conflict(f"port {listen.port} cannot be the control plane's and the gateway's both")
    wanted = [(listen.port, "--port")]
    # A gateway that outlived a killed server still has its port; it is ended in a moment.
    if not (home.folder / "gateway" / "process.json").exists():
        wanted.append((listen.gateway_port, "--gateway-port"))
    for port, option in wanted:
        family = socket.AF_INET6 if ":" in listen.host else socket.AF_INET
        with socket.socket(family) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind((listen.host, port))
            except OSError as error:
                raise Conflict(
                    f"port {port} on {listen.host} cannot be had ({error.strerror}): stop what "
                    f"listens there, or choose another with {option}"
                ) from None


async def _serve(
    home: Home,
    settings: Settings,
    listen: Listen,
    say: Callable[[str], None],
) -> None:
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    # A second signal is heeded no more than the first: stopping ends what was started, and
    # each step of it is bounded.
    for sig in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(sig, stop.set)
    work = asyncio.ensure_future(_run(home, settings, listen, say, stop))
    asked = asyncio.ensure_future(stop.wait())
    await asyncio.wait([work, asked], return_when=asyncio.FIRST_COMPLETED)
    if not work.done() and not asked.cancelled():
        say("Stopping")
        # Start-up is cut short where it is; a server that runs sees the event itself.
        if home.address() is None:
            work.cancel()
    try:
        await work
    except asyncio.CancelledError:
        log.info("interrupted while starting")
    finally:
        asked.cancel()


async def _run(
    home: Home,
    settings: Settings,
    listen: Listen,
    say: Callable[[str], None],
    stop: asyncio.Event,
) -> None:
    say(f"Starting in {home.folder}")
    services = await asyncio.to_thread(prepare, home, settings, listen, say)
    async with services.running():
        server = uvicorn.Server(
            uvicorn.Config(
                create_app(services),
                host=listen.host,
                port=listen.port,
                log_level="warning",
                # Long polls are cut off when the server stops; clients ask again.
                timeout_graceful_shutdown=1,
            )
        )
        # The signals are handled above, for start-up as well as for serving.
        serving = asyncio.ensure_future(server._serve())
        while not server.started and not serving.done():
            await asyncio.sleep(0.02)
        shown = "127.0.0.1" if listen.host in ("0.0.0.0", "::") else listen.host
        url = f"http://{shown}:{listen.port}"
        home.announce(Address(pid=os.getpid(), url=url, gateway_url=services.gateway.url))
        say(f"Control plane  {url}")
        say(f"Gateway        {services.gateway.url}/v1")
        say('Ready. In another shell: eval "$(slipway env)"')
        asked = asyncio.ensure_future(stop.wait())
        await asyncio.wait([serving, asked], return_when=asyncio.FIRST_COMPLETED)
        asked.cancel()
        server.should_exit = True
        await serving


def prepare(home: Home, settings: Settings, listen: Listen, say: Callable[[str], None]) -> Services:
    """Everything a server needs before its first process starts."""
    folder = resolve_base(settings.base_model, settings.cache.expanduser())
    validate_model_folder(folder)
    url = home.database_url(settings.database_url)
    migrate(url)
    registry = Registry.open(url, home.store)
    if swept := registry.store.sweep():
        log.info("%d unfinished packages of an earlier server were dropped", swept)
    tenant_id = registry.tenants.ensure_tenant(TENANT)
    ensure_key(home, registry, tenant_id)
    base = register_base(registry, tenant_id, folder, settings.base_model, home, say)
    jobs = Jobs(registry.clock, registry.new_id)
    engine: Engine = VllmEngine(device=settings.device)
    if words := settings.engine_words():
        engine = CommandEngine(words=tuple(words))
    replicas = Replicas(
        registry=registry,
        engine=engine,
        home=home.folder,
        clock=registry.clock,
        new_id=registry.new_id,
    )
    return Services(
        registry=registry,
        jobs=jobs,
        sessions=SessionService(
            registry=registry,
            home=home.sessions,
            base=base,
            base_name=base.base_model,
            other_names=frozenset({settings.base_model, folder.name}),
            logs=home.logs,
            device=settings.device,
            threads=settings.threads,
        ),
        merges=MergeService(registry, jobs, home.logs),
        evals=EvalService(registry, jobs, replicas),
        replicas=replicas,
        endpoints=Endpoints(
            registry=registry, replicas=replicas, jobs=jobs, routes=snapshot_path(home.folder)
        ),
        gateway=GatewayProcess(home=home.folder, host=listen.host, port=listen.gateway_port),
    )


def ensure_key(home: Home, registry: Registry, tenant_id: str) -> None:
    """See that the home's key file holds a key that is valid."""
    key = home.key()
    if key is not None:
        try:
            if registry.tenants.authenticate(key).tenant_id == tenant_id:
                return
        except Exception:
            log.warning("the home's API key is not valid any more; making a new one")
    _, key = registry.tenants.create_key(tenant_id, "home")
    home.save_key(key)


def model_name(configured: str, folder: Path) -> str:
    """What clients call the base model: a hub id as it is, a folder by its name."""
    if Path(configured).expanduser().is_dir():
        # A folder of the cache carries its hub id in its name.
        return folder.resolve().name.replace("--", "/", 1)
    return configured


def group_name(name: str) -> str:
    """A model's name as a group's: its last part, in the characters a group may have."""
    last = name.rsplit("/", 1)[-1].lower()
    cleaned = "".join(char if char.isalnum() or char in "._-" else "-" for char in last)
    return cleaned.strip("._-")[:63] or "base"


def fingerprint(folder: Path) -> dict[str, list[int]]:
    """Size and time of every file of a model, to tell whether any has changed."""
    stats = {name: (folder / name).stat() for name in content_files(folder)}
    return {name: [stat.st_size, stat.st_mtime_ns] for name, stat in stats.items()}


def register_base(
    registry: Registry,
    tenant_id: str,
    folder: Path,
    configured: str,
    home: Home,
    say: Callable[[str], None],
) -> VersionView:
    """The base model as a version of a group of its own, published the first time."""
    name = model_name(configured, folder)
    record = home.folder / "base.json"
    now = {"folder": str(folder.resolve()), "files": fingerprint(folder)}
    try:
        known = json.loads(record.read_text())
        # Hashing half a gigabyte at every start would be felt; sizes and times tell enough.
        if {key: known[key] for key in now} == now:
            return registry.versions.by_digest(tenant_id, known["digest"])
    except (FileNotFoundError, ValueError, KeyError, NotFound):
        pass
    say(f"Taking {name} into the artifact store, once")
    staged = registry.store.stage()
    try:
        for file in now["files"]:
            (staged / file).parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(folder / file, staged / file)
        manifest = registry.store.publish(staged)
    finally:
        registry.store.discard(staged)
    version = registry.versions.register(
        NewVersion(
            tenant_id=tenant_id,
            group=group_name(name),
            kind=Kind.MERGED,
            origin=Origin.IMPORT,
            base_model=name,
            base_digest=manifest.digest,
            provenance={"source": name},
            source_key=f"base:{tenant_id}:{manifest.digest}",
        ),
        manifest,
    )
    record.write_text(json.dumps({**now, "digest": manifest.digest}))
    return version
