"""Retries work that a database outage interrupts, without doing anything twice.

If the connection is lost before the commit, the transaction is rolled back. If it is lost during the commit, the outcome is
unknown. So each transaction also updates a receipt, a row that belongs to its writer. After a lost answer, the receipt shows
whether the transaction was committed. The transaction locks that row, so reading it waits while the server is still committing.
SQLite has no connection to lose and needs no receipts, but another program may lock its file.
"""

from __future__ import annotations

import functools
import logging
import threading
import time
from collections.abc import Callable
from typing import Any, Concatenate, ParamSpec, Protocol, TypeVar

from sqlalchemy import Engine, delete, insert, select, update
from sqlalchemy.exc import DBAPIError
from sqlalchemy.orm import Session

from foundation.clock import Clock
from foundation.ids import Ids
from researcher.store.errors import DatabaseAway, StorageFailed
from researcher.store.tables import ReceiptRow

_log = logging.getLogger(__name__)
PATIENCE_S = 600.0
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.05, 5.0
_KEPT_S = 30 * 86_400.0
"""Receipts that were not updated for this many seconds are deleted."""
_SHUTTING_DOWN = ("57P01", "57P02", "57P03")
"""SQLSTATEs of a server that is shutting down or does not accept connections yet."""

_STORAGE = ("SQLITE_FULL", "SQLITE_IOERR", "SQLITE_READONLY", "SQLITE_CANTOPEN", "SQLITE_CORRUPT", "SQLITE_NOTADB")
_HELD = ("SQLITE_BUSY", "SQLITE_LOCKED")
_NO_ROOM = ("53100", "58030")
"""SQLSTATEs of a full or failing disk."""

P = ParamSpec("P")
R = TypeVar("R")


class Waiting:
    """Whether to keep waiting for a database that is away. A signal handler calls `end`; after that, nothing is retried."""

    def __init__(self) -> None:
        self.ended = False

    def end(self) -> None:
        self.ended = True


waiting = Waiting()


class Retries:
    """Retries for one database, for at most `patience_s` seconds."""

    def __init__(self, engine: Engine, clock: Clock, ids: Ids, patience_s: float = PATIENCE_S) -> None:
        self._engine = engine
        self._clock = clock
        self._ids = ids
        self._patience_s = patience_s
        self._may_be_lost = engine.dialect.name == "postgresql"
        self._thread = threading.local()
        """Holds `writer`, the name of this thread's receipt row, and `number`, the number of its newest transaction."""

    def patiently(self, work: Callable[[], R]) -> R:
        """Call the function `patiently` with this database's retry time."""
        return patiently(work, self._patience_s)

    def commit(self, session: Session) -> None:
        """Commit; if the answer is lost, check the receipt. Raises: DBAPIError when the transaction was not committed."""
        if not self._may_be_lost:
            session.commit()
            return
        number = self._sign(session)
        try:
            session.commit()
        except DBAPIError as error:
            if not passes(error) or not self.patiently(lambda: self._was_committed(number)):
                raise
            _log.warning("a transaction was committed although the answer was lost")

    def _sign(self, session: Session) -> int:
        if not hasattr(self._thread, "writer"):
            self._enrol()
        self._thread.number += 1
        number: int = self._thread.number
        values = {"number": number, "at": self._clock.now()}
        session.execute(update(ReceiptRow).where(ReceiptRow.writer == self._thread.writer).values(**values))
        return number

    def _enrol(self) -> None:
        """Insert this thread's receipt row in advance, because a missing row cannot be locked."""
        writer, now = self._ids.new("writer"), self._clock.now()
        with self._engine.begin() as connection:
            connection.execute(delete(ReceiptRow).where(ReceiptRow.at < now - _KEPT_S))
            connection.execute(insert(ReceiptRow).values(writer=writer, number=0, at=now))
        self._thread.writer, self._thread.number = writer, 0

    def _was_committed(self, number: int) -> bool:
        with self._engine.begin() as connection:
            mine = select(ReceiptRow.number).where(ReceiptRow.writer == self._thread.writer)
            return connection.execute(mine.with_for_update()).scalar() == number


def patiently(work: Callable[[], R], patience_s: float = PATIENCE_S) -> R:
    """Run `work`, and retry it while the database is away. Running it twice must be harmless.

    Raises: DatabaseAway after `patience_s` seconds, or once `waiting` has ended; StorageFailed when the disk fails or is full.
    """
    began, pause_s = time.monotonic(), _FIRST_PAUSE_S
    while True:
        try:
            return work()
        except DBAPIError as error:
            if _is_storage(error):
                raise StorageFailed(_words(error)) from error
            if not passes(error):
                raise
            waited_s = time.monotonic() - began  # includes the time of the tries themselves
            if waited_s >= patience_s or waiting.ended:
                raise DatabaseAway(waited_s, _words(error)) from error
            _log.warning("the database does not answer (%s); retrying in %.2f s", _words(error), pause_s)
        time.sleep(pause_s)  # blocks the thread: code in an event loop has to call this from a worker thread
        pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)


def of_driver(error: Exception) -> DBAPIError:
    """Wrap a driver error that did not pass through SQLAlchemy, so that `patiently` recognises it."""
    return DBAPIError(None, None, error)


def passes(error: DBAPIError) -> bool:
    """Return whether the error is temporary, so that a retry may work: the connection or server failed, or another writer
    conflicted."""
    if error.connection_invalidated or is_held(error):
        return True
    state = getattr(error.orig, "sqlstate", "")  # SQLite's errors have none
    if state is None:  # no server was reached
        return type(error.orig).__name__ == "OperationalError"
    return state[:2] in ("08", "40") or state in _SHUTTING_DOWN


def is_held(error: DBAPIError) -> bool:
    """Return whether another program kept the SQLite file locked for longer than the driver waits."""
    return str(getattr(error.orig, "sqlite_errorname", "")).startswith(_HELD)


def _is_storage(error: DBAPIError) -> bool:
    """Return whether the disk failed or is full."""
    name = str(getattr(error.orig, "sqlite_errorname", ""))
    return name.startswith(_STORAGE) or getattr(error.orig, "sqlstate", None) in _NO_ROOM


class HasDatabase(Protocol):
    @property
    def _db(self) -> HasRetries: ...


class HasRetries(Protocol):
    @property
    def retries(self) -> Retries: ...


S = TypeVar("S", bound=HasDatabase)


def retried(method: Callable[Concatenate[S, P], R]) -> Callable[Concatenate[S, P], R]:
    """Decorate a method of a store's part, so that it retries while the database is away."""

    @functools.wraps(method)
    def tried(self: S, /, *args: P.args, **kwargs: P.kwargs) -> R:
        return self._db.retries.patiently(functools.partial(method, self, *args, **kwargs))

    return tried


def _words(error: DBAPIError) -> str:
    lines: list[Any] = str(error.orig).strip().splitlines() or [type(error.orig).__name__]
    return f"another program has locked the database: {lines[0]}" if is_held(error) else str(lines[0])
