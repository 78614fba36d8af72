"""The chat completions dialect (OpenAI), as the gateway needs it.

Pure functions over JSON objects; what vLLM serves is kept as it is.
"""

from __future__ import annotations

import bisect
import itertools
from collections.abc import Iterator, Sequence
from typing import Any

from swarm.engine.seam import Dialect as EngineDialect
from swarm.protocol.episodes import RecordedCall
from swarm.server.gateway.dialect import (
    Form,
    JsonObject,
    check_choices,
    check_no_thinking_budget,
    check_numbers,
    check_object_lists,
    check_objects,
    check_stops,
    data_frame,
)
from swarm.server.gateway.errors import ErrorAnswer, bad_request
from swarm.server.gateway.forms import ChunkAssembly
from swarm.server.gateway.message_form import Message

DONE = b"data: [DONE]\n\n"
_SETTINGS = ("tools", "chat_template_kwargs", "documents", "reasoning_effort")
_NUMBERS = ("temperature", "top_p", "top_k", "seed", "max_tokens", "max_completion_tokens")


class ChatForm:
    """The engine's chat completions: one prompt, `n` choices."""

    engine_dialect: EngineDialect = "chat.completions"

    def choices(self, body: JsonObject) -> int:
        return int(body.get("n") or 1)

    def assembly(self, body: JsonObject) -> ChatAssembly:
        return ChatAssembly(self.choices(body))

    def choice_of(self, answer: JsonObject, index: int) -> JsonObject:
        return answer | {"choices": [choice for choice in answer["choices"] if choice["index"] == index]}

    def joined(self, answers: Sequence[JsonObject]) -> JsonObject:
        (answer,) = answers
        return answer

    def replay(self, answer: JsonObject, body: JsonObject) -> Iterator[JsonObject]:
        head = {name: answer.get(name) for name in ("id", "created", "model")} | {"object": "chat.completion.chunk"}
        for choice in answer["choices"]:
            yield head | {"choices": [_delta(choice, {"role": "assistant", "content": ""})]}
            for delta, logprobs in _parts(choice):
                yield head | {"choices": [_delta(choice, delta) | {"logprobs": logprobs}]}
            end = {"finish_reason": choice.get("finish_reason"), "stop_reason": choice.get("stop_reason")}
            yield head | {"choices": [_delta(choice, {}) | end]}
        if (body.get("stream_options") or {}).get("include_usage") and answer.get("usage"):
            yield head | {"choices": [], "usage": answer["usage"]}


class ChatCompletions:
    """`/v1/chat/completions`: the engine's own words."""

    name = "chat.completions"
    form: Form = ChatForm()

    def check(self, body: JsonObject) -> None:
        messages = body.get("messages")
        if not isinstance(messages, list) or not messages or not all(isinstance(item, dict) for item in messages):
            raise bad_request("messages must be a list of at least one object", "messages")
        for message in messages:
            _check_message(message)
        check_chat(body)
        check_tools(body)
        for name in ("add_generation_prompt", "continue_final_message", "echo", "chat_template"):
            if body.get(name) not in (None, name == "add_generation_prompt"):
                text = f"{name} is not served here: prompts are recorded as the model's own template makes them"
                raise bad_request(text, name)

    def check_end(self, body: JsonObject) -> None:
        """A last message of the assistant is history, and `continue_final_message` is refused above."""

    def requests(self, body: JsonObject, earlier: Sequence[RecordedCall]) -> list[JsonObject]:
        return [body]

    def answer(self, body: JsonObject, asked: JsonObject, answer: JsonObject) -> JsonObject:
        return answer

    def stream(self, body: JsonObject, asked: JsonObject) -> ChatStream:
        return ChatStream()


class ChatStream:
    """Chunks as they come, then `[DONE]`."""

    def frames(self, chunk: JsonObject, prompt_tokens: int) -> list[bytes]:
        return [data_frame(chunk)]

    def end(self, answer: JsonObject) -> list[bytes]:
        return [DONE]

    def broken(self, error: ErrorAnswer) -> list[bytes]:
        return [data_frame(error.body)]


def check_chat(body: JsonObject) -> None:
    """Refuse fields of a chat completion that cannot be what they are."""
    check_choices(body)
    check_stops(body, "stop")
    check_numbers(body, *_NUMBERS)
    check_objects(body, "response_format", "stream_options", "chat_template_kwargs", "logit_bias")
    check_objects(body.get("response_format") or {}, "json_schema")
    check_no_thinking_budget(body)


