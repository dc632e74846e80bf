"""Aliases: names that move between versions, under the group's policy, never silently."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import datetime
from enum import Enum
from typing import Literal

from sqlalchemy.exc import IntegrityError
from sqlmodel import Session, col, select

from registry.database import Database
from registry.errors import Conflict, InvalidInput, NotFound, PolicyUnmet
from registry.models import Alias, AliasMove, GateRun, Group, Outbox, Policy, Version
from registry.versions import GROUP_NAME, Versions
from registry.views import AliasMoveView, AliasView


class Unset(Enum):
    """The type of `ANYWHERE`."""

    ANYWHERE = "anywhere"


ANYWHERE: Literal[Unset.ANYWHERE] = Unset.ANYWHERE
"""As ``expected``: wherever the alias points now."""


class Aliases:
    """Moves aliases by compare-and-swap and keeps the history of every move."""

    def __init__(
        self,
        db: Database,
        versions: Versions,
        clock: Callable[[], datetime],
        new_id: Callable[[], str],
    ) -> None:
        self._db = db
        self._versions = versions
        self._clock = clock
        self._new_id = new_id

    def move(
        self,
        tenant_id: str,
        group: str,
        alias: str,
        reference: str,
        *,
        moved_by: str,
        expected: str | Unset | None = ANYWHERE,
        override_reason: str | None = None,
    ) -> AliasMoveView:
        """Point an alias at a version of its group.

        Args:
            expected: id of the version the alias must point at now, None if it must not exist
                yet; `ANYWHERE` to move it from wherever it is.
            override_reason: move it although the policy is not met; kept in the history.

        Raises:
            NotFound: if the version does not exist.
            InvalidInput: if it belongs to another group, or the alias's name is not one.
            Conflict: if the alias does not point at ``expected``.
            PolicyUnmet: saying which demand is not met.
        """
        if not GROUP_NAME.fullmatch(alias):
            raise InvalidInput(f"{alias!r} is no alias: use a-z, 0-9, '.', '_' and '-'")
        if override_reason is not None and not override_reason.strip():
            raise InvalidInput("an override needs a reason: say why the policy is passed over")
        try:
            with self._db.write() as session:
                return self._move(
                    session, tenant_id, group, alias, reference, moved_by, expected, override_reason
                )
        except IntegrityError:
            # Two first moves of one alias at once: the database let one through.
            raise Conflict(f"{group}@{alias} was moved by somebody else meanwhile") from None

    def _move(
        self,
        session: Session,
        tenant_id: str,
        group: str,
        alias: str,
        reference: str,
        moved_by: str,
        expected: str | Unset | None,
        override_reason: str | None,
    ) -> AliasMoveView:
        version = self._versions.find(session, tenant_id, reference)
        owner = session.get_one(Group, version.group_id)
        if owner.name != group:
            raise InvalidInput(f"{reference} is a version of {owner.name}, not of {group}")
        statement = select(Alias).where(Alias.group_id == owner.id, Alias.name == alias)
        row = session.exec(statement.with_for_update()).one_or_none()
        current = row.version_id if row is not None else None
        if expected is not ANYWHERE and expected != current:
            where = f"at version id {current}" if current else "nowhere yet"
            raise Conflict(f"{group}@{alias} points {where}, not where it was expected: look again")
        gate = self._passing_gate(session, owner, version, alias, current)
        if isinstance(gate, str) and override_reason is None:
            raise PolicyUnmet(gate)
        now = self._clock()
        if row is None:
            row = Alias(
                id=self._new_id(),
                group_id=owner.id,
                name=alias,
                version_id=version.id,
                moved_at=now,
            )
        row.version_id, row.moved_at = version.id, now
        session.add(row)
        session.flush()
        move = AliasMove(
            alias_id=row.id,
            from_version_id=current,
            to_version_id=version.id,
            gate_id=gate.id if isinstance(gate, GateRun) else None,
            override_reason=override_reason if isinstance(gate, str) else None,
            moved_by=moved_by,
            moved_at=now,
        )
        payload = {"alias_id": row.id, "version_id": version.id}
        session.add_all([move, Outbox(event="alias.moved", payload=payload, created_at=now)])
        session.flush()
        return self._move_view(session, owner.name, alias, move)

    @staticmethod
    def _passing_gate(
        session: Session, group: Group, version: Version, alias: str, current: str | None
    ) -> GateRun | str | None:
        """The gate that lets this move through, what is missing, or None if none is demanded."""
        policy = session.exec(
            select(Policy).where(Policy.group_id == group.id, Policy.alias == alias)
        ).one_or_none()
        if policy is None or not policy.gate:
            return None
        name = f"{group.name}/{version.number}"
        baseline = "the version it replaces"
        if current is not None:
            now = session.get_one(Version, current)
            baseline = f"{group.name}/{now.number}"
        todo = f"run `slipway gate run --candidate {name} --baseline ... --suite ...`"
        newest = session.exec(
            select(GateRun)
            .where(GateRun.candidate_version_id == version.id)
            .order_by(col(GateRun.created_at).desc(), col(GateRun.id).desc())
        ).first()
        demand = f"{group.name}@{alias} demands a passing gate of {name}"
        if newest is None:
            return f"{demand}, and none was run: {todo}"
        if newest.verdict != "pass":
            return (
                f"{demand}, and its newest gate ({newest.id}) says {newest.verdict}: "
                f"{newest.reason}"
            )
        if newest.candidate_digest != version.digest:
            return f"{demand}, and its newest gate ({newest.id}) was of other bytes: {todo}"
        if current not in (None, version.id, newest.baseline_version_id):
            return (
                f"{demand} against {baseline}, which the alias points at now; its newest gate "
                f"({newest.id}) was against another version: "
                + todo.replace("--baseline ...", f"--baseline {baseline}")
            )
        return newest

    def get(self, tenant_id: str, group: str, alias: str) -> AliasView:
        """Where an alias points.

        Raises:
            NotFound: if it points nowhere yet.
        """
        for view in self.list(tenant_id, group=group):
            if view.alias == alias:
                return view
        raise NotFound(f"{group}@{alias} points at no version: promote one first")

    def list(self, tenant_id: str, *, group: str | None = None) -> Sequence[AliasView]:
        """A tenant's aliases, by group and name."""
        with self._db.read() as session:
            statement = (
                select(Alias, Group, Version)
                .join(Group, col(Alias.group_id) == Group.id)
                .join(Version, col(Alias.version_id) == Version.id)
                .where(Group.tenant_id == tenant_id)
                .order_by(Group.name, Alias.name)
            )
            if group is not None:
                statement = statement.where(Group.name == group)
            return [
                AliasView(
                    group=owner.name,
                    alias=alias.name,
                    version_id=version.id,
                    reference=f"{owner.name}/{version.number}",
                    digest=version.digest,
                    moved_at=alias.moved_at,
                )
                for alias, owner, version in session.exec(statement)
            ]

    def history(self, tenant_id: str, group: str, alias: str) -> Sequence[AliasMoveView]:
        """Every move of an alias, newest first.

        Raises:
            NotFound: if it never pointed anywhere.
        """
        with self._db.read() as session:
            statement = (
                select(AliasMove)
                .join(Alias, col(AliasMove.alias_id) == Alias.id)
                .join(Group, col(Alias.group_id) == Group.id)
                .where(Group.tenant_id == tenant_id, Group.name == group, Alias.name == alias)
                .order_by(col(AliasMove.id).desc())
            )
            moves = session.exec(statement).all()
            if not moves:
                raise NotFound(f"{group}@{alias} points at no version: promote one first")
            return [self._move_view(session, group, alias, move) for move in moves]

    def rollback(self, tenant_id: str, group: str, alias: str, *, moved_by: str) -> AliasMoveView:
        """Point an alias back at the version it pointed at before its last move.

        The version has served under this alias before, so no new gate is asked for; the move
        is recorded as what it is.

        Raises:
            NotFound: if the alias does not exist.
            Conflict: if there is nothing to go back to.
        """
        newest = self.history(tenant_id, group, alias)[0]
        if newest.from_reference is None:
            raise Conflict(f"{group}@{alias} has no version before {newest.to_reference}")
        return self.move(
            tenant_id,
            group,
            alias,
            newest.from_reference,
            moved_by=moved_by,
            expected=newest.to_version_id,
            override_reason=f"rollback from {newest.to_reference}",
        )

    @staticmethod
    def _move_view(session: Session, group: str, alias: str, move: AliasMove) -> AliasMoveView:
        before = move.from_version_id and session.get_one(Version, move.from_version_id)
        after = session.get_one(Version, move.to_version_id)
        return AliasMoveView(
            **move.model_dump(exclude={"id", "alias_id", "from_version_id"}),
            group=group,
            alias=alias,
            from_reference=f"{group}/{before.number}" if before else None,
            to_reference=f"{group}/{after.number}",
        )
