"""The migrations make what the models say, on both databases, and are found."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from alembic import command
from alembic.autogenerate import compare_metadata
from alembic.config import Config
from alembic.migration import MigrationContext
from alembic.script import ScriptDirectory

from researcher.store.database import connect, migrations_dir, upgrade
from researcher.store.store import Store
from researcher.store.tables import SCHEMA_REVISION, Base
from tests.fakes.postgres import fresh_database


@pytest.fixture(params=["sqlite", "postgresql"])
def url(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[str]:
    if request.param == "sqlite":
        yield f"sqlite:///{tmp_path}/r.db"
        return
    with fresh_database(request.getfixturevalue("postgres_url")) as found:
        yield found


def test_an_empty_database_is_brought_to_what_the_models_say(url: str) -> None:
    engine = connect(url)
    upgrade(engine)
    upgrade(engine)
    with engine.connect() as connection:
        context = MigrationContext.configure(connection, opts={"compare_type": True})
        assert context.get_current_revision() == SCHEMA_REVISION
        assert compare_metadata(context, Base.metadata) == []
    engine.dispose()


def test_records_of_the_first_release_are_kept(url: str) -> None:
    engine, config = connect(url), _config()
    with engine.begin() as connection:
        config.attributes["connection"] = connection
        command.upgrade(config, "0001")
        connection.exec_driver_sql(
            "INSERT INTO studies (id, topic, options, status, stop_requested, pause_requested, created_at, updated_at) "
            "VALUES ('st-1', 'a topic', '{}', 'running', false, false, 1.5, 2.5)"
        )
    engine.dispose()
    store = Store.open(url)
    [study] = store.studies()
    assert (study.id, study.topic, study.created_at) == ("st-1", "a topic", 1.5)
    store.request_pause("st-1")
    assert store.study("st-1").pause_requested
    store.close()


def _config() -> Config:
    config = Config()
    config.set_main_option("script_location", str(migrations_dir()))
    return config


def test_the_code_names_the_newest_migration() -> None:
    config = _config()
    assert ScriptDirectory.from_config(config).get_heads() == [SCHEMA_REVISION]
