"""When two messages say the same: white space, JSON key order, re-serialised arguments, tool-call ids and absent fields
do not count.

Pure functions over chat messages and text.
"""

from __future__ import annotations

import json
from typing import Any

Message = dict[str, Any]

_COMPARED = ("name", "reasoning", "reasoning_content")
_JSON_OPENERS = frozenset("{[")


def same_message(one: Message, other: Message) -> bool:
    """Whether two messages are equal but for normalisation."""
    return normal_message(one) == normal_message(other)


def normal_message(message: Message) -> dict[str, Any]:
    """A message with all that does not count taken out. Fields that no template reads are left out."""
    normal: dict[str, Any] = {"role": str(message.get("role", ""))}
    if text := normal_content(message.get("content")):
        normal["content"] = text
    if calls := message.get("tool_calls"):
        normal["tool_calls"] = [_normal_call(call) for call in calls if isinstance(call, dict)]
    for name in _COMPARED:
        if message.get(name):
            normal[name] = normal_text(str(message[name]))
    return normal


def normal_content(content: Any) -> Any:
    """A string, or a list of parts: text parts become one string, others stay what they are."""
    if content is None or isinstance(content, str):
        return normal_text(content or "")
    if not isinstance(content, list):
        return content
    parts = [part if isinstance(part, dict) else {"type": "text", "text": str(part)} for part in content]
    if all(str(part.get("type", "text")) in _TEXT_PARTS for part in parts):
        return normal_text("".join(str(part.get("text", "")) for part in parts))
    return [_sorted(part) for part in parts]


_TEXT_PARTS = frozenset({"text", "input_text", "output_text"})


def has_only_text(messages: list[Message]) -> bool:
    """Whether no message carries images, sound or files."""
    return all(
        content is None or isinstance(content, str) or isinstance(normal_content(content), str)
        for content in (message.get("content") for message in messages)
    )


def normal_text(text: str) -> str:
    """Text without white space, with every JSON object or list in it written in one way, and no broken last character."""
    parts: list[str] = []
    at = 0
    decoder = json.JSONDecoder()
    while at < len(text):
        if text[at] in _JSON_OPENERS:
            try:
                value, end = decoder.raw_decode(text, at)
            except (json.JSONDecodeError, RecursionError):
                pass  # a brace that opens no JSON is text like any other
            else:
                parts.append(json.dumps(_sorted(value), sort_keys=True, ensure_ascii=False))
                at = end
                continue
        following = _next_opener(text, at + 1)
        parts.append(text[at:following])
        at = following
    return "".join("".join(parts).split()).rstrip("�")


def _next_opener(text: str, start: int) -> int:
    found = [at for opener in _JSON_OPENERS if (at := text.find(opener, start)) >= 0]
    return min(found, default=len(text))


def _normal_call(call: dict[str, Any]) -> dict[str, Any]:
    function = call.get("function") or call
    arguments = function.get("arguments")
    text = arguments if isinstance(arguments, str) else json.dumps(arguments if arguments is not None else {})
    return {"name": str(function.get("name", "")), "arguments": normal_text(text) or "{}"}


def _sorted(value: Any) -> Any:
    """Nested JSON; strings that are themselves JSON objects (re-serialised arguments) are read as such."""
    if isinstance(value, dict):
        return {str(key): _sorted(value[key]) for key in sorted(value, key=str)}
    if isinstance(value, list):
        return [_sorted(item) for item in value]
    if isinstance(value, str) and value[:1] in _JSON_OPENERS:
        try:
            return _sorted(json.loads(value))
        except (json.JSONDecodeError, RecursionError):
            return value
    return value
