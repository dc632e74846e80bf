"""Bringing a database up to the tables this version knows."""

from __future__ import annotations

from pathlib import Path

from alembic import command
from alembic.config import Config
from alembic.util import CommandError
from sqlalchemy import make_url
from sqlalchemy.exc import ArgumentError, DBAPIError

# Tables register themselves when they are imported.
import registry.models
import serving.models
import session_core.models
from registry import InvalidInput, Unavailable

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
    """Upgrade a database to the newest revision; fine if it is there.

    Raises:
        InvalidInput: if the URL names no database that can be used, or one that a newer
            version of Slipway has upgraded.
        Unavailable: if the database does not answer.
    """
    try:
        # Not the URL itself in messages: it may hold a password.
        shown = make_url(url).render_as_string()
        command.upgrade(config(url), "head")
    except ArgumentError as error:
        raise InvalidInput(f"SLIPWAY_DATABASE_URL is no database URL: {error}") from None
    except ModuleNotFoundError as error:
        raise InvalidInput(
            f"the database {shown} needs the Python package {error.name}: install "
            "slipway-ml[postgres], or leave SLIPWAY_DATABASE_URL out to use SQLite"
        ) from None
    except CommandError as error:
        raise InvalidInput(
            f"the database {shown} cannot be upgraded ({error}): it may have been made by a newer "
            "version of Slipway"
        ) from None
    except DBAPIError as error:
        reason = " ".join(str(error.orig).split())
        raise Unavailable(f"the database {shown} cannot be used: {reason}") from None
