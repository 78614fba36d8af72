"""A chat completion of the echo engine: what the request allows, the tokens drafted, the answer in OpenAI's form.

Reads a chat.completions body and refuses what it cannot honour. Draws nothing itself.
"""

from __future__ import annotations

import codecs
import json
from dataclasses import dataclass
from typing import Any

from swarm.engine import echo_tokens
from swarm.engine.echo_tokens import IM_END, TOOL_CLOSE, TOOL_OPEN
from swarm.engine.seam import RequestRefused

_DEFAULT_MAX_TOKENS = 256
_UNSERVED = ("frequency_penalty", "presence_penalty", "logit_bias", "min_p", "repetition_penalty")


@dataclass(frozen=True, slots=True)
class Decision:
    """The one token of a choice that was drawn, and the one that could have stood there instead."""

    at: int
    other_id: int
    other_logprob: float


@dataclass(frozen=True, slots=True)
class Draft:
    """One choice: its tokens, and the text that they show.

    shown: how many of the tokens stand for `text`; those after it were cut off (a stop string, the end token).
    """

    index: int
    ids: list[int]
    logprobs: list[float]
    decision: Decision | None
    """None: what was asked for has one answer, whose tokens are certain."""
    shown: int
    text: str
    finish_reason: str
    tool_call: dict[str, Any] | None
    stop: str | None
    """The stop string that ended it."""


