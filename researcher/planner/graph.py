"""One planning by an LLM, as a LangGraph graph of short nodes.

    read → ask → act ─┬→ ask        look-ups, or problems to mend
                      ├→ wait → ask  a question to a person
                      └→ the end     a draft, a refusal, or a draft that a person has to finish

No node waits: `ask` interrupts the graph with a request for the LLM, `wait` with a question to a person, and whoever drives it
resumes it with what came back, be that hours later. Given a database, the graph is checkpointed there, and what was answered
before a crash is not asked again.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal, TypedDict

from langchain_core.runnables import RunnableConfig
from langgraph.checkpoint.memory import InMemorySaver
from langgraph.graph import START, StateGraph
from langgraph.types import Command, interrupt
from pydantic import TypeAdapter

from researcher.llm.templates import filled
from researcher.planner.outcome import Asked, Declined, NeedsEdit, Outcome, Proposed, TopicRequest
from researcher.planner.proposals import bare_draft, ended
from researcher.planner.replies import (
    ENDINGS,
    FORMS,
    AnswerSpent,
    Call,
    Reply,
    Unreadable,
    ending_schema,
    form_fields,
    read_reply,
    said_in,
)
from researcher.planner.tools import (
    LONGEST_LIST,
    PROMPTS,
    findings_text,
    instrument_list,
    look_up,
    shared_words,
    tool_schemas,
)
from researcher.store.checkpoints import PLANNING_PATIENCE_S, caught_up, with_saver
from researcher.study.draft import Draft
from swarm.models.catalogue import known_names

ATTEMPTS, MOST_LOOK_UPS, MOST_QUESTIONS = 3, 24, 3
FIRST_FINDINGS = 4
"""Findings in a prompt without look-ups, which must be short."""
_TOPIC = "\nThe topic, as a JSON string:\n"
_NO_MORE = "no look-ups are left: end with propose, ask or decline"
_ONE_ENDING = "exactly one of propose, ask, decline"
_OUTCOMES = {kind.__name__: TypeAdapter[Outcome](kind) for kind in (Proposed, NeedsEdit, Declined)}
_DRAFT = TypeAdapter(Draft)


@dataclass(frozen=True, slots=True, kw_only=True)
class Standing:
    """State of the conversation: a request to the LLM, a question to a person, an outcome, or the reason for none.

    request: fields of a chat completion without model name and limits. answered: number of the person's answers used.
    tokens, cost: of all answers.
    """

    purpose: str = ""
    request: dict[str, Any] | None = None
    asked: str = ""
    outcome: Outcome | None = None
    spent_answer: bool = False
    given_up: str = ""
    answered: int = 0
    tokens: int = 0
    cost: float = 0.0


class _State(TypedDict, total=False):
    """State between nodes, as saved: plain values only."""

    messages: list[dict[str, Any]]
    attempt: int
    form: int
    """Form of the next request: index in `FORMS`."""
    raw: str
    """The answer to act on, as JSON."""
    look_ups: int
    calls_tools: bool
    """Whether a tool was ever called; an endpoint may ignore them without a word."""
    asked: dict[str, Any]
    """The question to a person, and the id of the call that asked it."""
    questions: int
    answered: int
    draft: dict[str, Any]
    """The last proposal that could be read."""
    tokens: int
    cost: float
    outcome: dict[str, Any]
    spent_answer: bool
    given_up: str


_Next = Command[Literal["ask", "act", "wait", "__end__"]]


class Conversation:
    """The graph of one request. Its database is open only while a node runs, and not for as long as an LLM takes."""

    def __init__(self, request: TopicRequest, author: str, checkpoints: str | None, thread: str) -> None:
        """author: the LLM's name, which signs the draft. checkpoints: a database URL, or None to keep nothing."""
        self._request = request
        self._author = author
        self._checkpoints = checkpoints
        self._memory = InMemorySaver()
        self._config: RunnableConfig = {"configurable": {"thread_id": f"ask/{thread}"}}
        self._at = ""
        """The checkpoint at which it waits."""
        self._nodes: StateGraph[_State, None, _State, _State] = StateGraph(_State)
        self._nodes.add_node("read", self._read)
        self._nodes.add_node("ask", self._ask)
        self._nodes.add_node("act", self._act)
        self._nodes.add_node("wait", self._wait)
        self._nodes.add_edge(START, "read")
        self._nodes.add_edge("read", "ask")
        self._nodes.add_edge("wait", "ask")

    def begin(self) -> Standing:
        """Go to the first question, or to that at which it was left."""

        def to_a_question(graph: Any) -> None:
            if not caught_up(graph, self._config).values:
                graph.invoke(_State(attempt=1), self._config, durability="sync")

        return self._on(to_a_question)

    def give(self, said: dict[str, Any]) -> Standing:
        """Continue with an answer, to the next question or the end.

        said: `raw`, the LLM's answer; `refused`, the endpoint's reason against this form; or `person`, a person's
        answer.
        `tokens`, `cost`: spent by now.
        """
        if "raw" in said:  # as text: a checkpoint keeps the answer as it was, whatever is in it
            said = said | {"raw": json.dumps(said["raw"])}

        def go_on(graph: Any) -> None:
            # Elsewhere: it took the answer before the database went away.
            if _place(caught_up(graph, self._config)) == self._at:
                graph.invoke(Command(resume=said), self._config, durability="sync")

        return self._on(go_on)

    def _on(self, work: Callable[[Any], None]) -> Standing:
        def standing(saver: Any) -> Standing:
            graph = self._nodes.compile(checkpointer=saver or self._memory)
            work(graph)
            state = graph.get_state(self._config)
            self._at = _place(state)
            waits = state.interrupts[0].value if state.interrupts else {}
            reached = ("spent_answer", "given_up", "answered", "tokens", "cost")
            kept = state.values.get("outcome")
            outcome = None if kept is None else _OUTCOMES[kept["kind"]].validate_python(kept["fields"])
            return Standing(**{n: state.values[n] for n in reached if n in state.values}, **waits, outcome=outcome)

        return with_saver(self._checkpoints, standing, PLANNING_PATIENCE_S)

    # -- nodes ----------------------------------------------------------------------------------------------------------

    def _read(self, state: _State) -> _State:
        return {**self._in_form(0), "answered": len(self._request.answers)}

    def _ask(self, state: _State) -> _Next:
        form = state["form"]
        asks = {"messages": state["messages"], **form_fields(FORMS[form], tool_schemas())}
        said = interrupt({"purpose": f"plan, attempt {state['attempt']}, {FORMS[form]}", "request": asks})
        spent = _State(tokens=said["tokens"], cost=said["cost"])
        if "raw" in said:
            return Command(goto="act", update={**spent, "raw": said["raw"]})
        if form + 1 < len(FORMS):
            return Command(goto="ask", update={**spent, **self._in_form(form + 1)})
        given_up = f"the endpoint refuses the request in every form; the last: {said['refused']}"
        return Command(goto="__end__", update={**spent, "given_up": given_up})

    def _act(self, state: _State) -> _Next:
        raw = json.loads(state["raw"])
        try:
            return self._acted(state, read_reply(raw))
        except AnswerSpent:
            return Command(goto="__end__", update={"spent_answer": True})
        except Unreadable as error:
            if state["form"] + 1 < len(FORMS) and not state.get("calls_tools"):
                return self._again(state, self._in_form(state["form"] + 1), [str(error)])
            mended = {"role": "user", "content": f"{error}. End with {_ONE_ENDING}."}
            return self._again(state, {"messages": [*state["messages"], said_in(raw), mended]}, [str(error)])

    def _acted(self, state: _State, reply: Reply) -> _Next:
        """Look-ups are answered; an ending ends it, or comes back with its problems."""
        endings = [call for call in reply.calls if call.name in ENDINGS]
        looked = [call for call in reply.calls if call.name not in ENDINGS]
        made, questions = state.get("look_ups", 0) + len(looked), state.get("questions", 0)
        kept = _State(look_ups=made, calls_tools=state.get("calls_tools", False) or reply.calls[0].id is not None)
        messages = [*state["messages"], reply.message]
        for call in looked:
            messages.append(_result(call, look_up(call, self._request) if made <= MOST_LOOK_UPS else _NO_MORE))
        kept["messages"] = messages
        if not endings:
            goes_on = made <= MOST_LOOK_UPS
            return Command(goto="ask", update=kept) if goes_on else self._again(state, kept, [_NO_MORE])
        if len(endings) > 1:
            end: Outcome = NeedsEdit(draft=self._draft(state), problems=(f"end with {_ONE_ENDING}",))
        else:
            end = ended(endings[0], self._request, self._author, self._draft(state))
        if isinstance(end, Asked) and questions < MOST_QUESTIONS:
            kept |= _State(asked={"question": end.question, "call": endings[0].id}, questions=questions + 1)
            return Command(goto="wait", update=kept)
        if isinstance(end, Asked):
            end = NeedsEdit(draft=self._draft(state), problems=("a person was asked often enough: propose or decline",))
        if isinstance(end, Proposed | NeedsEdit):
            kept["draft"] = asdict(end.draft)
        problems = end.problems if isinstance(end, NeedsEdit) else ()
        messages += [_result(call, _verdict(problems)) for call in endings]
        if problems:
            return self._again(state, kept, problems)
        return Command(goto="__end__", update={**kept, "outcome": _kept(end)})

    def _wait(self, state: _State) -> _State:
        said = interrupt({"asked": state["asked"]["question"]})
        text = f"A person answers: {json.dumps(said['person'], ensure_ascii=False)}"
        answer = _result(Call(state["asked"]["call"], "ask", {}), text)
        return {"messages": [*state["messages"], answer], "answered": state.get("answered", 0) + 1}

    def _again(self, state: _State, kept: _State, problems: Sequence[str]) -> _Next:
        """The next attempt; after the last one the draft as it is, for a person to finish."""
        if state["attempt"] < ATTEMPTS:
            return Command(goto="ask", update={**kept, "attempt": state["attempt"] + 1})
        draft = self._draft({**state, **kept})
        outcome = NeedsEdit(draft=draft, problems=tuple(problems))
        return Command(goto="__end__", update={**kept, "outcome": _kept(outcome)})

    def _draft(self, state: _State) -> Draft:
        """The last that could be read."""
        found = state.get("draft")
        return bare_draft(self._request, self._author) if found is None else _DRAFT.validate_python(found)

    def _in_form(self, number: int) -> _State:
        return {"form": number, "messages": first_messages(self._request, FORMS[number])}


