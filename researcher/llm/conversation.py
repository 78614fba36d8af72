"""One conversation with an LLM, as a LangGraph graph of short nodes.

    read → ask → act ─┬→ ask        look-ups, or problems to fix
                      ├→ wait → ask  a question to a person
                      └→ the end     an outcome, or the best that is left after the last attempt

A `Subject` defines what the conversation is about. No node waits: `ask` interrupts the graph with a request for the LLM, `wait`
with a question for a person. The caller resumes the graph with the answer, perhaps hours later. Given a database, the graph is
checkpointed there, and requests that were answered before a crash are not repeated.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol, TypedDict

from langchain_core.runnables import RunnableConfig
from langgraph.checkpoint.memory import InMemorySaver
from langgraph.graph import START, StateGraph
from langgraph.types import Command, interrupt

from researcher.llm.asking import Asker
from researcher.llm.endpoint import LlmRefused, LlmSettings
from researcher.llm.replies import FORMS, AnswerSpent, Call, Reply, Unreadable, form_fields, read_reply, said_in
from researcher.store.checkpoints import PLANNING_PATIENCE_S, caught_up, with_saver

ATTEMPTS, MOST_QUESTIONS = 3, 3
_ASKED_OFTEN = "a person was asked often enough: end in another way"

Plain = dict[str, Any]
"""Data that JSON can hold. Checkpoints contain nothing else."""


@dataclass(frozen=True, slots=True, kw_only=True)
class End:
    """The result of an ending call: an outcome, a question to a person, or problems to fix.

    `draft` is the readable part of the call, kept for later attempts.
    """

    outcome: Plain | None = None
    question: str = ""
    problems: tuple[str, ...] = ()
    draft: Plain | None = None


class Subject(Protocol):
    """What a conversation is about: its tools, and how their calls are handled."""

    @property
    def endings(self) -> Sequence[str]:
        """Names of the tools that end the conversation. A tool named `ask` asks a person instead."""

    @property
    def most_look_ups(self) -> int: ...

    def tools(self) -> list[dict[str, Any]]:
        """Return the function tools for look-ups and endings."""

    def first_messages(self, form: str) -> list[dict[str, Any]]: ...

    def look_up(self, call: Call) -> str:
        """Return the look-up's result, or the problem with the call. Changes nothing."""

    def ended(self, call: Call, draft: Plain | None) -> End:
        """Handle an ending call. `draft` is the last readable draft."""

    def unfinished(self, draft: Plain | None, problems: Sequence[str]) -> Plain:
        """Return the outcome of a conversation whose last attempt has these problems."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Standing:
    """The state of a conversation: a request to the LLM, a question to a person, an outcome, or the reason why there is none.

    `request` has the fields of a chat completion, without model name and limits. `answered` is the number of the person's answers
    used so far. `tokens` and `cost` cover all answers. `calls` are stored as the caller gives them.
    """

    purpose: str = ""
    request: dict[str, Any] | None = None
    asked: str = ""
    outcome: Plain | None = None
    spent_answer: bool = False
    given_up: str = ""
    answered: int = 0
    tokens: int = 0
    cost: float = 0.0
    calls: list[Plain] = field(default_factory=list)


class _State(TypedDict, total=False):
    """State that is saved between nodes: plain values only."""

    messages: list[dict[str, Any]]
    attempt: int
    form: int
    """Form of the next request, as an index into `FORMS`."""
    raw: str
    """The answer to act on, as JSON."""
    look_ups: int
    calls_tools: bool
    """Whether the LLM ever called a tool. Some endpoints ignore tools silently."""
    asked: dict[str, Any]
    """The question to a person, and the id of the call that asked it."""
    questions: int
    answered: int
    draft: Plain
    """The last readable draft."""
    tokens: int
    cost: float
    calls: list[Plain]
    outcome: Plain
    spent_answer: bool
    given_up: str


_Next = Command[Literal["ask", "act", "wait", "__end__"]]


class Conversation:
    """The graph of one subject. Its database is open only while a node runs, never while an LLM answers."""

    def __init__(
        self, subject: Subject, checkpoints: str | None, thread: str, *, purpose: str = "plan", answered: int = 0
    ) -> None:
        """Build the graph.

        `checkpoints` is a database URL, or None to save nothing. `answered` is the number of people's answers in the first
        messages.
        """
        self._subject = subject
        self._checkpoints = checkpoints
        self._purpose = purpose
        self._answered = answered
        self._memory = InMemorySaver()
        self._thread = thread
        self._config: RunnableConfig = {"configurable": {"thread_id": thread}}
        self._at = ""
        """The checkpoint at which the conversation waits."""
        *some, last = subject.endings
        self._one_ending = f"exactly one of {', '.join([*some, last])}" if some else f"exactly one {last}"
        self._nodes: StateGraph[_State, None, _State, _State] = StateGraph(_State)
        self._nodes.add_node("read", self._read)
        self._nodes.add_node("ask", self._ask)
        self._nodes.add_node("act", self._act)
        self._nodes.add_node("wait", self._wait)
        self._nodes.add_edge(START, "read")
        self._nodes.add_edge("read", "ask")
        self._nodes.add_edge("wait", "ask")

    def begin(self) -> Standing:
        """Run to the first question, or to the one where the conversation stopped."""

        def to_a_question(graph: Any) -> None:
            if not caught_up(graph, self._config).values:
                graph.invoke(_State(attempt=1), self._config, durability="sync")

        return self._on(to_a_question)

    def give(self, said: dict[str, Any]) -> Standing:
        """Continue with an answer, up to the next question or the end.

        `said` has one of three keys: `raw`, the LLM's answer; `refused`, the endpoint's reason for refusing this form; or `person`,
        a person's answer. It also has `tokens` and `cost`, spent so far, and `calls`, the conversation's calls so far, if they are
        to be saved with it.
        """
        if "raw" in said:  # as text: a checkpoint then keeps any answer unchanged
            said = said | {"raw": json.dumps(said["raw"])}

        def go_on(graph: Any) -> None:
            # If the positions differ, the database stored the answer before it became unreachable.
            if _place(caught_up(graph, self._config)) == self._at:
                graph.invoke(Command(resume=said), self._config, durability="sync")

        return self._on(go_on)

    def forget(self) -> None:
        """Delete the checkpoints, so that a new start asks again."""
        with_saver(
            self._checkpoints, lambda saver: (saver or self._memory).delete_thread(self._thread), PLANNING_PATIENCE_S
        )

    def _on(self, work: Callable[[Any], None]) -> Standing:
        def standing(saver: Any) -> Standing:
            graph = self._nodes.compile(checkpointer=saver or self._memory)
            work(graph)
            state = graph.get_state(self._config)
            self._at = _place(state)
            waits = state.interrupts[0].value if state.interrupts else {}
            reached = ("outcome", "spent_answer", "given_up", "answered", "tokens", "cost", "calls")
            return Standing(**{n: state.values[n] for n in reached if n in state.values}, **waits)

        return with_saver(self._checkpoints, standing, PLANNING_PATIENCE_S)

    # -- nodes ----------------------------------------------------------------------------------------------------------

    def _read(self, state: _State) -> _State:
        return {**self._in_form(0), "answered": self._answered}

    def _ask(self, state: _State) -> _Next:
        form, endings = state["form"], self._subject.endings
        asks = {"messages": state["messages"], **form_fields(FORMS[form], self._subject.tools(), endings)}
        purpose = f"{self._purpose}, attempt {state['attempt']}, {FORMS[form]}"
        said = interrupt({"purpose": purpose, "request": asks})
        spent = _State(tokens=said["tokens"], cost=said["cost"], calls=said.get("calls", []))
        if "raw" in said:
            return Command(goto="act", update={**spent, "raw": said["raw"]})
        if form + 1 < len(FORMS):
            return Command(goto="ask", update={**spent, **self._in_form(form + 1)})
        given_up = f"the endpoint refuses the request in every form; the last reason: {said['refused']}"
        return Command(goto="__end__", update={**spent, "given_up": given_up})

    def _act(self, state: _State) -> _Next:
        raw = json.loads(state["raw"])
        try:
            return self._acted(state, read_reply(raw, self._subject.endings))
        except AnswerSpent:
            return Command(goto="__end__", update={"spent_answer": True})
        except Unreadable as error:
            if state["form"] + 1 < len(FORMS) and not state.get("calls_tools"):
                return self._again(state, self._in_form(state["form"] + 1), [str(error)])
            mended = {"role": "user", "content": f"{error}. End with {self._one_ending}."}
            return self._again(state, {"messages": [*state["messages"], said_in(raw), mended]}, [str(error)])

    def _acted(self, state: _State, reply: Reply) -> _Next:
        """Answer look-ups. A valid ending ends the conversation; any other goes back to the LLM with its problems."""
        endings = [call for call in reply.calls if call.name in self._subject.endings]
        looked = [call for call in reply.calls if call.name not in self._subject.endings]
        made, questions = state.get("look_ups", 0) + len(looked), state.get("questions", 0)
        most, no_more = self._subject.most_look_ups, f"no look-ups are left: end with {self._one_ending}"
        kept = _State(look_ups=made, calls_tools=state.get("calls_tools", False) or reply.calls[0].id is not None)
        messages = [*state["messages"], reply.message]
        for call in looked:
            messages.append(_result(call, self._subject.look_up(call) if made <= most else no_more))
        kept["messages"] = messages
        if not endings:
            return Command(goto="ask", update=kept) if made <= most else self._again(state, kept, [no_more])
        if len(endings) > 1:
            end = End(problems=(f"end with {self._one_ending}",))
        else:
            end = self._subject.ended(endings[0], state.get("draft"))
        if end.question and questions < MOST_QUESTIONS:
            kept |= _State(asked={"question": end.question, "call": endings[0].id}, questions=questions + 1)
            return Command(goto="wait", update=kept)
        problems = (_ASKED_OFTEN,) if end.question else end.problems
        if end.draft is not None:
            kept["draft"] = end.draft
        messages += [_result(call, self._verdict(problems)) for call in endings]
        if problems or end.outcome is None:
            return self._again(state, kept, problems)
        return Command(goto="__end__", update={**kept, "outcome": end.outcome})

    def _wait(self, state: _State) -> _State:
        said = interrupt({"asked": state["asked"]["question"]})
        text = f"A person answers: {json.dumps(said['person'], ensure_ascii=False)}"
        answer = _result(Call(state["asked"]["call"], "ask", {}), text)
        return {"messages": [*state["messages"], answer], "answered": state.get("answered", 0) + 1}

    def _again(self, state: _State, kept: _State, problems: Sequence[str]) -> _Next:
        """Start the next attempt; after the last one, end with the subject's outcome for an unfinished conversation."""
        if state["attempt"] < ATTEMPTS:
            return Command(goto="ask", update={**kept, "attempt": state["attempt"] + 1})
        outcome = self._subject.unfinished(kept.get("draft", state.get("draft")), problems)
        return Command(goto="__end__", update={**kept, "outcome": outcome})

    def _in_form(self, number: int) -> _State:
        return {"form": number, "messages": self._subject.first_messages(FORMS[number])}

    def _verdict(self, problems: Sequence[str]) -> str:
        lines = "\n".join(f"- {problem}" for problem in problems)
        return f"This cannot end it:\n{lines}\nEnd again, whole: {self._one_ending}." if problems else "ok"


async def asked_of(asker: Asker, at: Standing) -> dict[str, Any]:
    """Return the LLM's raw answer to the conversation's current request, or the endpoint's reason for refusing its form.

    Raises: LlmUnusable.
    """
    assert at.request is not None
    try:
        return {"raw": await asker.ask(at.purpose, at.request)}
    except LlmRefused as error:
        return {"refused": str(error)}


def spent_answer(settings: LlmSettings) -> str:
    """Explain why a reasoning model gave no answer, and what helps."""
    return (
        f"{settings.model} used all {settings.answer_tokens} tokens of its answer for reasoning, before it said anything; "
        "raise RESEARCHER_LLM_ANSWER_TOKENS"
    )


def _result(call: Call, text: str) -> dict[str, Any]:
    """Return the result of a tool call as a message."""
    if call.id is None:
        return {"role": "user", "content": text}
    return {"role": "tool", "tool_call_id": call.id, "content": text}


def _place(state: Any) -> str:
    return str(state.config["configurable"].get("checkpoint_id", ""))
