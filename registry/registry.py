"""The registry's parts, put together."""

from __future__ import annotations

import uuid
from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

from registry.aliases import Aliases
from registry.database import Database
from registry.evidence import Evidence
from registry.files import Files
from registry.prices import Prices
from registry.store import Store
from registry.tenants import Tenants
from registry.usage import Usage
from registry.versions import Versions


def utc_now() -> datetime:
    """The time now, aware."""
    return datetime.now(UTC)


def random_id() -> str:
    """A new UUID."""
    return str(uuid.uuid4())


@dataclass(frozen=True, kw_only=True)
class Registry:
    """The system of record: one database and one artifact store."""

    db: Database
    store: Store
    versions: Versions
    aliases: Aliases
    evidence: Evidence
    tenants: Tenants
    usage: Usage
    prices: Prices
    clock: Callable[[], datetime]
    new_id: Callable[[], str]

    @classmethod
    def open(
        cls,
        database_url: str,
        store_root: Path,
        *,
        clock: Callable[[], datetime] = utc_now,
        new_id: Callable[[], str] = random_id,
        files: Files | None = None,
    ) -> Registry:
        """Open a registry; the database must have its tables (see ``slipway.migrations``)."""
        db = Database(database_url)
        store = Store(store_root, files=files)
        versions = Versions(db, clock, new_id)
        return cls(
            db=db,
            store=store,
            versions=versions,
            aliases=Aliases(db, versions, clock, new_id),
            evidence=Evidence(db, store, clock, new_id),
            tenants=Tenants(db, clock, new_id),
            usage=Usage(db, clock),
            prices=Prices(db, clock),
            clock=clock,
            new_id=new_id,
        )