class ChatAnswer:
    """One request's answer as it is drafted and told.

    Raises: RequestRefused (400) from the constructor, in OpenAI's error format.
    """

    id_prefix = "chatcmpl"

    def __init__(
        self, body: dict[str, Any], prompt_ids: list[int], max_model_len: int, *, created: int, number: int
    ) -> None:
        """number: how many answers were made before, so that no two have one id."""
        self.prompt_ids = prompt_ids
        self._created = created
        self._id = f"{self.id_prefix}-{created:08x}{number:08x}"
        self.drafts: list[Draft] = []
        self._model = str(body.get("model") or "echo")
        self.count = _number(body, "n", 1, least=1, whole=True)
        self.temperature = _number(body, "temperature", 1.0, least=0)
        self.seed: int | str | None = body.get("seed")
        self._forced_tool = _forced_tool(body)
        self._json = _json_object(body)
        self._stops = _stops(body)
        self._logprobs = bool(body.get("logprobs"))
        self._top = _number(body, "top_logprobs", 0, least=0, whole=True)
        self.wants_usage = bool((body.get("stream_options") or {}).get("include_usage"))
        for name in _UNSERVED:
            if body.get(name) not in (None, 0, 0.0, {}) and not (name == "repetition_penalty" and body[name] == 1.0):
                raise refused(f"the echo engine does not serve {name}; leave it out")
        if not prompt_ids:
            raise refused("the prompt is empty; send at least one token")
        room = max_model_len - len(prompt_ids)
        named = "max_completion_tokens" if body.get("max_completion_tokens") is not None else "max_tokens"
        wanted = _number(body, named, _DEFAULT_MAX_TOKENS, least=1, whole=True)
        if room < 1 or wanted > max_model_len:
            raise refused(
                f"this model's context holds {max_model_len} tokens, but {len(prompt_ids)} in the prompt and "
                f"{wanted} for the answer were asked for",
                code="context_length_exceeded",
            )
        self._max_tokens = min(wanted, room)

    def add(self, word: str, other: str, logprob: float, other_logprob: float, *, call_seed: int) -> None:
        """Draft the next choice: `word` was drawn with `logprob`, `other` was not."""
        ids = [*echo_tokens.encode(self._text(word)), IM_END]
        other_ids = [*echo_tokens.encode(self._text(other)), IM_END]
        differing = (at for at, (one, two) in enumerate(zip(ids, other_ids, strict=False)) if one != two)
        decided_at = next(differing, None)
        decision = None if decided_at is None else Decision(decided_at, other_ids[decided_at], other_logprob)
        text_ids, finish = ids[:-1], "stop"
        cut, shown, stop = _stop_cut(text_ids, self._stops)
        if cut is not None:
            ids = ids[:cut]
        if len(ids) > self._max_tokens:
            ids, finish, stop = ids[: self._max_tokens], "length", None
            shown = min(shown, len(ids))
        logprobs = [0.0] * len(ids)
        if decision is not None and decision.at < len(ids):
            logprobs[decision.at] = logprob
        text = echo_tokens.decode(ids[:shown])
        tool_call = _parsed_call(text, call_seed) if self._forced_tool else None
        finish = "tool_calls" if tool_call and finish == "stop" else finish
        self.drafts.append(
            Draft(
                len(self.drafts),
                ids,
                logprobs,
                decision,
                shown,
                text,
                finish,
                tool_call,
                stop,
            )
        )

    def whole(self) -> dict[str, Any]:
        """The `chat.completion` object."""
        choices = [
            {
                "index": draft.index,
                "message": _message(draft),
                "finish_reason": draft.finish_reason,
                "stop_reason": draft.stop,
                "logprobs": self._logprob_content(draft, 0, len(draft.ids)) if self._logprobs else None,
            }
            for draft in self.drafts
        ]
        return self._frame("chat.completion", choices) | {"usage": self._usage()}

    def openings(self) -> list[dict[str, Any] | None]:
        """What a stream shows before the first token."""
        return [self._chunk(draft.index, {"role": "assistant", "content": ""}, None) for draft in self.drafts]

    def chunks(self, draft: Draft, position: int) -> list[dict[str, Any] | None]:
        """What a stream shows for the token at `position`; [None] while nothing new can be shown."""
        last = position == len(draft.ids) - 1
        logprobs = self._logprob_content(draft, position, position + 1) if self._logprobs else None
        found: list[dict[str, Any] | None] = []
        if draft.tool_call is None:
            text = shown_text(draft, position)
            if text or logprobs:
                found.append(self._chunk(draft.index, {"content": text}, None, logprobs))
        elif last:
            found.append(self._chunk(draft.index, {"tool_calls": [{"index": 0, **draft.tool_call}]}, None))
        if last:
            end = self._chunk(draft.index, {}, draft.finish_reason)
            end["choices"][0]["stop_reason"] = draft.stop
            found.append(end)
        return found or [None]

    def usage_chunk(self) -> dict[str, Any]:
        return self._frame("chat.completion.chunk", []) | {"usage": self._usage()}

    def _chunk(
        self, index: int, delta: dict[str, Any], finish: str | None, logprobs: dict[str, Any] | None = None
    ) -> dict[str, Any]:
        choice = {"index": index, "delta": delta, "finish_reason": finish, "logprobs": logprobs}
        return self._frame("chat.completion.chunk", [choice])

    def _frame(self, kind: str, choices: list[dict[str, Any]]) -> dict[str, Any]:
        return {"id": self._id, "object": kind, "created": self._created, "model": self._model, "choices": choices}

    def _usage(self) -> dict[str, int]:
        sampled = sum(len(draft.ids) for draft in self.drafts)
        prompt = len(self.prompt_ids)
        return {"prompt_tokens": prompt, "completion_tokens": sampled, "total_tokens": prompt + sampled}

    def _text(self, word: str) -> str:
        if self._forced_tool is None:
            return word if self._json is None else self._json.text(word)
        name, arguments = self._forced_tool
        return echo_tokens.tool_call_text(name, arguments.text(word))

    def _logprob_content(self, draft: Draft, start: int, end: int) -> dict[str, Any]:
        content = []
        for position in range(start, end):
            ranked = [_logprob_entry(draft.ids[position], draft.logprobs[position])]
            if draft.decision is not None and position == draft.decision.at:
                ranked.append(_logprob_entry(draft.decision.other_id, draft.decision.other_logprob))
            ranked.sort(key=lambda entry: -float(entry["logprob"]))
            own = _logprob_entry(draft.ids[position], draft.logprobs[position])
            content.append(own | {"top_logprobs": ranked[: self._top]})
        return {"content": content}


def refused(message: str, *, code: str | None = None) -> RequestRefused:
    error = {"message": message, "type": "invalid_request_error", "param": None, "code": code}
    return RequestRefused(400, {"error": error})


def _message(draft: Draft) -> dict[str, Any]:
    if draft.tool_call is None:
        return {"role": "assistant", "content": draft.text}
    return {"role": "assistant", "content": None, "tool_calls": [draft.tool_call]}


def shown_text(draft: Draft, position: int) -> str:
    """The characters that become whole with the token at `position`."""
    if position >= draft.shown:
        return ""
    start = position
    while start and 0x80 <= draft.ids[start] < 0xC0:
        start -= 1
    decoder = codecs.getincrementaldecoder("utf-8")("replace")
    return decoder.decode(bytes(draft.ids[start : position + 1]), final=position == draft.shown - 1)


