"""Gates at which a person decides: a LangGraph interrupt per gate, kept in the study's database until it is answered.

gate = Gate(url, "st-1", "plan/1")
answer = gate.ask({"hash": …})  # None: nobody has answered yet; so says gate.answer()
gate.give(Answer(verdict="approve", by="ada"))
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal, TypedDict, TypeVar

from langchain_core.runnables import RunnableConfig
from langgraph.checkpoint.base import BaseCheckpointSaver
from langgraph.graph import END, START, StateGraph
from langgraph.types import Command, interrupt

from foundation.strict import StrictModel
from researcher.planner.saving import caught_up, with_saver

T = TypeVar("T")


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
