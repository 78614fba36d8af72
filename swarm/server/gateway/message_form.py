"""Decides whether two messages are equal. It ignores white space around texts, JSON key order, re-serialised arguments,
tool-call ids and absent fields.
"""

from __future__ import annotations

import json
import re
from typing import Any

from foundation import strict_json

Message = dict[str, Any]

MOST_DEPTH = 128
"""Maximum nesting depth of a request. Translations and traces add a few levels, and readers of a trace stop at 200."""
MOST_DEPTH_SHOWN = MOST_DEPTH - 8
"""Maximum nesting depth of an answer: the request that sends it back nests it a few levels deeper."""
_COMPARED = ("name", "reasoning", "reasoning_content")
_JSON_OPENERS = frozenset("{[")
_OPENER = re.compile(r"""\{(?=\s*["}])|\[(?=\s*[\]\[{"\-\dtfnNI])""")
"""Matches a brace that may open JSON; the decoder skips all others."""
_TOKEN = re.compile(r'"[^"\\]*(?:\\.[^"\\]*)*"?|[\[\]{}]', re.DOTALL)
"""Matches a JSON string, possibly cut off, or a brace outside of strings."""
_DECODER = json.JSONDecoder(
    parse_constant=lambda name: None if name == "NaN" else float(name), parse_float=strict_json.finite
)
"""Reads a model's JSON even where `strict_json` refuses it. NaN becomes null, as it does in agents that re-serialise it."""
_HALF_CHARACTER = re.compile("[\ud800-\udfff]")


class _Unplaced(str):
    """A string that claims to have no line breaks, because a decoder's error would scan the whole text to count them."""

    def count(self, *_: Any) -> int:
        return 0

    def rfind(self, *_: Any) -> int:
        return -1


def normal_message(message: Message) -> dict[str, Any]:
    """Return the message in normal form, without insignificant differences and without fields that no template reads.

    White space counts, except at both ends. If an assistant's text is entirely JSON, only its value counts.
    """
    normal: dict[str, Any] = {"role": str(message.get("role", ""))}
    content = joined_content(message.get("content"))
    if isinstance(content, str):
        content = _normal_answer(content) if normal["role"] == "assistant" else content.strip()
    if content:
        normal["content"] = content
    if calls := message.get("tool_calls"):
        normal["tool_calls"] = [_normal_call(call) for call in calls if isinstance(call, dict)]
    for name in _COMPARED:
        if message.get(name):
            normal[name] = str(message[name]).strip()
    return normal


def spelling(message: Message) -> tuple[Any, ...]:
    """Return the exact spelling of the parts that may differ between messages with equal normal forms."""
    calls = [call for call in message.get("tool_calls") or () if isinstance(call, dict)]
    arguments = [(call.get("function") or call).get("arguments") for call in calls]
    return joined_content(message.get("content")), arguments, [call.get("id") for call in calls]


def joined_content(content: Any) -> Any:
    """Join the parts of a message's content into one string if all of them are text; otherwise return the list of parts."""
    if content is None or isinstance(content, str):
        return content or ""
    if not isinstance(content, list):
        return content
    parts = [part if isinstance(part, dict) else {"type": "text", "text": str(part)} for part in content]
    if all(str(part.get("type", "text")) in _TEXT_PARTS for part in parts):
        return "".join(str(part.get("text", "")) for part in parts)
    return parts


_TEXT_PARTS = frozenset({"text", "input_text", "output_text"})


def has_only_text(messages: list[Message]) -> bool:
    """True if no message carries images, sound or files."""
    return all(
        content is None or isinstance(content, str) or isinstance(joined_content(content), str)
        for content in (message.get("content") for message in messages)
    )


def normal_text(text: str) -> str:
    """Return the text with each JSON object or list in normal form, and without white space or a broken last character."""
    text = _Unplaced(text)
    parts: list[str] = []
    at, broken = 0, set[int]()
    while at < len(text):
        part, at = _json_at(text, at, broken) or _text_at(text, at)
        parts.append(part)
    return "".join("".join(parts).split()).rstrip("�")


def _json_at(text: str, at: int, broken: set[int]) -> tuple[str, int] | None:
    """Return the normal form of the object or list that begins at `at`, and its end; None if none begins there.

    `broken` collects the positions of braces that open no valid JSON, so that a text is read only a few times, however its
    braces nest.
    """
    if at in broken or _OPENER.match(text, at) is None:
        return None
    try:
        value, end = _DECODER.raw_decode(text, at)
        written = json.dumps(_sorted(value), sort_keys=True, ensure_ascii=False)
    except json.JSONDecodeError as error:
        broken.update(_open_at(text, at, error.pos))
        return None
    except ValueError:  # a number with too many digits
        return None
    except RecursionError:  # anything inside would be too deep as well
        return text[at:], len(text)
    return _HALF_CHARACTER.sub("�", written), end


def _open_at(text: str, begin: int, end: int) -> list[int]:
    """Return the positions of the braces that are still open at `end`. The JSON must be well-formed up to `end`."""
    still: list[int] = []
    for token in _TOKEN.finditer(text, begin, end):
        if token[0] in _JSON_OPENERS:
            still.append(token.start())
        elif token[0] in "]}":
            still.pop()
    return still


def _text_at(text: str, at: int) -> tuple[str, int]:
    """Return the text up to the next brace that may open JSON, and its end."""
    following = _OPENER.search(text, at + 1)
    end = following.start() if following else len(text)
    return text[at:end], end


def read_json(text: str) -> Any:
    """Parse JSON that a model wrote. Raises: ValueError if it is not JSON, or is nested too deeply for a request to send back."""
    value = strict_json.loads_plain(text)
    if strict_json.is_deeper(value, MOST_DEPTH_SHOWN):
        raise ValueError("the JSON is nested too deeply")
    return value


def _normal_answer(text: str) -> str:
    text = _ends_off(text)
    return (_written(text) if text[:1] in _JSON_OPENERS else None) or text


def _normal_call(call: dict[str, Any]) -> dict[str, Any]:
    function = call.get("function") or call
    arguments = function.get("arguments")
    text = arguments if isinstance(arguments, str) else json.dumps(arguments if arguments is not None else {})
    written = _written(text) or _ends_off(text)
    return {"name": str(function.get("name", "")), "arguments": written or "{}"}


def _written(text: str) -> str | None:
    """Return JSON text in normal form; None if the text is not JSON."""
    try:
        written = json.dumps(_DECODER.decode(_Unplaced(text)), sort_keys=True, ensure_ascii=False)
    except (ValueError, RecursionError):
        return None
    return _HALF_CHARACTER.sub("�", written)


def _ends_off(text: str) -> str:
    """Remove white space around the text, and a last character that was cut in half."""
    return text.strip().rstrip("�").rstrip()


def _sorted(value: Any) -> Any:
    """Sort the keys of a JSON value, and decode strings that are themselves JSON objects or lists (re-serialised arguments)."""
    if isinstance(value, dict):
        return {str(key): _sorted(value[key]) for key in sorted(value, key=str)}
    if isinstance(value, list):
        return [_sorted(item) for item in value]
    if isinstance(value, str) and value[:1] in _JSON_OPENERS:
        try:
            return _sorted(_DECODER.decode(value))
        except (ValueError, RecursionError):
            return value
    return value
