"""Every file operation of the registry, in one place where faults can be injected."""

from __future__ import annotations

import errno
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from registry.errors import StorageFull

# What a full disk, and a full quota, say.
FULL = frozenset({errno.ENOSPC, errno.EDQUOT})


class Files:
    """The operating system's file operations; tests subclass it to fail or stop at any of them."""

    def make_folder(self, path: Path) -> None:
        """Create a folder and its parents; fine if it exists."""
        path.mkdir(parents=True, exist_ok=True)

    def write(self, path: Path, data: bytes) -> None:
        """Write a whole file and make its bytes durable."""
        with path.open("wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())

    def sync(self, path: Path) -> None:
        """Make a file's bytes, or a folder's names, durable."""
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)

    def rename(self, source: Path, target: Path) -> None:
        """Rename within one file system; atomic."""
        source.rename(target)

    def remove_tree(self, path: Path) -> None:
        """Remove a folder and what is in it; fine if it is gone."""
        shutil.rmtree(path, ignore_errors=True)


@contextmanager
def full_disk_named(doing: str) -> Iterator[None]:
    """Turn "no space left" into an error a person understands.

    Raises:
        StorageFull: in place of the OSError a full disk or quota gives.
    """
    try:
        yield
    except OSError as error:
        if error.errno not in FULL:
            raise
        raise StorageFull(
            f"the disk is full: {doing} was given up and nothing was registered. "
            "Free some space and try again; versions already registered are intact."
        ) from error
