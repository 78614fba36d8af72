"""A chat answer in the words of the Messages dialect: whole, or as the events of a stream."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from swarm.server.gateway.dialect import JsonObject, named_frame
from swarm.server.gateway.errors import ErrorAnswer, anthropic_body
from swarm.server.gateway.message_form import read_json


@dataclass(slots=True)
class _Block:
    """The content block that is being said."""

    kind: str
    index: int
    call_index: int | None = None
    said: list[str] = field(default_factory=list)


class AnthropicStream:
    """Blocks one after the other. Text that comes while a call is being said waits for its end."""

    def __init__(self) -> None:
        self._id = ""
        self._blocks = 0
        self._open: _Block | None = None
        self._waiting: list[str] = []
        self._finish: str | None = None
        self._stop: int | str | None = None
        self._last_call: _Block | None = None

    def frames(self, chunk: JsonObject, prompt_tokens: int) -> list[bytes]:
        frames: list[bytes] = []
        if not self._id:
            self._id = str(chunk.get("id") or "")
            frames.append(_event("message_start", message=_head(chunk) | {"usage": _usage(prompt_tokens, 0)}))
        for choice in chunk.get("choices") or ():
            frames += self._delta(choice.get("delta") or {})
            if choice.get("finish_reason") is not None:
                self._finish, self._stop = choice["finish_reason"], choice.get("stop_reason")
        return frames

    def end(self, answer: JsonObject) -> list[bytes]:
        frames = self._close()
        complete = self._last_call is not None and _is_json("".join(self._last_call.said))
        reason, stop = _stop_reason(self._finish, self._stop, tools=self._last_call is not None, complete=complete)
        usage = answer.get("usage") or {}
        counted = _usage(usage.get("prompt_tokens", 0), usage.get("completion_tokens", 0))
        frames.append(_event("message_delta", delta={"stop_reason": reason, "stop_sequence": stop}, usage=counted))
        frames.append(_event("message_stop"))
        return frames

    def broken(self, error: ErrorAnswer) -> list[bytes]:
        return [named_frame(anthropic_body(error.status, error.body))]

    def _delta(self, delta: JsonObject) -> list[bytes]:
        frames: list[bytes] = []
        if delta.get("reasoning"):
            frames += self._switched("thinking", {"type": "thinking", "thinking": "", "signature": ""})
            frames.append(self._said("thinking_delta", thinking=delta["reasoning"]))
        if delta.get("content"):
            frames += self._text(delta["content"])
        for part in delta.get("tool_calls") or ():
            frames += self._call(part)
        return frames

    def _text(self, text: str) -> list[bytes]:
        if self._open is not None and self._open.kind == "tool_use":
            self._waiting.append(text)
            return []
        frames = self._switched("text", {"type": "text", "text": ""})
        return [*frames, self._said("text_delta", text=text)]

    def _call(self, part: JsonObject) -> list[bytes]:
        frames: list[bytes] = []
        function = part.get("function") or {}
        going_on = self._open is not None and self._open.call_index == part.get("index", 0)
        if function.get("name") and not going_on:
            frames += self._close()
            block = {"type": "tool_use", "id": part.get("id"), "name": function["name"], "input": {}}
            frames.append(self._begin("tool_use", block, call_index=part.get("index", 0)))
            self._last_call = self._open
        if function.get("arguments") and self._open is not None and self._open.kind == "tool_use":
            self._open.said.append(function["arguments"])
            frames.append(self._said("input_json_delta", partial_json=function["arguments"]))
        return frames

    def _switched(self, kind: str, block: JsonObject) -> list[bytes]:
        if self._open is not None and self._open.kind == kind:
            return []
        return [*self._close(), self._begin(kind, block)]

    def _begin(self, kind: str, block: JsonObject, call_index: int | None = None) -> bytes:
        self._open = _Block(kind, self._blocks, call_index)
        self._blocks += 1
        return _event("content_block_start", index=self._open.index, content_block=block)

    def _said(self, kind: str, **fields: Any) -> bytes:
        assert self._open is not None
        return _event("content_block_delta", index=self._open.index, delta={"type": kind} | fields)

    def _close(self) -> list[bytes]:
        frames: list[bytes] = []
        if self._open is not None:
            if self._open.kind == "thinking":
                frames.append(self._said("signature_delta", signature=_signature(self._id)))
            frames.append(_event("content_block_stop", index=self._open.index))
            self._open = None
        if self._waiting:
            text, self._waiting = "".join(self._waiting), []
            frames += [*self._text(text), *self._close()]
        return frames


def message_answer(answer: JsonObject) -> JsonObject:
    """A whole chat completion as a message."""
    choice, usage = answer["choices"][0], answer.get("usage") or {}
    message = choice["message"]
    calls = message.get("tool_calls") or []
    blocks: list[JsonObject] = []
    if message.get("reasoning"):
        thought = {"type": "thinking", "thinking": message["reasoning"], "signature": _signature(answer["id"])}
        blocks.append(thought)
    if message.get("content"):
        blocks.append({"type": "text", "text": message["content"]})
    for call in calls:
        function = call["function"]
        block = {"type": "tool_use", "id": call["id"], "name": function["name"], "input": _input(function["arguments"])}
        blocks.append(block)
    complete = bool(calls) and _is_json(calls[-1]["function"]["arguments"])
    reason, stop = _stop_reason(
        choice.get("finish_reason"), choice.get("stop_reason"), tools=bool(calls), complete=complete
    )
    return _head(answer) | {
        "content": blocks or [{"type": "text", "text": ""}],
        "stop_reason": reason,
        "stop_sequence": stop,
        "usage": _usage(usage.get("prompt_tokens", 0), usage.get("completion_tokens", 0)),
    }


def _stop_reason(
    finish: str | None, stop: int | str | None, *, tools: bool, complete: bool
) -> tuple[str | None, str | None]:
    """Why it ended, and at which stop sequence. A call that a stop sequence cut short must not run."""
    if finish == "length":
        return "max_tokens", None
    if finish not in ("stop", "tool_calls"):
        return None, None
    if complete:
        return "tool_use", None
    if isinstance(stop, str):
        return "stop_sequence", stop
    return ("tool_use" if finish == "tool_calls" or tools else "end_turn"), None


def _head(data: JsonObject) -> JsonObject:
    head: JsonObject = {
        "id": data.get("id"),
        "type": "message",
        "role": "assistant",
        "model": data.get("model"),
        "content": [],
    }
    return head | {"stop_reason": None, "stop_sequence": None}


def _usage(prompt_tokens: int, sampled_tokens: int) -> JsonObject:
    return {"input_tokens": prompt_tokens, "output_tokens": sampled_tokens}


def _signature(answer_id: str) -> str:
    """Clients send a thought back with its signature; ours says which answer it is from."""
    return answer_id.removeprefix("chatcmpl-")


def _input(arguments: str) -> Any:
    """Arguments as the object that the dialect has; what is no JSON, or a text, is shown as it was written."""
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
