"""A server's home folder: who holds it, where it listens, and the key to it."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path

import psutil
from filelock import FileLock, Timeout

from registry import Conflict, Unavailable


@dataclass(frozen=True, kw_only=True)
class Address:
    """Where a running server is."""

    pid: int
    url: str
    gateway_url: str


class Home:
    """The files of one home. Nothing is made before it is needed."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder.expanduser().absolute()
        self.store = self.folder / "store"
        self.sessions = self.folder / "sessions"
        self.logs = self.folder / "logs"
        self._address = self.folder / "server.json"
        self._credentials = self.folder / "credentials.json"
        self._lock = self.folder / "lock"
        self._holder = self.folder / "lock.pid"

    def database_url(self, configured: str | None) -> str:
        """The configured database, or SQLite in here."""
        return configured or f"sqlite:///{self.folder / 'slipway.db'}"

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Hold the home; one process at a time can.

        Raises:
            Conflict: naming the process that holds it.
        """
        self.folder.mkdir(parents=True, exist_ok=True)
        self.logs.mkdir(exist_ok=True)
        lock = FileLock(self._lock)
        try:
            lock.acquire(timeout=0)
        except Timeout:
            raise self._held() from None
        try:
            # What a killed server left must not be taken for this one's.
            self._address.unlink(missing_ok=True)
            self._holder.write_text(str(os.getpid()))
            yield
        finally:
            self._address.unlink(missing_ok=True)
            self._holder.unlink(missing_ok=True)
            lock.release()

    def refuse_if_held(self) -> None:
        """Raises: Conflict: as `locked` does. Makes nothing and keeps nothing."""
        if self._lock.exists():
            lock = FileLock(self._lock)
            try:
                lock.acquire(timeout=0)
            except Timeout:
                raise self._held() from None
            lock.release()

    def _held(self) -> Conflict:
        running = self.address()
        who = "another process"
        if running is not None:
            who = f"process {running.pid} at {running.url}"
        elif self._holder.exists():
            who = f"process {self._holder.read_text()}, which is starting or stopping"
        return Conflict(
            f"the home {self.folder} is in use by {who}: stop that server, or give this one "
            "another home with --home"
        )

    def announce(self, address: Address) -> None:
        """Say that the server is ready, and where."""
        self._write(self._address, asdict(address), mode=0o644)

    def address(self) -> Address | None:
        """Where the server of this home is, if it has said so."""
        try:
            return Address(**json.loads(self._address.read_text()))
        except (FileNotFoundError, ValueError, TypeError):
            return None

    def running(self) -> Address:
        """As `address`. Raises: Unavailable: if no server is running."""
        address = self.address()
        # A server that was killed had no time to take its address away.
        if address is None or not psutil.pid_exists(address.pid):
            raise Unavailable(
                f"no server is running for the home {self.folder}: start it with `slipway up`"
            )
        return address

    def save_key(self, key: str) -> None:
        """Keep the API key of this home, for its owner's eyes only."""
        self._write(self._credentials, {"api_key": key}, mode=0o600)

    def key(self) -> str | None:
        """The API key of this home, if it has one."""
        try:
            return str(json.loads(self._credentials.read_text())["api_key"])
        except (FileNotFoundError, ValueError, KeyError, TypeError):
            return None

    @staticmethod
    def _write(path: Path, document: dict[str, object], *, mode: int) -> None:
        partial = path.with_name(f".{path.name}.partial")
        partial.unlink(missing_ok=True)
        descriptor = os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode)
        with os.fdopen(descriptor, "w") as file:
            json.dump(document, file)
        partial.rename(path)
