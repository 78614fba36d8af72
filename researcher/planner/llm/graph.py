"""Asking an LLM for a plan, as a LangGraph graph of short nodes.

    read → ask → check → write
            ↑______│              until a choice can be planned; three attempts at the most

No node waits for the LLM: `ask` interrupts the graph with the question, and whoever drives it resumes it with what came back,
be that hours later. Given a database, the graph is checkpointed there, and what was answered before a crash is not asked again.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, TypedDict

from langchain_core.runnables import RunnableConfig
from langgraph.checkpoint.memory import InMemorySaver
from langgraph.graph import END, START, StateGraph
from langgraph.types import Command, interrupt

from researcher.analysis.knowledge import known_to, told_of
from researcher.design import balance
from researcher.design.design import checked, design, fitted
from researcher.design.reading import Reading
from researcher.design.sources import pinned
from researcher.instruments.catalogue import InstrumentFolder
from researcher.instruments.instrument import Instrument
from researcher.llm.templates import filled
from researcher.planner.choosing import asked_for, model_and_rest
from researcher.planner.llm.choice import ChoiceWrong, reading_of, schema
from researcher.planner.llm.ladder import LADDER, Malformed, Unreadable, choice_in
from researcher.planner.matching import with_steps
from researcher.planner.saving import PLANNING_PATIENCE_S, caught_up, with_saver
from researcher.planner.seam import PlanRequest
from researcher.planner.wording import tokens
from researcher.planner.written import not_in_topic
from researcher.refusals import PlanningRefused
from researcher.study.plan import Plan

ATTEMPTS = 3
_PROMPTS = Path(__file__).parent / "prompts"
_KNOWN = 50
"""Findings that fit into a prompt."""
_LONGEST = 700
"""Characters of one finding there: an imported one may say much."""


@dataclass(frozen=True, slots=True)
class Question:
    """What the graph waits for. request: the fields of a chat completion besides the model's name and limits."""

    purpose: str
    request: dict[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Reply:
    """What came back: a raw answer, or why the endpoint refuses a request of this form; and what was spent by now."""

    raw: dict[str, Any] | None = None
    refused: str = ""
    tokens: int = 0
    cost: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Standing:
    """Where it is: a question that waits for its reply, or else the plan, or why there is none. tokens, cost: of all replies."""

    question: Question | None = None
    plan: Plan | None = None
    given_up: str = ""
    tokens: int = 0
    cost: float = 0.0


class Conversation:
    """The graph of one request. Its database is open only while a node runs, and not for as long as an LLM takes."""

    def __init__(self, request: PlanRequest, planner: str, checkpoints: str | None, thread: str) -> None:
        """planner: the name that the plan is signed with. checkpoints: a database URL, or None to keep nothing."""
        self._nodes = _graph(request, planner)
        self._checkpoints = checkpoints
        self._memory = InMemorySaver()
        self._config: RunnableConfig = {"configurable": {"thread_id": f"ask/{thread}"}}
        self._at = ""
        """The checkpoint at which it waits for a reply."""

    def begin(self) -> Standing:
        """Go to the first question, or to that at which a crash cut it off."""

        def to_a_question(graph: Any) -> Standing:
            if not caught_up(graph, self._config).values:
                graph.invoke(_State(attempt=1, rung=0), self._config, durability="sync")
            return self._standing(graph)

        return self._on(to_a_question)

    def give(self, reply: Reply) -> Standing:
        """Go on with what came back, to the next question or to the end."""
        raw = None if reply.raw is None else json.dumps(reply.raw)
        said = {"raw": raw, "refused": reply.refused, "tokens": reply.tokens, "cost": reply.cost}

        def go_on(graph: Any) -> Standing:
            # Elsewhere: it took the reply before the database went away.
            if _place(caught_up(graph, self._config)) == self._at:
                graph.invoke(Command(resume=said), self._config, durability="sync")
            return self._standing(graph)

        return self._on(go_on)

    def _on(self, work: Callable[[Any], Standing]) -> Standing:
        return with_saver(
            self._checkpoints,
            lambda saver: work(self._nodes.compile(checkpointer=saver or self._memory)),
            PLANNING_PATIENCE_S,
        )

    def _standing(self, graph: Any) -> Standing:
        state = graph.get_state(self._config)
        values, waiting, self._at = state.values, state.interrupts, _place(state)
        plan = values.get("plan")
        return Standing(
            question=Question(**waiting[0].value) if waiting else None,
            plan=None if plan is None else Plan.model_validate(plan),
            given_up=values.get("given_up", ""),
            tokens=values.get("tokens", 0),
            cost=values.get("cost", 0.0),
        )


def _place(state: Any) -> str:
    return str(state.config["configurable"].get("checkpoint_id", ""))


class _State(TypedDict, total=False):
    """What the nodes hand on, and a saver keeps: plain values only."""

    messages: list[dict[str, str]]
    attempt: int
    rung: int
    """How the next question is put: its number in `LADDER`."""
    raw: str
    """The answer to be checked, as JSON."""
    tokens: int
    cost: float
    draft: dict[str, Any]
    plan: dict[str, Any]
    given_up: str


def _graph(request: PlanRequest, planner: str) -> StateGraph[_State, None, _State, _State]:
    """The nodes, over one request."""
    folders = asked_for(request)
    wanted = schema(folders)

    def read(state: _State) -> _State:
        return {"messages": _messages(request, folders, wanted)}

    def ask(state: _State) -> Command[Literal["ask", "check", "__end__"]]:
        rung = LADDER[state["rung"]]
        question = {
            "purpose": f"plan, attempt {state['attempt']}, {rung.name}",
            "request": {"messages": state["messages"], **rung.form(wanted)},
        }
        said = interrupt(question)
        spent = _State(tokens=said["tokens"], cost=said["cost"])
        if said["raw"] is not None:
            return Command(goto="check", update={**spent, "raw": said["raw"]})
        if state["rung"] + 1 < len(LADDER):
            return Command(goto="ask", update={**spent, "rung": state["rung"] + 1})
        given_up = f"the endpoint refuses the request in every form; the last: {said['refused']}"
        return Command(goto="__end__", update={**spent, "given_up": given_up})

    def check(state: _State) -> Command[Literal["ask", "write", "__end__"]]:
        raw, rung = json.loads(state["raw"]), state["rung"]
        try:
            draft = _planned(raw, rung, request, folders)
        except (Unreadable, Malformed, ChoiceWrong, PlanningRefused) as error:
            if state["attempt"] == ATTEMPTS:
                given_up = f"no valid plan in {ATTEMPTS} attempts; the last: {error}"
                return Command(goto="__end__", update={"given_up": given_up})
            again = {
                "attempt": state["attempt"] + 1,
                "rung": min(rung + isinstance(error, Unreadable), len(LADDER) - 1),
                "messages": [*state["messages"], *_told(raw, str(error))],
            }
            return Command(goto="ask", update=again)
        return Command(goto="write", update={"draft": draft.model_dump(mode="json")})

    def write(state: _State) -> _State:
        draft = Plan.model_validate(state["draft"])
        plan = draft.model_copy(update={"planner": planner, "known": known_to(draft, request.known)})
        return {"plan": plan.model_dump(mode="json")}

    graph: StateGraph[_State, None, _State, _State] = StateGraph(_State)
    graph.add_node("read", read)
    graph.add_node("ask", ask)
    graph.add_node("check", check)
    graph.add_node("write", write)
    graph.add_edge(START, "read")
    graph.add_edge("read", "ask")
    graph.add_edge("write", END)
    return graph


def _planned(raw: dict[str, Any], rung: int, request: PlanRequest, folders: Sequence[InstrumentFolder]) -> Plan:
    """What the answer chooses, laid out by code. Raises: Unreadable, Malformed, ChoiceWrong, PlanningRefused."""
    folder, reading = reading_of(choice_in(raw, LADDER[rung]), folders)
    _check_written(request.topic, folder.instrument, reading)
    reading = _balanced(request.topic, folder.instrument, pinned(reading))
    model, _ = model_and_rest(request)
    draft = design(request.topic, model or folder.instrument.model, folder, reading, request.options)
    return checked(fitted(draft, folder.instrument, request.options))


def _messages(
    request: PlanRequest, folders: Sequence[InstrumentFolder], wanted: dict[str, Any]
) -> list[dict[str, str]]:
    question = filled(
        _PROMPTS,
        "question.md.jinja",
        instruments=[with_steps(folder.instrument) for folder in folders],
        known=[json.dumps(told_of(each)[:_LONGEST], ensure_ascii=False) for each in request.known[-_KNOWN:]],
        schema=json.dumps(wanted),
        topic=json.dumps(request.topic, ensure_ascii=False),
    )
    system = (_PROMPTS / "system.md").read_text(encoding="utf-8")
    return [{"role": "system", "content": system}, {"role": "user", "content": question}]


def _balanced(topic: str, instrument: Instrument, reading: Reading) -> Reading:
    """A balance is a rule of code's: the LLM chooses its levels and its metric."""
    if reading.crossed or not balance.is_asked(tokens(topic)):
        return reading
    return balance.balanced(reading, instrument)


def _check_written(topic: str, instrument: Instrument, reading: Reading) -> None:
    """Raises: ChoiceWrong for a file, data set or text that the topic does not hold: no LLM may name one; and where data are missing."""
    varied = [(reading.factor, level) for level in reading.levels]
    varied += [(each.factor, level) for each in reading.crossed for level in each.levels]
    levels = [*varied, *reading.settings]
    for factor in instrument.factors:
        if factor.type == "data" and not factor.default and factor.name not in {each.name for each, _ in levels}:
            raise ChoiceWrong(f"{instrument.name} needs its {factor.name}, as the topic names it, among the settings")
    invented = not_in_topic(topic, instrument, levels)
    if invented:
        raise ChoiceWrong(
            f"{', '.join(map(repr, invented))} does not stand in the topic as it is; texts and data are its author's to name"
        )


def _told(raw: dict[str, Any], wrong: str) -> list[dict[str, str]]:
    """What the LLM said, and what was wrong with it, verbatim."""
    said = json.dumps(raw.get("choices", raw), ensure_ascii=False)[:4000]
    told = f"That cannot be planned: {wrong}\nAnswer again with one whole JSON object by the schema, and nothing else."
    messages = {"assistant": said, "user": told}
    return [{"role": role, "content": _storable(text)} for role, text in messages.items()]


def _storable(text: str) -> str:
    """Half a surrogate pair, as a cut-off answer may end in, is no text that could be sent or kept."""
    return text.encode("utf-8", errors="replace").decode()
