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
from pathlib import Path
from typing import Any, Literal, TypedDict

from langchain_core.runnables import RunnableConfig
from langgraph.checkpoint.memory import InMemorySaver
from langgraph.graph import START, StateGraph
from langgraph.types import Command, interrupt
from pydantic import TypeAdapter

from researcher.llm.templates import filled
from researcher.planner.outcome import Asked, Declined, NeedsEdit, Outcome, Proposed, TopicRequest
from researcher.planner.proposals import Ended, bare_draft, ended
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
from researcher.planner.tools import catalogue_text, findings_text, look_up, tool_schemas
from researcher.store.checkpoints import PLANNING_PATIENCE_S, caught_up, with_saver
from researcher.study.draft import Draft
from swarm.models.catalogue import known_names

ATTEMPTS, MOST_LOOK_UPS, MOST_QUESTIONS = 3, 24, 3
FIRST_FINDINGS = 4
"""In a prompt without look-ups, which has to stay short."""
_PROMPTS = Path(__file__).parent / "prompts"
_TOPIC = "\nThe topic, as a JSON string:\n"
_NO_MORE = "no look-ups are left: end with propose, ask or decline"


@dataclass(frozen=True, slots=True)
class Question:
    """What the graph waits for. request: the fields of a chat completion besides the model's name and limits."""

    purpose: str
    request: dict[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """What came back: the LLM's raw answer, or why the endpoint refuses a request of this form, or what a person said.

    tokens, cost: spent by now.
    """

    raw: dict[str, Any] | None = None
    refused: str = ""
    person: str = ""
    tokens: int = 0
    cost: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Standing:
    """Where it is: a question to the LLM, a question to a person, an outcome, or why there is none. answered: of the person's
    answers, how many it has had. tokens, cost: of all answers."""

    question: Question | None = None
    asked: str = ""
    outcome: Outcome | None = None
    spent_answer: bool = False
    given_up: str = ""
    answered: int = 0
    tokens: int = 0
    cost: float = 0.0


class Conversation:
    """The graph of one request. Its database is open only while a node runs, and not for as long as an LLM takes."""

    def __init__(self, request: TopicRequest, author: str, checkpoints: str | None, thread: str) -> None:
        """author: the LLM's name, which signs the draft. checkpoints: a database URL, or None to keep nothing."""
        self._nodes = _graph(request, author)
        self._checkpoints = checkpoints
        self._memory = InMemorySaver()
        self._config: RunnableConfig = {"configurable": {"thread_id": f"ask/{thread}"}}
        self._at = ""
        """The checkpoint at which it waits."""

    def begin(self) -> Standing:
        """Go to the first question, or to that at which it was left."""

        def to_a_question(graph: Any) -> Standing:
            if not caught_up(graph, self._config).values:
                graph.invoke(_State(attempt=1, form=0), self._config, durability="sync")
            return self._standing(graph)

        return self._on(to_a_question)

    def give(self, answer: Answer) -> Standing:
        """Go on with what came back, to the next question or to the end."""
        # As text: a checkpoint keeps the answer as it was, whatever is in it.
        said = asdict(answer) | {"raw": None if answer.raw is None else json.dumps(answer.raw)}

        def go_on(graph: Any) -> Standing:
            # Elsewhere: it took the answer before the database went away.
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
        values, self._at = state.values, _place(state)
        waiting = state.interrupts[0].value if state.interrupts else {}
        return Standing(
            question=Question(**waiting) if "request" in waiting else None,
            asked=waiting.get("asked", ""),
            outcome=_outcome(values["outcome"]) if "outcome" in values else None,
            spent_answer=values.get("spent_answer", False),
            given_up=values.get("given_up", ""),
            answered=values.get("answered", 0),
            tokens=values.get("tokens", 0),
            cost=values.get("cost", 0.0),
        )


def _place(state: Any) -> str:
    return str(state.config["configurable"].get("checkpoint_id", ""))


class _State(TypedDict, total=False):
    """What the nodes hand on, and a saver keeps: plain values only."""

    messages: list[dict[str, Any]]
    attempt: int
    form: int
    """How the next request is put: its number in `FORMS`."""
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


_Next = Command[Literal["ask", "wait", "__end__"]]


def _graph(request: TopicRequest, author: str) -> StateGraph[_State, None, _State, _State]:
    """The nodes, over one request."""
    tools = tool_schemas()

    def read(state: _State) -> _State:
        return {"messages": first_messages(request, FORMS[0]), "answered": len(request.answers)}

    def ask(state: _State) -> Command[Literal["ask", "act", "__end__"]]:
        form = FORMS[state["form"]]
        question = {
            "purpose": f"plan, attempt {state['attempt']}, {form}",
            "request": {"messages": state["messages"], **form_fields(form, tools)},
        }
        said = interrupt(question)
        spent = _State(tokens=said["tokens"], cost=said["cost"])
        if said["raw"] is not None:
            return Command(goto="act", update={**spent, "raw": said["raw"]})
        if state["form"] + 1 < len(FORMS):
            return Command(goto="ask", update={**spent, **_in_form(state["form"] + 1)})
        given_up = f"the endpoint refuses the request in every form; the last: {said['refused']}"
        return Command(goto="__end__", update={**spent, "given_up": given_up})

    def act(state: _State) -> _Next:
        raw = json.loads(state["raw"])
        try:
            reply = read_reply(raw)
        except AnswerSpent:
            return Command(goto="__end__", update={"spent_answer": True})
        except Unreadable as error:
            if state["form"] + 1 < len(FORMS) and not state.get("calls_tools"):
                return again(state, _in_form(state["form"] + 1), [str(error)])
            told = {"role": "user", "content": f"{error}. End with exactly one of propose, ask, decline."}
            return again(state, {"messages": [*state["messages"], said_in(raw), told]}, [str(error)])
        return acted(state, reply)

    def acted(state: _State, reply: Reply) -> _Next:
        """Look-ups are answered; an ending ends it, or comes back with its problems."""
        endings = [call for call in reply.calls if call.name in ENDINGS]
        looked = [call for call in reply.calls if call.name not in ENDINGS]
        end = ended(endings[0], request, author) if len(endings) == 1 else Ended()
        if len(endings) > 1:
            end = Ended(problems=("end with exactly one of propose, ask, decline",))
        if isinstance(end.outcome, Asked) and state.get("questions", 0) >= MOST_QUESTIONS:
            end = Ended(problems=("a person was asked often enough: propose or decline",))
        made = state.get("look_ups", 0) + len(looked)
        results = [_result(call, look_up(call, request) if made <= MOST_LOOK_UPS else _NO_MORE) for call in looked]
        kept = _State(look_ups=made, calls_tools=state.get("calls_tools", False) or reply.calls[0].id is not None)
        if end.draft is not None:
            kept["draft"] = asdict(end.draft)
        told = _told(end.problems)
        kept["messages"] = [*state["messages"], reply.message, *results, *(_result(call, told) for call in endings)]
        if end.problems:
            return again(state, kept, end.problems)
        if not endings:
            return again(state, kept, [_NO_MORE]) if made > MOST_LOOK_UPS else Command(goto="ask", update=kept)
        if isinstance(end.outcome, Asked):
            asked = {"question": end.outcome.question, "call": endings[0].id}
            kept["messages"] = kept["messages"][:-1]
            return Command(goto="wait", update={**kept, "asked": asked, "questions": state.get("questions", 0) + 1})
        outcome = end.outcome or Proposed(draft=end.draft or bare_draft(request, author))
        return Command(goto="__end__", update={**kept, "outcome": _kept(outcome)})

    def wait(state: _State) -> _State:
        said = interrupt({"asked": state["asked"]["question"]})
        answer = _result(
            Call(state["asked"]["call"], "ask", {}),
            f"A person answers: {json.dumps(said['person'], ensure_ascii=False)}",
        )
        return {"messages": [*state["messages"], answer], "answered": state.get("answered", 0) + 1}

    def again(state: _State, kept: _State, problems: Any) -> _Next:
        """The next attempt; after the last one the draft as it is, for a person to finish."""
        if state["attempt"] < ATTEMPTS:
            return Command(goto="ask", update={**kept, "attempt": state["attempt"] + 1})
        found = kept.get("draft", state.get("draft"))
        draft = _DRAFT.validate_python(found) if found is not None else bare_draft(request, author)
        return Command(
            goto="__end__", update={**kept, "outcome": _kept(NeedsEdit(draft=draft, problems=tuple(problems)))}
        )

    def _in_form(number: int) -> _State:
        return {"form": number, "messages": first_messages(request, FORMS[number])}

    graph: StateGraph[_State, None, _State, _State] = StateGraph(_State)
    graph.add_node("read", read)
    graph.add_node("ask", ask)
    graph.add_node("act", act)
    graph.add_node("wait", wait)
    graph.add_edge(START, "read")
    graph.add_edge("read", "ask")
    graph.add_edge("wait", "ask")
    return graph


def first_messages(request: TopicRequest, form: str) -> list[dict[str, Any]]:
    """The system prompt and the topic with what it may ask for. Without tools it holds findings and schema as well."""
    look_ups = form == FORMS[0]
    system = filled(_PROMPTS, "system.md.jinja", look_ups=look_ups)
    user = filled(
        _PROMPTS,
        "request.md.jinja",
        catalogue=catalogue_text(request.instruments),
        models=known_names(),
        findings="" if look_ups else findings_text(request, most=FIRST_FINDINGS),
        schema="" if look_ups else json.dumps(ending_schema(tool_schemas())),
        request=_asked_for(request),
    )
    return [{"role": "system", "content": system}, {"role": "user", "content": user}]


def request_of(messages: Sequence[dict[str, Any]]) -> str | None:
    """What these messages ask for, without the prompt around it: topic, fixed fields, answers. None: they plan nothing."""
    first = next((str(each["content"]) for each in messages if each["role"] == "user"), "")
    _, found, request = first.rpartition(_TOPIC)
    return request if found else None


def _asked_for(request: TopicRequest) -> str:
    def quoted(value: Any) -> str:
        return json.dumps(value, ensure_ascii=False, default=str)

    parts = [f"{_TOPIC}{quoted(request.topic)}"]
    if request.given:
        parts.append(
            f"Fixed with options; it holds whatever the topic says, and the spec need not repeat it: {quoted(request.given)}"
        )
    if request.answers:
        parts.append(f"You asked about it before, and a person answered: {quoted(list(request.answers))}")
    return "\n".join(parts)


def _result(call: Call, text: str) -> dict[str, Any]:
    """What a call comes to, as the LLM is told."""
    if call.id is None:
        return {"role": "user", "content": text}
    return {"role": "tool", "tool_call_id": call.id, "content": text}


def _told(problems: tuple[str, ...]) -> str:
    lines = "\n".join(f"- {problem}" for problem in problems)
    return (
        f"This cannot end it:\n{lines}\nEnd again, whole: exactly one of propose, ask, decline." if problems else "ok"
    )


_KINDS = {kind.__name__: TypeAdapter[Outcome](kind) for kind in (Proposed, NeedsEdit, Declined)}
_DRAFT = TypeAdapter(Draft)


def _kept(outcome: Outcome) -> dict[str, Any]:
    return {"kind": type(outcome).__name__, **asdict(outcome)}


def _outcome(kept: dict[str, Any]) -> Outcome:
    return _KINDS[kept["kind"]].validate_python({name: each for name, each in kept.items() if name != "kind"})
