"""The ladder: how one and the same question is put, and how its answer is read, from the strictest form to the plainest.

json_schema   the endpoint constrains the answer          tool   the answer is a call of one tool
prompted      the answer is text with a JSON object in it, mended where only commas or fences are wrong
"""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from pydantic import BaseModel, ValidationError

from foundation.strict import explain
from researcher.planner.llm.choice import PlanChoice

_TOOL = "choose_plan"
_LONGEST, _MOST_OBJECTS = 100_000, 100
"""Letters of an answer that are read, and places in it where an object may begin."""


class Unreadable(ValueError):
    """The answer holds no choice at all; the text says why, for the LLM to read."""


class Malformed(ValueError):
    """The answer holds JSON that is no choice; the text names each wrong field."""


class _Function(BaseModel):
    arguments: str


class _ToolCall(BaseModel):
    function: _Function


class _Message(BaseModel):
    content: str | None = None
    tool_calls: list[_ToolCall] | None = None


class _Choice(BaseModel):
    message: _Message
    finish_reason: str | None = None


class _Answer(BaseModel):
    choices: list[_Choice]


@dataclass(frozen=True, slots=True)
class Rung:
    """name: for records. form: what is added to the request. read: the text that should be JSON."""

    name: str
    form: Callable[[dict[str, Any]], dict[str, Any]]
    read: Callable[[_Message], str | None]


def _schema_form(schema: dict[str, Any]) -> dict[str, Any]:
    wanted = {"name": "plan_choice", "strict": True, "schema": schema}
    return {"response_format": {"type": "json_schema", "json_schema": wanted}}


def _tool_form(schema: dict[str, Any]) -> dict[str, Any]:
    tool = {"name": _TOOL, "description": "Choose what the study compares.", "parameters": schema}
    return {
        "tools": [{"type": "function", "function": tool}],
        "tool_choice": {"type": "function", "function": {"name": _TOOL}},
    }


def _content(message: _Message) -> str | None:
    return message.content


def _arguments(message: _Message) -> str | None:
    return message.tool_calls[0].function.arguments if message.tool_calls else message.content


LADDER = (
    Rung("json_schema", _schema_form, _content),
    Rung("tool", _tool_form, _arguments),
    Rung("prompted", lambda _: {}, _content),
)


def choice_in(raw: dict[str, Any], rung: Rung) -> PlanChoice:
    """Raises: Unreadable, Malformed."""
    try:
        answer = _Answer.model_validate(raw)
    except ValidationError as error:
        raise Unreadable("the answer is no chat completion") from error
    if not answer.choices:
        raise Unreadable("the answer is empty")
    text = rung.read(answer.choices[0].message)
    if not text:
        raise Unreadable("the answer is empty")
    found = _found(text)
    if found is None:
        cut = " It was cut off: be shorter." if answer.choices[0].finish_reason == "length" else ""
        raise Unreadable(f"the answer holds no whole JSON object with the field 'instrument'.{cut}")
    try:
        return PlanChoice.model_validate(found)
    except ValidationError as error:
        raise Malformed("; ".join(str(problem) for problem in explain(error, PlanChoice))) from error


def _found(text: str) -> dict[str, Any] | None:
    """The first object that could be a choice, in prose, in a fence, or with commas too many."""
    text = text[:_LONGEST]
    for candidate in (text, re.sub(r",(\s*[}\]])", r"\1", text)):
        for found in _objects(candidate):
            if "instrument" in found:
                return found
    return None


def _objects(text: str) -> Iterator[dict[str, Any]]:
    decoder = json.JSONDecoder(parse_constant=_no_constant)
    for start in itertools.islice((match.start() for match in re.finditer(r"\{", text)), _MOST_OBJECTS):
        try:
            found, _ = decoder.raw_decode(text, start)
        except (ValueError, RecursionError):
            continue
        if isinstance(found, dict):
            yield found


def _no_constant(name: str) -> None:
    raise ValueError(f"{name} is no JSON")
