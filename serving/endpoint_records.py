"""The endpoint rows, and the routes that follow from them.

Everything here is synchronous and meant for a thread. `living` are the ids of the replicas
that produce tokens now, for a row cannot know.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass

from sqlmodel import Session, col, select

from registry.errors import NotFound
from registry.registry import Registry
from registry.views import VersionView
from serving.models import Endpoint, EndpointStatus, EndpointView, Replica, ReplicaView
from serving.routes import Route, Routes

_SHOWN_REPLICAS = 50


@dataclass(frozen=True, kw_only=True)
class Deployed:
    """What an endpoint served when it was last seen."""

    tenant_id: str
    name: str
    reference: str
    version_id: str


class EndpointRecords:
    """Reads and writes of the `endpoint` table."""

    def __init__(self, registry: Registry) -> None:
        self._db = registry.db
        self._clock = registry.clock
        self._new_id = registry.new_id
        self._tenants = registry.tenants

    def views(self, tenant_id: str, name: str | None = None) -> list[EndpointView]:
        """The tenant's endpoints by name, or the one called `name`."""
        query = (
            select(Endpoint, Replica)
            .join(Replica, col(Replica.id) == col(Endpoint.replica_id), isouter=True)
            .where(Endpoint.tenant_id == tenant_id)
            .order_by(Endpoint.name)
        )
        if name is not None:
            query = query.where(Endpoint.name == name)
        with self._db.read() as session:
            return [
                EndpointView.model_validate(endpoint).model_copy(
                    update={"engine_fingerprint": replica.engine_fingerprint if replica else None}
                )
                for endpoint, replica in session.exec(query)
            ]

    def replica_views(self, tenant_id: str) -> list[ReplicaView]:
        """The tenant's replicas, newest first, at most 50."""
        query = (
            select(Replica)
            .where(Replica.tenant_id == tenant_id)
            .order_by(col(Replica.started_at).desc())
            .limit(_SHOWN_REPLICAS)
        )
        with self._db.read() as session:
            return [ReplicaView.model_validate(row) for row in session.exec(query)]

    def begin(
        self,
        tenant_id: str,
        name: str,
        reference: str,
        version: VersionView,
        living: Collection[str],
    ) -> tuple[str, str | None]:
        """Note that `version` is being deployed; makes the endpoint if it is missing.

        Returns the endpoint's id and the replica that serves it meanwhile, if one does.
        """
        now = self._clock()
        with self._db.write() as session:
            row = _find(session, tenant_id, name)
            if row is not None and row.replica_id in living:
                row.status, row.updated_at = EndpointStatus.UPDATING, now
                session.add(row)
                return row.id, row.replica_id
            row = row or Endpoint(
                id=self._new_id(),
                tenant_id=tenant_id,
                name=name,
                reference=reference,
                status=EndpointStatus.STARTING,
                version_id=version.id,
                version=version.reference,
                digest=version.digest,
                created_at=now,
                updated_at=now,
            )
            row.status, row.error, row.updated_at = EndpointStatus.STARTING, None, now
            row.replica_id = None
            _point(row, reference, version)
            session.add(row)
            return row.id, None

    def switch(
        self, endpoint_id: str, reference: str, version: VersionView, replica_id: str
    ) -> None:
        """Note that `replica_id` serves from now on."""

        def change(row: Endpoint) -> None:
            row.status, row.error = EndpointStatus.READY, None
            row.replica_id = replica_id
            _point(row, reference, version)

        self._change(endpoint_id, change)

    def failed(self, endpoint_id: str, message: str, living: Collection[str]) -> None:
        """Note why a deployment failed; what served before still does."""

        def change(row: Endpoint) -> None:
            serves = row.replica_id in living
            row.status = EndpointStatus.READY if serves else EndpointStatus.FAILED
            row.error = message

        self._change(endpoint_id, change)

    def replica_died(self, replica_id: str, reason: str) -> None:
        """Mark the endpoints of a replica that is gone."""
        with self._db.write() as session:
            for row in session.exec(select(Endpoint).where(Endpoint.replica_id == replica_id)):
                # One that is being updated is marked by its deployment.
                if row.status == EndpointStatus.READY:
                    row.status = EndpointStatus.FAILED
                row.error, row.updated_at = reason, self._clock()
                session.add(row)

    def reopen(self, restore: bool) -> list[Deployed]:
        """Note that no replica survived the last server; returns what was served."""
        with self._db.write() as session:
            rows = session.exec(
                select(Endpoint).where(col(Endpoint.status) != EndpointStatus.FAILED)
            ).all()
            for row in rows:
                row.replica_id = None
                row.status = EndpointStatus.STARTING if restore else EndpointStatus.FAILED
                row.error = None if restore else "the server was stopped; deploy it again"
                session.add(row)
            return [
                Deployed(
                    tenant_id=row.tenant_id,
                    name=row.name,
                    reference=row.reference,
                    version_id=row.version_id,
                )
                for row in rows
            ]

    def remove(self, tenant_id: str, name: str) -> str:
        """Delete the row; returns its id. Raises NotFound."""
        with self._db.write() as session:
            row = _find(session, tenant_id, name)
            if row is None:
                raise NotFound(f"no endpoint is called {name!r}; see: slipway endpoints")
            session.delete(row)
            return row.id

    def routes(self, living: Collection[str]) -> Routes:
        """The gateway's snapshot: keys that are not revoked, and every endpoint."""
        keys = self._tenants.live_keys()
        with self._db.read() as session:
            pairs = session.exec(
                select(Endpoint, Replica).join(
                    Replica, col(Replica.id) == col(Endpoint.replica_id), isouter=True
                )
            ).all()
            return Routes(
                keys=keys,
                routes=tuple(_route(endpoint, replica, living) for endpoint, replica in pairs),
            )

    def _change(self, endpoint_id: str, change: Callable[[Endpoint], None]) -> None:
        with self._db.write() as session:
            row = session.get(Endpoint, endpoint_id)
            if row is None:
                raise NotFound("the endpoint was deleted meanwhile")
            change(row)
            row.updated_at = self._clock()
            session.add(row)


def _find(session: Session, tenant_id: str, name: str) -> Endpoint | None:
    return session.exec(
        select(Endpoint).where(Endpoint.tenant_id == tenant_id, Endpoint.name == name)
    ).first()


def _point(row: Endpoint, reference: str, version: VersionView) -> None:
    row.reference = reference
    row.version_id, row.version, row.digest = version.id, version.reference, version.digest


def _route(endpoint: Endpoint, replica: Replica | None, living: Collection[str]) -> Route:
    serves = replica is not None and replica.id in living
    return Route(
        tenant_id=endpoint.tenant_id,
        name=endpoint.name,
        url=replica.url if replica is not None and serves else None,
        model=replica.model if replica is not None and serves else "",
        version=endpoint.version,
        digest=endpoint.digest,
        created=int(endpoint.created_at.timestamp()),
    )
