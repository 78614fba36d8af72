"""Builds requests, with tools and schemas for the LLM, in the form that an endpoint supports, and parses the answers.

tools        look-ups and endings are OpenAI function tools
json_schema  one JSON object that the endpoint constrains by a schema; no look-ups
prompted     the same object in plain text; stray commas and code fences are tolerated
"""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from researcher.study.spec import StudySpec

FORMS = ("tools", "json_schema", "prompted")
_LONGEST, _LONGEST_REFUSAL, _MOST_OBJECTS, _MOST_CALLS = 100_000, 2_000, 100, 16
"""Limits: characters read from an answer, characters kept of a refusal, braces tried as the start of a JSON object, and tool calls per
answer.
"""
_KEPT = ("content", "tool_calls", "reasoning_content", "reasoning_details")
"""Fields of an answer with tool calls that the next request sends back. Some endpoints refuse requests without their own reasoning."""
_UNUSED = ("title", "default", "description", "minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "minLength", "maxLength",
    "minItems", "maxItems")  # fmt: skip


class Unreadable(ValueError):
    """The answer contains neither a call nor an ending. The text tells the LLM why."""


class AnswerSpent(Exception):
    """The answer's tokens ran out before it said anything: a reasoning model used them all for thinking."""


@dataclass(frozen=True, slots=True)
class Call:
    """A call in an answer.

    `id` is None if it is not a tool call. `arguments` is None if they are not a JSON object; `problem` then says so.
    """

    id: str | None
    name: str
    arguments: dict[str, Any] | None
    problem: str = ""


@dataclass(frozen=True, slots=True)
class Reply:
    """A parsed answer. `message` is the assistant's message, to be included in the next request."""

    message: dict[str, Any]
    calls: list[Call] = field(default_factory=list)


def form_fields(form: str, tools: Sequence[dict[str, Any]], endings: Sequence[str]) -> dict[str, Any]:
    """Return the fields of a request other than its messages. `endings` names the tools that end the conversation."""
    if form == "tools":
        return {"tools": list(tools), "tool_choice": "auto"}
    if form == "json_schema":
        wanted = {"name": "ending", "strict": False, "schema": ending_schema(tools, endings)}
        return {"response_format": {"type": "json_schema", "json_schema": wanted}}
    return {}


def form_of(request: dict[str, Any]) -> str:
    """Return the form of a request."""
    return "tools" if "tools" in request else "json_schema" if "response_format" in request else "prompted"


def ending_schema(tools: Sequence[dict[str, Any]], endings: Sequence[str]) -> dict[str, Any]:
    """Return the schema of one object for all endings: its `ending` says which one it is, and its fields are those of their tools."""
    parameters = [tool["function"]["parameters"] for tool in tools if tool["function"]["name"] in endings]
    fields = {name: schema for each in parameters for name, schema in each["properties"].items()}
    properties = {"ending": {"type": "string", "enum": list(endings)}, **fields}
    return {"type": "object", "properties": properties, "required": ["ending"], "additionalProperties": False}


def read_reply(raw: dict[str, Any], endings: Sequence[str]) -> Reply:
    """Parse an answer. Raises: Unreadable, AnswerSpent."""
    choices = raw.get("choices")
    choice = choices[0] if isinstance(choices, list) and choices else None
    message = choice.get("message") if isinstance(choice, dict) else None
    if not isinstance(choice, dict) or not isinstance(message, dict):
        raise Unreadable("the answer is not a chat completion")
    cut = choice.get("finish_reason") == "length"
    made = [each for each in message.get("tool_calls") or () if isinstance(each, dict)][:_MOST_CALLS]
    if made:
        named = [{**each, "id": str(each.get("id") or f"call-{number}")} for number, each in enumerate(made)]
        kept = {name: message[name] for name in _KEPT if message.get(name)} | {"tool_calls": named}
        said = storable({"role": "assistant", "content": None, **kept})
        return Reply(said, [_call(each, cut=cut) for each in named])
    content = message.get("content")
    parts = [part for part in content if isinstance(part, dict)] if isinstance(content, list) else [message]
    text = "".join(str(part.get("text", "")) for part in parts) if isinstance(content, list) else content
    text = text if isinstance(text, str) else ""
    found = _ending(text, endings)
    if found is not None:
        return Reply(storable({"role": "assistant", "content": text}), [found])
    # A refusal is a field next to the content, or part of the content.
    refusals = [each for part in (message, *parts) if isinstance(each := part.get("refusal"), str)]
    refusal = str(storable(" ".join(dict.fromkeys(refusals)).strip()[:_LONGEST_REFUSAL]))
    if refusal:
        raise Unreadable(f"the LLM refused: {refusal}")
    if not text.strip():
        if cut:
            raise AnswerSpent
        raise Unreadable("the answer is empty")
    raise Unreadable("the answer was cut off: be shorter" if cut else "the answer contains no call and no JSON object")


def said_in(raw: dict[str, Any]) -> dict[str, Any]:
    """Return an unreadable answer as the assistant's message."""
    text = json.dumps(raw.get("choices", raw), ensure_ascii=False)[:4000]
    return {"role": "assistant", "content": storable(text)}


