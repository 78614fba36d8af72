"""The Responses dialect (OpenAI): items in, items out, over chat completions.

A request's items become chat messages, and the chat answer's parts become items again. A request can refer to earlier
responses that its episode has recorded.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from swarm.protocol.episodes import RecordedCall
from swarm.server.gateway.dialect import (
    check_numbers,
    check_object_lists,
    check_objects,
    check_sampling,
    has_items,
    no_prefill,
    without_none,
)
from swarm.server.gateway.errors import bad_request, refused
from swarm.server.gateway.forms import JsonObject, message_of
from swarm.server.gateway.item_stream import ItemDialect
from swarm.server.gateway.message_form import Message
from swarm.server.gateway.responses_stream import ResponsesStream, is_item_of, response_id, same_item
from swarm.server.gateway.responses_tools import ToolNames, chat_tool_choice, custom_arguments, offered_tools

INSTRUCTIONS = "instructions"
"""Field of the recorded request that holds the instructions, so that the next response can leave them out: it does not inherit them."""
_PASSED = (
    "model", "temperature", "top_p", "top_k", "min_p", "presence_penalty", "frequency_penalty", "repetition_penalty",
    "seed", "stop", "stop_token_ids", "ignore_eos", "logit_bias", "chat_template_kwargs", "vllm_xargs", "cache_salt",
    "priority", "skip_special_tokens", "include_stop_str_in_output", "structured_outputs", "include_reasoning",
    "parallel_tool_calls", "thinking_token_budget", "user",
)  # fmt: skip
_LOGPROBS = "message.output_text.logprobs"
_FORMATS = (None, "text", "json_object", "json_schema")
_UNFINISHED = ("in_progress", "incomplete")
_TEXT_PARTS = ("input_text", "output_text", "text", "summary_text", "reasoning_text", "refusal")


class Responses(ItemDialect):
    """The rules of `/v1/responses`."""

    name = "responses"

    def check(self, body: JsonObject) -> None:
        given = body.get("input")
        if not isinstance(given, str) and not has_items(given):
            raise bad_request("input must be a string or a list of at least one item", "input")
        for name in (INSTRUCTIONS, "previous_response_id"):
            if body.get(name) is not None and not isinstance(body[name], str):
                raise bad_request(f"{name} must be a string", name)
        for name in ("background", "prompt", "conversation", "previous_input_messages"):
            if body.get(name):
                raise bad_request(f"{name} is not supported; send the items themselves as input", name)
        if body.get("include") is not None and not isinstance(body["include"], list):
            raise bad_request("include must be a list of strings", "include")
        check_numbers(body, "max_output_tokens", "top_logprobs")
        check_objects(body, "text", "reasoning")
        check_objects(body.get("text") or {}, "format")
        kind = ((body.get("text") or {}).get("format") or {}).get("type")
        if kind not in _FORMATS:
            raise bad_request(f"text.format must be of type text, json_object or json_schema, not {kind!r}", "text")
        check_object_lists(body, "tools")
        check_sampling({name: body.get(name) for name in _PASSED})

    def check_end(self, body: JsonObject) -> None:
        last = body["input"][-1] if isinstance(body["input"], list) else {}
        own = last.get("type") == "reasoning" or last.get("role") == "assistant"
        if own and last.get("status") in _UNFINISHED:
            raise no_prefill("input")

    def requests(self, body: JsonObject, earlier: Sequence[RecordedCall]) -> list[JsonObject]:
        asked = {name: body[name] for name in _PASSED if body.get(name) is not None}
        messages = _history(body, earlier) + input_messages(_resolved(body["input"], earlier))
        if body.get(INSTRUCTIONS):
            messages = [{"role": "system", "content": body[INSTRUCTIONS]}, *messages]
            asked[INSTRUCTIONS] = body[INSTRUCTIONS]
        asked |= {"messages": messages} | _limits(body) | _format(body)
        if tools := offered_tools(body):
            asked["tools"] = tools
        if (choice := chat_tool_choice(body.get("tool_choice"), tools)) is not None:
            asked["tool_choice"] = choice
        return [asked]

    def stream(self, body: JsonObject, asked: JsonObject) -> ResponsesStream:
        return ResponsesStream(body, asked, ToolNames.of(body.get("tools") or []))


def _limits(body: JsonObject) -> JsonObject:
    """Return the chat fields for token limits, reasoning effort and log-probabilities."""
    wants_logprobs = _LOGPROBS in (body.get("include") or ())
    return without_none(
        {
            "max_completion_tokens": body.get("max_output_tokens"),
            "reasoning_effort": (body.get("reasoning") or {}).get("effort"),
            "truncate_prompt_tokens": -1 if body.get("truncation") == "auto" else None,
            "logprobs": wants_logprobs or None,
            "top_logprobs": body.get("top_logprobs") if wants_logprobs else None,
        }
    )


def _format(body: JsonObject) -> JsonObject:
    wanted = (body.get("text") or {}).get("format") or {}
    if wanted.get("type") == "json_schema":
        schema = without_none({name: wanted.get(name) for name in ("name", "description", "schema", "strict")})
        return {"response_format": {"type": "json_schema", "json_schema": schema}}
    return {"response_format": {"type": "json_object"}} if wanted.get("type") == "json_object" else {}


def _history(body: JsonObject, earlier: Sequence[RecordedCall]) -> list[Message]:
    """Return the conversation up to the previous response, without its instructions.

    Raises: RequestRefused (404) if that response is unknown.
    """
    wanted = body.get("previous_response_id")
    if wanted is None:
        return []
    for call in reversed(earlier):
        if call.complete and call.dialect == Responses.name and response_id(call.answer) == wanted:
            before = list(call.request["messages"])[1 if call.request.get(INSTRUCTIONS) else 0 :]
            return [*before, message_of(call.answer) or {"role": "assistant", "content": ""}]
    text = f"Response with id '{wanted}' not found: this episode has no record of it"
    raise refused(404, text, "NotFoundError", "previous_response_id", code="previous_response_not_found")


def _resolved(given: str | list[JsonObject], earlier: Sequence[RecordedCall]) -> str | list[JsonObject]:
    """Replace references in the input by the items of earlier responses. Raises: RequestRefused (404) if an item is unknown."""
    if isinstance(given, str):
        return given
    return [_item_of(str(item.get("id")), earlier) if _is_reference(item) else item for item in given]


def _is_reference(item: JsonObject) -> bool:
    return item.get("type") == "item_reference" or (item.get("type") is None and item.keys() - {"type"} == {"id"})


def _item_of(wanted: str, earlier: Sequence[RecordedCall]) -> JsonObject:
    """Return an output item of an earlier response. Records do not say which kind of tool it calls, but that does not matter here."""
    for call in reversed(earlier):
        if call.complete and call.dialect == Responses.name and is_item_of(wanted, call.answer):
            for item in Responses().answer({}, call.request, call.answer)["output"]:
                if same_item(wanted, item["id"]):
                    return dict(item)
    text = f"Item with id '{wanted}' not found: no recorded response of this episode has it; send the item itself"
    raise refused(404, text, "NotFoundError", "input")


# -- items → messages ---------------------------------------------------------------------------------------------------


def input_messages(given: str | list[JsonObject]) -> list[Message]:
    """Convert input items to chat messages. Reasoning, text and calls of one turn become one message. Raises: RequestRefused."""
    if isinstance(given, str):
        return [{"role": "user", "content": given}]
    messages: list[Message] = []
    for item in given:
        kind = item.get("type", "message")
        if kind == "message" and item.get("role") == "assistant":
            _join(messages, "content", _text(item.get("content")))
        elif kind == "message" and isinstance(item.get("role"), str):
            messages.append({"role": item["role"], "content": _content(item.get("content"))})
        elif kind == "reasoning":
            _join(messages, "reasoning", _reasoning(item))
        elif kind in ("function_call", "custom_tool_call"):
            _assistant(messages).setdefault("tool_calls", []).append(_call(item))
        elif kind in ("function_call_output", "custom_tool_call_output"):
            content = _content(item.get("output"))
            messages.append({"role": "tool", "tool_call_id": str(item.get("call_id") or ""), "content": content})
        else:
            raise bad_request(f"input items of type {kind!r} are not supported", "input")
    return messages


def _assistant(messages: list[Message]) -> Message:
    """Return the last message if it is the assistant's; otherwise append a new one."""
    if not messages or messages[-1]["role"] != "assistant":
        messages.append({"role": "assistant", "content": None})
    return messages[-1]


