"""Opens the database: chooses its URL, sets transaction guarantees, upgrades the schema, and refuses a schema newer than the code."""

from __future__ import annotations

import logging
import os
import sqlite3
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from sqlalchemy import Connection, Engine, create_engine, event, inspect, text
from sqlalchemy.engine import URL, make_url
from sqlalchemy.exc import ArgumentError, DatabaseError, DBAPIError

from foundation.paths import shipped, user_data_dir
from researcher.store.errors import DatabaseAway, DatabaseRefused, StorageFailed
from researcher.store.retries import is_held, patiently
from researcher.store.tables import SCHEMA_REVISION

MIGRATION_LOCK = 0x5EA4C8
"""Key of the PostgreSQL advisory lock that lets only one process upgrade at a time."""
BUSY_TIMEOUT_S = 20
RESTART_S = 5.0
"""Seconds to retry the first connection. Long enough for a server restart, short enough to report a wrong address soon."""
_NO_ROOM = ("SQLITE_FULL", "SQLITE_IOERR")
"""SQLite errors that may mean a full disk; SQLite reports some writes on a full disk as I/O errors."""


def default_url(environ: Mapping[str, str] | None = None) -> str:
    """Return `RESEARCHER_DATABASE_URL`, or else the URL of `researcher.db` in the user data directory.

    The path in a SQLite URL is made absolute. Raises: DatabaseRefused when the URL names neither SQLite nor PostgreSQL.
    """
    env = os.environ if environ is None else environ
    given = env.get("RESEARCHER_DATABASE_URL")
    if not given:
        return sqlite_url(user_data_dir(env) / "researcher.db")
    file, options = sqlite_file(given), given.partition("?")
    return given if file is None else "".join((sqlite_url(file), *options[1:]))


def sqlite_url(file: Path) -> str:
    """Return the SQLite URL of `file`, with `%` and `?` escaped."""
    return "sqlite:///" + str(file).replace("%", "%25").replace("?", "%3F")


def sqlite_file(url: str) -> Path | None:
    """Return the file of a SQLite URL, with `~` expanded, or None for PostgreSQL.

    Raises: DatabaseRefused when the URL names neither.
    """
    parsed = _parse(url)
    return Path(str(parsed.database)) if parsed.get_backend_name() == "sqlite" else None


def place_of(url: str) -> str:
    """Return the kind, host, port and name of a URL's database, without user, password and options, so that two URLs can be
    compared.

    Raises: DatabaseRefused.
    """
    parsed = _parse(url)
    return f"{parsed.get_backend_name()} {parsed.host} {parsed.port} {parsed.database}"


def connect(url: str) -> Engine:
    """Create an engine whose write transactions run one at a time (SQLite) or lock rows (PostgreSQL).

    Raises: DatabaseRefused when the URL names neither SQLite nor PostgreSQL.
    """
    parsed = _parse(url)
    if parsed.get_backend_name() == "sqlite":
        Path(str(parsed.database)).parent.mkdir(parents=True, exist_ok=True)
        engine = _engine_of(parsed, connect_args={"timeout": BUSY_TIMEOUT_S})
        event.listen(engine, "connect", _prepare_sqlite)
        event.listen(engine, "begin", _begin_sqlite)
        return engine
    return _engine_of(parsed, pool_pre_ping=True)


def _engine_of(url: URL, **options: Any) -> Engine:
    """Create the engine. Raises: DatabaseRefused when the URL's options after `?` are invalid."""
    try:
        return create_engine(url, **options)
    except (ArgumentError, ValueError) as error:
        raise DatabaseRefused(
            f"the options of the database URL ({', '.join(url.query)}) cannot be read: {error}"
        ) from error


def upgrade(engine: Engine) -> None:
    """Upgrade the schema to this code's revision, one process at a time. Costs one query if the schema is current.

    Waits a few seconds for a server that is restarting. Raises: DatabaseRefused when the database cannot be reached or was made
    by newer code.
    """
    shown = engine.url.render_as_string(hide_password=True)
    try:
        patiently(lambda: _upgrade(engine, shown), RESTART_S if engine.dialect.name == "postgresql" else 0.0)
    except DatabaseError as error:
        raise _refused(engine, error) from error
    except (DatabaseAway, StorageFailed) as error:
        cause = error.__cause__
        assert isinstance(cause, DBAPIError)
        raise _refused(engine, cause) from cause


