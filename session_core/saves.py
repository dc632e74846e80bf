"""Saves: what an engine writes becomes a version of a package, once."""

from __future__ import annotations

import shutil
from asyncio import to_thread
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from registry import (
    Corrupt,
    InvalidInput,
    Kind,
    NewVersion,
    Origin,
    Registry,
    VersionView,
)
from registry.versions import check_group_name
from session_core import operations as op
from session_core.exports import Execute, Exports, fresh_folder
from session_core.hints import LORAPLUS_KEY
from session_core.log import OperationLog
from session_core.models import LoggedOperation, Sampler, TrainingRun, TrainingSession
from session_core.operations import Operation, Result
from session_core.paths import (
    SAMPLER_WEIGHTS,
    WEIGHTS,
    TinkerPath,
    check_name,
    folder_name,
    sampler_id_of,
)
from session_core.saved import Saved, SavedPaths

GROUP_KEY = "model_package_group"
DEFAULT_GROUP = "default"
# Unnamed sampler snapshots of a run that are kept; its older ones go.
UNNAMED_KEPT = 16


@dataclass(frozen=True, kw_only=True)
class Base:
    """The base model that is trained: its version, and the names a client may call it by."""

    version: VersionView
    name: str
    aliases: frozenset[str] = frozenset()

    def check(self, name: str) -> None:
        """Raises: InvalidInput: naming the model that is served, if it is another."""
        if name != self.name and name not in self.aliases:
            raise InvalidInput(f"the base model {name!r} is not served here: use {self.name!r}")


def group_of(metadata: Mapping[str, Any]) -> str:
    """The package group a client's metadata names, or the default one.

    Raises:
        InvalidInput: if what it names is no group's name.
    """
    name = metadata.get(GROUP_KEY, DEFAULT_GROUP)
    if not isinstance(name, str):
        raise InvalidInput(f"{GROUP_KEY} must be a text, not {name!r}")
    check_group_name(name)
    return name


