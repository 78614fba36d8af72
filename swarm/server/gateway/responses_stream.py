"""A chat stream told in the events of the Responses dialect, and the response that they amount to."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from swarm.server.gateway.dialect import JsonObject, named_frame
from swarm.server.gateway.errors import ErrorAnswer
from swarm.server.gateway.responses_tools import ToolNames, custom_input

_ASKED_BACK = (
    "instructions", "metadata", "previous_response_id", "max_tool_calls", "prompt_cache_key", "reasoning",
    "user", "safety_identifier",
)  # fmt: skip

_CALL_PREFIXES = ("fc_", "ctc_")


def response_id(answer: JsonObject) -> str:
    """The response's id, given by that of the chat completion behind it."""
    return f"resp_{_suffix(answer)}"


def is_item_of(item_id: str, answer: JsonObject) -> bool:
    """Whether an output item's id is of the response behind this answer."""
    return item_id.partition("_")[2].rpartition("_")[0] == _suffix(answer)


def same_item(wanted: str, item_id: str) -> bool:
    """Whether two ids of one response's items are of the same one: of one kind, all calls being one, and of one number."""
    return _as_call(wanted) == _as_call(item_id)


def _as_call(item_id: str) -> str:
    return f"fc_{item_id.removeprefix('ctc_')}" if item_id.startswith("ctc_") else item_id


def _suffix(data: JsonObject) -> str:
    return str(data.get("id") or "").removeprefix("chatcmpl-")


@dataclass(slots=True)
class _Item:
    """An output item that is being said: of reasoning, of text, or of a call."""

    kind: str
    item: JsonObject
    index: int
    call_index: int | None = None
    said: str = ""
    logprobs: list[JsonObject] = field(default_factory=list)


