"""Exports: a run's adapter in PEFT's own files, to be downloaded.

An export is a copy to carry away and no version: it takes no number, lies below sessions/,
and its files go when its path is deleted or expires.
"""

from __future__ import annotations

import shutil
from asyncio import to_thread
from collections.abc import Awaitable, Callable
from pathlib import Path

from registry import InvalidInput
from session_core import operations as op
from session_core.models import LoggedOperation, TrainingRun
from session_core.operations import Operation, Result
from session_core.paths import EXTERNAL_WEIGHTS, TinkerPath, check_name, folder_name
from session_core.saved import Saved, SavedPaths

Execute = Callable[[Operation], Awaitable[Result]]

# What PEFT and those who read its adapters know.
FILES = frozenset({"adapter_config.json", "adapter_model.safetensors"})


class Exports:
    """Writes exports and drops them.

    Args:
        base: the base model's name, as the adapter's config is to say it.
        home: the folder that the paths' folders are below.
    """

    def __init__(self, *, paths: SavedPaths, base: str, home: Path) -> None:
        self._paths = paths
        self._base = base
        self._home = home

    async def export(self, run: TrainingRun, row: LoggedOperation, execute: Execute) -> Result:
        """Write a run's adapter. Repeating it after a crash writes it anew.

        Raises:
            InvalidInput: if the name is taken in this run, or is none.
            StorageFull, OperationFailed: if it could not be written; nothing is left of it.
        """
        params = op.decode(row.payload).params
        name = check_name(params["name"])
        path = TinkerPath(run_id=run.id, kind=EXTERNAL_WEIGHTS, name=name)
        relative = Path(folder_name(run.id)) / "exports" / str(row.seq)
        known = await to_thread(self._paths.find, run.tenant_id, str(path))
        if known is not None and known.folder != str(relative):
            raise InvalidInput(f"this run has exported {name!r} already: choose another name")
        folder = self._home / relative
        await to_thread(fresh_folder, folder)
        try:
            await execute(
                Operation(
                    kind=op.SAVE_WEIGHTS,
                    params={"folder": str(folder), "base_model": self._base, "evidence": False},
                )
            )
        except BaseException:
            shutil.rmtree(folder, ignore_errors=True)
            raise
        size = await to_thread(_trim, folder)
        await to_thread(
            self._paths.put,
            path,
            tenant_id=run.tenant_id,
            folder=str(relative),
            size_bytes=size,
            ttl_seconds=params.get("ttl_seconds"),
        )
        return Result(params={"path": str(path), "size_bytes": size, "external": True})

    def files_of(self, saved: Saved) -> dict[str, Path]:
        """An export's files by name; none once they are dropped."""
        assert saved.folder is not None
        return {file.name: file for file in sorted((self._home / saved.folder).glob("*"))}

    def expire(self) -> int:
        """Drop the files of exports that have expired, and note what else has; how many went."""
        folders = self._paths.expire()
        for folder in folders:
            self.drop(folder)
        return len(folders)

    def drop(self, folder: str) -> None:
        """Drop an export's files; fine if they are gone."""
        shutil.rmtree(self._home / folder, ignore_errors=True)


def _trim(folder: Path) -> int:
    """Leave nothing but an adapter's files; their size in bytes."""
    for file in folder.iterdir():
        if file.name not in FILES:
            file.unlink()
    return sum(file.stat().st_size for file in folder.iterdir())


def fresh_folder(folder: Path) -> None:
    """Make a folder, empty."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
