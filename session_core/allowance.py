"""What sampling may use: counted while it is under way, in memory, as sampling itself is."""

from __future__ import annotations

from asyncio import to_thread
from collections import Counter
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

from session_core.operations import Operation
from session_core.quota_records import Quotas
from session_core.quotas import samples_of, sampling_tokens


class Allowance:
    """Reserves what a request may use at most, until it is done and metered.

    Args:
        context: the model's, once it is known.
    """

    def __init__(self, quotas: Quotas, context: Callable[[], int]) -> None:
        self._quotas = quotas
        self._context = context
        self._samples: Counter[str] = Counter()
        self._tokens: Counter[str] = Counter()

    def promised(self, tenant_id: str) -> int:
        """Tokens that a tenant's samples under way may still use."""
        return self._tokens[tenant_id]

    async def reserve(
        self, tenant_id: str, operation: Operation
    ) -> tuple[Operation, Callable[[], None]]:
        """Let a sample operation in: the operation, cut to the context, and its release.

        Raises:
            TooMany: if too many samples are under way.
            QuotaExceeded: if its prompt is too long, or too few tokens are left today.
        """
        quota, used = await to_thread(self._quotas.standing, tenant_id)
        # From here on nothing is awaited: what was checked still holds when it is counted.
        operation = quota.bounded(operation)
        samples, tokens = samples_of(operation), sampling_tokens(operation, self._context())
        quota.check_samples(self._samples[tenant_id], samples)
        quota.check_tokens(used + self._tokens[tenant_id], tokens)
        self._count(tenant_id, samples, tokens)
        return operation, lambda: self._count(tenant_id, -samples, -tokens)

    @asynccontextmanager
    async def reserved(self, tenant_id: str, operation: Operation) -> AsyncIterator[Operation]:
        """The same for as long as the context lasts."""
        operation, release = await self.reserve(tenant_id, operation)
        try:
            yield operation
        finally:
            release()

    def _count(self, tenant_id: str, samples: int, tokens: int) -> None:
        for counter, amount in ((self._samples, samples), (self._tokens, tokens)):
            counter[tenant_id] += amount
            if not counter[tenant_id]:
                del counter[tenant_id]
