"""LangGraph in the study's own database: where its graphs keep their place, and the gates at which a person decides.

gate = Gate(url, "st-1", "plan/1")
answer = gate.ask({"hash": …})  # None: nobody has answered yet; so says gate.answer()
gate.give(Answer(verdict="approve", by="ada"))
"""

from __future__ import annotations

import sqlite3
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Literal, TypedDict, TypeVar

import psycopg
from langchain_core.runnables import RunnableConfig
from langgraph.checkpoint.base import BaseCheckpointSaver
from langgraph.checkpoint.postgres import PostgresSaver
from langgraph.checkpoint.sqlite import SqliteSaver
from langgraph.graph import END, START, StateGraph
from langgraph.types import Command, interrupt

from foundation.strict import StrictModel
from researcher.store.database import sqlite_file
from researcher.store.outages import PATIENCE_S, is_held, of_driver, patiently

_BUSY_S = 20.0
PLANNING_PATIENCE_S = 60.0
"""While a plan is made: a person sits before it, and one Ctrl-C waits for the end of it."""

T = TypeVar("T")
Saver = BaseCheckpointSaver[str]


def with_saver(url: str | None, work: Callable[[Saver | None], T], patience_s: float | None = None) -> T:
    """The work done with LangGraph's saver in that database, SQLite or PostgreSQL; None for no database.

    While the database is away, or another program holds it, the work is begun anew: it must find its place in what was kept.
    patience_s: how long it is tried, ten minutes unless stated.
    Raises: DatabaseAway when patience ends; OSError when SQLite's disk fails.
    """
    if url is None:
        return work(None)

    def once() -> T:
        with _saver_in(url) as saver:
            return work(saver)

    return patiently(once, patience_s or PATIENCE_S)


def caught_up(graph: Any, config: RunnableConfig) -> Any:
    """The graph's state at its next question or its end: what an outage or a crash cut off is done first."""
    state = graph.get_state(config)
    if state.tasks and not state.interrupts:
        graph.invoke(None, config, durability="sync")
        state = graph.get_state(config)
    return state


@contextmanager
def _saver_in(url: str) -> Iterator[Saver]:
    """Raises: DBAPIError when the database is away; OSError."""
    file = sqlite_file(url)
    if file is not None:
        connection = sqlite3.connect(file, check_same_thread=False, timeout=_BUSY_S)
        try:
            yield SqliteSaver(connection)
        except sqlite3.OperationalError as error:
            if is_held(held := of_driver(error)):
                raise held from error
            raise OSError(
                f"the plan cannot be kept in {file}: {error}; make room on that disk, then start again"
            ) from error
        finally:
            connection.close()
    else:
        scheme, _, rest = url.partition("://")
        try:
            with PostgresSaver.from_conn_string(f"{scheme.split('+')[0]}://{rest}") as saver:
                saver.setup()
                yield saver
        except psycopg.OperationalError as error:
            raise of_driver(error) from error


# -- gates ----------------------------------------------------------------------------------------------------------


class Answer(StrictModel):
    """What a person said at a gate. words: why; what a rejection is for."""

    verdict: Literal["approve", "reject"]
    words: str = ""
    by: str = ""


class _State(TypedDict, total=False):
    question: dict[str, Any]
    answer: dict[str, Any]


class Gate:
    """One question to people about one study. Asked again it is the same question; its first answer stays.

    name: `plan/1` (the plan's version) or `stage/compare`.
    """

    def __init__(self, checkpoints: str, study_id: str, name: str) -> None:
        self._checkpoints = checkpoints
        self._config: RunnableConfig = {"configurable": {"thread_id": f"gate/{study_id}/{name}"}}

    def ask(self, question: dict[str, Any]) -> Answer | None:
        """Put the question, unless it was put before. Returns the answer, None while there is none."""

        def put(graph: Any) -> Answer | None:
            if not caught_up(graph, self._config).values:
                graph.invoke(_State(question=question), self._config, durability="sync")
            return _answer(graph.get_state(self._config).values)

        return self._on(put)

    def answer(self) -> Answer | None:
        """What was answered; None while nobody has."""
        return self._on(lambda graph: _answer(graph.get_state(self._config).values))

    def waits(self) -> bool:
        """Whether it was asked and nobody has answered."""
        values = self._on(lambda graph: graph.get_state(self._config).values)
        return bool(values) and _answer(values) is None

    def give(self, answer: Answer) -> Answer:
        """Answer; returns the answer that counts, which is an earlier one where there is one.

        Raises: LookupError when nothing was asked.
        """

        def take(graph: Any) -> Answer:
            state = caught_up(graph, self._config)
            if not state.values:
                raise LookupError("nothing was asked at this gate")
            if state.next:
                graph.invoke(Command(resume=answer.model_dump()), self._config, durability="sync")
            given = _answer(graph.get_state(self._config).values)
            assert given is not None
            return given

        return self._on(take)

    def _on(self, work: Callable[[Any], T]) -> T:
        """The work on the gate's graph. Raises: DatabaseAway; OSError when SQLite's disk fails."""
        return with_saver(self._checkpoints, lambda saver: work(_graph(saver)))


def _graph(saver: BaseCheckpointSaver[str] | None) -> Any:
    def ask(state: _State) -> _State:
        return {"answer": interrupt(state["question"])}

    graph: StateGraph[_State, None, _State, _State] = StateGraph(_State)
    graph.add_node("ask", ask)
    graph.add_edge(START, "ask")
    graph.add_edge("ask", END)
    return graph.compile(checkpointer=saver)


def _answer(values: dict[str, Any]) -> Answer | None:
    given = values.get("answer")
    return None if given is None else Answer.model_validate(given)
