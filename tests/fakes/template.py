"""Chat templates of a few lines for tests of the echo rule: a token is a character, special tokens stand above them.

Tokenisation is as treacherous as the real thing: the pair `ab` written by the template becomes one token, while a model may
have sampled it as two.
"""

from __future__ import annotations

import json
from collections.abc import Awaitable, Callable
from typing import Any

START, END, PAIR = 0x110000, 0x110001, 0x110002
SPECIAL = {START: "<|start|>", END: "<|end|>", PAIR: "ab"}


def encode(text: str) -> list[int]:
    ids: list[int] = []
    at = 0
    while at < len(text):
        pair = text.startswith("ab", at)
        ids.append(PAIR if pair else ord(text[at]))
        at += 2 if pair else 1
    return ids


def decode(ids: list[int]) -> str:
    return "".join(SPECIAL.get(token) or chr(token) for token in ids)


class Template:
    """ChatML with tools. strip_reasoning: as Qwen3 does, thoughts before the last user message are left out."""

    def __init__(self, *, strip_reasoning: bool = False, trims: bool = False) -> None:
        self.strip_reasoning = strip_reasoning
        self.trims = trims
        self.renders = 0

    def ids(
        self, messages: list[dict[str, Any]], open_answer: bool = True, tools: list[Any] | None = None
    ) -> list[int]:
        ids = self._turn("system", json.dumps(tools)) if tools else []
        last_user = max((at for at, message in enumerate(messages) if message["role"] == "user"), default=-1)
        for at, message in enumerate(messages):
            ids += self._turn(message["role"], self._text(message, keep_thoughts=at > last_user))
        return ids + ([START, *encode("assistant\n")] if open_answer else [])

    def bound(self, tools: list[Any] | None = None) -> Callable[[list[dict[str, Any]], bool], Awaitable[list[int]]]:
        async def render(messages: list[dict[str, Any]], open_answer: bool) -> list[int]:
            self.renders += 1
            return self.ids(messages, open_answer, tools)

        return render

    def _turn(self, role: str, text: str) -> list[int]:
        return [START, *encode(f"{role}\n{text}"), END, *encode("\n")]

    def _text(self, message: dict[str, Any], *, keep_thoughts: bool) -> str:
        content = message.get("content") or ""
        if isinstance(content, list):
            content = "".join(part["text"] for part in content)
        if self.strip_reasoning and not keep_thoughts and "</think>" in content:
            content = content.split("</think>")[1].lstrip()
        if self.trims:
            content = content.strip()
        for call in message.get("tool_calls") or ():
            function = call["function"]
            arguments = json.dumps(json.loads(function["arguments"]))
            content += f'<tool_call>\n{{"name": "{function["name"]}", "arguments": {arguments}}}\n</tool_call>'
        return content
