"""Routes about who uses the server: tenants, their keys, what they used, and prices."""

from __future__ import annotations

from datetime import date
from decimal import Decimal

from fastapi import APIRouter
from pydantic import BaseModel

from registry.auth import ADMIN_ONLY, Admin, Caller
from registry.bodies import Body
from registry.errors import Forbidden
from registry.models import Role, UsageKind
from registry.registry import Registry
from registry.usage import Grouping
from registry.views import KeyView, PriceView, TenantView, UsageView


class CreateTenant(Body):
    """A new tenant."""

    name: str


class CreateKey(Body):
    """A new API key."""

    name: str
    role: Role = Role.MEMBER


class SetPrice(Body):
    """What a million tokens cost from now on."""

    kind: UsageKind
    per_million: Decimal | None
    """Null takes the price away."""
    base_model: str | None = None
    """Null: every model that has no price of its own."""


class CreatedKey(BaseModel):
    """A new key, shown this once only."""

    key: KeyView
    secret: str


def add_routes(routes: APIRouter, registry: Registry) -> None:
    """Tenants are an administrator's; keys and usage also each tenant's own.

    ``tenant``, a name, is an administrator's way to another tenant than their own.
    """
    tenants = registry.tenants

    @routes.get("/tenants")
    def list_tenants(_: Admin) -> list[TenantView]:
        return tenants.list()

    @routes.post("/tenants", status_code=201)
    def create_tenant(_: Admin, body: CreateTenant) -> TenantView:
        made = tenants.create(body.name)
        registry.versions.adopt_bases(made.id)
        return made

    @routes.get("/keys")
    def list_keys(caller: Caller, tenant: str | None = None) -> list[KeyView]:
        return tenants.keys(tenants.reached(caller, tenant))

    @routes.post("/keys", status_code=201)
    def create_key(caller: Caller, body: CreateKey, tenant: str | None = None) -> CreatedKey:
        tenant_id = tenants.reached(caller, tenant)
        if body.role is Role.ADMIN and not caller.is_admin:
            raise Forbidden(ADMIN_ONLY)
        key, secret = tenants.create_key(tenant_id, body.name, role=body.role)
        return CreatedKey(key=key, secret=secret)

    @routes.delete("/keys/{key_id}")
    def revoke_key(caller: Caller, key_id: str, tenant: str | None = None) -> KeyView:
        return tenants.revoke(tenants.reached(caller, tenant), key_id, by=caller.role)

    @routes.get("/usage")
    def show_usage(
        caller: Caller,
        by: Grouping = "kind",
        since: date | None = None,
        tenant: str | None = None,
    ) -> list[UsageView]:
        return registry.usage.totals(tenants.reached(caller, tenant), by=by, since=since)

    @routes.get("/prices")
    def list_prices(_: Caller) -> list[PriceView]:
        return registry.prices.list()

    @routes.put("/prices")
    def set_price(_: Admin, body: SetPrice) -> PriceView:
        return registry.prices.set(body.kind, body.per_million, base_model=body.base_model)
