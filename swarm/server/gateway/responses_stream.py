"""The events of the Responses dialect (OpenAI), and the ids of its items."""

from __future__ import annotations

from typing import Any, Literal

from swarm.server.gateway.dialect import named_frame
from swarm.server.gateway.errors import ErrorAnswer
from swarm.server.gateway.forms import JsonObject
from swarm.server.gateway.item_stream import Item, ItemStream
from swarm.server.gateway.responses_tools import ToolNames, custom_input

_ASKED_BACK = (
    "instructions", "metadata", "previous_response_id", "max_tool_calls", "prompt_cache_key", "reasoning",
    "user", "safety_identifier",
)  # fmt: skip

_CALL_PREFIXES = ("fc_", "ctc_")


def response_id(answer: JsonObject) -> str:
    """Return the response's id, derived from the chat completion's."""
    return f"resp_{_suffix(answer)}"


def is_item_of(item_id: str, answer: JsonObject) -> bool:
    """True if an output item belongs to the response made from this answer."""
    return item_id.partition("_")[2].rpartition("_")[0] == _suffix(answer)


def same_item(wanted: str, item_id: str) -> bool:
    """True if two ids within a response name the same item. All kinds of tool calls share one numbering."""
    return _as_call(wanted) == _as_call(item_id)


def _as_call(item_id: str) -> str:
    return f"fc_{item_id.removeprefix('ctc_')}" if item_id.startswith("ctc_") else item_id


def _suffix(data: JsonObject) -> str:
    return str(data.get("id") or "").removeprefix("chatcmpl-")


