"""A topic as the subject of a conversation with an LLM: the prompt, and what its endings come to."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from pydantic import TypeAdapter

from researcher.llm.conversation import End, Plain
from researcher.llm.look_ups import LONGEST_LIST, findings_text, instrument_list, shared_words
from researcher.llm.replies import FORMS, Call, ending_schema
from researcher.llm.templates import filled
from researcher.planner.outcome import Asked, Declined, NeedsEdit, Outcome, Proposed, TopicRequest
from researcher.planner.proposals import bare_draft, ended
from researcher.planner.tools import ENDINGS, PROMPTS, look_up, tool_schemas
from researcher.study.draft import Draft
from swarm.models.catalogue import known_names

MOST_LOOK_UPS = 24
FIRST_FINDINGS = 4
"""Findings in a prompt without look-ups, which must be short."""
_TOPIC = "\nThe topic, as a JSON string:\n"
_OUTCOMES = {kind.__name__: TypeAdapter[Outcome](kind) for kind in (Proposed, NeedsEdit, Declined)}
_DRAFT = TypeAdapter(Draft)


class Topic:
    """A `Subject`. author: the LLM's name, which signs the draft."""

    endings = ENDINGS
    most_look_ups = MOST_LOOK_UPS

    def __init__(self, request: TopicRequest, author: str) -> None:
        self._request = request
        self._author = author

    def tools(self) -> list[dict[str, Any]]:
        return tool_schemas()

    def first_messages(self, form: str) -> list[dict[str, Any]]:
        return first_messages(self._request, form)

    def look_up(self, call: Call) -> str:
        return look_up(call, self._request)

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
        """The last that could be read."""
        return bare_draft(self._request, self._author) if draft is None else _DRAFT.validate_python(draft)


def outcome_of(kept: Plain) -> Outcome:
    """The outcome of a conversation about a topic."""
    return _OUTCOMES[kept["kind"]].validate_python(kept["fields"])


def first_messages(request: TopicRequest, form: str) -> list[dict[str, Any]]:
    """The system prompt, the topic and its limits; without tools, findings and the schema as well."""
    look_ups = form == FORMS[0]
    user = filled(
        PROMPTS,
        "request.md.jinja",
        **shared_words(),
        instruments=instrument_list(request.instruments, LONGEST_LIST),
        models=known_names(),
        findings="" if look_ups else findings_text(request.known, most=FIRST_FINDINGS),
        schema="" if look_ups else json.dumps(ending_schema(tool_schemas(), ENDINGS)),
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


def _kept(outcome: Outcome) -> Plain:
    return {"kind": type(outcome).__name__, "fields": asdict(outcome)}
