"""Locks between processes, for work that does not fit into a transaction.

PostgreSQL has advisory locks; with SQLite, a lock file lies next to the database. Both are released when their process ends.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from sqlalchemy import Connection, Engine, text
from sqlalchemy.exc import DBAPIError

from foundation.locks import NoLocks, locked
from researcher.store.errors import NoTurns, StorageFailed
from researcher.store.retries import Retries


@contextmanager
def turn(engine: Engine, retries: Retries, name: str) -> Iterator[None]:
    """Hold the lock called `name` while the body runs.

    Raises: DatabaseAway, StorageFailed or NoTurns before the body runs.
    """
    if engine.dialect.name == "postgresql":
        with _on_server(engine, retries, name):
            yield
    else:
        with _on_file(Path(str(engine.url.database)).with_name(f".{name}.lock")):
            yield


@contextmanager
def _on_server(engine: Engine, retries: Retries, name: str) -> Iterator[None]:
    key = {"key": int.from_bytes(hashlib.sha256(name.encode()).digest()[:8], signed=True)}

    def take() -> Connection:
        connection = engine.connect().execution_options(isolation_level="AUTOCOMMIT")
        connection.execute(text("SELECT pg_advisory_lock(:key)"), key)
        return connection

    with retries.patiently(take) as connection:
        try:
            yield
        finally:
            with suppress(DBAPIError):  # a lost connection has already released its lock
                connection.execute(text("SELECT pg_advisory_unlock(:key)"), key)


@contextmanager
def _on_file(path: Path) -> Iterator[None]:
    lock = _taken(path)
    try:
        yield
    finally:
        path.unlink(missing_ok=True)
        os.close(lock)


def _taken(path: Path) -> int:
    """Open and lock the file. The previous holder deletes it, so retry if the locked file was deleted."""
    while True:
        try:
            lock = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        except OSError as error:
            raise StorageFailed(f"{path} cannot be created ({error.strerror})") from error
        try:
            locked(lock, path)
        except NoLocks as error:
            os.close(lock)
            raise NoTurns(str(error)) from error
        if _is_at(path, lock):
            return lock
        os.close(lock)


def _is_at(path: Path, file: int) -> bool:
    try:
        return os.path.samestat(path.stat(), os.fstat(file))
    except FileNotFoundError:
        return False
