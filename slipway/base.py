"""The base model as a version: taken into the artifact store once."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

from merge import content_files
from registry import Kind, NewVersion, NotFound, Origin, Registry, VersionView
from registry.versions import base_key
from slipway.home import Home


def model_name(configured: str, folder: Path) -> str:
    """What clients call the base model: a hub id as it is, a folder by its name."""
    if Path(configured).expanduser().is_dir():
        # A folder of the cache carries its hub id in its name.
        return folder.resolve().name.replace("--", "/", 1)
    return configured


def group_name(name: str) -> str:
    """A model's own part, in the characters a group may have."""
    last = name.rsplit("/", 1)[-1].lower()
    cleaned = "".join(
        char if char.isascii() and (char.isalnum() or char in "._-") else "-" for char in last
    )
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
    except (FileNotFoundError, ValueError, KeyError, TypeError, NotFound):
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
            source_key=base_key(tenant_id, manifest.digest),
        ),
        manifest,
    )
    record.write_text(json.dumps({**now, "digest": manifest.digest}))
    return version
