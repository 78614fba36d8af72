"""A gate waits for its first answer, over processes and databases."""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from threading import Event, Thread

import pytest
from langgraph.checkpoint.postgres import PostgresSaver

from researcher.store import checkpoints as saving
from researcher.store.checkpoints import Answer, Gate
from researcher.store.errors import DatabaseAway
from tests.fakes.postgres import postgres


@pytest.fixture
def url(tmp_path: Path) -> str:
    return f"sqlite:///{tmp_path / 'records.sqlite'}"


def test_a_question_waits_until_somebody_answers(url: str) -> None:
    assert not Gate(url, "st-1", "plan/1").waits()
    assert Gate(url, "st-1", "plan/1").ask({"hash": "abc"}) is None
    assert Gate(url, "st-1", "plan/1").waits()
    assert Gate(url, "st-1", "plan/1").ask({"hash": "abc"}) is None
    given = Gate(url, "st-1", "plan/1").give(Answer(verdict="reject", words="too dear", by="ada"))
    assert given.verdict == "reject"
    assert not Gate(url, "st-1", "plan/1").waits()
    assert Gate(url, "st-1", "plan/1").ask({"hash": "abc"}) == Answer(verdict="reject", words="too dear", by="ada")


def test_the_first_answer_stays(url: str) -> None:
    gate = Gate(url, "st-1", "stage/compare")
    gate.ask({})
    gate.give(Answer(verdict="approve"))
    assert gate.give(Answer(verdict="reject")).verdict == "approve"


def test_gates_of_other_studies_are_other_gates(url: str) -> None:
    Gate(url, "st-1", "plan/1").ask({})
    Gate(url, "st-1", "plan/1").give(Answer(verdict="approve"))
    assert Gate(url, "st-2", "plan/1").ask({}) is None


def test_an_answer_to_nothing_is_refused(url: str) -> None:
    with pytest.raises(LookupError):
        Gate(url, "st-1", "plan/1").give(Answer(verdict="approve"))


def test_a_database_that_somebody_holds_is_waited_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A question and its answer are kept once, however often they had to be tried."""
    monkeypatch.setattr(saving, "_BUSY_S", 0.05)
    file = tmp_path / "records.sqlite"
    gate = Gate(f"sqlite:///{file}", "st-1", "plan/1")
    with _held(file, 0.5):
        assert gate.ask({"hash": "abc"}) is None
    with _held(file, 0.5):
        assert gate.give(Answer(verdict="approve", by="ada")) == Answer(verdict="approve", by="ada")
    assert gate.give(Answer(verdict="reject")).verdict == "approve"


def test_one_that_is_held_for_too_long_is_said_to_be_away(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(saving, "_BUSY_S", 0.01)
    monkeypatch.setattr(saving, "PATIENCE_S", 0.1)
    file = tmp_path / "records.sqlite"
    with _held(file, 30.0), pytest.raises(DatabaseAway, match="another program holds the database"):
        Gate(f"sqlite:///{file}", "st-1", "plan/1").ask({})


def test_a_server_that_cannot_be_reached_is_said_to_be_away(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(saving, "PATIENCE_S", 0.1)
    with pytest.raises(DatabaseAway):
        Gate("postgresql://nobody@localhost:1/nothing", "st-1", "plan/1").ask({})


def test_a_connection_that_is_lost_costs_no_question_and_no_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    real, lost = PostgresSaver.from_conn_string, list[PostgresSaver]()

    @contextmanager
    def loses(url: str) -> Iterator[PostgresSaver]:
        with real(url) as saver:
            if len(lost) % 2 == 0:  # every other time
                monkeypatch.setattr(saver, "put", lambda *_: saver.conn.close() or saver.conn.execute("SELECT 1"))
            lost.append(saver)
            yield saver

    monkeypatch.setattr(PostgresSaver, "from_conn_string", loses)
    with postgres() as url:
        gate = Gate(url, "st-1", "plan/1")
        assert gate.ask({"hash": "abc"}) is None
        assert gate.give(Answer(verdict="approve")).verdict == "approve"
        assert len(lost) == 4
        assert gate.ask({"hash": "abc"}) == Answer(verdict="approve")


@contextmanager
def _held(file: Path, seconds: float) -> Iterator[None]:
    """Another program writes in that database for so long, or until it is told to end."""
    taken, enough = Event(), Event()

    def write() -> None:
        with closing(sqlite3.connect(file, isolation_level=None)) as connection:
            connection.execute("BEGIN IMMEDIATE")
            taken.set()
            enough.wait(seconds)

    writer = Thread(target=write)
    writer.start()
    assert taken.wait(10)
    yield
    enough.set()
    writer.join()
