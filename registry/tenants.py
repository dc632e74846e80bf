"""Tenants and their API keys."""

from __future__ import annotations

import builtins
import hashlib
import re
import secrets
from collections.abc import Callable
from dataclasses import dataclass
from datetime import datetime

from sqlalchemy.exc import IntegrityError
from sqlmodel import and_, col, func, select

from registry.database import Database
from registry.errors import Conflict, Forbidden, InvalidInput, NotFound, Unauthorized
from registry.models import ApiKey, Role, Tenant
from registry.views import KeyView, TenantView

# The `tinker` SDK accepts no key without this prefix.
KEY_PREFIX = "tml-"
KEY_BYTES = 32
LONGEST_NAME = 100
TENANT_NAME = re.compile(r"[a-z0-9][a-z0-9._-]{0,62}")


@dataclass(frozen=True, kw_only=True)
class Principal:
    """Who a request comes from."""

    tenant_id: str
    tenant: str
    key_id: str
    key_name: str
    role: Role = Role.MEMBER

    @property
    def is_admin(self) -> bool:
        """Whether the whole server is theirs to administer."""
        return self.role is Role.ADMIN


def key_hash(key: str) -> str:
    """What is kept of a key: SHA-256 in hex. It has 256 random bits, so no salt is needed."""
    return hashlib.sha256(key.encode()).hexdigest()


class Tenants:
    """Makes tenants and keys, and tells whose a key is."""

    def __init__(
        self, db: Database, clock: Callable[[], datetime], new_id: Callable[[], str]
    ) -> None:
        self._db = db
        self._clock = clock
        self._new_id = new_id

    # Tenants.

    def ensure_tenant(self, name: str) -> str:
        """The id of the tenant with a name, made when missing."""
        try:
            with self._db.write() as session:
                tenant = session.exec(select(Tenant).where(Tenant.name == name)).one_or_none()
                if tenant is None:
                    tenant = Tenant(id=self._new_id(), name=name, created_at=self._clock())
                    session.add(tenant)
                return tenant.id
        except IntegrityError:
            with self._db.read() as session:
                return session.exec(select(Tenant).where(Tenant.name == name)).one().id

    def create(self, name: str) -> TenantView:
        """A new tenant, with no key yet.

        Raises:
            InvalidInput: for a name that cannot be part of a URL.
            Conflict: if there is a tenant of that name.
        """
        if not TENANT_NAME.fullmatch(name):
            raise InvalidInput(
                f"{name!r} is no tenant's name: use 1 to 63 of a-z, 0-9, '.', '_' and '-', "
                "beginning with a letter or a digit"
            )
        row = Tenant(id=self._new_id(), name=name, created_at=self._clock())
        try:
            with self._db.write() as session:
                session.add(row)
        except IntegrityError:
            raise Conflict(f"there is a tenant {name} already") from None
        return TenantView(id=row.id, name=name, keys=0, created_at=row.created_at)

    def list(self) -> builtins.list[TenantView]:
        """Every tenant by name, with how many of its keys are in force."""
        live = and_(col(ApiKey.tenant_id) == Tenant.id, col(ApiKey.revoked_at).is_(None))
        statement = (
            select(Tenant, func.count(col(ApiKey.id)))
            .join(ApiKey, live, isouter=True)
            .group_by(col(Tenant.id))
            .order_by(Tenant.name)
        )
        with self._db.read() as session:
            return [
                TenantView(**tenant.model_dump(), keys=keys)
                for tenant, keys in session.exec(statement)
            ]

    def named(self, name: str) -> str:
        """The id of the tenant with a name. Raises: NotFound."""
        with self._db.read() as session:
            tenant = session.exec(select(Tenant).where(Tenant.name == name)).one_or_none()
        if tenant is None:
            raise NotFound(f"there is no tenant {name}: `slipway tenants list` shows all")
        return tenant.id

    def reached(self, caller: Principal, name: str | None) -> str:
        """The id of the tenant a caller speaks of: its own, or for an administrator any.

        Raises:
            Forbidden: if a member names another tenant, whether there is such a one or not.
            NotFound: if an administrator names one that is not there.
        """
        if name is None or name == caller.tenant:
            return caller.tenant_id
        if not caller.is_admin:
            raise Forbidden(
                f"only an administrator's key reaches another tenant than {caller.tenant}"
            )
        return self.named(name)

    # Keys.

    def create_key(
        self, tenant_id: str, name: str, *, role: Role = Role.MEMBER
    ) -> tuple[KeyView, str]:
        """A new key: its record, and the key itself, which is shown this once only.

        Raises:
            InvalidInput: for an empty or overlong name.
        """
        if not name.strip() or len(name) > LONGEST_NAME:
            raise InvalidInput(f"a key needs a name of 1 to {LONGEST_NAME} characters")
        key = KEY_PREFIX + secrets.token_urlsafe(KEY_BYTES)
        row = ApiKey(
            id=self._new_id(),
            tenant_id=tenant_id,
            name=name,
            role=role.value,
            hint=key[-4:],
            sha256=key_hash(key),
            created_at=self._clock(),
        )
        with self._db.write() as session:
            session.add(row)
            session.flush()
            return KeyView(**row.model_dump()), key

    def keys(self, tenant_id: str) -> builtins.list[KeyView]:
        """A tenant's keys, oldest first, revoked ones included."""
        with self._db.read() as session:
            statement = select(ApiKey).where(ApiKey.tenant_id == tenant_id)
            rows = session.exec(statement.order_by(col(ApiKey.created_at)))
            return [KeyView(**row.model_dump()) for row in rows]

    def revoke(self, tenant_id: str, key_id: str, *, by: Role = Role.ADMIN) -> KeyView:
        """End a key; ending it twice is fine.

        Raises:
            NotFound: if this tenant has no such key.
            Forbidden: if a member would end an administrator's key.
        """
        with self._db.write() as session:
            row = session.get(ApiKey, key_id)
            if row is None or row.tenant_id != tenant_id:
                raise NotFound(f"there is no key {key_id}: `slipway keys list` shows all")
            if by is not Role.ADMIN and row.role == Role.ADMIN:
                raise Forbidden("only an administrator ends an administrator's key")
            row.revoked_at = row.revoked_at or self._clock()
            session.add(row)
            return KeyView(**row.model_dump())

    def authenticate(self, key: str) -> Principal:
        """Who a key belongs to.

        The key is looked up by its hash, so how long that takes tells nothing about keys.

        Raises:
            Unauthorized: for a key that is unknown or revoked, the same for both.
        """
        with self._db.read() as session:
            statement = (
                select(ApiKey, Tenant)
                .join(Tenant)
                .where(ApiKey.sha256 == key_hash(key), col(ApiKey.revoked_at).is_(None))
            )
            found = session.exec(statement).one_or_none()
            if found is None:
                raise Unauthorized("this API key is not valid")
            row, tenant = found
            return Principal(
                tenant_id=tenant.id,
                tenant=tenant.name,
                key_id=row.id,
                key_name=row.name,
                role=Role(row.role),
            )

    def live_keys(self) -> dict[str, str]:
        """SHA-256 of every key that is not revoked, and its tenant's id: for the gateway."""
        with self._db.read() as session:
            rows = session.exec(select(ApiKey).where(col(ApiKey.revoked_at).is_(None)))
            return {row.sha256: row.tenant_id for row in rows}
