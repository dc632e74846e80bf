from __future__ import annotations

from alembic import command
from alembic.autogenerate import compare_metadata
from alembic.migration import MigrationContext
from sqlalchemy import create_engine, inspect
from sqlmodel import SQLModel

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


def test_a_percent_sign_in_an_address_is_no_interpolation():
    url = "postgresql://me:p%40ss@host/db"
    assert config(url).get_main_option("sqlalchemy.url") == url
