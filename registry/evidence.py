"""Evidence: frozen suites, runs of a suite on a version, and verdicts of gates.

Written by `evals`; kept here because aliases ask for it.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from sqlalchemy import desc
from sqlmodel import Session, SQLModel, col, select

from registry.database import Database
from registry.errors import InvalidInput, NotFound
from registry.models import EvalRun, GateRun, Group, Suite, Version
from registry.store import Store, canonical
from registry.views import EvalRunView, GateRunView, SuiteView


@dataclass(frozen=True, kw_only=True)
class NewRun:
    """A finished evaluation run, to be kept."""

    tenant_id: str
    version_id: str
    version_digest: str
    suite_name: str
    suite_digest: str
    engine: dict[str, Any]
    engine_fingerprint: str
    counts: dict[str, int]
    """Items per outcome class."""
    items: tuple[dict[str, Any], ...]
    """One record an item, in the suite's order."""


@dataclass(frozen=True, kw_only=True)
class NewGate:
    """A verdict, to be kept."""

    tenant_id: str
    candidate_run: EvalRunView
    baseline_run: EvalRunView
    verdict: str
    reason: str
    statistics: dict[str, Any]


class Evidence:
    """Keeps what was measured; nothing in it is ever changed."""

    def __init__(
        self,
        db: Database,
        store: Store,
        clock: Callable[[], datetime],
        new_id: Callable[[], str],
    ) -> None:
        self._db = db
        self._store = store
        self._clock = clock
        self._new_id = new_id

    def add_suite(self, tenant_id: str, name: str, spec: dict[str, Any]) -> SuiteView:
        """Freeze a suite under the digest of its canonical JSON; adding it again is fine."""
        if not isinstance(spec.get("items"), list):
            raise InvalidInput(f"suite {name!r} has no list of items")
        digest = self._store.put_blob(canonical(spec))
        with self._db.write() as session:
            mine = select(Suite).where(Suite.tenant_id == tenant_id, Suite.digest == digest)
            suite = session.exec(mine).one_or_none()
            if suite is None:
                suite = Suite(
                    id=self._new_id(),
                    tenant_id=tenant_id,
                    name=name,
                    digest=digest,
                    items=len(spec["items"]),
                    created_at=self._clock(),
                )
                session.add(suite)
                session.flush()
            return SuiteView(**suite.model_dump())

    def suite(self, tenant_id: str, name_or_digest: str) -> tuple[SuiteView, dict[str, Any]]:
        """The newest suite of a name, or the one with a digest; with its specification.

        Raises:
            NotFound: if this tenant has none.
        """
        with self._db.read() as session:
            statement = select(Suite).where(Suite.tenant_id == tenant_id)
            named = col(Suite.name) == name_or_digest
            statement = statement.where(named | (col(Suite.digest) == name_or_digest))
            suite = session.exec(statement.order_by(desc("created_at"))).first()
            if suite is None:
                raise NotFound(
                    f"there is no suite {name_or_digest}: add one with `slipway suites add FILE`"
                )
            view = SuiteView(**suite.model_dump())
        return view, json.loads(self._store.get_blob(view.digest))

    def suites(self, tenant_id: str) -> list[SuiteView]:
        """A tenant's suites, newest first."""
        with self._db.read() as session:
            statement = select(Suite).where(Suite.tenant_id == tenant_id)
            rows = session.exec(statement.order_by(desc("created_at")))
            return [SuiteView(**row.model_dump()) for row in rows]

    def add_run(self, new: NewRun) -> EvalRunView:
        """Keep a run; its items go into the store as JSON lines."""
        lines = b"".join(canonical(item) + b"\n" for item in new.items)
        row = EvalRun(
            id=self._new_id(),
            tenant_id=new.tenant_id,
            version_id=new.version_id,
            version_digest=new.version_digest,
            suite_name=new.suite_name,
            suite_digest=new.suite_digest,
            engine=new.engine,
            engine_fingerprint=new.engine_fingerprint,
            counts=new.counts,
            items=len(new.items),
            correct=new.counts.get("correct", 0),
            evidence_digest=self._store.put_blob(lines),
            created_at=self._clock(),
        )
        with self._db.write() as session:
            session.add(row)
            session.flush()
            return self._run_view(session, row)

    def run(self, tenant_id: str, run_id: str) -> EvalRunView:
        """A run by its id. Raises: NotFound: if this tenant has none."""
        with self._db.read() as session:
            return self._run_view(session, self._mine(session, EvalRun, tenant_id, run_id))

    def runs(
        self,
        tenant_id: str,
        *,
        version_id: str | None = None,
        suite_digest: str | None = None,
        limit: int = 100,
    ) -> list[EvalRunView]:
        """A tenant's runs, newest first."""
        with self._db.read() as session:
            statement = select(EvalRun).where(EvalRun.tenant_id == tenant_id)
            if version_id is not None:
                statement = statement.where(EvalRun.version_id == version_id)
            if suite_digest is not None:
                statement = statement.where(EvalRun.suite_digest == suite_digest)
            order = (col(EvalRun.created_at).desc(), col(EvalRun.id).desc())
            rows = session.exec(statement.order_by(*order).limit(limit))
            return [self._run_view(session, row) for row in rows]

    def latest_run(self, tenant_id: str, version_id: str, suite_digest: str) -> EvalRunView | None:
        """The newest run of a suite on a version, if there is one."""
        found = self.runs(tenant_id, version_id=version_id, suite_digest=suite_digest, limit=1)
        return found[0] if found else None

    def items(self, run: EvalRunView) -> list[dict[str, Any]]:
        """A run's records, one an item, in the suite's order."""
        lines = self._store.get_blob(run.evidence_digest).splitlines()
        return [json.loads(line) for line in lines]

    def add_gate(self, new: NewGate) -> GateRunView:
        """Keep a verdict."""
        candidate, baseline = new.candidate_run, new.baseline_run
        row = GateRun(
            id=self._new_id(),
            tenant_id=new.tenant_id,
            candidate_version_id=candidate.version_id,
            candidate_digest=candidate.version_digest,
            baseline_version_id=baseline.version_id,
            candidate_run_id=candidate.id,
            baseline_run_id=baseline.id,
            suite_name=candidate.suite_name,
            suite_digest=candidate.suite_digest,
            verdict=new.verdict,
            reason=new.reason,
            statistics=new.statistics,
            created_at=self._clock(),
        )
        with self._db.write() as session:
            session.add(row)
            session.flush()
            return self._gate_view(session, row)

    def gate(self, tenant_id: str, gate_id: str) -> GateRunView:
        """A verdict by its id. Raises: NotFound: if this tenant has none."""
        with self._db.read() as session:
            return self._gate_view(session, self._mine(session, GateRun, tenant_id, gate_id))

    def gates(
        self,
        tenant_id: str,
        *,
        version_id: str | None = None,
        suite_digest: str | None = None,
        limit: int = 100,
    ) -> list[GateRunView]:
        """A tenant's verdicts, newest first; ``version_id`` is the candidate's."""
        with self._db.read() as session:
            statement = select(GateRun).where(GateRun.tenant_id == tenant_id)
            if version_id is not None:
                statement = statement.where(GateRun.candidate_version_id == version_id)
            if suite_digest is not None:
                statement = statement.where(GateRun.suite_digest == suite_digest)
            order = (col(GateRun.created_at).desc(), col(GateRun.id).desc())
            rows = session.exec(statement.order_by(*order).limit(limit))
            return [self._gate_view(session, row) for row in rows]

    @staticmethod
    def _mine(session: Session, table: type[Any], tenant_id: str, row_id: str) -> Any:
        row = session.get(table, row_id)
        if row is None or row.tenant_id != tenant_id:
            what = "evaluation run" if table is EvalRun else "gate run"
            raise NotFound(f"there is no {what} {row_id}")
        return row

    @staticmethod
    def _references(session: Session, version_ids: Iterable[str]) -> dict[str, str]:
        statement = select(Version, Group).join(Group).where(col(Version.id).in_(version_ids))
        rows = session.exec(statement)
        return {version.id: f"{group.name}/{version.number}" for version, group in rows}

    def _run_view(self, session: Session, row: SQLModel) -> EvalRunView:
        fields = row.model_dump()
        names = self._references(session, [fields["version_id"]])
        return EvalRunView(**fields, reference=names[fields["version_id"]])

    def _gate_view(self, session: Session, row: SQLModel) -> GateRunView:
        fields = row.model_dump()
        candidate, baseline = fields["candidate_version_id"], fields["baseline_version_id"]
        names = self._references(session, [candidate, baseline])
        return GateRunView(**fields, candidate=names[candidate], baseline=names[baseline])