def _join(messages: list[Message], field: str, text: str) -> None:
    message = _assistant(messages)
    if message.get(field) is not None:
        messages.append({"role": "assistant", "content": None})
        message = messages[-1]
    message[field] = text


def _call(item: JsonObject) -> JsonObject:
    name = str(item.get("name") or "")
    if item.get("namespace"):
        name = ToolNames.flat(str(item["namespace"]), name)
    custom = item.get("type") == "custom_tool_call"
    arguments = custom_arguments(str(item.get("input") or "")) if custom else item.get("arguments")
    text = arguments if isinstance(arguments, str) else json.dumps(arguments or {})
    function = {"name": name, "arguments": text}
    return {"id": str(item.get("call_id") or item.get("id") or ""), "type": "function", "function": function}


def _reasoning(item: JsonObject) -> str:
    if item.get("encrypted_content") and not item.get("content"):
        raise bad_request(
            "this server cannot read encrypted reasoning; send its content, or leave the item out", "input"
        )
    return _text(item.get("content") or item.get("summary"))


def _text(content: Any) -> str:
    """Return the text in a message's content; ignore other parts. Raises: RequestRefused if the content is malformed."""
    if isinstance(content, str):
        return content
    if content is not None and not isinstance(content, list):
        raise bad_request("content must be a string or a list of parts", "input")
    parts = [part for part in content or () if isinstance(part, dict)]
    return "".join(str(part.get("text") or part.get("refusal") or "") for part in parts)


def _content(content: Any) -> Any:
    """Convert content to chat form: pure text becomes one string; content with images or files stays a list of parts."""
    if isinstance(content, str) or content is None:
        return content or ""
    if not isinstance(content, list) or not all(isinstance(part, dict) for part in content):
        raise bad_request("content must be a string or a list of parts", "input")
    if all(part.get("type") in _TEXT_PARTS for part in content):
        return _text(content)
    return [_part(part) for part in content]


def _part(part: JsonObject) -> JsonObject:
    kind = part.get("type")
    if kind in _TEXT_PARTS:
        return {"type": "text", "text": str(part.get("text") or "")}
    if kind == "input_image":
        return {"type": "image_url", "image_url": {"url": part.get("image_url"), "detail": part.get("detail", "auto")}}
    raise bad_request(f"content parts of type {kind!r} are not supported", "input")
