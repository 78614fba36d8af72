"""An LLM that answers from a script: chat completions as JSON, or errors."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from typing import Any

Answer = dict[str, Any] | BaseException

SENSIBLE: dict[str, Any] = {
    "spec": {
        "instrument": "arithmetic",
        "compare": {"learning_rate": {"baseline": 1e-5, "levels": [1e-4]}},
        "metric": "auc_reward",
        "claim": "increase",
    },
    "because": "The topic compares two learning rates.",
    "uncovered": [],
    "from_topic": ["compare.learning_rate"],
}
"""A proposal."""


def completion(text: str | None, *, finish: str = "stop", **usage: Any) -> dict[str, Any]:
    """A chat completion that says `text`."""
    return _completed({"role": "assistant", "content": text}, finish, **usage)


def called(*calls: tuple[str, Any], **usage: Any) -> dict[str, Any]:
    """A chat completion that calls tools: their names, and arguments as an object or as text."""
    made = [
        {"id": f"call_{number}", "type": "function", "function": {"name": name, "arguments": _text(arguments)}}
        for number, (name, arguments) in enumerate(calls)
    ]
    return _completed({"role": "assistant", "content": None, "tool_calls": made}, "tool_calls", **usage)


def proposed(proposal: dict[str, Any] = SENSIBLE, /, **spec: Any) -> dict[str, Any]:
    """A chat completion that proposes; fields of the spec may differ."""
    return called(("propose", {**proposal, "spec": {**proposal["spec"], **spec}}))


def said(answer: Any) -> dict[str, Any]:
    """A chat completion that says this as JSON."""
    return completion(json.dumps(answer))


def _completed(message: dict[str, Any], finish: str, **usage: Any) -> dict[str, Any]:
    counts = {"prompt_tokens": 100, "completion_tokens": 20, **usage}
    return {"choices": [{"index": 0, "message": message, "finish_reason": finish}], "usage": counts}


def _text(arguments: Any) -> str:
    return arguments if isinstance(arguments, str) else json.dumps(arguments)


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