class Saver:
    """Carries out the operations whose result is on disk."""

    def __init__(self, *, registry: Registry, log: OperationLog, base: Base, home: Path) -> None:
        self._registry = registry
        self._log = log
        self._base = base
        self._home = home
        self.paths = SavedPaths(registry.db, registry.clock)
        self.exports = Exports(paths=self.paths, base=base.name, home=home)

    @property
    def base_model(self) -> str:
        """What clients call the base model."""
        return self._base.name

    async def save(self, run: TrainingRun, row: LoggedOperation, execute: Execute) -> Result:
        """Write, publish, register. Repeating it after a crash makes no second version.

        Raises:
            InvalidInput: if the name is taken in this run, or is none.
            StorageFull, OperationFailed: if it could not be written; nothing is left of it.
        """
        params = op.decode(row.payload).params
        if params.get("external"):
            return await self.exports.export(run, row, execute)
        kind = WEIGHTS if row.kind == op.SAVE_CHECKPOINT else SAMPLER_WEIGHTS
        name = check_name(params["name"])
        path = TinkerPath(run_id=run.id, kind=kind, name=name)
        source = f"{run.id}:{row.seq}"
        await to_thread(self._check_free, row, path, bool(params.get("overwrite")))
        session = await to_thread(self._log.session, run.tenant_id, run.session_id)
        metadata = {**session.user_metadata, **run.user_metadata, **params["user_metadata"]}
        group = group_of(metadata)
        staged = await to_thread(self._registry.store.stage)
        try:
            written = await execute(
                Operation(
                    kind=row.kind,
                    params={"folder": str(staged), "base_model": self._base.name},
                )
            )
        except BaseException:
            await to_thread(self._registry.store.discard, staged)
            raise
        # It cleans up after itself. Discarding beside it, when this is cancelled while it still
        # runs, could take files out of a package on its way into the store.
        manifest = await to_thread(self._registry.store.publish, staged)
        metadata.pop(GROUP_KEY, None)
        base = await to_thread(self._registry.versions.adopt, self._base.version, run.tenant_id)
        version = await to_thread(
            self._registry.versions.register,
            NewVersion(
                tenant_id=run.tenant_id,
                group=group,
                kind=Kind.CHECKPOINT if kind == WEIGHTS else Kind.WEIGHTS,
                origin=Origin.SESSION,
                base_model=self._base.name,
                base_digest=self._base.version.digest,
                lora=run.lora,
                provenance=self._provenance(session, run, row, path, written.params),
                user_metadata=metadata,
                parents=tuple(filter(None, (base.id, run.parent_version_id))),
                source_key=source,
            ),
            manifest,
        )
        await to_thread(
            self.paths.put,
            path,
            tenant_id=run.tenant_id,
            version_id=version.id,
            size_bytes=version.size_bytes,
            ttl_seconds=params.get("ttl_seconds"),
        )
        return Result(params={"path": str(path), "version": version.reference})

    def _check_free(self, row: LoggedOperation, path: TinkerPath, overwrite: bool) -> None:
        known = self.paths.find(row.tenant_id, str(path))
        if known is None or known.version_id is None or overwrite:
            return
        # The save itself, repeated after a crash between registering and noting the result.
        version = self._registry.versions.by_id(known.version_id)
        if version.provenance.get("seq") != row.seq:
            raise InvalidInput(
                f"this run has saved {path.name!r} already, as {version.reference}: "
                "choose another name, or save with overwrite"
            )

    @staticmethod
    def _provenance(
        session: TrainingSession,
        run: TrainingRun,
        row: LoggedOperation,
        path: TinkerPath,
        written: Mapping[str, Any],
    ) -> dict[str, Any]:
        return {
            "session": session.id,
            "run": run.id,
            "seq": row.seq,
            "step": written.get("step"),
            "loss": written.get("last_loss"),
            "tokens": written.get("tokens_trained"),
            "seed": written.get("seed"),
            LORAPLUS_KEY: written.get(LORAPLUS_KEY),
            "sdk_version": session.sdk_version,
            "tinker_path": str(path),
        }

    async def snapshot_sampler(
        self, run: TrainingRun, row: LoggedOperation, execute: Execute
    ) -> Result:
        """Keep the adapter as it is now for a sampler of this session; no version is made."""
        params = op.decode(row.payload).params
        sampler_id = sampler_id_of(run.session_id, params["sampling_session_seq_id"])
        relative = Path(folder_name(run.id)) / "samplers" / str(row.seq)
        folder = self._home / relative
        await to_thread(fresh_folder, folder)
        await execute(
            Operation(
                kind=op.SAVE_WEIGHTS,
                params={
                    "folder": str(folder),
                    "base_model": self._base.name,
                    "evidence": False,
                },
            )
        )
        sampler = Sampler(
            id=sampler_id,
            session_id=run.session_id,
            tenant_id=run.tenant_id,
            base_model=self._base.name,
            snapshot=str(relative),
            created_at=self._registry.clock(),
        )
        await to_thread(self._log.add_sampler, sampler)
        await to_thread(self._drop_old_snapshots, run)
        return Result(params={"sampling_session_id": sampler_id})

    def _drop_old_snapshots(self, run: TrainingRun) -> None:
        # The run's own alone: another run's last one may be a teacher that is asked for long.
        own = self._log.samplers(run.session_id, below=folder_name(run.id))
        for old in own[UNNAMED_KEPT:]:
            self._log.drop_sampler(old.id)
            assert old.snapshot is not None
            shutil.rmtree(self._home / old.snapshot, ignore_errors=True)

    def version_of(self, tenant_id: str, path: str) -> VersionView:
        """The version a ``tinker://`` path of this tenant names.

        Raises:
            InvalidInput: if it is no such path, or an export's.
            NotFound: if it names nothing, or nothing any more.
        """
        saved = self.paths.get(tenant_id, path)
        if saved.version_id is None:
            raise InvalidInput(
                f"{path} is an export, to be downloaded: load or sample from what save_state or "
                "save_weights_for_sampler saved"
            )
        return self._registry.versions.by_id(saved.version_id)

    def version(self, version_id: str) -> VersionView:
        """A version by its id."""
        return self._registry.versions.by_id(version_id)

    def files_of(self, saved: Saved) -> dict[str, Path]:
        """The files of what a path names, by their path within it."""
        if saved.version_id is None:
            return self.exports.files_of(saved)
        version = self._registry.versions.by_id(saved.version_id)
        folder = self._registry.store.path(version.digest)
        return {file.path: folder / file.path for file in version.files}

    def loadable(self, tenant_id: str, path: str, *, optimizer: bool) -> VersionView:
        """The version to train on from; see `version_of`.

        Raises:
            InvalidInput: if it was trained on another base model, or holds no optimizer state
                and that was asked for.
        """
        version = self.version_of(tenant_id, path)
        if version.base_digest != self._base.version.digest:
            raise InvalidInput(
                f"{path} ({version.reference}) was trained on {version.base_model} with digest "
                f"{version.base_digest[:19]}, and this server has {self._base.name} with "
                f"{self._base.version.digest[:19]}"
            )
        if optimizer and version.kind is not Kind.CHECKPOINT:
            raise InvalidInput(
                f"{path} holds no optimizer state, being saved to sample from: load it without "
                "the optimizer, or load a path of save_state (tinker://RUN/weights/NAME)"
            )
        return version

    async def resolve(self, operation: Operation) -> Operation:
        """An operation with the folder of the version it names in place of the version.

        Raises:
            Corrupt: if the version's bytes are not what was saved.
        """
        version_id = operation.params.get("version_id")
        if version_id is None:
            return operation
        version = await to_thread(self._registry.versions.by_id, version_id)
        if problems := await to_thread(self._registry.store.verify, version.digest):
            raise Corrupt(f"{version.reference} cannot be loaded: {problems[0]}")
        params = {k: v for k, v in operation.params.items() if k != "version_id"}
        params["folder"] = str(self._registry.store.path(version.digest))
        return Operation(kind=operation.kind, params=params, arrays=operation.arrays)

    def sampler_folder(self, sampler: Sampler) -> Path | None:
        """Where a sampler's adapter is; None for the base model."""
        if sampler.snapshot is not None:
            return self._home / sampler.snapshot
        if sampler.version_id is None:
            return None
        version = self._registry.versions.by_id(sampler.version_id)
        return self._registry.store.path(version.digest)