class ResponsesStream(ItemStream):
    """Builds the events of a response, and the whole response that they add up to."""

    def __init__(self, body: JsonObject, asked: JsonObject, names: ToolNames) -> None:
        super().__init__()
        self._body = body
        self._asked = asked
        self._names = names
        self._head: JsonObject = {}
        self._logprobs: list[JsonObject] = []
        """Log-probabilities of the open text item."""
        self._waiting_logprobs: list[JsonObject] = []
        """Log-probabilities of tokens whose text has not been sent yet."""
        self._sequence = 0
        self._cut = False

    def frames(self, chunk: JsonObject, prompt_tokens: int) -> list[bytes]:
        frames: list[bytes] = []
        if not self._head:
            self._head = {name: chunk.get(name) for name in ("id", "created", "model")}
            for kind in ("response.created", "response.in_progress"):
                frames.append(self._event(kind, response=self._response("in_progress")))
        for choice in chunk.get("choices") or ():
            delta = choice.get("delta") or {}
            if delta.get("content") or not delta.get("tool_calls"):
                self._waiting_logprobs += (choice.get("logprobs") or {}).get("content") or []
            frames += self._delta(delta)
            self._cut = self._cut or choice.get("finish_reason") == "length"
        return frames

    def broken(self, error: ErrorAnswer) -> list[bytes]:
        shown = error.body.get("error") or {}
        code = shown.get("code") if isinstance(shown.get("code"), str) else "server_error"
        failed = self._response("failed") | {"error": {"code": code, "message": shown.get("message")}}
        return [self._event("response.failed", response=failed)]

    def _last(self, answer: JsonObject) -> list[bytes]:
        response = self._whole(answer)
        return [self._event(f"response.{response['status']}", response=response)]

    def _whole(self, answer: JsonObject) -> JsonObject:
        usage = answer.get("usage") or {}
        cut = answer["choices"][0].get("finish_reason") == "length"
        response = self._response("incomplete" if cut else "completed")
        if cut:
            response["incomplete_details"] = {"reason": "max_output_tokens"}
        response["usage"] = {
            "input_tokens": usage.get("prompt_tokens", 0),
            "input_tokens_details": {"cached_tokens": 0, "cache_write_tokens": 0},
            "output_tokens": usage.get("completion_tokens", 0),
            "output_tokens_details": {"reasoning_tokens": 0},
            "total_tokens": usage.get("total_tokens", 0),
        }
        return response

    # -- items ----------------------------------------------------------------------------------------------------

    def _begin_text(self, kind: Literal["reasoning", "text"]) -> tuple[JsonObject, list[bytes]]:
        if kind == "reasoning":
            item: JsonObject = {"id": self._id("rs"), "type": "reasoning", "summary": [], "status": "in_progress"}
            part: JsonObject = {"type": "reasoning_text", "text": ""}
        else:
            item = {"id": self._id("msg"), "type": "message", "role": "assistant", "status": "in_progress"}
            item["content"] = []
            part = {"type": "output_text", "text": "", "annotations": [], "logprobs": []}
            self._logprobs = []
        begun = self._event("response.output_item.added", output_index=len(self.items), item=item)
        return item, [begun, self._item_event("response.content_part.added", item, content_index=0, part=part)]

    def _begin_call(self, part: JsonObject, name: str) -> tuple[JsonObject, list[bytes]]:
        call_id = str(part.get("id") or self._id("call"))
        if name in self._names.custom:
            item: JsonObject = {"id": self._id("ctc"), "type": "custom_tool_call", "call_id": call_id, "name": name}
            item |= {"input": "", "status": "in_progress"}
        else:
            namespace, own_name = self._names.spaced.get(name, (None, name))
            item = {"id": self._id("fc"), "type": "function_call", "call_id": call_id, "name": own_name}
            item |= ({"namespace": namespace} if namespace else {}) | {"arguments": "", "status": "in_progress"}
        return item, [self._event("response.output_item.added", output_index=len(self.items), item=item)]

    def _said(self, item: Item, text: str) -> list[bytes]:
        logprobs, self._waiting_logprobs = self._waiting_logprobs, []
        shown = item.shown
        if item.kind == "text":
            self._logprobs += logprobs
            said = {"content_index": 0, "delta": text, "logprobs": logprobs}
            return [self._item_event("response.output_text.delta", shown, **said)]
        if item.kind == "reasoning":
            return [self._item_event("response.reasoning_text.delta", shown, content_index=0, delta=text)]
        if shown["type"] == "function_call":
            return [self._item_event("response.function_call_arguments.delta", shown, delta=text)]
        return []  # a custom tool's input is sent once its arguments can be parsed

    def _done(self, item: Item) -> tuple[JsonObject, list[bytes]]:
        done, frames = self._call_done(item) if item.kind == "call" else self._text_done(item)
        ended = item.shown | done | {"status": "incomplete" if self._cut else "completed"}
        frames.append(self._event("response.output_item.done", output_index=len(self.items), item=ended))
        return ended, frames

    def _text_done(self, item: Item) -> tuple[JsonObject, list[bytes]]:
        part: JsonObject
        if item.kind == "reasoning":
            kind, part = "reasoning_text", {"type": "reasoning_text", "text": item.said}
            fields: JsonObject = {}
        else:
            logprobs, self._waiting_logprobs = self._logprobs + self._waiting_logprobs, []
            kind, fields = "output_text", {"logprobs": logprobs}
            part = {"type": "output_text", "text": item.said, "annotations": [], "logprobs": logprobs}
        return {"content": [part]}, [
            self._item_event(f"response.{kind}.done", item.shown, content_index=0, text=item.said, **fields),
            self._item_event("response.content_part.done", item.shown, content_index=0, part=part),
        ]

    def _call_done(self, item: Item) -> tuple[JsonObject, list[bytes]]:
        if item.shown["type"] == "custom_tool_call":
            text = custom_input(item.said)
            return {"input": text}, [
                self._item_event("response.custom_tool_call_input.delta", item.shown, delta=text),
                self._item_event("response.custom_tool_call_input.done", item.shown, input=text),
            ]
        fields = {"arguments": item.said, "name": item.shown["name"]}
        done = self._item_event("response.function_call_arguments.done", item.shown, **fields)
        return {"arguments": item.said}, [done]

    # -- events ---------------------------------------------------------------------------------------------------

    def _id(self, prefix: str) -> str:
        """Return the next item's id. Each kind is numbered separately, because a replayed answer always has text before calls."""
        alike = (f"{prefix}_",) if prefix in ("msg", "rs") else _CALL_PREFIXES
        number = sum(item["id"].startswith(alike) for item in self.items)
        return f"{prefix}_{_suffix(self._head)}_{number}"

    def _item_event(self, kind: str, item: JsonObject, **fields: Any) -> bytes:
        return self._event(kind, item_id=item["id"], output_index=len(self.items), **fields)

    def _event(self, kind: str, **fields: Any) -> bytes:
        data = {"type": kind, "sequence_number": self._sequence} | fields
        self._sequence += 1
        return named_frame(data)

    def _response(self, status: str) -> JsonObject:
        body, asked = self._body, self._asked
        return {name: body.get(name) for name in _ASKED_BACK} | {
            "id": response_id(self._head),
            "object": "response",
            "created_at": self._head.get("created"),
            "model": self._head.get("model"),
            "status": status,
            "error": None,
            "incomplete_details": None,
            "output": list(self.items),
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
