"""A graph keeps its place over processes and databases, also where the database is away for a while."""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from threading import Event, Thread
from typing import Any, TypedDict

import pytest
from langchain_core.runnables import RunnableConfig
from langgraph.checkpoint.postgres import PostgresSaver
from langgraph.graph import END, START, StateGraph
from langgraph.types import Command, interrupt

from researcher.store import checkpoints as saving
from researcher.store.checkpoints import Saver, caught_up, with_saver
from researcher.store.errors import DatabaseAway
from tests.fakes.postgres import postgres

PLACE: RunnableConfig = {"configurable": {"thread_id": "a place"}}


class _State(TypedDict, total=False):
    question: str
    answer: str


def _graph(saver: Saver | None) -> Any:
    graph: StateGraph[_State, None, _State, _State] = StateGraph(_State)
    graph.add_node("ask", lambda state: _State(answer=interrupt(state["question"])))
    graph.add_edge(START, "ask")
    graph.add_edge("ask", END)
    return graph.compile(checkpointer=saver)


def ask(url: str) -> str | None:
    """Put the question, unless it was put before; returns its answer."""

    def put(saver: Saver | None) -> str | None:
        graph = _graph(saver)
        if not caught_up(graph, PLACE).values:
            graph.invoke(_State(question="why?"), PLACE, durability="sync")
        answer: str | None = graph.get_state(PLACE).values.get("answer")
        return answer

    return with_saver(url, put)


def give(url: str, answer: str) -> str:
    """Returns the answer that counts."""

    def take(saver: Saver | None) -> str:
        graph = _graph(saver)
        if caught_up(graph, PLACE).next:
            graph.invoke(Command(resume=answer), PLACE, durability="sync")
        return str(graph.get_state(PLACE).values["answer"])

    return with_saver(url, take)


def test_a_database_that_somebody_holds_is_waited_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A question and its answer are kept once, however often they had to be tried."""
    monkeypatch.setattr(saving, "_BUSY_S", 0.05)
    file = tmp_path / "records.sqlite"
    url = f"sqlite:///{file}"
    with _held(file, 0.5):
        assert ask(url) is None
    with _held(file, 0.5):
        assert give(url, "yes") == "yes"
    assert give(url, "no") == "yes"


def test_one_that_is_held_for_too_long_is_said_to_be_away(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(saving, "_BUSY_S", 0.01)
    monkeypatch.setattr(saving, "PATIENCE_S", 0.1)
    file = tmp_path / "records.sqlite"
    with _held(file, 30.0), pytest.raises(DatabaseAway, match="another program has locked the database"):
        ask(f"sqlite:///{file}")


def test_a_server_that_cannot_be_reached_is_said_to_be_away(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(saving, "PATIENCE_S", 0.1)
    with pytest.raises(DatabaseAway):
        ask("postgresql://nobody@localhost:1/nothing")


def test_a_connection_that_is_lost_costs_no_question_and_no_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    real, lost = PostgresSaver.from_conn_string, list[PostgresSaver]()

    def dropped(connection: Any) -> None:
        connection.close()
        connection.execute("SELECT 1")

    @contextmanager
    def loses(url: str) -> Iterator[PostgresSaver]:
        with real(url) as saver:
            if len(lost) % 2 == 0:  # every other time
                monkeypatch.setattr(saver, "put", lambda *_: dropped(saver.conn))
            lost.append(saver)
            yield saver

    monkeypatch.setattr(PostgresSaver, "from_conn_string", loses)
    with postgres() as url:
        assert ask(url) is None
        assert give(url, "yes") == "yes"
        assert len(lost) == 4
        assert ask(url) == "yes"


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
