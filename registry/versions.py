"""Groups and versions: numbers given out in order, never twice, never reused."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, field
from datetime import datetime
from typing import Any

from sqlalchemy.exc import IntegrityError
from sqlmodel import Session, col, func, select

from registry.database import Database
from registry.errors import InvalidInput, NotFound
from registry.models import (
    Alias,
    Group,
    Kind,
    Origin,
    Outbox,
    Policy,
    Version,
    VersionParent,
)
from registry.store import Manifest, ManifestFile
from registry.views import FileView, GroupView, LineageView, Page, VersionView

GROUP_NAME = re.compile(r"[a-z0-9][a-z0-9._-]{0,62}")
LARGEST_PAGE = 200
GATED_ALIAS = "production"
BASE_KEY = "base:"


@dataclass(frozen=True, kw_only=True)
class NewVersion:
    """What a version is registered with, beside its files."""

    tenant_id: str
    group: str
    kind: Kind
    origin: Origin
    base_model: str
    base_digest: str
    lora: dict[str, Any] = field(default_factory=dict)
    provenance: dict[str, Any] = field(default_factory=dict)
    user_metadata: dict[str, Any] = field(default_factory=dict)
    parents: tuple[str, ...] = ()
    source_key: str | None = None
    """Registering with a key that is known returns the version it made: a save that is
    repeated after a crash makes no second one."""


def check_group_name(name: str) -> None:
    """Raises: InvalidInput: if the name cannot be part of a path, a URL and a model name."""
    if not GROUP_NAME.fullmatch(name):
        raise InvalidInput(
            f"{name!r} is no group name: use 1 to 63 of a-z, 0-9, '.', '_' and '-', "
            "beginning with a letter or a digit"
        )


def base_key(tenant_id: str, digest: str) -> str:
    """The source key of a tenant's version of a base model."""
    return f"{BASE_KEY}{tenant_id}:{digest}"


