"""The LLM planner: its tools, its prompt, and its requests until it proposes, asks or declines.

The LLM writes a spec. Code validates the spec and derives arms, stages, statistics and price from it; the LLM never does.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter

from researcher.design.pricing import price_of
from researcher.instruments.catalogue import InstrumentFolder
from researcher.llm.asking import Asker
from researcher.llm.conversation import Conversation, End, Plain, asked_of, spent_answer
from researcher.llm.endpoint import LlmUnusable
from researcher.llm.look_ups import (
    LONGEST_LIST,
    described,
    findings_text,
    hours,
    instrument_list,
    looked_up,
    power_text,
    shared_words,
    span,
)
from researcher.llm.replies import FORMS, Call, ending_schema, spec_schema, tool
from researcher.llm.templates import filled
from researcher.planner.outcome import Asked, Declined, NeedsEdit, Outcome, Proposed, TopicRequest
from researcher.planner.proposals import bare_draft, ended, judged
from researcher.refusals import PlanningRefused
from researcher.study.draft import Draft
from researcher.study.spec import duration_text
from swarm.models.catalogue import known_names

ENDINGS = ("propose", "ask", "decline")
MOST_LOOK_UPS = 24
FIRST_FINDINGS = 4
"""Maximum number of findings in the first prompt when the LLM has no look-ups; that prompt must be short."""
_PROMPTS = Path(__file__).parent / "prompts"
_TOPIC = "\nThe topic, as a JSON string:\n"
_OUTCOMES = {kind.__name__: TypeAdapter[Outcome](kind) for kind in (Proposed, NeedsEdit, Declined)}
_DRAFT = TypeAdapter(Draft)


class LlmPlanner:
    """Plans topics with an LLM.

    Args:
        checkpoints: URL of the database where planning saves its position; None saves nothing.
        thread: name under which the position is saved.
    """

    def __init__(self, asker: Asker, *, checkpoints: str | None = None, thread: str = "plan") -> None:
        self._asker = asker
        self._spent_before = asker.purse.tokens, asker.purse.cost
        self._checkpoints = checkpoints
        self._thread = thread

    @property
    def name(self) -> str:
        return self._asker.settings.model

    async def propose(self, request: TopicRequest) -> Outcome:
        """Plan the topic. After `Asked`, call this again with the answer in `request.answers`; planning continues where it stopped.

        Raises: PlanningRefused when the LLM cannot be reached, or never gives a readable answer.
        """
        if not request.instruments:
            raise PlanningRefused(
                "no instrument was found; put one under studies/ or name its folder with --instrument"
            )
        try:
            return await self._outcome(request)
        except LlmUnusable as error:
            raise PlanningRefused(
                f"the planner LLM {self.name} cannot be used: {error}; to plan without it, use --planner builtin"
            ) from error

    async def _outcome(self, request: TopicRequest) -> Outcome:
        """Run the conversation to its outcome. Raises: LlmUnusable, PlanningRefused."""
        topic = Topic(request, self.name)
        conversation = Conversation(topic, self._checkpoints, f"ask/{self._thread}", answered=len(request.answers))
        at, purse = conversation.begin(), self._asker.purse
        tokens, cost = self._spent_before
        purse.tokens, purse.cost = max(purse.tokens, tokens + at.tokens), max(purse.cost, cost + at.cost)
        while at.outcome is None:
            if at.spent_answer:
                raise PlanningRefused(f"the planner LLM {spent_answer(self._asker.settings)}")
            if at.given_up:
                raise LlmUnusable(at.given_up)
            if at.request is not None:
                said = await asked_of(self._asker, at)
            elif at.answered < len(request.answers):
                said = {"person": request.answers[at.answered]}
            else:
                return Asked(question=at.asked)
            at = conversation.give(said | {"tokens": purse.tokens - tokens, "cost": purse.cost - cost})
        return _OUTCOMES[at.outcome["kind"]].validate_python(at.outcome["fields"])


class Topic:
    """The `Subject` of a planning conversation. `author` is the LLM's name, recorded as the draft's author."""

    endings = ENDINGS
    most_look_ups = MOST_LOOK_UPS

    def __init__(self, request: TopicRequest, author: str) -> None:
        self._request = request
        self._author = author

    def tools(self) -> list[dict[str, Any]]:
        return tool_schemas()

    def first_messages(self, form: str) -> list[dict[str, Any]]:
        """Return the system prompt, the topic and its limits; in forms without tools, also the findings and the JSON schema."""
        request, look_ups = self._request, form == FORMS[0]
        user = filled(
            _PROMPTS,
            "request.md.jinja",
            **shared_words(),
            instruments=instrument_list(request.instruments, LONGEST_LIST),
            models=known_names(),
            findings="" if look_ups else findings_text(request.known, most=FIRST_FINDINGS),
            schema="" if look_ups else json.dumps(ending_schema(tool_schemas(), ENDINGS)),
            request=_asked_for(request),
        )
        system = filled(_PROMPTS, "system.md.jinja", look_ups=look_ups)
        return [{"role": "system", "content": system}, {"role": "user", "content": user}]

    def look_up(self, call: Call) -> str:
        request = self._request
        known: dict[str, Callable[[dict[str, Any]], str]] = {
            "instruments": lambda _: instrument_list(request.instruments),
            "instrument": lambda given: _described(str(given.get("name", "")), request.instruments),
            "findings": lambda given: (
                findings_text(request.known, str(given.get("query", ""))) or "no finding contains these words"
            ),
            "price": lambda given: _priced(given.get("spec"), request),
        }
        return looked_up(call, known, ENDINGS)

    def ended(self, call: Call, draft: Plain | None) -> End:
        found = ended(call, self._request, self._author, self._draft(draft))
        if isinstance(found, Asked):
            return End(question=found.question)
        made = asdict(found.draft) if isinstance(found, Proposed | NeedsEdit) else None
        if isinstance(found, NeedsEdit):
            return End(problems=found.problems, draft=made)
        return End(outcome=_kept(found), draft=made)

    def unfinished(self, draft: Plain | None, problems: Sequence[str]) -> Plain:
        return _kept(NeedsEdit(draft=self._draft(draft), problems=tuple(problems)))

    def _draft(self, draft: Plain | None) -> Draft:
        """Return the last readable draft, or an empty one."""
        return bare_draft(self._request, self._author) if draft is None else _DRAFT.validate_python(draft)


def request_of(messages: Sequence[dict[str, Any]]) -> str | None:
    """Return the planning request within these messages (topic, fixed fields, answers), or None if they are not about planning."""
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


def _kept(outcome: Outcome) -> Plain:
    return {"kind": type(outcome).__name__, "fields": asdict(outcome)}


# -- tools ---------------------------------------------------------------------------------------------------------------


def tool_schemas() -> list[dict[str, Any]]:
    text, texts = {"type": "string"}, {"type": "array", "items": {"type": "string"}}
    proposal = {
        "spec": spec_schema() | {"required": ["instrument"]},
        "because": text,
        "uncovered": texts,
        "from_topic": texts,
    }
    return [
        tool("instruments", "All instruments, one line each.", {}),
        tool("instrument", "One instrument: what it does, defaults, factors with bounds, metrics with margins.", {"name": text}),
        tool("findings", "Earlier findings that hold these words (instrument, factor, metric, model); newest first.", {"query": text}),
        tool("price", "Check a spec: its problems, or else trials, hours, detectable effect.", {"spec": {"type": "object"}}),
        tool("propose", "End with a study. because: why this study, in a sentence or two.", proposal),
        tool("ask", "End with a question to a person.", {"question": text}),
        tool("decline", "End without a study. nearest: topics that could be studied instead.", {"reason": text, "nearest": texts}),
    ]  # fmt: skip


def _described(name: str, folders: Sequence[InstrumentFolder]) -> str:
    instrument = next((each.instrument for each in folders if each.instrument.name == name), None)
    if instrument is None:
        return f"no instrument is called {name!r}; there are: {', '.join(each.instrument.name for each in folders)}"
    return described(instrument)


def _priced(given: Any, request: TopicRequest) -> str:
    verdict = judged(given, request)
    if verdict.plan is None or verdict.folder is None:
        return "This spec has problems:\n" + "\n".join(f"- {problem}" for problem in verdict.problems)
    plan, instrument = verdict.plan, verdict.folder.instrument
    price = price_of(plan, instrument, servers=request.servers)
    lines = [
        f"It can be planned: {span(*price.trials)} trials, {span(*(hours(each) for each in price.wall_s))} of wall time "
        f"({plan.trial_s_source}) on {request.servers} server{'s' if request.servers > 1 else ''}, {duration_text(plan.budget.wall_s)} allowed.",
        power_text(plan, price.seeds_needed),
    ]
    if price.tokens is not None:
        lines.append(
            f"About {span(*(f'{each:.2g}' for each in price.tokens))} tokens of the agents' calls, {plan.budget.tokens} allowed."
        )
    return "\n".join([*lines, *(f"Note: {note}" for note in plan.assumptions)])
