"""The chat completions dialect (OpenAI), which the engine itself speaks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from swarm.protocol.episodes import RecordedCall
from swarm.server.gateway.dialect import Dialect, check_object_lists, check_sampling, data_frame, has_items
from swarm.server.gateway.errors import ErrorAnswer, bad_request
from swarm.server.gateway.forms import ChatForm, JsonObject
from swarm.server.gateway.message_form import Message

DONE = b"data: [DONE]\n\n"
_NOT_SERVED = ("add_generation_prompt", "continue_final_message", "echo", "chat_template")


class ChatCompletions(Dialect):
    """The rules of `/v1/chat/completions`."""

    name = "chat.completions"
    form = ChatForm()

    def check(self, body: JsonObject) -> None:
        if not has_items(body.get("messages")):
            raise bad_request("messages must be a list of at least one object", "messages")
        for message in body["messages"]:
            _check_message(message)
        check_sampling(body)
        check_tools(body)
        for name in _NOT_SERVED:
            if body.get(name) not in (None, name == "add_generation_prompt"):
                text = f"{name} is not supported: prompts must be exactly what the model's own template renders"
                raise bad_request(text, name)

    def check_end(self, body: JsonObject) -> None:
        """Accept every request: a final assistant message is history, and `check` refuses `continue_final_message`."""

    def requests(self, body: JsonObject, earlier: Sequence[RecordedCall]) -> list[JsonObject]:
        return [body]

    def answer(self, body: JsonObject, asked: JsonObject, answer: JsonObject) -> JsonObject:
        return answer

    def stream(self, body: JsonObject, asked: JsonObject) -> ChatStream:
        return ChatStream()


class ChatStream:
    """Sends chunks as they arrive, then `[DONE]`."""

    def frames(self, chunk: JsonObject, prompt_tokens: int) -> list[bytes]:
        return [data_frame(chunk)]

    def end(self, answer: JsonObject) -> list[bytes]:
        return [DONE]

    def broken(self, error: ErrorAnswer) -> list[bytes]:
        return [data_frame(error.body)]


def check_tools(body: JsonObject) -> None:
    """Refuse tools without names, and unknown kinds of tool choice. Raises: RequestRefused."""
    check_object_lists(body, "tools")
    if not all(map(_names_function, body.get("tools") or ())):
        raise bad_request("each tool must have a function with a name", "tools")
    choice = body.get("tool_choice")
    named = isinstance(choice, dict) and (choice.get("type") != "function" or _names_function(choice))
    if not (choice in (None, "none", "auto", "required") or named):
        raise bad_request("tool_choice must be none, auto, required, or name a function", "tool_choice")


def _check_message(message: Message) -> None:
    content, calls = message.get("content"), message.get("tool_calls")
    if not isinstance(message.get("role"), str):
        raise bad_request("each message must have a role", "messages")
    parts = content if isinstance(content, list) else []
    if not (content is None or isinstance(content, str | list)) or not all(isinstance(p, dict | str) for p in parts):
        raise bad_request("content must be a string or a list of parts", "messages")
    if calls is not None and not (isinstance(calls, list) and all(map(_names_function, calls))):
        raise bad_request("tool_calls must be a list of objects, each with a function that has a name", "messages")


def _names_function(tool: Any) -> bool:
    function = tool.get("function") if isinstance(tool, dict) else None
    return isinstance(function, dict) and isinstance(function.get("name"), str)
