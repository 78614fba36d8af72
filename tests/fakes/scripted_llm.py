"""An LLM that answers from a script: chat completions as JSON, or errors."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from typing import Any

Answer = dict[str, Any] | BaseException

SENSIBLE = {
    "instrument": "arithmetic",
    "factors": [{"name": "learning_rate", "baseline": 1e-5, "treatments": [1e-4]}],
    "metric": "auc_reward",
    "direction": "increase",
    "settings": [],
}


def completion(text: str | None, *, finish: str = "stop", **usage: Any) -> dict[str, Any]:
    """A chat completion that says `text`."""
    counts = {"prompt_tokens": 100, "completion_tokens": 20, **usage}
    message = {"role": "assistant", "content": text}
    return {"choices": [{"index": 0, "message": message, "finish_reason": finish}], "usage": counts}


def called(arguments: str) -> dict[str, Any]:
    """A chat completion that calls the tool."""
    call = {"id": "c", "type": "function", "function": {"name": "choose_plan", "arguments": arguments}}
    return {"choices": [{"index": 0, "message": {"role": "assistant", "content": None, "tool_calls": [call]}}]}


def said(choice: Any) -> dict[str, Any]:
    return completion(json.dumps(choice))


class ScriptedLlm:
    """Answers in turn, the last one for ever. asked: every request."""

    def __init__(self, *answers: Answer, when: Callable[[dict[str, Any]], Answer] | None = None) -> None:
        self._answers: Sequence[Answer] = answers
        self._when = when
        self.asked: list[dict[str, Any]] = []

    async def answer(self, request: dict[str, Any]) -> dict[str, Any]:
        place = min(len(self.asked), len(self._answers) - 1)
        self.asked.append(request)
        found = self._when(request) if self._when is not None else self._answers[place]
        if isinstance(found, BaseException):
            raise found
        return found
