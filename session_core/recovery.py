"""Bringing a run into the engine: from its newest snapshot, and the log since then.

Snapshots are folders ``<seq>`` below the run's own; one that has its final name is whole.
They bound how much is replayed and hold nothing the log could not give back.
"""

from __future__ import annotations

import shutil
from asyncio import to_thread as in_thread
from collections.abc import Awaitable, Callable
from pathlib import Path

from registry import Files
from session_core import operations as op
from session_core.exports import Execute
from session_core.log import OperationLog
from session_core.operations import Operation, decode
from session_core.worker_client import OperationFailed

# What changes a run's state, and so is done again in a replay.
STATEFUL = frozenset({op.CREATE_RUN, op.LOAD_RUN, op.FORWARD_BACKWARD, op.OPTIM_STEP})
PARTIAL = ".partial"

Resolve = Callable[[Operation], Awaitable[Operation]]
"""Puts the folder of the version an operation names into its parameters."""


class Snapshots:
    """The snapshots of one run, in a folder of its own."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def newest(self) -> tuple[int, Path] | None:
        """The sequence id of the last operation in the newest snapshot, and its folder."""
        if not self._folder.is_dir():
            return None
        whole = [int(path.name) for path in self._folder.iterdir() if path.name.isdigit()]
        return (max(whole), self._folder / str(max(whole))) if whole else None

    def begin(self, seq: int) -> Path:
        """An empty folder to write the snapshot after an operation into."""
        partial = self._folder / f"{seq}{PARTIAL}"
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir(parents=True)
        return partial

    def commit(self, partial: Path) -> None:
        """Give a written snapshot its name, and drop what it replaces."""
        final = partial.with_name(partial.name.removesuffix(PARTIAL))
        shutil.rmtree(final, ignore_errors=True)
        partial.rename(final)
        # Durable before the older ones go, or a power cut could leave none.
        Files().sync(self._folder)
        for path in self._folder.iterdir():
            if path != final:
                shutil.rmtree(path, ignore_errors=True)

    def drop(self) -> None:
        """Remove all of them."""
        shutil.rmtree(self._folder, ignore_errors=True)


async def bring_in(
    run_id: str,
    *,
    log: OperationLog,
    snapshots: Snapshots,
    resolve: Resolve,
    execute: Execute,
) -> int:
    """Load a run's state into the engine; the number of operations that were replayed.

    Raises:
        WorkerDied, EpochPassed: if the engine went away meanwhile.
    """
    await execute(Operation(kind=op.UNLOAD_RUN))
    after = -1
    newest = await in_thread(snapshots.newest)
    if newest is not None:
        after, folder = newest
        restore = Operation(kind=op.RESTORE, params={"folder": str(folder)})
        try:
            await execute(restore)
        except OperationFailed:
            # A snapshot only saves time: without it the log gives everything back.
            await in_thread(snapshots.drop)
            after = -1
    rows = await in_thread(log.done_after, run_id, after, STATEFUL)
    for row in rows:
        operation = await resolve(decode(row.payload))
        await execute(operation)
    return len(rows)
