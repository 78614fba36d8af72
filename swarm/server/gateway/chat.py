"""The chat completions dialect (OpenAI), as the gateway needs it.

Pure functions over JSON objects; what vLLM serves is kept as it is.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import orjson

from swarm.engine.seam import RequestRefused, SampledEvent
from swarm.server.gateway.messages import Message

_SETTINGS = ("tools", "chat_template_kwargs", "documents", "reasoning_effort")


class ChatCompletions:
    """`/v1/chat/completions`."""

    def check(self, body: dict[str, Any]) -> None:
        messages = body.get("messages")
        if not isinstance(messages, list) or not messages or not all(isinstance(item, dict) for item in messages):
            raise self.refusal(400, "messages must be a list of at least one object", "BadRequestError", "messages")
        count = body.get("n")
        if count is not None and (isinstance(count, bool) or not isinstance(count, int) or count < 1):
            raise self.refusal(400, f"n must be a whole number of at least 1, got {count!r}", "BadRequestError", "n")
        for name in ("temperature", "top_p", "top_k", "seed", "max_tokens", "max_completion_tokens"):
            value = body.get(name)
            if value is not None and (isinstance(value, bool) or not isinstance(value, int | float)):
                raise self.refusal(400, f"{name} must be a number, got {value!r}", "BadRequestError", name)
        for name in ("add_generation_prompt", "continue_final_message", "echo", "chat_template"):
            if body.get(name) not in (None, name == "add_generation_prompt"):
                text = f"{name} is not served here: prompts are recorded as the model's own template makes them"
                raise self.refusal(400, text, "BadRequestError", name)

    def refusal(self, status: int, message: str, kind: str, parameter: str | None = None) -> RequestRefused:
        return RequestRefused(status, {"error": {"message": message, "type": kind, "param": parameter, "code": status}})

    def choices(self, body: dict[str, Any]) -> int:
        return int(body.get("n") or 1)

    def messages(self, body: dict[str, Any]) -> list[Message]:
        return list(body["messages"])

    def prompt_settings(self, body: dict[str, Any]) -> dict[str, Any]:
        return {name: body[name] for name in _SETTINGS if body.get(name)}

    def prompt_body(self, body: dict[str, Any], messages: list[Message]) -> dict[str, Any]:
        return {"messages": messages, "tool_choice": "none"} | self.prompt_settings(body)

    def choice_of(self, answer: dict[str, Any], index: int) -> dict[str, Any]:
        return answer | {"choices": [choice for choice in answer["choices"] if choice["index"] == index]}

    def message_of(self, answer: dict[str, Any]) -> Message | None:
        choices = answer.get("choices") or ()
        if not choices or not choices[0].get("message"):
            return None
        message = {name: value for name, value in choices[0]["message"].items() if value is not None}
        return message if message.get("tool_calls") else {"content": ""} | message

    def assembly(self, body: dict[str, Any]) -> ChatAssembly:
        return ChatAssembly(self.choices(body))

    def frame(self, data: dict[str, Any]) -> bytes:
        return b"data: " + orjson.dumps(data) + b"\n\n"

    def last_frame(self) -> bytes:
        return b"data: [DONE]\n\n"

    def replay(self, answer: dict[str, Any], body: dict[str, Any]) -> Iterator[dict[str, Any]]:
        head = {name: answer.get(name) for name in ("id", "created", "model")} | {"object": "chat.completion.chunk"}
        for choice in answer["choices"]:
            yield head | {"choices": [_delta(choice, {"role": "assistant", "content": ""})]}
            delta = {name: value for name, value in choice["message"].items() if name != "role" and value is not None}
            for position, call in enumerate(delta.get("tool_calls") or ()):
                call["index"] = position
            yield head | {"choices": [_delta(choice, delta) | {"logprobs": choice.get("logprobs")}]}
            end = {"finish_reason": choice.get("finish_reason"), "stop_reason": choice.get("stop_reason")}
            yield head | {"choices": [_delta(choice, {}) | end]}
        if (body.get("stream_options") or {}).get("include_usage") and answer.get("usage"):
            yield head | {"choices": [], "usage": answer["usage"]}


def _delta(choice: dict[str, Any], delta: dict[str, Any]) -> dict[str, Any]:
    return {"index": choice["index"], "delta": delta, "logprobs": None, "finish_reason": None}


class ChatAssembly:
    """Chunks put together to a `chat.completion`."""

    def __init__(self, choices: int) -> None:
        self._wanted = choices
        self._head: dict[str, Any] = {}
        self._choices: dict[int, dict[str, Any]] = {}
        self._prompt_tokens = 0
        self._sampled_tokens = 0

    def add(self, event: SampledEvent) -> None:
        if event.prompt_ids is not None:
            self._prompt_tokens = len(event.prompt_ids)
        self._sampled_tokens += sum(len(choice.sampled_ids) for choice in event.choices)
        data = event.data or {}
        for name in ("id", "created", "model"):
            if name in data:
                self._head.setdefault(name, data[name])
        for chunk in data.get("choices") or ():
            self._add_choice(chunk)

    @property
    def finished(self) -> bool:
        done = [choice for choice in self._choices.values() if choice["finish_reason"] is not None]
        return len(done) == self._wanted

    def answer(self) -> dict[str, Any]:
        usage = {
            "prompt_tokens": self._prompt_tokens,
            "completion_tokens": self._sampled_tokens,
            "total_tokens": self._prompt_tokens + self._sampled_tokens,
        }
        choices = [self._choices[index] for index in sorted(self._choices)]
        return self._head | {"object": "chat.completion", "choices": choices, "usage": usage}

    def _add_choice(self, chunk: dict[str, Any]) -> None:
        index = int(chunk["index"])
        message: Message = {"role": "assistant", "content": None}
        choice = self._choices.setdefault(index, {"index": index, "message": message, "finish_reason": None})
        _merge(choice["message"], chunk.get("delta") or {})
        if (logprobs := chunk.get("logprobs")) and logprobs.get("content"):
            choice.setdefault("logprobs", {"content": []})["content"] += logprobs["content"]
        for name in ("finish_reason", "stop_reason"):
            if chunk.get(name) is not None:
                choice[name] = chunk[name]


def _merge(message: Message, delta: dict[str, Any]) -> None:
    for name in ("content", "reasoning", "refusal"):
        if delta.get(name):
            message[name] = (message.get(name) or "") + delta[name]
    for part in delta.get("tool_calls") or ():
        calls: list[dict[str, Any]] = message.setdefault("tool_calls", [])
        position = int(part.get("index", len(calls)))
        while len(calls) <= position:
            calls.append({"id": None, "type": "function", "function": {"name": "", "arguments": ""}})
        call, function = calls[position], part.get("function") or {}
        call["id"] = part.get("id") or call["id"]
        call["function"]["name"] += function.get("name") or ""
        call["function"]["arguments"] += function.get("arguments") or ""