def _logprob_entry(token: int, logprob: float) -> dict[str, Any]:
    raw = [token] if token < 256 else list(echo_tokens.decode([token]).encode())
    return {"token": echo_tokens.decode([token]), "logprob": max(logprob, -9999.0), "bytes": raw}


def _stop_cut(text_ids: list[int], stops: list[str]) -> tuple[int | None, int, str | None]:
    """Where the earliest stop string ends and begins, in tokens, and which it is; (None, all, None) without any."""
    raw = bytes(text_ids)
    found = [(raw.find(stop.encode()), len(stop.encode()), stop) for stop in stops if stop.encode() in raw]
    if not found:
        return None, len(text_ids), None
    begin, width, stop = min(found)
    return begin + width, begin, stop


def _parsed_call(text: str, call_seed: int) -> dict[str, Any] | None:
    """The tool call in a whole answer; None when it was cut off."""
    if not (text.startswith(TOOL_OPEN) and text.endswith(TOOL_CLOSE)):
        return None
    call = json.loads(text.removeprefix(TOOL_OPEN).removesuffix(TOOL_CLOSE))
    function = {"name": call["name"], "arguments": json.dumps(call["arguments"])}
    return {"id": f"call_{call_seed:08x}", "type": "function", "function": function}


@dataclass(frozen=True, slots=True)
class _Filled:
    """A JSON object as a schema asks for it. word_in: the field that gets the word; None: none is a string."""

    values: dict[str, Any]
    word_in: str | None

    def text(self, word: str) -> str:
        return json.dumps(self.values if self.word_in is None else self.values | {self.word_in: word})


def _filled(schema: Any) -> _Filled:
    """Every required field, or else one, the first string where there is one."""
    properties, required = _properties(schema), _object(schema).get("required")
    strings = [name for name, wanted in properties.items() if _value(wanted) == ""]
    names = [name for name in properties if isinstance(required, list) and name in required]
    if not properties:
        return _Filled({"value": ""}, "value")
    names = names or strings[:1] or list(properties)[:1]
    word_in = next((name for name in names if name in strings), None)
    return _Filled({name: _value(properties[name]) for name in names}, word_in)


def _value(schema: Any) -> Any:
    """The plainest value that a schema permits; a string is empty."""
    wanted = _object(schema)
    if "const" in wanted:
        return wanted["const"]
    if wanted.get("enum"):
        return wanted["enum"][0]
    kind = wanted.get("type")
    match kind[0] if isinstance(kind, list) and kind else kind:
        case "integer" | "number":
            return wanted.get("minimum", 0)
        case "boolean":
            return False
        case "array":
            return []
        case "object":
            return _filled(schema).values
        case "null":
            return None
    return ""


def _forced_tool(body: dict[str, Any]) -> tuple[str, _Filled] | None:
    """The tool that must be called, and its arguments; None when the answer is free text."""
    choice = body.get("tool_choice")
    tools = {tool["function"]["name"]: tool["function"] for tool in body.get("tools") or ()}
    if choice in (None, "none", "auto") or (isinstance(choice, dict) and "function" not in choice):
        return None
    name = str(next(iter(tools), None) if choice == "required" else choice.get("function", {}).get("name"))
    if name not in tools:
        raise refused(f"tool_choice names {name!r}, which is not among the tools {sorted(tools)}")
    return name, _filled(tools[name].get("parameters"))


def _json_object(body: dict[str, Any]) -> _Filled | None:
    """The JSON object that a response format asks for; None: plain text."""
    wanted = body.get("response_format") or {}
    if wanted.get("type", "text") == "text":
        return None
    return _filled(_object(wanted.get("json_schema")).get("schema"))


def _properties(schema: Any) -> dict[str, Any]:
    return _object(_object(schema).get("properties"))


def _object(value: Any) -> dict[str, Any]:
    return value if isinstance(value, dict) else {}


def _stops(body: dict[str, Any]) -> list[str]:
    stop = body.get("stop")
    return [] if not stop else [stop] if isinstance(stop, str) else [text for text in stop if text]


def _number(body: dict[str, Any], name: str, default: Any, *, least: float, whole: bool = False) -> Any:
    value = body.get(name)
    if value is None:
        return default
    kinds = (int,) if whole else (int, float)
    if isinstance(value, bool) or not isinstance(value, kinds) or not value >= least:
        raise refused(
            f"{name} must be {'a whole number' if whole else 'a number'} of at least {least:g}, got {value!r}"
        )
    return value