def first_messages(request: TopicRequest, form: str) -> list[dict[str, Any]]:
    """The system prompt, the topic and its limits; without tools, findings and the schema as well."""
    look_ups = form == FORMS[0]
    user = filled(
        PROMPTS,
        "request.md.jinja",
        **shared_words(),
        instruments=instrument_list(request.instruments, LONGEST_LIST),
        models=known_names(),
        findings="" if look_ups else findings_text(request, most=FIRST_FINDINGS),
        schema="" if look_ups else json.dumps(ending_schema(tool_schemas())),
        request=_asked_for(request),
    )
    system = filled(PROMPTS, "system.md.jinja", look_ups=look_ups)
    return [{"role": "system", "content": system}, {"role": "user", "content": user}]


def request_of(messages: Sequence[dict[str, Any]]) -> str | None:
    """The request in these messages, without the prompt: topic, fixed fields, answers. None if they plan nothing."""
    first = next((str(each["content"]) for each in messages if each["role"] == "user"), "")
    _, found, request = first.rpartition(_TOPIC)
    return request if found else None


def _asked_for(request: TopicRequest) -> str:
    topic, given, answers = (
        json.dumps(each, ensure_ascii=False, default=str)
        for each in (request.topic, request.given, list(request.answers))
    )
    parts = [f"{_TOPIC}{topic}"]
    if request.given:
        parts.append(f"Fixed with options; it holds whatever the topic says, and the spec need not repeat it: {given}")
    if request.answers:
        parts.append(f"You asked about it before, and a person answered: {answers}")
    return "\n".join(parts)


def _result(call: Call, text: str) -> dict[str, Any]:
    """Result of a tool call, as a message."""
    if call.id is None:
        return {"role": "user", "content": text}
    return {"role": "tool", "tool_call_id": call.id, "content": text}


def _verdict(problems: Sequence[str]) -> str:
    lines = "\n".join(f"- {problem}" for problem in problems)
    return f"This cannot end it:\n{lines}\nEnd again, whole: {_ONE_ENDING}." if problems else "ok"


def _place(state: Any) -> str:
    return str(state.config["configurable"].get("checkpoint_id", ""))


def _kept(outcome: Outcome) -> dict[str, Any]:
    return {"kind": type(outcome).__name__, "fields": asdict(outcome)}
