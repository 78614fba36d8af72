"""The Messages dialect (Anthropic): content blocks in, content blocks out, over chat completions."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any, Literal

from swarm.protocol.episodes import RecordedCall
from swarm.server.gateway.dialect import (
    check_count,
    check_object_lists,
    check_objects,
    check_sampling,
    check_stops,
    named_frame,
    no_prefill,
    without_none,
)
from swarm.server.gateway.errors import ErrorAnswer, anthropic_body, bad_request
from swarm.server.gateway.forms import JsonObject
from swarm.server.gateway.item_stream import Item, ItemDialect, ItemStream
from swarm.server.gateway.message_form import Message, read_json

_PASSED = (
    "model", "temperature", "top_p", "top_k", "seed", "cache_salt", "vllm_xargs", "chat_template_kwargs",
)  # fmt: skip
_ROLES = ("user", "assistant", "system")
_TOOL_CHOICES = {"auto": "auto", "any": "required", "none": "none"}
_EFFORT_WITHOUT_THINKING = "none"
_REFERENCE = "tool_reference"
_BILLING = "x-anthropic-billing-header"
"""Prefix of a block or line that a command-line agent puts before its system prompt: a hash of the request. We drop it,
because it would make every prompt different."""


class AnthropicMessages(ItemDialect):
    """The rules of `/v1/messages`."""

    name = "messages"

    def check(self, body: JsonObject) -> None:
        messages = body.get("messages")
        if not isinstance(messages, list) or not messages:
            raise bad_request("messages must be a list of at least one message", "messages")
        for message in messages:
            if not isinstance(message, dict) or message.get("role") not in _ROLES:
                raise bad_request(f"each message must be an object with a role of {', '.join(_ROLES)}", "messages")
            _check_content(message.get("content"), "messages")
            # Clients send an empty answer back as an assistant's message without content.
            if message["content"] == [] and message["role"] != "assistant":
                raise bad_request(f"{message['role']} messages must have non-empty content", "messages")
        if body.get("system") is not None:
            _check_content(body["system"], "system")
        check_count(body, "max_tokens")
        check_objects(body, "tool_choice", "thinking", "output_config")
        check_objects(body.get("output_config") or {}, "format")
        check_object_lists(body, "tools")
        if isinstance(body.get("stop_sequences"), str):
            raise bad_request("stop_sequences must be a list of strings", "stop_sequences")
        check_stops(body, "stop_sequences")
        check_sampling({name: body.get(name) for name in _PASSED})

    def check_end(self, body: JsonObject) -> None:
        last = body["messages"][-1]
        if last["role"] == "assistant" and any(map(_says, chat_messages([last]))):
            raise no_prefill("messages")

    def requests(self, body: JsonObject, earlier: Sequence[RecordedCall]) -> list[JsonObject]:
        asked = {name: body[name] for name in _PASSED if body.get(name) is not None}
        asked["messages"] = _system(body.get("system")) + chat_messages(body["messages"])
        for name, chat_name in (("max_tokens", "max_completion_tokens"), ("stop_sequences", "stop")):
            if body.get(name):
                asked[chat_name] = body[name]
        return [asked | _tools(body) | _thinking(body) | _format(body)]

    def stream(self, body: JsonObject, asked: JsonObject) -> AnthropicStream:
        return AnthropicStream()


def _says(message: Message) -> bool:
    return bool(str(message.get("content") or "").strip() or message.get("tool_calls"))


def _check_content(content: Any, parameter: str) -> None:
    if isinstance(content, str):
        return
    if not isinstance(content, list) or not all(isinstance(block, dict) for block in content):
        raise bad_request("content must be a string or a list of content blocks", parameter)


def _tools(body: JsonObject) -> JsonObject:
    """Return the request's tools and tool choice. A deferred tool is shown to the model once a tool result has referred to it.

    Raises: RequestRefused for a tool that the client does not run itself.
    """
    functions: list[JsonObject] = []
    found = _referred(body["messages"])
    for tool in body.get("tools") or ():
        if tool.get("defer_loading") and tool.get("name") not in found:
            continue
        if not isinstance(tool.get("input_schema"), dict) or not isinstance(tool.get("name"), str):
            text = f"the tool {tool.get('name')!r} has no name or no input_schema; tools that the provider runs are not supported"
            raise bad_request(text, "tools")
        function: JsonObject = {name: tool.get(name) for name in ("name", "description", "strict")}
        function["parameters"] = {"type": "object"} | tool["input_schema"]
        functions.append({"type": "function", "function": without_none(function)})
    asked: JsonObject = {"tools": functions} if functions else {}
    choice = body.get("tool_choice")
    if choice is None:
        return asked
    asked["parallel_tool_calls"] = not choice.get("disable_parallel_tool_use")
    if choice.get("type") == "tool":
        names = [function["function"]["name"] for function in functions]
        if choice.get("name") not in names:
            raise bad_request(f"tool_choice names {choice.get('name')!r}, which is not one of {names}", "tool_choice")
        return asked | {"tool_choice": {"type": "function", "function": {"name": choice["name"]}}}
    if choice.get("type") not in list(_TOOL_CHOICES):
        raise bad_request(
            f"tool_choice.type must be auto, any, tool or none, got {choice.get('type')!r}", "tool_choice"
        )
    if choice["type"] == "any" and not functions:
        raise bad_request("tool_choice requires a tool call, but tools is empty", "tool_choice")
    return asked | ({"tool_choice": _TOOL_CHOICES[choice["type"]]} if functions else {})


def _referred(messages: Sequence[JsonObject]) -> set[str]:
    """Return the names of deferred tools that tool results refer to, because a tool search has found them."""
    blocks = [block for message in messages if isinstance(message["content"], list) for block in message["content"]]
    parts = [part for block in blocks if isinstance(block.get("content"), list) for part in block["content"]]
    return {str(part.get("tool_name")) for part in parts if isinstance(part, dict) and part.get("type") == _REFERENCE}


def _thinking(body: JsonObject) -> JsonObject:
    """Return the thinking settings. Thoughts are shown whatever `display` says, because they are sampled tokens too.

    `budget_tokens` is ignored: our engines do not count thoughts separately, and `max_tokens` limits thoughts and answer together.
    """
    asked: JsonObject = {}
    if effort := (body.get("output_config") or {}).get("effort"):
        asked["reasoning_effort"] = effort
    if (body.get("thinking") or {}).get("type") == "disabled":
        asked["reasoning_effort"] = _EFFORT_WITHOUT_THINKING
    return asked


def _format(body: JsonObject) -> JsonObject:
    wanted = (body.get("output_config") or {}).get("format") or {}
    schema = wanted.get("schema")
    if wanted.get("type") != "json_schema" or schema is None:
        return {}
    return {"response_format": {"type": "json_schema", "json_schema": {"name": "json_schema", "schema": schema}}}


# -- blocks → messages --------------------------------------------------------------------------------------------------


def _system(system: Any) -> list[Message]:
    text = _system_text(system)
    return [{"role": "system", "content": text}] if text else []


def _system_text(system: Any) -> str:
    if isinstance(system, str):
        return system.partition("\n")[2] if system.startswith(_BILLING) else system
    texts = [str(block.get("text") or "") for block in system or ()]
    return "".join(text for text in texts if not text.startswith(_BILLING))


def chat_messages(messages: Sequence[JsonObject]) -> list[Message]:
    """Convert messages of blocks to chat messages: each tool result becomes a separate message. Raises: RequestRefused."""
    found: list[Message] = []
    for message in messages:
        role, content = message["role"], message["content"]
        if role == "system":
            found += _system(content)
        elif isinstance(content, str):
            found.append({"role": role, "content": content})
        elif role == "assistant":
            found.append(_assistant(content))
        else:
            found += _user(content)
    return found


def _assistant(blocks: Sequence[JsonObject]) -> Message:
    parts: list[JsonObject] = []
    calls: list[JsonObject] = []
    thoughts: list[str] = []
    for block in blocks:
        kind = block.get("type")
        if kind == "text":
            parts.append(block)
        elif kind == "thinking":
            thoughts.append(str(block.get("thinking") or ""))
        elif kind == "tool_use":
            function = {"name": str(block.get("name") or ""), "arguments": _arguments(block.get("input", {}))}
            calls.append({"id": str(block.get("id") or ""), "type": "function", "function": function})
        elif kind != "redacted_thinking":
            raise bad_request(f"content blocks of type {kind!r} are not supported in assistant messages", "messages")
    text = "".join(str(part.get("text") or "") for part in parts)
    message: Message = {"role": "assistant", "content": text or None if calls else text}
    if thoughts:
        message["reasoning"] = "".join(thoughts)
    return message | ({"tool_calls": calls} if calls else {})


def _arguments(given: Any) -> str:
    """Return the input of a call as the model wrote it: plain text if it was not JSON."""
    return given if isinstance(given, str) else json.dumps(given)


def _user(blocks: Sequence[JsonObject]) -> list[Message]:
    """Convert the user's blocks to messages: first the tool results, in order, then the user's own content."""
    results: list[Message] = []
    parts: list[JsonObject] = []
    for block in blocks:
        if block.get("type") == "tool_result":
            results += _result(block)
        else:
            parts.append(_part(block))
    return results + ([{"role": "user", "content": _joined(parts)}] if parts else [])


def _result(block: JsonObject) -> list[Message]:
    content = block.get("content")
    given = [{"type": "text", "text": content}] if isinstance(content, str) else content or []
    if not isinstance(given, list) or not all(isinstance(part, dict) for part in given):
        raise bad_request("a tool_result's content must be a string or a list of content blocks", "messages")
    parts = [_part(part) for part in given]
    texts = [part["text"] for part in parts if part["type"] == "text"]
    images = [part for part in parts if part["type"] != "text"]
    call_id = str(block.get("tool_use_id") or "")
    result: Message = {"role": "tool", "tool_call_id": call_id, "content": "\n".join(texts)}
    return [result, {"role": "user", "content": images}] if images else [result]


def _part(block: JsonObject) -> JsonObject:
    kind = block.get("type")
    if kind == "text":
        return {"type": "text", "text": str(block.get("text") or "")}
    if kind == _REFERENCE:
        return {"type": "text", "text": f"The tool {block.get('tool_name')} can be called now."}
    source = block.get("source")
    if kind == "image" and isinstance(source, dict):
        url = source.get("url")
        if source.get("type") != "url":
            url = f"data:{source.get('media_type', 'image/jpeg')};base64,{source.get('data', '')}"
        return {"type": "image_url", "image_url": {"url": url}}
    raise bad_request(f"content blocks of type {kind!r} are not supported in user messages", "messages")


def _joined(parts: list[JsonObject]) -> Any:
    """Return a single text part as a string, anything else as the list of parts."""
    return parts[0]["text"] if len(parts) == 1 and parts[0]["type"] == "text" else parts


# -- chat deltas → blocks -----------------------------------------------------------------------------------------------


class AnthropicStream(ItemStream):
    """Builds the events of a message, and the whole message that they add up to."""

    def __init__(self) -> None:
        super().__init__()
        self._head: JsonObject = {}
        self._finish: str | None = None
        self._stop: int | str | None = None
        self._last_arguments: str | None = None
        """Arguments of the last tool call; None before the first."""

    def frames(self, chunk: JsonObject, prompt_tokens: int) -> list[bytes]:
        frames: list[bytes] = []
        if not self._head:
            self._head = {"id": chunk.get("id"), "type": "message", "role": "assistant", "model": chunk.get("model")}
            began = self._message([], None, None, _usage(prompt_tokens, 0))
            frames.append(_event("message_start", message=began))
        for choice in chunk.get("choices") or ():
            frames += self._delta(choice.get("delta") or {})
            if choice.get("finish_reason") is not None:
                self._finish, self._stop = choice["finish_reason"], choice.get("stop_reason")
        return frames

    def broken(self, error: ErrorAnswer) -> list[bytes]:
        return [named_frame(anthropic_body(error.status, error.body))]

    def _begin_text(self, kind: Literal["reasoning", "text"]) -> tuple[JsonObject, list[bytes]]:
        if kind == "reasoning":
            return self._begin({"type": "thinking", "thinking": "", "signature": ""})
        return self._begin({"type": "text", "text": ""})

    def _begin_call(self, part: JsonObject, name: str) -> tuple[JsonObject, list[bytes]]:
        self._last_arguments = ""
        return self._begin({"type": "tool_use", "id": part.get("id"), "name": name, "input": {}})

    def _begin(self, block: JsonObject) -> tuple[JsonObject, list[bytes]]:
        return block, [_event("content_block_start", index=len(self.items), content_block=block)]

    def _said(self, item: Item, text: str) -> list[bytes]:
        if item.kind == "reasoning":
            return [self._block_delta("thinking_delta", thinking=text)]
        if item.kind == "text":
            return [self._block_delta("text_delta", text=text)]
        return [self._block_delta("input_json_delta", partial_json=text)]

    def _done(self, item: Item) -> tuple[JsonObject, list[bytes]]:
        frames = [_event("content_block_stop", index=len(self.items))]
        if item.kind == "text":
            return item.shown | {"text": item.said}, frames
        if item.kind == "call":
            self._last_arguments = item.said
            return item.shown | {"input": _input(item.said)}, frames
        # Clients send a thought back with its signature; ours names the answer that the thought belongs to.
        signature = str(self._head["id"] or "").removeprefix("chatcmpl-")
        frames.insert(0, self._block_delta("signature_delta", signature=signature))
        return item.shown | {"thinking": item.said, "signature": signature}, frames

    def _block_delta(self, kind: str, **fields: str) -> bytes:
        return _event("content_block_delta", index=len(self.items), delta={"type": kind} | fields)

    def _last(self, answer: JsonObject) -> list[bytes]:
        reason, stop = self._stop_reason()
        delta = {"stop_reason": reason, "stop_sequence": stop}
        return [_event("message_delta", delta=delta, usage=_counted(answer)), _event("message_stop")]

    def _whole(self, answer: JsonObject) -> JsonObject:
        reason, stop = self._stop_reason()
        return self._message(self.items or [{"type": "text", "text": ""}], reason, stop, _counted(answer))

    def _message(
        self, content: list[JsonObject], reason: str | None, stop: str | None, usage: JsonObject
    ) -> JsonObject:
        return self._head | {"content": content, "stop_reason": reason, "stop_sequence": stop, "usage": usage}

    def _stop_reason(self) -> tuple[str | None, str | None]:
        """Return why the answer ended, and at which stop sequence. A call that a stop sequence cut short must not run."""
        if self._finish == "length":
            return "max_tokens", None
        if self._finish not in ("stop", "tool_calls"):
            return None, None
        if self._last_arguments is not None and _is_json(self._last_arguments):
            return "tool_use", None
        if isinstance(self._stop, str):
            return "stop_sequence", self._stop
        called = self._finish == "tool_calls" or self._last_arguments is not None
        return ("tool_use" if called else "end_turn"), None


def _counted(answer: JsonObject) -> JsonObject:
    usage = answer.get("usage") or {}
    return _usage(usage.get("prompt_tokens", 0), usage.get("completion_tokens", 0))


def _usage(prompt_tokens: int, sampled_tokens: int) -> JsonObject:
    return {"input_tokens": prompt_tokens, "output_tokens": sampled_tokens}


def _input(arguments: str) -> Any:
    """Parse a call's arguments. Text that is not JSON, or is a JSON string, is returned as written."""
    try:
        value = read_json(arguments or "{}")
    except ValueError:
        return arguments
    return arguments if isinstance(value, str) else value


def _is_json(text: str) -> bool:
    try:
        read_json(text)
    except ValueError:
        return False
    return True


def _event(kind: str, **fields: Any) -> bytes:
    return named_frame({"type": kind} | fields)
