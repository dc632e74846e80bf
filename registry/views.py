"""What the registry hands out: frozen copies of its rows, ready to be sent as JSON."""

from __future__ import annotations

from datetime import datetime
from decimal import Decimal
from typing import Any, Generic, TypeVar

from pydantic import BaseModel, ConfigDict

from registry.models import Kind, Origin, Role, UsageKind

Item = TypeVar("Item")


class View(BaseModel):
    """Base of all views."""

    model_config = ConfigDict(frozen=True)


class Page(View, Generic[Item]):
    """One page of a list; ``cursor`` gets the next one and is None at the end."""

    items: list[Item]
    cursor: str | None = None


class FileView(View):
    """A file of a version: path within it, size in bytes, SHA-256 in hex."""

    path: str
    size: int
    sha256: str


class VersionView(View):
    """A model package version."""

    id: str
    tenant_id: str
    group: str
    number: int
    reference: str
    """``GROUP/NUMBER``"""
    kind: Kind
    origin: Origin
    digest: str
    size_bytes: int
    files: list[FileView]
    base_model: str
    base_digest: str
    lora: dict[str, Any]
    provenance: dict[str, Any]
    user_metadata: dict[str, Any]
    parents: list[str]
    """Ids of the versions it was made from."""
    aliases: list[str]
    """Names of the aliases that point at it now."""
    created_at: datetime


class LineageView(View):
    """A version with everything it came from and everything made of it, nearest first."""

    version: VersionView
    ancestors: list[VersionView]
    descendants: list[VersionView]


class GroupView(View):
    """A model package group."""

    id: str
    name: str
    versions: int
    created_at: datetime


class AliasView(View):
    """An alias and the version it points at."""

    group: str
    alias: str
    version_id: str
    reference: str
    digest: str
    moved_at: datetime


class AliasMoveView(View):
    """One move of an alias."""

    group: str
    alias: str
    from_reference: str | None
    to_reference: str
    to_version_id: str
    gate_id: str | None
    override_reason: str | None
    moved_by: str
    moved_at: datetime


class TenantView(View):
    """A tenant and how many keys of it are in force."""

    id: str
    name: str
    keys: int
    created_at: datetime


class KeyView(View):
    """An API key, without the key."""

    id: str
    name: str
    role: Role
    hint: str
    created_at: datetime
    revoked_at: datetime | None


class UsageView(View):
    """Tokens of one kind of use, in one group."""

    group: str | None
    """The kind, the day, or the id of the session or key; None where there was none."""
    name: str | None = None
    """The key's, where the group is a key."""
    kind: UsageKind
    tokens: int
    operations: int
    cost: Decimal | None
    """By the prices of the time; None if there was none for any of it."""

    def plus(self, other: UsageView) -> UsageView:
        """The sum of two rows of one group and kind."""
        costs = [cost for cost in (self.cost, other.cost) if cost is not None]
        return self.model_copy(
            update={
                "tokens": self.tokens + other.tokens,
                "operations": self.operations + other.operations,
                "cost": sum(costs, Decimal(0)) if costs else None,
            }
        )


class HourView(View):
    """Tokens of one kind, session and base model in one hour."""

    start: datetime
    kind: UsageKind
    session_id: str | None
    base_model: str | None
    tokens: int
    price: Decimal | None
    """Of a million tokens, when they ran."""

    @property
    def cost(self) -> Decimal | None:
        """What they cost."""
        return None if self.price is None else self.price * self.tokens / Decimal(1_000_000)


class PriceView(View):
    """What a million tokens cost."""

    kind: UsageKind
    base_model: str | None
    """None: every model that has no price of its own."""
    per_million: Decimal | None
    set_at: datetime


class SuiteView(View):
    """A frozen evaluation suite."""

    id: str
    name: str
    digest: str
    items: int
    created_at: datetime


class EvalRunView(View):
    """One suite run on one version."""

    id: str
    tenant_id: str
    version_id: str
    version_digest: str
    reference: str
    suite_name: str
    suite_digest: str
    engine: dict[str, Any]
    engine_fingerprint: str
    counts: dict[str, int]
    items: int
    correct: int
    evidence_digest: str
    created_at: datetime


class GateRunView(View):
    """The verdict on a candidate against a baseline."""

    id: str
    tenant_id: str
    candidate: str
    candidate_version_id: str
    candidate_digest: str
    baseline: str
    baseline_version_id: str
    candidate_run_id: str
    baseline_run_id: str
    suite_name: str
    suite_digest: str
    verdict: str
    reason: str
    statistics: dict[str, Any]
    created_at: datetime
