"""The gateway's routes: a snapshot file the control plane writes and the gateway reads.

The gateway needs nothing else to serve, so it goes on while the control plane is down. A
snapshot holds SHA-256 sums of keys and never a key; the file is readable by its owner only.
"""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Any

from registry.tenants import key_hash

FORMAT = 1
_log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class Route:
    """Where the requests of one endpoint go."""

    tenant_id: str
    name: str
    """What clients give as `model`."""
    url: str | None
    """The replica, on loopback: `http://127.0.0.1:PORT`. None: nothing serves it now."""
    model: str
    """What the replica calls it; empty when nothing serves it."""
    version: str
    digest: str
    created: int
    """When the endpoint was made, in seconds since the epoch."""


@dataclass(frozen=True, kw_only=True)
class Routes:
    """One snapshot: who may call (`keys`: SHA-256 -> tenant id), and what there is to call."""

    keys: Mapping[str, str] = field(default_factory=lambda: MappingProxyType({}))
    routes: tuple[Route, ...] = ()

    def tenant(self, key: str) -> str | None:
        """The tenant of an API key, or None. Looked up by hash, so timing tells nothing."""
        return self.keys.get(key_hash(key))

    def of(self, tenant_id: str) -> list[Route]:
        """The routes of a tenant, by name."""
        return sorted((r for r in self.routes if r.tenant_id == tenant_id), key=lambda r: r.name)

    def find(self, tenant_id: str, name: str) -> Route | None:
        """The route of the endpoint called `name`, or None."""
        for route in self.routes:
            if route.tenant_id == tenant_id and route.name == name:
                return route
        return None

    def to_json(self) -> str:
        """The snapshot file's text; equal snapshots give equal text."""
        routes = sorted(self.routes, key=lambda r: (r.tenant_id, r.name))
        content = {
            "format": FORMAT,
            "keys": dict(sorted(self.keys.items())),
            "routes": [asdict(route) for route in routes],
        }
        return json.dumps(content, indent=1) + "\n"

    @classmethod
    def from_json(cls, text: str) -> Routes:
        """The inverse of `to_json`. Raises ValueError for anything else."""
        content: Any = json.loads(text)
        if not isinstance(content, dict) or content.get("format") != FORMAT:
            raise ValueError(f"not a routes snapshot of format {FORMAT}")
        try:
            return cls(
                keys=MappingProxyType({str(k): str(v) for k, v in content["keys"].items()}),
                routes=tuple(Route(**route) for route in content["routes"]),
            )
        except (KeyError, TypeError, AttributeError) as error:
            raise ValueError(f"malformed routes snapshot: {error!r}") from error


def write(path: Path, routes: Routes) -> None:
    """Replace the snapshot at `path` in one step: a reader sees the old one or the new one."""
    path.parent.mkdir(parents=True, exist_ok=True)
    staged = path.with_name(f".{path.name}.{os.getpid()}")
    descriptor = os.open(staged, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    try:
        with os.fdopen(descriptor, "w") as file:
            file.write(routes.to_json())
            file.flush()
            os.fsync(file.fileno())
        staged.replace(path)
    except BaseException:
        with suppress(OSError):
            staged.unlink(missing_ok=True)
        raise


class RoutesFile:
    """A snapshot file that is read again whenever it has changed.

    While it is missing there are no routes; while it cannot be read, the last good ones hold.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._seen: tuple[int, int, int] | None = None
        self._routes = Routes()

    def current(self) -> Routes:
        """The routes now: one `stat`, and a read only after a change."""
        try:
            stat = self._path.stat()
            seen = (stat.st_mtime_ns, stat.st_ino, stat.st_size)
            if seen != self._seen:
                self._routes = Routes.from_json(self._path.read_text())
                self._seen = seen
        except FileNotFoundError:
            if self._seen is not None:
                _log.warning("the routes snapshot is gone; keeping the last one")
                self._seen = None
        except (OSError, ValueError) as error:
            _log.error("keeping the last good routes: %s", error)
        return self._routes
