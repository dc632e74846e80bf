"""The database: SQLite in WAL mode by default, PostgreSQL by URL."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from sqlalchemy import Engine, event, text
from sqlmodel import Session, SQLModel, create_engine

BUSY_MILLISECONDS = 20_000


def _configure_sqlite(connection: Any, _record: Any) -> None:
    # The driver must not open transactions by itself: `write` opens them as IMMEDIATE.
    connection.isolation_level = None
    for pragma in (
        "journal_mode=WAL",
        "synchronous=FULL",
        "foreign_keys=ON",
        f"busy_timeout={BUSY_MILLISECONDS}",
    ):
        connection.execute(f"PRAGMA {pragma}")


class Database:
    """Sessions on one engine.

    Args:
        url: a SQLAlchemy URL, ``sqlite:///file`` or ``postgresql+psycopg://...``.
    """

    def __init__(self, url: str) -> None:
        self.engine: Engine = create_engine(url)
        self._sqlite = self.engine.dialect.name == "sqlite"
        if self._sqlite:
            event.listen(self.engine, "connect", _configure_sqlite)

    @contextmanager
    def read(self) -> Iterator[Session]:
        """A session that only reads, from one snapshot."""
        with Session(self.engine, expire_on_commit=False) as session:
            if self._sqlite:
                session.execute(text("BEGIN"))
            # Closing ends the transaction; a rollback would expire the rows handed out.
            yield session

    @contextmanager
    def write(self) -> Iterator[Session]:
        """A transaction: committed on leaving, rolled back on any error.

        On SQLite it begins IMMEDIATE, so that what is read in it cannot change before it is
        written back, and waiting for another writer happens here and not at the commit.
        """
        with Session(self.engine, expire_on_commit=False) as session:
            if self._sqlite:
                session.execute(text("BEGIN IMMEDIATE"))
            try:
                yield session
                session.commit()
            except BaseException:
                session.rollback()
                raise

    def create_all(self) -> None:
        """Create every table without migrations; for tests."""
        SQLModel.metadata.create_all(self.engine)

    def close(self) -> None:
        """Close every connection."""
        self.engine.dispose()
