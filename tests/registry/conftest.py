"""A registry on a SQLite file and a folder, and packages to put into it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from registry import Kind, Manifest, NewVersion, Origin, Registry, VersionView


class Bench:
    """A registry with a tenant, and shorthands for what tests do all the time."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.url = f"sqlite:///{folder / 'registry.db'}"
        self.registry = Registry.open(self.url, folder / "store")
        self.registry.db.create_all()
        self.tenant = self.registry.tenants.ensure_tenant("mine")
        self.stranger = self.registry.tenants.ensure_tenant("stranger")

    def publish(self, text: str = "weights") -> Manifest:
        """A package of one file in a folder."""
        staged = self.registry.store.stage()
        (staged / "inner").mkdir()
        (staged / "inner" / "model.txt").write_text(text)
        return self.registry.store.publish(staged)

    def register(self, group: str = "sums", text: str = "weights", **fields) -> VersionView:
        """A version of a package with this content."""
        given = {
            "tenant_id": self.tenant,
            "kind": Kind.MERGED,
            "origin": Origin.IMPORT,
            "base_model": "org/base",
            "base_digest": "sha256:" + "0" * 64,
            **fields,
        }
        return self.registry.versions.register(NewVersion(group=group, **given), self.publish(text))


@pytest.fixture
def bench(tmp_path: Path) -> Iterator[Bench]:
    """See `Bench`."""
    made = Bench(tmp_path)
    yield made
    made.registry.db.close()
