"""A PostgreSQL that is restarted, or whose answers get lost: each change is made once."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import psycopg
import pytest

from researcher.store.errors import DatabaseAway, NotFound
from researcher.store.store import Store
from tests.fakes.postgres import Postgres, postgres_server


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
    return [event.detail["n"] for event in store.events(study, limit=100_000, kind="note")]


def _interrupted(store: Store, monkeypatch: pytest.MonkeyPatch, *, committed: bool) -> list[bool]:
    """Let the connection be lost with the next commit, done or not; the list is filled when it was."""
    dialect, lost = store._engine.dialect, list[bool]()
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
    study = store.create_study("a topic", {})
    store.record_event(study, "note", {"n": 0})
    lost = _interrupted(store, monkeypatch, committed=committed)
    store.record_event(study, "note", {"n": 1})
    store.record_event(study, "note", {"n": 2})
    assert lost
    assert numbers(store, study) == [0, 1, 2]


def test_through_restarts_every_change_of_several_writers_is_made_once_and_in_order(
    server: Postgres, store: Store
) -> None:
    study = store.create_study("a topic", {})
    enough = threading.Event()

    def write(writer: int) -> int:
        count = 0
        while not enough.is_set():
            store.record_event(study, "note", {"writer": writer, "n": count})
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
    events = store.events(study, limit=1_000_000, kind="note")
    for writer, count in enumerate(counts):
        assert [event.detail["n"] for event in events if event.detail["writer"] == writer] == list(range(count))


def test_what_is_wrong_is_said_at_once_and_what_is_away_for_too_long_in_the_end(
    store: Store, monkeypatch: pytest.MonkeyPatch, server: Postgres
) -> None:
    with pytest.raises(NotFound):
        store.study("st-none")
    study = store.create_study("a topic", {})
    away = Store.open(server.url, patience_s=0.2)

    def refuse(*_: Any, **__: Any) -> None:
        raise psycopg.OperationalError("connection refused")

    away._engine.dispose()
    monkeypatch.setattr(away._engine.dialect, "connect", refuse)
    with pytest.raises(DatabaseAway, match="connection refused"):
        away.study(study)
    away.close()
