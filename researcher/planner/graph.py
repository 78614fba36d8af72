"""The planner's entry: `plan_study`. The built-in planner is a LangGraph graph of short nodes.

    read → match → design → price → check → write

Each node is pure and quick, and nothing outside is changed by any of them, so that a node that is run again after a crash
does no harm. Given a database, the graph is checkpointed there under its thread; a finished thread gives its plan again.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path
from typing import Any, TypedDict

from langchain_core.runnables import RunnableConfig
from langgraph.graph import END, START, StateGraph

from researcher.analysis.knowledge import known_to
from researcher.design.design import checked, design, fitted
from researcher.design.reading import Reading
from researcher.design.sources import pinned
from researcher.instruments.catalogue import InstrumentFolder, available, read_instrument
from researcher.models import Finding
from researcher.planner.choosing import choose, model_and_rest
from researcher.planner.saving import PLANNING_PATIENCE_S, Saver, caught_up, with_saver
from researcher.planner.seam import Planner, PlannerChoice, PlanOptions, PlanRequest
from researcher.refusals import PlanningRefused
from researcher.study.plan import Plan

__all__ = ["BuiltinPlanner", "PlanOptions", "PlanRequest", "Planner", "PlannerChoice", "plan_study"]

NO_LLM = "No planner LLM is configured: planned by the built-in planner."


async def plan_study(
    topic: str,
    options: PlanOptions,
    *,
    known: Sequence[Finding] = (),
    instruments: Sequence[InstrumentFolder] | None = None,
    llm: Planner | None = None,
    checkpoints: str | None = None,
    thread: str | None = None,
) -> Plan:
    """Turn a topic into a plan.

    Args:
        known: findings of earlier studies.
        instruments: those to choose from; by default all on this machine, unless `options` names a folder.
        llm: a planner that asks an LLM, where one is configured.
        checkpoints: a database URL (SQLite or PostgreSQL) in which the graph keeps its place; None keeps nothing.
        thread: name of that place, the study's id.
    Raises: PlanningRefused: one clear line, with the nearest things that could be asked.
    """
    if instruments is None:
        instruments = available()
    request = PlanRequest(topic=topic, options=options, instruments=instruments, known=known)
    if options.planner == "llm" and llm is None:
        raise PlanningRefused(
            "--planner llm needs a planner LLM, and none is configured here; set RESEARCHER_LLM_MODEL and "
            "RESEARCHER_LLM_API_KEY or RESEARCHER_LLM_BASE_URL, or plan with --planner builtin"
        )
    if llm is not None and options.planner != "builtin":
        return await llm.plan(request)
    plan = await BuiltinPlanner(checkpoints, thread).plan(request)
    if options.planner == "auto":
        plan = plan.model_copy(update={"assumptions": (*plan.assumptions, NO_LLM)})
    return plan


class BuiltinPlanner:
    """Plans by the words of the topic and by design of experiments; asks nobody."""

    name = "builtin"

    def __init__(self, checkpoints: str | None = None, thread: str | None = None) -> None:
        if checkpoints is not None and thread is None:
            raise ValueError("checkpoints need a thread, the study's id")
        self._checkpoints = checkpoints
        self._thread = thread

    async def plan(self, request: PlanRequest) -> Plan:
        return await asyncio.to_thread(self._run, request)

    def _run(self, request: PlanRequest) -> Plan:
        return with_saver(self._checkpoints, lambda saver: self._run_with(saver, request), PLANNING_PATIENCE_S)

    def _run_with(self, saver: Saver | None, request: PlanRequest) -> Plan:
        graph = _graph(request).compile(checkpointer=saver)
        if saver is None:
            return Plan.model_validate(graph.invoke(_State(topic=request.topic))["plan"])
        config: RunnableConfig = {"configurable": {"thread_id": f"plan/{self._thread}"}}
        values = caught_up(graph, config).values
        return Plan.model_validate(
            (values or graph.invoke(_State(topic=request.topic), config, durability="sync"))["plan"]
        )


class _State(TypedDict, total=False):
    """What the nodes hand on: plain JSON values only, so that any saver can keep them."""

    topic: str
    model: str | None
    rest: str
    """The topic without the model's name."""
    instrument: str
    reading: dict[str, Any]
    draft: dict[str, Any]
    plan: dict[str, Any]


def _graph(request: PlanRequest) -> StateGraph[_State, None, _State, _State]:
    """The nodes, over one request."""

    def folder(state: _State) -> InstrumentFolder:
        return _folder(request, state["instrument"])

    def read_topic(state: _State) -> _State:
        model, rest = model_and_rest(request)
        return {"model": model, "rest": rest}

    def match(state: _State) -> _State:
        chosen, reading = choose(state["rest"], request)
        reading = pinned(reading)
        return {"instrument": str(chosen.path), "reading": reading.model_dump()}

    def lay_out(state: _State) -> _State:
        reading, chosen = Reading.model_validate(state["reading"]), folder(state)
        model = state.get("model") or chosen.instrument.model
        return {"draft": design(request.topic, model, chosen, reading, request.options).model_dump(mode="json")}

    def price(state: _State) -> _State:
        draft = Plan.model_validate(state["draft"])
        return {"draft": fitted(draft, folder(state).instrument, request.options).model_dump(mode="json")}

    def check(state: _State) -> _State:
        return {"draft": checked(Plan.model_validate(state["draft"])).model_dump(mode="json")}

    def write(state: _State) -> _State:
        draft = Plan.model_validate(state["draft"])
        plan = draft.model_copy(update={"known": known_to(draft, request.known)})
        return {"plan": plan.model_dump(mode="json")}

    graph: StateGraph[_State, None, _State, _State] = StateGraph(_State)
    steps = {"read": read_topic, "match": match, "design": lay_out, "price": price, "check": check, "write": write}
    last = START
    for name, node in steps.items():
        graph.add_node(name, node)
        graph.add_edge(last, name)
        last = name
    graph.add_edge(last, END)
    return graph


def _folder(request: PlanRequest, path: str) -> InstrumentFolder:
    for each in request.instruments:
        if str(each.path) == path:
            return each
    return read_instrument(Path(path))