def storable(value: Any) -> Any:
    """Replace what cannot be sent or stored: lone surrogates, which truncated answers may contain, and numbers over 64 bits."""
    if isinstance(value, str):
        return value.encode("utf-8", errors="replace").decode()
    if isinstance(value, int) and value.bit_length() > 63:
        return f"a number of {value.bit_length()} bits"
    if isinstance(value, dict):
        return {storable(name): storable(each) for name, each in value.items()}
    return [storable(each) for each in value] if isinstance(value, list) else value


def _call(made: dict[str, Any], *, cut: bool) -> Call:
    function = made.get("function")
    function = function if isinstance(function, dict) else {}
    name, given = str(function.get("name", "")), function.get("arguments") or "{}"
    if isinstance(given, dict):
        return Call(made["id"], name, storable(given))
    text = str(given)[:_LONGEST]
    found = next(_objects(text[text.find("{") :], most=1), None)
    problem = "the arguments were cut off: be shorter" if cut else "the arguments are not a JSON object"
    return Call(made["id"], name, storable(found), "" if found is not None else problem)


def _ending(text: str, endings: Sequence[str]) -> Call | None:
    """Return the first object in the text that ends the conversation, or None.

    The object may stand in prose or in a code fence, have extra commas, or be written as a call: {"name": "propose", "arguments":
    {…}}, {"propose": {…}}.
    """
    for found in _objects(text[:_LONGEST]):
        arguments = found.get("arguments", found.get("parameters"))
        if found.get("ending") in endings:
            name, arguments = found["ending"], {key: each for key, each in found.items() if key != "ending"}
        elif found.get("name") in endings and isinstance(arguments, dict):
            name = found["name"]
        elif (
            len(found) == 1 and isinstance(arguments := next(iter(found.values())), dict) and found.keys() <= {*endings}
        ):
            (name,) = found
        else:
            continue
        return Call(None, name, storable(arguments))
    return None


def _objects(text: str, most: int = _MOST_OBJECTS) -> Iterator[dict[str, Any]]:
    decoder = json.JSONDecoder(parse_constant=_no_constant)
    for candidate in (text, re.sub(r",(\s*[}\]])", r"\1", text)):
        for start in itertools.islice((match.start() for match in re.finditer(r"\{", candidate)), most):
            try:
                found, _ = decoder.raw_decode(candidate, start)
            except (ValueError, RecursionError):
                continue
            if isinstance(found, dict):
                yield found


def _no_constant(name: str) -> None:
    raise ValueError(f"{name} is not JSON")


# -- tools and schemas ---------------------------------------------------------------------------------------------------


def tool(
    name: str, description: str, properties: dict[str, Any], required: Collection[str] | None = None
) -> dict[str, Any]:
    """Return an OpenAI function tool. `required` defaults to all properties."""
    parameters = {
        "type": "object",
        "properties": properties,
        "required": list(properties if required is None else required),
        "additionalProperties": False,
    }
    return {"type": "function", "function": {"name": name, "description": description, "parameters": parameters}}


def spec_schema(without: Collection[str] = ()) -> dict[str, Any]:
    """Return the schema of `StudySpec` without references, bounds (code checks them), the question and the given fields."""
    whole = StudySpec.model_json_schema()
    plain: dict[str, Any] = _plain(whole, whole.pop("$defs"))
    for name in ("question", *without):
        del plain["properties"][name]
    return plain


def _plain(schema: Any, defs: dict[str, Any]) -> Any:
    if isinstance(schema, list):
        return [_plain(each, defs) for each in schema]
    if not isinstance(schema, dict):
        return schema
    if "$ref" in schema:
        return _plain(defs[schema["$ref"].rpartition("/")[2]], defs)
    if "anyOf" in schema:
        kinds = [_plain(each, defs) for each in schema["anyOf"] if each.get("type") != "null"]
        names = [each["type"] for each in kinds if len(each) == 1]
        kinds = [each for each in kinds if each != {"type": "integer"} or "number" not in names]
        return kinds[0] if len(kinds) == 1 else {"anyOf": kinds}
    if "properties" in schema:
        fields = {name: _plain(each, defs) for name, each in schema["properties"].items()}
        return {"type": "object", "properties": fields, "additionalProperties": False}
    kept = {name: _plain(each, defs) for name, each in schema.items() if name not in _UNUSED}
    if "patternProperties" in kept:
        kept["additionalProperties"] = next(iter(kept.pop("patternProperties").values()))
    return kept


def pruned(value: Any) -> Any:
    """Drop the values that LLMs write for "not set": null, and empty lists, objects and texts.

    Keeps an empty arm, which means all defaults.
    """
    if not isinstance(value, dict):
        return value
    arms = value.get("arms")
    kept = {name: pruned(each) for name, each in value.items() if name != "arms"}
    if isinstance(arms, dict) and arms:
        kept["arms"] = {name: {} if each is None else each for name, each in arms.items()}
    elif arms:
        kept["arms"] = arms
    return {name: each for name, each in kept.items() if each is not None and each not in ("", [], {}, ())}
