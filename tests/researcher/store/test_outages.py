"""A PostgreSQL that is restarted, or whose answers get lost, a SQLite that is held: each change is made once."""

from __future__ import annotations

import os
import signal
import sqlite3
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psycopg
import pytest

from researcher.cli import Interrupted
from researcher.cli.resume import _to_its_end
from researcher.conduct import Outcome
from researcher.store.errors import DatabaseAway, DatabaseRefused, NotFound
from researcher.store.retries import waiting
from researcher.store.store import Store
from tests.fakes.postgres import Postgres, postgres_server

DEFAULT: dict[signal.Signals, Any] = {
    signal.SIGINT: signal.default_int_handler,
    signal.SIGTERM: signal.SIG_DFL,
    signal.SIGHUP: signal.SIG_DFL,
}


@pytest.fixture(scope="module")
def server() -> Iterator[Postgres]:
    with postgres_server() as running:
        yield running


@pytest.fixture
def store(server: Postgres) -> Iterator[Store]:
    opened = Store.open(server.url)
    yield opened
    opened.close()


def numbers(store: Store, study: str) -> list[int]:
    return [event.detail["n"] for event in store.journal.events(study, "note")]


def _interrupted(store: Store, monkeypatch: pytest.MonkeyPatch, *, committed: bool) -> list[bool]:
    """Let the connection be lost with the next commit, done or not; the list is filled when it was."""
    dialect, lost = store._db.engine.dialect, list[bool]()
    real: Callable[[Any], None] = dialect.do_commit

    def commit(connection: Any) -> None:
        if lost:
            real(connection)
            return
        lost.append(True)
        if committed:
            real(connection)
        connection.dbapi_connection.close()
        raise psycopg.OperationalError("server closed the connection unexpectedly")

    monkeypatch.setattr(dialect, "do_commit", commit)
    return lost


@pytest.mark.parametrize("committed", [True, False])
def test_a_commit_whose_answer_is_lost_is_done_once(
    store: Store, monkeypatch: pytest.MonkeyPatch, committed: bool
) -> None:
    study = store.studies.create("a topic", {})
    store.journal.record(study, "note", {"n": 0})
    lost = _interrupted(store, monkeypatch, committed=committed)
    store.journal.record(study, "note", {"n": 1})
    store.journal.record(study, "note", {"n": 2})
    assert lost
    assert numbers(store, study) == [0, 1, 2]


def test_through_restarts_every_change_of_several_writers_is_made_once_and_in_order(
    server: Postgres, store: Store
) -> None:
    study = store.studies.create("a topic", {})
    enough = threading.Event()

    def write(writer: int) -> int:
        count = 0
        while not enough.is_set():
            store.journal.record(study, "note", {"writer": writer, "n": count})
            count += 1
        return count

    with ThreadPoolExecutor(3) as threads:
        writing = [threads.submit(write, writer) for writer in range(3)]
        for mode in ("immediate", "fast", "immediate", "fast"):
            written = len(numbers(store, study))
            server.restart(mode)
            while len(numbers(store, study)) < written + 30:
                assert not any(each.done() for each in writing)
        enough.set()
        counts = [each.result(timeout=60) for each in writing]
    events = store.journal.events(study, "note")
    for writer, count in enumerate(counts):
        assert [event.detail["n"] for event in events if event.detail["writer"] == writer] == list(range(count))


def test_what_is_wrong_is_said_at_once_and_what_is_away_for_too_long_in_the_end(
    store: Store, monkeypatch: pytest.MonkeyPatch, server: Postgres
) -> None:
    with pytest.raises(NotFound):
        store.studies.get("st-none")
    study = store.studies.create("a topic", {})
    away = Store.open(server.url, patience_s=0.2)

    def refuse(*_: Any, **__: Any) -> None:
        raise psycopg.OperationalError("connection refused")

    away._db.engine.dispose()
    monkeypatch.setattr(away._db.engine.dialect, "connect", refuse)
    with pytest.raises(DatabaseAway, match="connection refused"):
        away.studies.get(study)
    away.close()


@contextmanager
def held(database: Path) -> Iterator[sqlite3.Connection]:
    """By another program, until it rolls back."""
    holder = sqlite3.connect(database, isolation_level=None, check_same_thread=False)
    holder.execute("BEGIN IMMEDIATE")
    yield holder
    holder.close()


def hurried(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("researcher.store.database.BUSY_TIMEOUT_S", 0)


def test_a_sqlite_file_that_another_program_holds_for_long_is_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    hurried(monkeypatch)
    store = Store.open(f"sqlite:///{tmp_path}/r.db")
    study = store.studies.create("a topic", {})
    with held(tmp_path / "r.db") as holder, ThreadPoolExecutor(1) as thread:
        writing = thread.submit(store.journal.record, study, "note", {"n": 1})
        while "does not answer" not in caplog.text:
            assert not writing.done()
        holder.execute("ROLLBACK")
        writing.result(timeout=60)
    assert numbers(store, study) == [1]
    store.close()


def test_a_sqlite_file_that_is_held_for_too_long_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    hurried(monkeypatch)
    store = Store.open(f"sqlite:///{tmp_path}/r.db", patience_s=0.2)
    study = store.studies.create("a topic", {})
    with held(tmp_path / "r.db"), pytest.raises(DatabaseAway, match="another program has locked the database"):
        store.journal.record(study, "note", {"n": 1})
    assert numbers(store, study) == []
    store.close()


def test_whoever_is_interrupted_waits_no_longer_for_a_sqlite_file_that_is_held(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hurried(monkeypatch)
    store = Store.open(f"sqlite:///{tmp_path}/r.db")
    study = store.studies.create("a topic", {})

    async def work(number: signal.Signals) -> Outcome:
        threading.Timer(0.3, os.kill, (os.getpid(), number)).start()
        try:
            store.journal.record(study, "note", {"n": 1})
        finally:
            store.journal.record(study, "note", {"n": 2})  # what is given back at the end waits no longer either
        raise AssertionError("nobody holds the file")

    before = {each: signal.signal(each, how) for each, how in DEFAULT.items()}
    try:
        for number in DEFAULT:
            with held(tmp_path / "r.db"), pytest.raises(Interrupted):
                _to_its_end(study, work(number))
            assert {each: signal.getsignal(each) for each in DEFAULT} == DEFAULT
            assert not waiting.ended
    finally:
        for each, how in before.items():
            signal.signal(each, how)
    assert numbers(store, study) == []
    store.close()


def test_a_new_sqlite_file_that_is_held_is_refused_with_the_reason(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hurried(monkeypatch)
    with held(tmp_path / "r.db"), pytest.raises(DatabaseRefused, match="another program has locked the database"):
        Store.open(f"sqlite:///{tmp_path}/r.db")
