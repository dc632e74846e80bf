from __future__ import annotations

import sqlite3

import pytest
from alembic import command
from alembic.autogenerate import compare_metadata
from alembic.migration import MigrationContext
from sqlalchemy import create_engine, inspect
from sqlmodel import SQLModel

from registry import InvalidInput, Unavailable
from slipway.database import config, migrate


def test_the_migrated_database_is_what_the_models_say(tmp_path):
    url = f"sqlite:///{tmp_path / 'a.db'}"
    migrate(url)
    migrate(url)
    engine = create_engine(url)
    with engine.connect() as connection:
        context = MigrationContext.configure(connection, opts={"compare_type": True})
        assert compare_metadata(context, SQLModel.metadata) == []
        # The comparison would notice: it saw every table.
        assert set(SQLModel.metadata.tables) <= set(inspect(connection).get_table_names())
    engine.dispose()


def test_it_goes_down_and_up_again(tmp_path):
    url = f"sqlite:///{tmp_path / 'a.db'}"
    migrate(url)
    command.downgrade(config(url), "base")
    engine = create_engine(url)
    assert set(inspect(engine).get_table_names()) == {"alembic_version"}
    migrate(url)
    assert "package_version" in inspect(engine).get_table_names()
    engine.dispose()


def test_the_keys_of_an_older_home_stay_as_mighty_as_they_were(tmp_path):
    url = f"sqlite:///{tmp_path / 'a.db'}"
    command.upgrade(config(url), "0001")
    with sqlite3.connect(tmp_path / "a.db") as connection:
        for name in ("default", "other"):
            connection.execute("insert into tenant values (?, ?, '2026-01-01')", (name, name))
            connection.execute(
                "insert into api_key (id, tenant_id, name, hint, sha256, created_at) "
                "values (?, ?, 'home', 'abcd', ?, '2026-01-01')",
                (name, name, name),
            )
    connection.close()
    migrate(url)
    with sqlite3.connect(tmp_path / "a.db") as connection:
        roles = dict(connection.execute("select id, role from api_key").fetchall())
    connection.close()
    assert roles == {"default": "admin", "other": "member"}


def test_a_percent_sign_in_an_address_is_no_interpolation():
    url = "postgresql://me:p%40ss@host/db"
    assert config(url).get_main_option("sqlalchemy.url") == url


@pytest.mark.parametrize("url", ["garbage", "nonsense://u:hunter2@h/d", "sqlite+none:///x"])
def test_what_is_no_database_is_said_without_its_password(url):
    with pytest.raises(InvalidInput, match="SLIPWAY_DATABASE_URL") as caught:
        migrate(url)
    assert "hunter2" not in caught.value.message


def test_a_database_of_a_newer_version_is_left_alone(tmp_path):
    url = f"sqlite:///{tmp_path / 'a.db'}"
    migrate(url)
    with sqlite3.connect(tmp_path / "a.db") as connection:
        connection.execute("update alembic_version set version_num = '9999'")
    connection.close()
    with pytest.raises(InvalidInput, match="newer version"):
        migrate(url)


def test_a_file_that_is_no_database_is_named(tmp_path):
    (tmp_path / "a.db").write_text("not a database at all, only some words " * 100)
    with pytest.raises(Unavailable, match=r"a\.db cannot be used: file is not a database"):
        migrate(f"sqlite:///{tmp_path / 'a.db'}")
