"""Tokens and chat template of the echo engine: one id per UTF-8 byte, a few special ids, ChatML with tools.

Pure functions over lists of ids. Knows nothing of sampling, training or HTTP.
"""

from __future__ import annotations

import json
from typing import Any

IM_START, IM_END = 256, 257
SPECIAL: dict[int, str] = {IM_START: "<|im_start|>", IM_END: "<|im_end|>"}
TOOL_OPEN, TOOL_CLOSE = "<tool_call>\n", "\n</tool_call>"

_USER_HEAD = [IM_START, *b"user\n"]


def encode(text: str) -> list[int]:
    """The bytes of `text`; special tokens never arise from text."""
    return list(text.encode("utf-8", "surrogatepass"))


def decode(ids: list[int]) -> str:
    """Text of the ids, special tokens included; bytes that are no UTF-8 become U+FFFD."""
    parts: list[str] = []
    run = bytearray()
    for token in ids:
        if token < 256:
            run.append(token)
            continue
        parts.append(run.decode("utf-8", "replace"))
        run.clear()
        parts.append(SPECIAL.get(token, "�"))
    parts.append(run.decode("utf-8", "replace"))
    return "".join(parts)


def render_chat(messages: list[dict[str, Any]], tools: list[dict[str, Any]], *, open_answer: bool) -> list[int]:
    """ChatML, one `<|im_start|>role … <|im_end|>` for each message; tools are listed in a system message up front."""
    ids: list[int] = []
    if tools:
        listed = "\n".join(json.dumps(tool, sort_keys=True) for tool in tools)
        ids += _turn("system", f"You may call these tools:\n<tools>\n{listed}\n</tools>")
    for message in messages:
        ids += _turn(str(message.get("role", "user")), message_text(message))
    if open_answer:
        ids += [IM_START, *encode("assistant\n")]
    return ids


def message_text(message: dict[str, Any]) -> str:
    """What the template writes for a message: its text, then its tool calls."""
    content = message.get("content")
    if isinstance(content, list):
        content = "".join(str(part.get("text", "")) for part in content if isinstance(part, dict))
    text = "" if content is None else str(content)
    for call in message.get("tool_calls") or ():
        function = call.get("function", {})
        text += tool_call_text(str(function.get("name", "")), str(function.get("arguments", "{}")))
    return text


def other_than_text(messages: list[dict[str, Any]]) -> list[str]:
    """Types of content parts that carry no text: images, sound, files."""
    parts = [part for message in messages if isinstance(content := message.get("content"), list) for part in content]
    return sorted({str(part.get("type")) for part in parts if isinstance(part, dict) and "text" not in part})


def tool_call_text(name: str, arguments_json: str) -> str:
    return f'{TOOL_OPEN}{{"name": {json.dumps(name)}, "arguments": {arguments_json}}}{TOOL_CLOSE}'


def last_user_word(prompt_ids: list[int]) -> str:
    """The last word of the last user message in a rendered prompt, or of a plain text; `ok` where there is none."""
    if IM_START not in prompt_ids:
        return _last_word(decode([token if token < 256 else 32 for token in prompt_ids]))
    width = len(_USER_HEAD)
    for start in range(len(prompt_ids) - width, -1, -1):
        if prompt_ids[start] == IM_START and prompt_ids[start : start + width] == _USER_HEAD:
            body = prompt_ids[start + width :]
            end = body.index(IM_END) if IM_END in body else len(body)
            return _last_word(decode(body[:end]))
    return "ok"


def _last_word(text: str) -> str:
    words = text.split()
    return words[-1] if words else "ok"


def _turn(role: str, text: str) -> list[int]:
    return [IM_START, *encode(f"{role}\n{text}"), IM_END, *encode("\n")]
