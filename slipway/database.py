"""Bringing a database up to the tables this version knows."""

from __future__ import annotations

from pathlib import Path

from alembic import command
from alembic.config import Config

# Tables register themselves when they are imported.
import registry.models
import serving.models
import session_core.models

MIGRATIONS = Path(__file__).parent / "migrations"
TABLES = (registry.models, session_core.models, serving.models)


def config(url: str) -> Config:
    """Alembic's configuration for one database."""
    made = Config()
    made.set_main_option("script_location", str(MIGRATIONS))
    # A percent sign, as in an encoded password, would be taken for interpolation.
    made.set_main_option("sqlalchemy.url", url.replace("%", "%%"))
    return made


def migrate(url: str) -> None:
    """Upgrade a database to the newest revision; fine if it is there."""
    command.upgrade(config(url), "head")
