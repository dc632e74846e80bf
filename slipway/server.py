"""`slipway up`: one process that owns a home, and every process below it."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import socket
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass

import psutil
import uvicorn

from evals import EvalService
from merge import MergeService, resolve_base, validate_model_folder
from registry import Conflict, Jobs, Registry, Role, Unauthorized, Unavailable
from serving import Endpoints, Engine, GatewayProcess, Replicas, VllmEngine, snapshot_path
from session_core import Quota, SessionService
from slipway.app import Services, create_app
from slipway.base import register_base
from slipway.database import migrate
from slipway.engine import CommandEngine
from slipway.home import Address, Home
from slipway.settings import Settings

log = logging.getLogger(__name__)

TENANT = "default"
# How long a stop waits for the preparations, which end by themselves in most cases.
PATIENCE_SECONDS = 1.0


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
        InvalidInput: if the base model's folder is not whole, or the database not usable.
        Unavailable: if a part does not come up.
    """
    home = Home(settings.home)
    # Asked before the ports: a second server on a home most often wants the same ports, and
    # the first server's process is what a person needs to hear of.
    home.refuse_if_held()
    with closing(bind(listen, home)) as listener, home.locked():
        logging.basicConfig(
            filename=home.logs / "server.log",
            level=logging.INFO,
            format="%(asctime)s %(levelname)s %(name)s %(message)s",
        )
        logging.getLogger("httpx").setLevel(logging.WARNING)
        asyncio.run(_serve(home, settings, listen, listener, say))


def bind(listen: Listen, home: Home) -> socket.socket:
    """The control plane's socket, bound before anything is started.

    Raises:
        Conflict: naming the port that is taken, the gateway's included.
    """
    if listen.port == listen.gateway_port:
        raise Conflict(f"port {listen.port} cannot be the control plane's and the gateway's both")
    # A gateway that outlived a killed server still has its port; it is ended in a moment.
    if not (home.folder / "gateway" / "process.json").exists():
        _bind(listen.host, listen.gateway_port, "--gateway-port").close()
    return _bind(listen.host, listen.port, "--port")


def _bind(host: str, port: int, option: str) -> socket.socket:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    # asyncio turns Nagle's algorithm off only where the protocol is given by name. With it on,
    # an answer of two writes waits for the client's delayed acknowledgement: 40 ms each.
    made = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        made.bind((host, port))
    except OSError as error:
        made.close()
        raise Conflict(
            f"port {port} on {host} cannot be had ({error.strerror}): stop what listens there, "
            f"or choose another with {option}"
        ) from None
    return made


class _Server(uvicorn.Server):
    """uvicorn, which leaves the signals to us: they matter while starting as well."""

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


async def _serve(
    home: Home,
    settings: Settings,
    listen: Listen,
    listener: socket.socket,
    say: Callable[[str], None],
) -> None:
    stop = asyncio.Event()
    say(f"Starting in {home.folder}")
    with handled(stop):
        services = await _prepared(home, settings, listen, say, stop)
        if services is None:
            return
        work = asyncio.ensure_future(_run(home, services, listen, listener, say, stop))
        asked = asyncio.ensure_future(stop.wait())
        await asyncio.wait([work, asked], return_when=asyncio.FIRST_COMPLETED)
        asked.cancel()
        if not work.done():
            say("Stopping")
            # Start-up is cut short where it is; a server that runs sees the event itself.
            if home.address() is None:
                work.cancel()
        with suppress(asyncio.CancelledError):
            await work


@contextmanager
def handled(stop: asyncio.Event) -> Iterator[None]:
    """Turn signals into the event; from the second on, kill what takes its time to end."""

    def asked() -> None:
        if stop.is_set():
            for process in psutil.Process().children(recursive=True):
                with suppress(psutil.NoSuchProcess):
                    process.kill()
        stop.set()

    loop = asyncio.get_running_loop()
    signals = [signal.SIGINT, signal.SIGTERM]
    # A terminal that is closed would leave every process below this one; `nohup` says that
    # it is not to matter.
    if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:
        signals.append(signal.SIGHUP)
    for sig in signals:
        loop.add_signal_handler(sig, asked)
    try:
        yield
    finally:
        for sig in signals:
            loop.remove_signal_handler(sig)


