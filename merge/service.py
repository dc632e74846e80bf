"""Merges adapter versions into derived versions, each in a process of its own."""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import IO, Any

from merge.plan import DTYPES
from merge.request import FORMAT, Request, error_of
from registry.errors import Corrupt, InvalidInput, NotFound, Unavailable
from registry.jobs import JobHandle, Jobs, JobView
from registry.models import Kind, Origin
from registry.registry import Registry
from registry.store import canonical
from registry.versions import NewVersion
from registry.views import VersionView

COMMAND = (sys.executable, "-m", "merge.job")
# A line of the job holds a report over every tensor of a model.
_LONGEST_LINE = 64 << 20


class MergeService:
    """One a server.

    Args:
        logs: folder for each merge's log.
        concurrency: merges at once; others wait their turn.
        logits: whether the merged model is run beside the adapter before it is registered.
        command: the job; tests put another in its place.
    """

    def __init__(
        self,
        registry: Registry,
        jobs: Jobs,
        logs: Path,
        *,
        concurrency: int = 1,
        logits: bool = True,
        command: Sequence[str] = COMMAND,
    ) -> None:
        self._registry = registry
        self._jobs = jobs
        self._logs = logs
        self._turn = asyncio.Semaphore(concurrency)
        self._logits = logits
        self._command = command

    def start(self, tenant_id: str, reference: str, *, dtype: str | None = None) -> JobView:
        """Merge a version into its base; a job, whose result is the merged version.

        Args:
            dtype: float32, bfloat16 or float16; by default the types the base is stored in.

        The same request again gives the same version, at once when it is there; while it is
        being made, the same job.

        Raises:
            NotFound: if there is no such version, or its base is not registered.
            InvalidInput: if it is no adapter, or the type is unknown.
        """
        version = self._registry.versions.get(tenant_id, reference)
        if version.kind not in (Kind.CHECKPOINT, Kind.WEIGHTS):
            raise InvalidInput(
                f"{version.reference} is of kind {version.kind.value}: only an adapter (checkpoint "
                "or weights) can be merged."
            )
        if dtype is not None and dtype not in DTYPES:
            raise InvalidInput(
                f"{dtype!r} is no type to store weights in: use {', '.join(DTYPES)}."
            )
        base = self._base_of(version)
        key = f"merge:{version.id}:{dtype}:{FORMAT}"

        async def work(handle: JobHandle) -> dict[str, Any]:
            made = await asyncio.to_thread(self._known, version, key)
            if made is None:
                async with self._turn:
                    made = await self._merge(handle, version, base, dtype, key)
            return made.model_dump(mode="json")

        return self._jobs.start("merge", tenant_id, work, key=key)

    def _base_of(self, version: VersionView) -> VersionView:
        try:
            base = self._registry.versions.by_digest(version.tenant_id, version.base_digest)
        except NotFound:
            raise NotFound(
                f"the base of {version.reference}, {version.base_model} ({version.base_digest}), "
                "is not registered: start the server with it once."
            ) from None
        if base.kind is not Kind.MERGED:
            raise InvalidInput(f"the base of {version.reference} is no full model")
        return base

    def _known(self, version: VersionView, key: str) -> VersionView | None:
        """The version an equal request has made before."""
        lineage = self._registry.versions.lineage(version.tenant_id, version.id)
        for made in lineage.descendants:
            if made.provenance.get("merge", {}).get("key") == key:
                return made
        return None

    async def _merge(
        self,
        handle: JobHandle,
        version: VersionView,
        base: VersionView,
        dtype: str | None,
        key: str,
    ) -> VersionView:
        store = self._registry.store
        handle.progress(0, 0, "checking the bytes of base and adapter")
        for source in (version, base):
            if problems := await asyncio.to_thread(store.verify, source.digest):
                raise Corrupt(f"{source.reference} is damaged: {problems[0]}")
        staged = store.stage()
        try:
            request = Request(
                base=store.path(base.digest),
                adapter=store.path(version.digest),
                output=staged,
                dtype=dtype,
                base_digest=base.digest,
                recorded_base_digest=version.base_digest,
                # Packages never change, so files they have in common may be one.
                link=True,
                logits=self._logits,
            )
            outcome = await self._run(handle, request)
            handle.progress(0, 0, "publishing")
            publish = asyncio.ensure_future(
                asyncio.to_thread(self._publish, staged, version, base, key, outcome)
            )
            try:
                return await asyncio.shield(publish)
            except asyncio.CancelledError:
                # Too late: in a moment the version is there, and saying otherwise would lie.
                return await publish
        finally:
            await asyncio.to_thread(store.discard, staged)

    async def _run(self, handle: JobHandle, request: Request) -> dict[str, Any]:
        """Run the job; its last line. Whatever happens, its process is gone afterwards."""
        self._logs.mkdir(parents=True, exist_ok=True)
        path = self._logs / f"merge-{handle.id}.log"
        with path.open("wb") as log:
            process = await self._spawn(log)
            try:
                outcome = await self._talk(handle, process, request)
                status = await process.wait()
            finally:
                if process.returncode is None:
                    process.kill()
                    await process.wait()
        if outcome is None:
            ending = f"signal {-status}" if status < 0 else f"status {status}"
            raise Unavailable(
                f"the merge process ended early ({ending}), as it does when memory runs out; "
                f"nothing was registered. Its log is {path.name}."
            )
        if "error" in outcome:
            raise error_of(outcome["error"])
        return outcome

    async def _spawn(self, log: IO[bytes]) -> asyncio.subprocess.Process:
        return await asyncio.create_subprocess_exec(
            *self._command,
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=log,
            limit=_LONGEST_LINE,
            # A Ctrl-C at the terminal is for the server, which then ends its jobs itself.
            start_new_session=True,
        )

    @staticmethod
    async def _talk(
        handle: JobHandle, process: asyncio.subprocess.Process, request: Request
    ) -> dict[str, Any] | None:
        assert process.stdin is not None
        assert process.stdout is not None
        process.stdin.write(request.model_dump_json().encode() + b"\n")
        # Not closed: the job ends when it is.
        outcome = None
        async for line in process.stdout:
            document = json.loads(line)
            if "progress" in document:
                handle.progress(**document["progress"])
            else:
                outcome = document
        return outcome

    def _publish(
        self,
        staged: Path,
        version: VersionView,
        base: VersionView,
        key: str,
        outcome: dict[str, Any],
    ) -> VersionView:
        report = self._registry.store.put_blob(canonical(outcome))
        manifest = self._registry.store.publish(staged)
        provenance = {
            **version.provenance,
            "merge": {"key": key, "format": FORMAT, "report": report, **outcome["report"]},
        }
        new = NewVersion(
            tenant_id=version.tenant_id,
            group=version.group,
            kind=Kind.MERGED,
            origin=Origin.MERGE,
            base_model=version.base_model,
            base_digest=version.base_digest,
            lora=version.lora,
            provenance=provenance,
            user_metadata=version.user_metadata,
            parents=(version.id, base.id),
            source_key=key,
        )
        return self._registry.versions.register(new, manifest)
