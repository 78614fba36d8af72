"""Asks an LLM for one JSON object: by constrained decoding if the endpoint supports it, else by the prompt alone."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from researcher.llm.asking import Asker
from researcher.llm.endpoint import LlmRefused, LlmUnusable

PROMPTS = Path(__file__).parent / "prompts"
_LONGEST = 400_000
_TOLD = 8000

Messages = list[dict[str, str]]


class Unreadable(ValueError):
    """The answer contains no object with the expected field."""


@dataclass(frozen=True, slots=True)
class Form:
    """The form of the expected answer. `field` is always present in it; `schema` describes the whole object."""

    name: str
    field: str
    schema: dict[str, Any]


@dataclass(frozen=True, slots=True)
class Llm:
    """An LLM to ask. `tokens` limits the length of its answer."""

    asker: Asker
    model: str
    tokens: int


async def ask(llm: Llm, messages: Messages, form: Form, purpose: str) -> dict[str, Any]:
    """Ask, and return the raw answer. Raises: LlmUnusable, also when the endpoint accepts no form of the request."""
    request: dict[str, Any] = {"model": llm.model, "messages": messages, "max_completion_tokens": llm.tokens}
    wanted = {"name": form.name, "strict": True, "schema": form.schema}
    constrained = {**request, "response_format": {"type": "json_schema", "json_schema": wanted}}
    try:
        return await llm.asker.ask(f"{purpose}, json_schema", constrained)
    except LlmRefused:
        pass
    try:
        return await llm.asker.ask(f"{purpose}, prompted", request)
    except LlmRefused as error:
        raise LlmUnusable(f"the endpoint refuses the request in every form; the last: {error}") from error


def object_in(raw: dict[str, Any], form: Form) -> dict[str, Any]:
    """Return the first JSON object in the answer that has the form's field. Raises: Unreadable."""
    text = _text(raw)[:_LONGEST]
    decoder = json.JSONDecoder()
    for match in re.finditer(r"\{", text):
        try:
            found, _ = decoder.raw_decode(text, match.start())
        except (ValueError, RecursionError):
            continue
        if isinstance(found, dict) and form.field in found:
            return found
    raise Unreadable(
        f"the answer contains no complete JSON object with the field {form.field!r}; it may have been cut off"
    )


def told(raw: dict[str, Any], wrong: str) -> Messages:
    """Return the messages for the next try: the LLM's answer verbatim, and what was wrong with it."""
    again = f"That cannot be used: {wrong}\nAnswer again with one whole JSON object, and nothing else."
    return [{"role": "assistant", "content": _text(raw)[:_TOLD] or "(nothing)"}, {"role": "user", "content": again}]


def prompt(name: str) -> str:
    return (PROMPTS / name).read_text(encoding="utf-8")


def strict(**properties: Any) -> dict[str, Any]:
    """Return the schema of an object with exactly these properties."""
    return {"type": "object", "properties": properties, "required": list(properties), "additionalProperties": False}


def _text(raw: dict[str, Any]) -> str:
    """Return the message's content, or "" if there is none."""
    choices = raw.get("choices")
    first = choices[0] if isinstance(choices, list) and choices else None
    message = first.get("message") if isinstance(first, dict) else None
    content = message.get("content") if isinstance(message, dict) else None
    return content if isinstance(content, str) else ""
