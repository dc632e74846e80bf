"""Sampling from a live session by text: what an OpenAI-compatible address in front needs.

A model is named by the ``tinker://`` path of something saved or by a sampler's id. Whatever a
session saves can be asked at once: nothing is merged and no server is started for it.
"""

from __future__ import annotations

import contextlib
from asyncio import to_thread
from collections.abc import AsyncGenerator, Mapping
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from registry import Principal, VersionView
from session_core.allowance import Allowance
from session_core.log import OperationLog
from session_core.models import Sampler
from session_core.operations import Operation
from session_core.paths import SCHEME, parse_path
from session_core.sampling import Samples
from session_core.saves import Saver
from session_core.supervisor import Supervisor


@dataclass(frozen=True, kw_only=True)
class LiveModel:
    """What a client named: the sampler that answers, and the version in it, if it is one."""

    name: str
    sampler: Sampler
    version: VersionView | None

    @property
    def reference(self) -> str:
        """What to tell a client has answered: ``GROUP/7``, or the sampler's id."""
        return self.version.reference if self.version is not None else self.sampler.id


class Live:
    """Text in, tokens out, from what a tenant's sessions have saved."""

    def __init__(
        self,
        *,
        operations: OperationLog,
        saver: Saver,
        samples: Samples,
        supervisor: Supervisor,
        allowance: Allowance,
    ) -> None:
        self._operations = operations
        self._saver = saver
        self._samples = samples
        self._supervisor = supervisor
        self._allowance = allowance

    async def find(self, caller: Principal, model: str, *, now: datetime) -> LiveModel:
        """What a name means.

        Raises:
            NotFound: if the caller has nothing of that name.
            InvalidInput: if it cannot be sampled from.
        """
        if not model.startswith(SCHEME):
            sampler = await to_thread(self._operations.sampler, caller.tenant_id, model)
            version = None
            if sampler.version_id is not None:
                version = await to_thread(self._saver.version, sampler.version_id)
            return LiveModel(name=model, sampler=sampler, version=version)
        version = await to_thread(self._saver.loadable, caller.tenant_id, model, optimizer=False)
        # No row of its own: the path is the sampler, whoever asks for it and however often.
        sampler = Sampler(
            id=f"version:{version.id}",
            session_id=parse_path(model).run_id.partition(":")[0],
            tenant_id=caller.tenant_id,
            base_model=self._saver.base_model,
            model_path=model,
            version_id=version.id,
            created_at=now,
        )
        return LiveModel(name=model, sampler=sampler, version=version)

    async def tokens(self, body: Mapping[str, Any]) -> list[int]:
        """Token ids of a chat (``messages``) or a ``text``.

        Raises:
            OperationFailed: if the model's chat template cannot render the messages.
            Unavailable: if the engine is not running.
        """
        return await self._supervisor.tokens(body)

    async def stream(
        self, model: LiveModel, operation: Operation, *, caller: Principal
    ) -> AsyncGenerator[dict[str, Any], None]:
        """The samples token by token, see `session_core.streaming`. Metered.

        Raises:
            TooMany, QuotaExceeded: if it is more than the tenant may have.
        """
        async with self._allowance.reserved(caller.tenant_id, operation) as allowed:
            lines = self._samples.stream(model.sampler, allowed, caller=caller)
            async with contextlib.aclosing(lines):
                async for line in lines:
                    yield line