def _check_message(message: Message) -> None:
    content, calls = message.get("content"), message.get("tool_calls")
    if not isinstance(message.get("role"), str):
        raise bad_request("each message must have a role", "messages")
    parts = content if isinstance(content, list) else []
    if not (content is None or isinstance(content, str | list)) or not all(isinstance(p, dict | str) for p in parts):
        raise bad_request("content must be a text or a list of parts", "messages")
    if calls is not None and not (isinstance(calls, list) and all(map(_names_function, calls))):
        raise bad_request("tool_calls must be a list of objects, each with a function and its name", "messages")


def check_tools(body: JsonObject) -> None:
    """Raises: RequestRefused for tools without names, or a choice that is none."""
    check_object_lists(body, "tools")
    if not all(map(_names_function, body.get("tools") or ())):
        raise bad_request("each tool must have a function with a name", "tools")
    choice = body.get("tool_choice")
    named = isinstance(choice, dict) and (choice.get("type") != "function" or _names_function(choice))
    if not (choice in (None, "none", "auto", "required") or named):
        raise bad_request("tool_choice must be none, auto, required, or name a function", "tool_choice")


def _names_function(tool: Any) -> bool:
    function = tool.get("function") if isinstance(tool, dict) else None
    return isinstance(function, dict) and isinstance(function.get("name"), str)


def prompt_settings(body: JsonObject) -> JsonObject:
    """All that a prompt depends on besides its messages: tools, template settings."""
    return {name: body[name] for name in _SETTINGS if body.get(name)}


def prompt_body(body: JsonObject, messages: list[Message]) -> JsonObject:
    """A body to render `messages` with the settings of `body`."""
    return {"messages": messages, "tool_choice": "none"} | prompt_settings(body)


def message_of(answer: JsonObject) -> Message | None:
    """The message that a client would send back for a recorded answer; None where there is none."""
    choices = answer.get("choices") or ()
    if not choices or not choices[0].get("message"):
        return None
    message = {name: value for name, value in choices[0]["message"].items() if value is not None}
    return message if message.get("tool_calls") else {"content": ""} | message


def _parts(choice: JsonObject) -> Iterator[tuple[JsonObject, JsonObject | None]]:
    """What was thought, said and called, in this order, as deltas with the log-probabilities of each."""
    said = {name: value for name, value in choice["message"].items() if name != "role" and value is not None}
    thought = {"reasoning": said.pop("reasoning")} if said.get("reasoning") else {}
    called = [call | {"index": position} for position, call in enumerate(said.pop("tool_calls", ()))]
    calls = {"tool_calls": called} if called else {}
    entries = (choice.get("logprobs") or {}).get("content") or []
    begin, end = _text_span(entries, thought.get("reasoning", ""), said.get("content", ""), called=bool(called))
    for delta, some in ((thought, entries[:begin]), (said, entries[begin:end]), (calls, entries[end:])):
        if delta or some:
            yield delta, {"content": some} if some else None


def _text_span(entries: list[JsonObject], thought: str, text: str, *, called: bool) -> tuple[int, int]:
    """The entries of `text`: all, but for those before and after it where something was thought or called."""
    spelt = [bytes(entry.get("bytes") or ()) for entry in entries]
    ends = list(itertools.accumulate(map(len, spelt)))
    whole = b"".join(spelt)
    after = max(0, whole.find(thought.encode())) + len(thought.encode())
    at = whole.find(text.encode(), after)
    if not text or at < 0:  # where its tokens cannot be found, none are told
        return (len(entries), len(entries)) if thought or called else (0, len(entries))
    begin = bisect.bisect_right(ends, at) if thought else 0
    return begin, bisect.bisect_left(ends, at + len(text.encode())) + 1 if called else len(entries)


def _delta(choice: dict[str, Any], delta: dict[str, Any]) -> dict[str, Any]:
    return {"index": choice["index"], "delta": delta, "logprobs": None, "finish_reason": None}


class ChatAssembly(ChunkAssembly):
    """Chunks put together to a `chat.completion`."""

    kind = "chat.completion"

    def _begun(self) -> JsonObject:
        return {"message": {"role": "assistant", "content": None}, "finish_reason": None}

    def _grow(self, choice: JsonObject, chunk: JsonObject) -> None:
        _merge(choice["message"], chunk.get("delta") or {})
        if (logprobs := chunk.get("logprobs")) and logprobs.get("content"):
            choice.setdefault("logprobs", {"content": []})["content"] += logprobs["content"]


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