async def _prepared(
    home: Home,
    settings: Settings,
    listen: Listen,
    say: Callable[[str], None],
    stop: asyncio.Event,
) -> Services | None:
    """The result of `prepare`; None if a stop was asked for first."""
    work = asyncio.ensure_future(asyncio.to_thread(prepare, home, settings, listen, say))
    asked = asyncio.ensure_future(stop.wait())
    await asyncio.wait([work, asked], return_when=asyncio.FIRST_COMPLETED)
    asked.cancel()
    if not stop.is_set():
        return await work
    say("Stopping")
    await asyncio.wait([work], timeout=PATIENCE_SECONDS)
    if not work.done():
        # A thread cannot be stopped, and this one may be downloading for minutes. No process
        # has been started yet, and whatever is half written is dropped by the next start.
        log.info("interrupted while preparing")
        logging.shutdown()
        os._exit(0)
    (await work).registry.db.close()
    return None


async def _run(
    home: Home,
    services: Services,
    listen: Listen,
    listener: socket.socket,
    say: Callable[[str], None],
    stop: asyncio.Event,
) -> None:
    async with services.running():
        # Long polls are cut off when the server stops; clients ask again.
        config = uvicorn.Config(
            create_app(services), log_level="warning", timeout_graceful_shutdown=1
        )
        server = _Server(config)
        serving = asyncio.ensure_future(server.serve(sockets=[listener]))
        while not server.started and not serving.done():
            await asyncio.sleep(0.02)
        if serving.done():
            await serving
            raise Unavailable("the control plane ended before it was ready; see logs/server.log")
        url = address_of(listen)
        home.announce(Address(pid=os.getpid(), url=url, gateway_url=services.gateway.url))
        say(f"Control plane  {url}")
        say(f"Gateway        {services.gateway.url}/v1")
        say('Ready. In another shell: eval "$(slipway env)"')
        asked = asyncio.ensure_future(stop.wait())
        await asyncio.wait([serving, asked], return_when=asyncio.FIRST_COMPLETED)
        asked.cancel()
        server.should_exit = True
        await serving


def address_of(listen: Listen) -> str:
    """The URL a client on this machine reaches the control plane at."""
    host = "127.0.0.1" if listen.host in ("0.0.0.0", "::") else listen.host
    return f"http://[{host}]:{listen.port}" if ":" in host else f"http://{host}:{listen.port}"


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
    for tenant in registry.tenants.list():
        registry.versions.adopt(base, tenant.id)
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
            quota=Quota(
                sessions=settings.quota_sessions,
                operations=settings.quota_operations,
                samples=settings.quota_samples,
                tokens_per_day=settings.quota_tokens_per_day,
                context=settings.quota_context,
            ),
        ),
        merges=MergeService(registry, jobs, home.logs),
        evals=EvalService(registry, jobs, replicas),
        replicas=replicas,
        endpoints=Endpoints(
            registry=registry, replicas=replicas, jobs=jobs, routes=snapshot_path(home.folder)
        ),
        gateway=GatewayProcess(
            home=home.folder,
            host=listen.host,
            port=listen.gateway_port,
            live=address_of(listen),
        ),
    )


def ensure_key(home: Home, registry: Registry, tenant_id: str) -> None:
    """See that the home's key file holds an administrator's key that is valid."""
    key = home.key()
    if key is not None:
        try:
            who = registry.tenants.authenticate(key)
            if who.tenant_id == tenant_id and who.is_admin:
                return
        except Unauthorized:
            log.warning("the home's API key is not valid any more; making a new one")
    _, key = registry.tenants.create_key(tenant_id, "home", role=Role.ADMIN)
    home.save_key(key)