def _upgrade(engine: Engine, shown: str) -> None:
    with engine.connect() as connection:
        if _revision(connection) == SCHEMA_REVISION:
            return
    with engine.begin() as connection:
        if connection.dialect.name == "postgresql":
            connection.execute(text("SELECT pg_advisory_xact_lock(:key)"), {"key": MIGRATION_LOCK})
        _migrate(connection, shown)


def _refused(engine: Engine, error: DBAPIError) -> DatabaseRefused:
    shown = engine.url.render_as_string(hide_password=True)
    reason = "; ".join(line.strip() for line in str(error.orig).splitlines() if line.strip())
    return DatabaseRefused(f"cannot open {shown}: {reason}; {_advice(engine, error)}")


def _advice(engine: Engine, error: DBAPIError) -> str:
    if engine.dialect.name != "sqlite":
        return "check RESEARCHER_DATABASE_URL"
    if is_held(error):
        return "another program has locked the database: stop it, or wait for it"
    if str(getattr(error.orig, "sqlite_errorname", "")).startswith(_NO_ROOM):
        return "make room on that disk, then try again"
    if isinstance(error.orig, sqlite3.OperationalError):  # missing folder or permission
        return "check that this path, set by RESEARCHER_DATABASE_URL or else RESEARCHER_HOME, exists and is writable"
    return "the file is damaged: restore a backup, or move it away to start with an empty database"


def _parse(url: str) -> URL:
    try:
        parsed = make_url(url)
    except (ArgumentError, ValueError) as error:  # ValueError: the port is not a number
        raise DatabaseRefused(
            "the database URL cannot be read; write postgresql://user@host/name or sqlite:///file"
        ) from error
    backend = parsed.drivername.split("+")[0]
    if backend in ("postgres", "postgresql"):
        return parsed.set(drivername="postgresql+psycopg")
    if backend == "sqlite":
        return parsed.set(drivername="sqlite", database=str(_lasting_file(parsed)))
    raise DatabaseRefused(f"database {backend!r} is not supported; use sqlite or postgresql")


def _lasting_file(url: URL) -> Path:
    name = url.database or ""
    if name in ("", ":memory:") or name.startswith("file:"):
        raise DatabaseRefused(f"{url} does not name a permanent file; write sqlite:////home/you/researcher.db")
    return Path(os.path.expanduser(name)).absolute()


def _prepare_sqlite(connection: sqlite3.Connection, _record: Any) -> None:
    # The driver would begin transactions too late; `_begin_sqlite` does it instead.
    connection.isolation_level = None
    for pragma in ("journal_mode=WAL", "synchronous=FULL", "foreign_keys=ON", f"busy_timeout={BUSY_TIMEOUT_S * 1000}"):
        connection.execute(f"PRAGMA {pragma}")


def _begin_sqlite(connection: Connection) -> None:
    """Lock at the start of a write transaction, so that the data it reads cannot change before it writes."""
    reads = connection.get_execution_options().get("read_only", False)
    connection.exec_driver_sql("BEGIN" if reads else "BEGIN IMMEDIATE")


def _revision(connection: Connection) -> str | None:
    if not inspect(connection).has_table("alembic_version"):
        return None
    row = connection.execute(text("SELECT version_num FROM alembic_version")).first()
    return None if row is None else str(row[0])


def _migrate(connection: Connection, shown: str) -> None:
    # Alembic takes a fifth of a second to import, is needed only here, and would log each of its plugins.
    logging.getLogger("alembic").setLevel(logging.WARNING)
    from alembic import command
    from alembic.config import Config
    from alembic.script import ScriptDirectory

    config = Config()
    config.set_main_option("script_location", str(shipped("migrations")).replace("%", "%%"))
    config.attributes["connection"] = connection
    known = {script.revision for script in ScriptDirectory.from_config(config).walk_revisions()}
    current = _revision(connection)
    if current is not None and current not in known:
        raise DatabaseRefused(
            f"{shown} has schema revision {current}, which this version does not know: a newer version made it. "
            "Update swarm-researcher, or point RESEARCHER_DATABASE_URL at another database"
        )
    command.upgrade(config, "head")
