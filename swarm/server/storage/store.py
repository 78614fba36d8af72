"""The pool on disk: one SQLite file in write-ahead mode, with an fsync per commit. Knows rows, but no rules."""

from __future__ import annotations

import logging
import sqlite3
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import orjson

from swarm.protocol.errors import ErrorCode, Refusal, SwarmError
from swarm.server.state.rows import (
    Change,
    ConfigRow,
    DropUnkept,
    EpisodeRow,
    FreeCalls,
    GroupRow,
    KeepSteps,
    PutCalls,
    PutMeta,
    RunRow,
    SetFate,
    StepRow,
    SupersedeAfter,
    TeamRow,
    VersionRow,
)
from swarm.server.storage import schema
from swarm.server.storage.reader import Reader
from swarm.server.storage.summary import tallies

_LOG = logging.getLogger(__name__)
BUSY_S = 5.0
"""SQLite busy timeout, in seconds."""
PAGE_CACHE_KIB = 16_384
"""Size of SQLite's page cache: enough for one commit; the operating system caches the other pages."""


class StorageUnreadable(SwarmError):
    """The file cannot be read as this server's database."""


class Store:
    """The rows of one server. To write, call `begin`, `apply` any number of times, then `commit` or `rollback`; or just `write`.

    Not thread-safe, except that `commit`, which waits for the disk, may run in a different thread.
    """

    def __init__(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self.path = path
        self._failing = False
        self._db = sqlite3.connect(path, isolation_level=None, check_same_thread=False, timeout=BUSY_S)
        try:
            self._prepare()
            self.read = Reader(path)
        except sqlite3.OperationalError as error:
            self._db.close()
            raise _refusal(error, path) from error
        except (sqlite3.DatabaseError, SwarmError) as error:
            self._db.close()
            raise StorageUnreadable(f"cannot read {path} as this server's database: {error}") from error

    def _prepare(self) -> None:
        db = self._db
        db.execute("PRAGMA journal_mode = WAL")
        db.execute("PRAGMA synchronous = FULL")
        db.execute(f"PRAGMA cache_size = -{PAGE_CACHE_KIB}")
        found = db.execute("PRAGMA user_version").fetchone()[0]
        if found == schema.SCHEMA_VERSION:
            db.executescript(schema.ADDED + schema.BY_CAUSE + schema.BY_SUSPICION)
            known = "SELECT count(*) FROM pragma_table_info('tallies') WHERE name = 'prompt_tokens'"
            if not db.execute(known).fetchone()[0]:
                db.executescript(f"BEGIN;{tallies()}COMMIT;")
            return
        if found != 0 or db.execute("SELECT count(*) FROM sqlite_master").fetchone()[0]:
            raise StorageUnreadable(
                f"{self.path} is a pool of version {found}, but this server reads version {schema.SCHEMA_VERSION}; "
                "start it with another state directory"
            )
        db.executescript(
            f"BEGIN;{schema.SCHEMA}{schema.ADDED}{schema.BY_CAUSE}{schema.BY_SUSPICION}{tallies()}"
            f"PRAGMA user_version = {schema.SCHEMA_VERSION};COMMIT;"
        )

    def close(self) -> None:
        self.read.close()
        self._db.close()

    # -- writing --------------------------------------------------------------------------------------------------

    def begin(self) -> None:
        self._guarded(lambda: self._db.execute("BEGIN IMMEDIATE"))

    def apply(self, changes: Sequence[Change]) -> None:
        """Apply changes in the open transaction. Raises: Refusal(STORAGE_FULL); then call `rollback`."""
        self._guarded(lambda: self._apply(changes))

    def commit(self) -> None:
        """Commit everything applied since `begin` to disk. Raises: Refusal(STORAGE_FULL); then call `rollback`."""
        self._guarded(lambda: self._db.execute("COMMIT"))
        if self._failing:
            self._failing = False
            _LOG.warning("the pool at %s is writable again", self.path)

    def rollback(self) -> None:
        """Undo everything applied since `begin`. Does nothing if no transaction is open."""
        if self._db.in_transaction:
            self._db.execute("ROLLBACK")

    def write(self, changes: Sequence[Change]) -> None:
        """Write the changes to disk, either all of them or, on an error, none."""
        try:
            self.begin()
            self.apply(changes)
            self.commit()
        except (Refusal, sqlite3.Error):
            self.rollback()
            raise

    def _guarded(self, action: Callable[[], Any]) -> None:
        try:
            action()
        except sqlite3.OperationalError as error:
            refusal = _refusal(error, self.path)
            if isinstance(refusal, Refusal) and not self._failing:  # log it once; every caller gets the refusal
                self._failing = True
                _LOG.warning("%s", refusal)
            raise refusal from error

    def _apply(self, changes: Sequence[Change]) -> None:
        execute = self._db.execute
        for change in changes:
            match change:
                case EpisodeRow():
                    body = orjson.dumps(schema.body_of(change))
                    execute(schema.PUT_EPISODE, (*schema.columns_of(change), body))
                case PutCalls(seq, body):
                    execute("INSERT OR REPLACE INTO calls VALUES (?, ?)", (seq, body))
                case SetFate(episode_id, state, reason, step, detail):
                    execute(schema.SET_FATE, (state, reason, step, detail, episode_id))
                case GroupRow():
                    execute(schema.PUT_GROUP, schema.group_columns_of(change))
                case VersionRow():
                    key = (change.run_id, change.mix or "", change.client_version, change.first_at)
                    execute(schema.PUT_VERSION, (*key, orjson.dumps(change)))
                case _:
                    self._apply_rare(change)

    def _apply_rare(self, change: Change) -> None:
        execute = self._db.execute
        match change:
            case RunRow():
                key = (change.seq, change.run_id, change.idempotency_key)
                execute("INSERT OR REPLACE INTO runs VALUES (?, ?, ?, ?)", (*key, orjson.dumps(change)))
            case ConfigRow(run_id=run_id, config_version=version, at=at, by=by, patch=patch, spec=spec):
                body = (orjson.dumps(patch), orjson.dumps(spec))
                execute("INSERT OR REPLACE INTO configs VALUES (?, ?, ?, ?, ?, ?)", (run_id, version, at, by, *body))
            case StepRow():
                execute("INSERT OR REPLACE INTO steps VALUES (?, ?, ?, ?, ?, ?, ?, ?)", _step_values(change))
            case TeamRow():
                execute("INSERT OR REPLACE INTO teams VALUES (?, ?)", (change.seq, orjson.dumps(change)))
            case PutMeta(name, value):
                execute("INSERT OR REPLACE INTO meta VALUES (?, ?)", (name, value))
            case KeepSteps(run_id, after, through):
                execute(schema.KEEP_STEPS, (run_id, after, through))
            case DropUnkept(run_id, after, detail):
                execute(schema.DROP_UNKEPT, (detail, run_id, after))
                execute(schema.ABANDON_STEPS, (run_id,))
            case SupersedeAfter(run_id, step, detail):
                where = {"run_id": run_id, "step": step}
                execute(schema.SUPERSEDE_EPISODES, where | {"detail": detail})
                execute(schema.SUPERSEDE_EVALS, where | {"detail": detail})
                execute(schema.SUPERSEDE_STEPS, where)
            case FreeCalls(run_id, through, traces_from):
                execute(schema.FREE_CALLS, {"run_id": run_id, "through": through, "traces_from": traces_from})
            case _:
                raise TypeError(f"unknown kind of change: {change!r}")


_FULL = (sqlite3.SQLITE_FULL, sqlite3.SQLITE_IOERR, sqlite3.SQLITE_CANTOPEN, sqlite3.SQLITE_READONLY)


def _refusal(error: sqlite3.OperationalError, path: Path) -> Refusal | sqlite3.OperationalError:
    """Turn problems that the operator must fix into a refusal: a full or failing disk, or a file that another program holds. Other
    errors are bugs, and are returned unchanged."""
    primary_code = error.sqlite_errorcode & 0xFF
    if primary_code == sqlite3.SQLITE_BUSY:
        mend = f"another program has locked it for {BUSY_S:g} s; stop that program (`fuser {path}` finds it), and try again"
    elif primary_code in _FULL:
        mend = "make room on the disk and try again"
    else:
        return error
    return Refusal(
        ErrorCode.STORAGE_FULL, f"the pool at {path} could not be written ({error}); nothing was stored: {mend}"
    )


def _step_values(row: StepRow) -> tuple[Any, ...]:
    batch = orjson.dumps([[group.group_id, group.task_id, group.episode_ids] for group in row.groups])
    values = orjson.dumps(row.values)
    return row.run_id, row.branch, row.step, row.state, row.at, row.config_version, batch, values