class Versions:
    """Registers versions and finds them again."""

    def __init__(
        self, db: Database, clock: Callable[[], datetime], new_id: Callable[[], str]
    ) -> None:
        self._db = db
        self._clock = clock
        self._new_id = new_id

    def register(self, new: NewVersion, manifest: Manifest) -> VersionView:
        """Give a published package the next number of its group.

        The group is made when missing, with a policy that its ``production`` alias demands a
        passing gate.

        Raises:
            InvalidInput: for a bad group name.
            NotFound: if a parent is no version of this tenant.
        """
        check_group_name(new.group)
        try:
            with self._db.write() as session:
                return self._register(session, new, manifest)
        except IntegrityError:
            # Two writers made the same group, or brought the same source key, at once; the
            # one that came second finds the other's row now.
            with self._db.write() as session:
                return self._register(session, new, manifest)

    def _register(self, session: Session, new: NewVersion, manifest: Manifest) -> VersionView:
        if new.source_key is not None:
            known = session.exec(
                select(Version).where(Version.source_key == new.source_key)
            ).one_or_none()
            if known is not None:
                return self._view(session, known)
        for parent in new.parents:
            self._owned(session, new.tenant_id, parent)
        group = self._group(session, new.tenant_id, new.group)
        now = self._clock()
        version = Version(
            id=self._new_id(),
            group_id=group.id,
            number=group.next_number,
            kind=new.kind,
            origin=new.origin,
            digest=manifest.digest,
            size_bytes=manifest.size_bytes,
            files=[asdict(file) for file in manifest.files],
            base_model=new.base_model,
            base_digest=new.base_digest,
            lora=new.lora,
            provenance=new.provenance,
            user_metadata=new.user_metadata,
            source_key=new.source_key,
            created_at=now,
        )
        group.next_number += 1
        session.add_all([group, version])
        session.flush()
        session.add_all(
            VersionParent(child_id=version.id, parent_id=parent)
            for parent in dict.fromkeys(new.parents)
        )
        payload = {"version_id": version.id}
        session.add(Outbox(event="version.registered", payload=payload, created_at=now))
        session.flush()
        return self._view(session, version)

    def _group(self, session: Session, tenant_id: str, name: str) -> Group:
        statement = select(Group).where(Group.tenant_id == tenant_id, Group.name == name)
        # The row lock is PostgreSQL's; on SQLite the whole transaction is exclusive.
        group = session.exec(statement.with_for_update()).one_or_none()
        if group is None:
            now = self._clock()
            group = Group(id=self._new_id(), tenant_id=tenant_id, name=name, created_at=now)
            session.add(group)
            session.flush()
            policy = Policy(id=self._new_id(), group_id=group.id, alias=GATED_ALIAS, gate=True)
            session.add(policy)
        return group

    def get(self, tenant_id: str, reference: str) -> VersionView:
        """A version by ``GROUP/NUMBER``, ``GROUP@ALIAS`` or its id.

        Raises:
            InvalidInput: if the reference is none of these.
            NotFound: if this tenant has no such version.
        """
        with self._db.read() as session:
            return self._view(session, self.find(session, tenant_id, reference))

    def find(self, session: Session, tenant_id: str, reference: str) -> Version:
        """The row behind a reference; see `get`."""
        missing = NotFound(f"there is no version {reference}: `slipway packages list` shows all")
        mine = select(Version).join(Group).where(Group.tenant_id == tenant_id)
        if "@" in reference:
            group, _, alias = reference.partition("@")
            mine = mine.join(Alias, col(Alias.version_id) == Version.id)
            mine = mine.where(Group.name == group, Alias.name == alias)
            missing = NotFound(f"{reference} points at no version: promote one first")
        elif "/" in reference:
            group, _, number = reference.partition("/")
            # Bounded, so that no number a database cannot hold gets there.
            if not re.fullmatch(r"[1-9][0-9]{0,8}", number):
                raise InvalidInput(
                    f"{reference!r} names no version: expected GROUP/NUMBER, as in sums/7"
                )
            mine = mine.where(Group.name == group, Version.number == int(number))
        else:
            mine = mine.where(Version.id == reference)
        version = session.exec(mine).one_or_none()
        if version is None:
            raise missing
        return version

    def by_id(self, version_id: str) -> VersionView:
        """A version by its id, whoever owns it; for the server's own use.

        Raises:
            NotFound: if there is none.
        """
        with self._db.read() as session:
            version = session.get(Version, version_id)
            if version is None:
                raise NotFound(f"there is no version with id {version_id}")
            return self._view(session, version)

    def by_digest(self, tenant_id: str, digest: str) -> VersionView:
        """This tenant's oldest version with a content digest.

        Raises:
            NotFound: if there is none.
        """
        with self._db.read() as session:
            statement = select(Version).join(Group).where(Group.tenant_id == tenant_id)
            statement = statement.where(Version.digest == digest)
            version = session.exec(statement.order_by(col(Version.created_at))).first()
            if version is None:
                raise NotFound(f"no version has the digest {digest}")
            return self._view(session, version)

    def list(
        self,
        tenant_id: str,
        *,
        group: str | None = None,
        kind: Kind | None = None,
        limit: int = 50,
        cursor: str | None = None,
    ) -> Page[VersionView]:
        """A tenant's versions, newest first.

        Args:
            limit: versions a page, 1 to 200.
            cursor: where the page before ended; from its ``cursor``.

        Raises:
            InvalidInput: for a limit out of bounds or a cursor that names nothing.
        """
        if not 1 <= limit <= LARGEST_PAGE:
            raise InvalidInput(f"limit is {limit}: expected 1 to {LARGEST_PAGE}")
        with self._db.read() as session:
            statement = select(Version).join(Group).where(Group.tenant_id == tenant_id)
            if group is not None:
                statement = statement.where(Group.name == group)
            if kind is not None:
                statement = statement.where(Version.kind == kind)
            if cursor is not None:
                try:
                    last = self._owned(session, tenant_id, cursor)
                except NotFound:
                    raise InvalidInput(
                        f"the cursor {cursor!r} names no place in the list"
                    ) from None
                older = col(Version.created_at) < last.created_at
                beside = (col(Version.created_at) == last.created_at) & (Version.id < last.id)
                statement = statement.where(older | beside)
            order = (col(Version.created_at).desc(), col(Version.id).desc())
            rows = session.exec(statement.order_by(*order).limit(limit + 1)).all()
            items = self._views(session, rows[:limit])
            return Page(items=[*items], cursor=items[-1].id if len(rows) > limit else None)

    def adopt(self, version: VersionView, tenant_id: str) -> VersionView:
        """A tenant's own version of a base model that is served to all: made when missing.

        Its bytes are the other's; so every tenant can name the base model, have it as a
        parent, merge into it and measure against it, as its own.

        Raises:
            InvalidInput: if the version is no imported full model.
        """
        if version.tenant_id == tenant_id:
            return version
        if (version.kind, version.origin) != (Kind.MERGED, Origin.IMPORT):
            raise InvalidInput(f"{version.reference} is no base model: it is its tenant's own")
        manifest = Manifest(
            digest=version.digest,
            size_bytes=version.size_bytes,
            files=tuple(ManifestFile(**file.model_dump()) for file in version.files),
        )
        new = NewVersion(
            tenant_id=tenant_id,
            group=version.group,
            kind=version.kind,
            origin=version.origin,
            base_model=version.base_model,
            base_digest=version.base_digest,
            provenance=version.provenance,
            source_key=base_key(tenant_id, version.digest),
        )
        return self.register(new, manifest)

    def adopt_bases(self, tenant_id: str) -> None:
        """Give a tenant every base model that is served."""
        with self._db.read() as session:
            keys = col(Version.source_key).startswith(BASE_KEY)
            rows = session.exec(select(Version).where(keys)).all()
            bases = {view.digest: view for view in self._views(session, rows)}
        for base in bases.values():
            self.adopt(base, tenant_id)

    def groups(self, tenant_id: str) -> Sequence[GroupView]:
        """A tenant's groups by name, with how many versions each has."""
        with self._db.read() as session:
            statement = (
                select(Group, func.count(col(Version.id)))
                .join(Version, isouter=True)
                .where(Group.tenant_id == tenant_id)
                .group_by(col(Group.id))
                .order_by(Group.name)
            )
            return [
                GroupView(id=group.id, name=group.name, versions=n, created_at=group.created_at)
                for group, n in session.exec(statement)
            ]

    def lineage(self, tenant_id: str, reference: str) -> LineageView:
        """A version, all it came from, and all that was made of it.

        Raises:
            NotFound: as `get`.
        """
        with self._db.read() as session:
            version = self.find(session, tenant_id, reference)
            up = (VersionParent.child_id, VersionParent.parent_id)
            ancestors = self._walk(session, version.id, *up)
            descendants = self._walk(session, version.id, *reversed(up))
            return LineageView(
                version=self._view(session, version),
                ancestors=[*self._views(session, ancestors)],
                descendants=[*self._views(session, descendants)],
            )

    @staticmethod
    def _walk(session: Session, start: str, here: Any, there: Any) -> Sequence[Version]:
        """Every version reached from one by the edges ``here -> there``, nearest first."""
        seen, edge = {start: None}, [start]
        while edge:
            reached = session.exec(select(there).where(here.in_(edge))).all()
            edge = [version for version in dict.fromkeys(reached) if version not in seen]
            seen |= dict.fromkeys(edge)
        del seen[start]
        rows = session.exec(select(Version).where(col(Version.id).in_(list(seen)))).all()
        by_id = {row.id: row for row in rows}
        return [by_id[version] for version in seen]

    @staticmethod
    def _owned(session: Session, tenant_id: str, version_id: str) -> Version:
        statement = select(Version).join(Group).where(Group.tenant_id == tenant_id)
        version = session.exec(statement.where(Version.id == version_id)).one_or_none()
        if version is None:
            raise NotFound(f"there is no version with id {version_id}")
        return version

    def _view(self, session: Session, version: Version) -> VersionView:
        return self._views(session, [version])[0]

    @staticmethod
    def _views(session: Session, versions: Iterable[Version]) -> Sequence[VersionView]:
        """Views of many rows with three queries, however many they are."""
        rows = list(versions)
        ids = [row.id for row in rows]
        named = select(Group).where(col(Group.id).in_({row.group_id for row in rows}))
        groups = {group.id: group for group in session.exec(named)}
        parents: defaultdict[str, list[str]] = defaultdict(list)
        edges = select(VersionParent).where(col(VersionParent.child_id).in_(ids))
        for edge in session.exec(edges.order_by(VersionParent.parent_id)):
            parents[edge.child_id].append(edge.parent_id)
        aliases: defaultdict[str, list[str]] = defaultdict(list)
        pointing = select(Alias).where(col(Alias.version_id).in_(ids)).order_by(Alias.name)
        for alias in session.exec(pointing):
            aliases[alias.version_id].append(alias.name)
        return [
            VersionView(
                **row.model_dump(exclude={"group_id", "source_key", "files"}),
                files=[FileView(**file) for file in row.files],
                tenant_id=groups[row.group_id].tenant_id,
                group=groups[row.group_id].name,
                reference=f"{groups[row.group_id].name}/{row.number}",
                parents=parents[row.id],
                aliases=aliases[row.id],
            )
            for row in rows
        ]