class ResponsesStream:
    """See the module. One instance per answer."""

    def __init__(self, body: JsonObject, asked: JsonObject, names: ToolNames) -> None:
        self._body = body
        self._asked = asked
        self._names = names
        self._head: JsonObject = {}
        self._items: list[JsonObject] = []
        self._open: _Item | None = None
        self._waiting_text: list[str] = []
        self._waiting_logprobs: list[JsonObject] = []
        self._sequence = 0
        self._cut = False

    # -- stream --------------------------------------------------------------------------------------------------

    def frames(self, chunk: JsonObject, prompt_tokens: int) -> list[bytes]:
        frames: list[bytes] = []
        if not self._head:
            self._head = {name: chunk.get(name) for name in ("id", "created", "model")}
            for kind in ("response.created", "response.in_progress"):
                frames.append(self._event(kind, response=self._response("in_progress")))
        for choice in chunk.get("choices") or ():
            frames += self._delta(choice.get("delta") or {}, (choice.get("logprobs") or {}).get("content") or [])
            self._cut = self._cut or choice.get("finish_reason") == "length"
        return frames

    def end(self, answer: JsonObject) -> list[bytes]:
        frames = self._close()
        response = self.response(answer)
        frames.append(self._event(f"response.{response['status']}", response=response))
        return frames

    def broken(self, error: ErrorAnswer) -> list[bytes]:
        told = error.body.get("error") or {}
        code = told.get("code") if isinstance(told.get("code"), str) else "server_error"
        failed = self._response("failed") | {"error": {"code": code, "message": told.get("message")}}
        return [self._event("response.failed", response=failed)]

    def response(self, answer: JsonObject) -> JsonObject:
        """The whole response, once everything of `answer` is told."""
        self._close()
        usage, choice = answer.get("usage") or {}, answer["choices"][0]
        cut = choice.get("finish_reason") == "length"
        told = self._response("incomplete" if cut else "completed")
        if cut:
            told["incomplete_details"] = {"reason": "max_output_tokens"}
        told["usage"] = {
            "input_tokens": usage.get("prompt_tokens", 0),
            "input_tokens_details": {"cached_tokens": 0, "cache_write_tokens": 0},
            "output_tokens": usage.get("completion_tokens", 0),
            "output_tokens_details": {"reasoning_tokens": 0},
            "total_tokens": usage.get("total_tokens", 0),
        }
        return told

    # -- deltas ---------------------------------------------------------------------------------------------------

    def _delta(self, delta: JsonObject, logprobs: list[JsonObject]) -> list[bytes]:
        frames: list[bytes] = []
        if delta.get("content") or not delta.get("tool_calls"):
            self._waiting_logprobs += logprobs
        if delta.get("reasoning"):
            frames += self._switched("reasoning") + self._said(delta["reasoning"])
        if delta.get("content"):
            frames += self._text(delta["content"])
        for part in delta.get("tool_calls") or ():
            function = part.get("function") or {}
            if function.get("name") and not self._is_open(part.get("index")):
                frames += self._close() + self._begin_call(part, function["name"])
            if function.get("arguments") and self._open is not None:
                frames += self._said(function["arguments"])
        return frames

    def _text(self, text: str) -> list[bytes]:
        """Text that comes while a call is being said waits for its end."""
        if self._open is not None and self._open.kind in ("function_call", "custom_tool_call"):
            self._waiting_text.append(text)
            return []
        return self._switched("message") + self._said(text)

    def _is_open(self, call_index: int | None) -> bool:
        return self._open is not None and self._open.call_index is not None and self._open.call_index == call_index

    def _switched(self, kind: str) -> list[bytes]:
        """Go on with an item of this kind; begin one where another was said."""
        if self._open is not None and self._open.kind == kind:
            return []
        frames = self._close()
        index = len(self._items)
        if kind == "reasoning":
            item: JsonObject = {"id": self._id("rs"), "type": "reasoning", "summary": [], "status": "in_progress"}
            part: JsonObject = {"type": "reasoning_text", "text": ""}
        else:
            item = {"id": self._id("msg"), "type": "message", "role": "assistant", "status": "in_progress"}
            item["content"] = []
            part = {"type": "output_text", "text": "", "annotations": [], "logprobs": []}
        self._open = _Item(kind, item, index)
        frames.append(self._event("response.output_item.added", output_index=index, item=item))
        frames.append(self._item_event("response.content_part.added", content_index=0, part=part))
        return frames

    def _begin_call(self, part: JsonObject, name: str) -> list[bytes]:
        index = len(self._items)
        call_id = str(part.get("id") or self._id("call"))
        if name in self._names.custom:
            item: JsonObject = {"id": self._id("ctc"), "type": "custom_tool_call", "call_id": call_id, "name": name}
            item |= {"input": "", "status": "in_progress"}
        else:
            namespace, own_name = self._names.spaced.get(name, (None, name))
            item = {"id": self._id("fc"), "type": "function_call", "call_id": call_id, "name": own_name}
            item |= ({"namespace": namespace} if namespace else {}) | {"arguments": "", "status": "in_progress"}
        self._open = _Item(item["type"], item, index, part.get("index", 0))
        return [self._event("response.output_item.added", output_index=index, item=item)]

    def _said(self, text: str) -> list[bytes]:
        opened = self._open
        assert opened is not None
        opened.said += text
        if opened.kind == "message":
            logprobs, self._waiting_logprobs = self._waiting_logprobs, []
            opened.logprobs += logprobs
            return [self._item_event("response.output_text.delta", content_index=0, delta=text, logprobs=logprobs)]
        self._waiting_logprobs = []
        if opened.kind == "reasoning":
            return [self._item_event("response.reasoning_text.delta", content_index=0, delta=text)]
        if opened.kind == "function_call":
            return [self._item_event("response.function_call_arguments.delta", delta=text)]
        return []  # a custom tool's input is told when its arguments can be read

    # -- what is said to the end ----------------------------------------------------------------------------------

    def _close(self) -> list[bytes]:
        opened = self._open
        if opened is None:
            return []
        frames: list[bytes]
        if opened.kind == "message":
            frames, done = self._message_done(opened)
        elif opened.kind == "reasoning":
            frames, done = self._reasoning_done(opened)
        else:
            frames, done = self._call_done(opened)
        item = opened.item | done | ({"status": "incomplete"} if self._cut else {})
        frames.append(self._event("response.output_item.done", output_index=opened.index, item=item))
        self._items.append(item)
        self._open = None
        if self._waiting_text:
            text, self._waiting_text = "".join(self._waiting_text), []
            frames += [*self._text(text), *self._close()]
        return frames

    def _message_done(self, opened: _Item) -> tuple[list[bytes], JsonObject]:
        opened.logprobs += self._waiting_logprobs
        self._waiting_logprobs = []
        part = {"type": "output_text", "text": opened.said, "annotations": [], "logprobs": opened.logprobs}
        frames = [
            self._item_event("response.output_text.done", content_index=0, text=opened.said, logprobs=opened.logprobs),
            self._item_event("response.content_part.done", content_index=0, part=part),
        ]
        return frames, {"content": [part], "status": "completed"}

    def _reasoning_done(self, opened: _Item) -> tuple[list[bytes], JsonObject]:
        part = {"type": "reasoning_text", "text": opened.said}
        frames = [
            self._item_event("response.reasoning_text.done", content_index=0, text=opened.said),
            self._item_event("response.content_part.done", content_index=0, part=part),
        ]
        return frames, {"content": [part], "status": "completed"}

    def _call_done(self, opened: _Item) -> tuple[list[bytes], JsonObject]:
        if opened.kind == "custom_tool_call":
            text = custom_input(opened.said)
            frames = [
                self._item_event("response.custom_tool_call_input.delta", delta=text),
                self._item_event("response.custom_tool_call_input.done", input=text),
            ]
            return frames, {"input": text, "status": "completed"}
        done = self._item_event(
            "response.function_call_arguments.done", arguments=opened.said, name=opened.item["name"]
        )
        return [done], {"arguments": opened.said, "status": "completed"}

    # -- words ----------------------------------------------------------------------------------------------------

    def _id(self, prefix: str) -> str:
        """Numbered by kind: told again, an answer has its text before the calls, wherever it came."""
        alike = (f"{prefix}_",) if prefix in ("msg", "rs") else _CALL_PREFIXES
        number = sum(item["id"].startswith(alike) for item in self._items)
        return f"{prefix}_{_suffix(self._head)}_{number}"

    def _item_event(self, kind: str, **fields: Any) -> bytes:
        assert self._open is not None
        return self._event(kind, item_id=self._open.item["id"], output_index=self._open.index, **fields)

    def _event(self, kind: str, **fields: Any) -> bytes:
        data = {"type": kind, "sequence_number": self._sequence} | fields
        self._sequence += 1
        return named_frame(data)

    def _response(self, status: str) -> JsonObject:
        body, asked = self._body, self._asked
        told = {name: body.get(name) for name in _ASKED_BACK}
        return told | {
            "id": response_id(self._head),
            "object": "response",
            "created_at": self._head.get("created"),
            "model": self._head.get("model"),
            "status": status,
            "error": None,
            "incomplete_details": None,
            "output": list(self._items),
            "text": body.get("text") or {"format": {"type": "text"}},
            "parallel_tool_calls": body.get("parallel_tool_calls") is not False,
            "tool_choice": body.get("tool_choice") or ("auto" if body.get("tools") else "none"),
            "tools": body.get("tools") or [],
            "temperature": asked.get("temperature"),
            "top_p": asked.get("top_p"),
            "top_logprobs": body.get("top_logprobs") or 0,
            "max_output_tokens": asked.get("max_completion_tokens") or asked.get("max_tokens"),
            "presence_penalty": body.get("presence_penalty"),
            "frequency_penalty": body.get("frequency_penalty"),
            "truncation": body.get("truncation") or "disabled",
            "background": False,
            "service_tier": body.get("service_tier") or "auto",
            "store": body.get("store") is not False,
            "usage": None,
        }
