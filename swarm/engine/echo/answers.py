"""Tokens and answers of the echo engine: one id per UTF-8 byte, ChatML with tools, OpenAI's chat and text completions.

Refuses unsupported parameters. It samples nothing, and knows nothing of training or HTTP.
"""

from __future__ import annotations

import codecs
import json
from dataclasses import dataclass
from itertools import accumulate, groupby
from typing import Any

from swarm.engine.seam import Dialect, RequestRefused
from swarm.protocol.sampling_mask import only

IM_START, IM_END = 256, 257
_SPECIAL = {IM_START: "<|im_start|>", IM_END: "<|im_end|>"}
_TOOL_OPEN, _TOOL_CLOSE = "<tool_call>\n", "\n</tool_call>"
_DEFAULT_MAX_TOKENS = 256
_UNSERVED = ("frequency_penalty", "presence_penalty", "logit_bias", "min_p", "repetition_penalty")
Json = dict[str, Any]


def refused(message: str, *, code: str | None = None) -> RequestRefused:
    error = {"message": message, "type": "invalid_request_error", "param": None, "code": code}
    return RequestRefused(400, {"error": error})


# -- tokens -----------------------------------------------------------------------------------------------------------


def encode(text: str) -> list[int]:
    """Return the bytes of `text`; text never turns into special tokens."""
    return list(text.encode("utf-8", "surrogatepass"))


def decode(ids: list[int]) -> str:
    """Return the text of the ids, including special tokens; bytes that are not UTF-8 become U+FFFD."""
    runs = [(plain, list(run)) for plain, run in groupby(ids, lambda token: token < 256)]
    return "".join(
        bytes(run).decode("utf-8", "replace") if plain else "".join(_SPECIAL.get(token, "�") for token in run)
        for plain, run in runs
    )


def prompt_ids(dialect: Dialect, body: Json, *, open_answer: bool) -> list[int]:
    """Return the ids of a chat in ChatML, with tools in a leading system message; for a text completion, the bytes of its prompt."""
    if dialect == "completions":
        return _text_ids(body.get("prompt"))
    messages = body.get("messages")
    if not isinstance(messages, list) or not all(isinstance(message, dict) for message in messages):
        raise refused("messages must be a list of objects")
    parts = [part for message in messages if isinstance(message.get("content"), list) for part in message["content"]]
    if other := sorted({str(part.get("type")) for part in parts if isinstance(part, dict) and "text" not in part}):
        raise refused(f"the echo engine reads only text; leave out content parts of type {', '.join(other)}")
    turns = [(str(message.get("role", "user")), _message_text(message)) for message in messages]
    if body.get("tools"):
        listed = "\n".join(json.dumps(tool, sort_keys=True) for tool in body["tools"])
        turns.insert(0, ("system", f"You may call these tools:\n<tools>\n{listed}\n</tools>"))
    ids = [token for role, text in turns for token in (IM_START, *encode(f"{role}\n{text}"), IM_END, *b"\n")]
    return [*ids, IM_START, *b"assistant\n"] if open_answer else ids


def last_user_word(prompt_ids: list[int]) -> str:
    """Return the last word of the last user message in a rendered prompt, or of a plain text; `ok` if there is none."""
    text = "".join(map(chr, prompt_ids))  # one character per token
    if chr(IM_START) in text:
        _, found, rest = text.rpartition(f"{chr(IM_START)}user\n")
        text = rest.partition(chr(IM_END))[0] if found else ""
    words = decode([ord(token) if ord(token) < 256 else 32 for token in text]).split()
    return words[-1] if words else "ok"


def garbled(word: str) -> str:
    """Return a wrong answer: `word` reversed, after a mark that `word` does not begin with."""
    return garble_mark(word) + word[::-1]


def garble_mark(word: str) -> str:
    return "!" if word.startswith("~") else "~"


def _message_text(message: Json) -> str:
    content = message.get("content")
    if isinstance(content, list):
        content = "".join(str(part.get("text", "")) for part in content if isinstance(part, dict))
    text = "" if content is None else str(content)
    for call in message.get("tool_calls") or ():
        function = call.get("function", {})
        text += _call_text(str(function.get("name", "")), str(function.get("arguments", "{}")))
    return text


def _text_ids(prompt: Any) -> list[int]:
    if isinstance(prompt, str):
        return encode(prompt)
    if not isinstance(prompt, list) or not all(isinstance(token, int) and 0 <= token <= IM_END for token in prompt):
        raise refused(f"prompt must be text, or ids from 0 to {IM_END}")
    return list(prompt)


def _call_text(name: str, arguments_json: str) -> str:
    return f'{_TOOL_OPEN}{{"name": {json.dumps(name)}, "arguments": {arguments_json}}}{_TOOL_CLOSE}'


# -- answers ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Draft:
    """One choice.

    pieces: text added by each token, up to the last token that is shown; a stop string and the end token are not.
    drawn_at: position of the only token that was sampled; None if the answer was certain.
    other: id and log-probability of the alternative to that token.
    """

    index: int
    ids: list[int]
    logprobs: list[float]
    drawn_at: int | None
    other: tuple[int, float]
    pieces: list[str]
    finish_reason: str
    stop: str | None
    tool_call: Json | None

    def mask(self, position: int) -> bytes:
        """Return the candidate tokens at `position`, as a row of a sampling mask."""
        others = (self.other[0],) if position == self.drawn_at else ()
        return only((self.ids[position], *others))


class Answer:
    """One request's answer: its drafts, complete or in chunks. Raises: RequestRefused (400) for unsupported parameters."""

    def __init__(
        self, dialect: Dialect, body: Json, prompt_ids: list[int], max_model_len: int, *, created: int, number: int
    ) -> None:
        """Check the request's parameters. `number` makes the answer's id unique. Raises: RequestRefused."""
        self._chat = dialect == "chat.completions"
        self._body, self.prompt_ids, self.drafts = body, prompt_ids, list[Draft]()
        self._head = {
            "id": f"{'chatcmpl' if self._chat else 'cmpl'}-{created:08x}{number:08x}",
            "created": created,
            "model": str(body.get("model") or "echo"),
        }
        self.count = _number(body, "n", 1, least=1, whole=True)
        self.temperature = _number(body, "temperature", 1.0, least=0)
        self.seed: int | str | None = body.get("seed")
        self._tool = _forced_tool(body)
        wanted = body.get("logprobs")  # in a text completion: the number of alternatives to return
        self._logprobs = bool(wanted) if self._chat else wanted is not None
        self._top = _number(body, "top_logprobs" if self._chat else "logprobs", 0, least=0, whole=True)
        self.wants_usage = bool((body.get("stream_options") or {}).get("include_usage"))
        for name in _UNSERVED:
            if body.get(name) not in (None, 0, 0.0, {}) and not (name == "repetition_penalty" and body[name] == 1.0):
                raise refused(f"the echo engine does not support {name}; leave it out")
        if not prompt_ids:
            raise refused("the prompt is empty; send at least one token")
        room = max_model_len - len(prompt_ids)
        named = "max_completion_tokens" if body.get("max_completion_tokens") is not None else "max_tokens"
        asked = _number(body, named, _DEFAULT_MAX_TOKENS, least=1, whole=True)
        if room < 1 or asked > max_model_len:
            raise refused(
                f"this model's context holds {max_model_len} tokens, but the prompt has {len(prompt_ids)} and "
                f"the request asks for {asked} more",
                code="context_length_exceeded",
            )
        self._max_tokens = min(asked, room)

    def add(self, word: str, other: str, logprob: float, other_logprob: float, *, seed: int) -> None:
        """Append the next choice. `word` was sampled with log-probability `logprob`; `other` is the alternative. `seed` determines the
        tool call's id."""
        ids, others = ([*encode(self._text(each)), IM_END] for each in (word, other))
        at = next((at for at, (one, two) in enumerate(zip(ids, others, strict=False)) if one != two), None)
        finish, shown, stop = "stop", len(ids) - 1, None
        raw, stops = bytes(ids[:-1]), self._body.get("stop") or ()
        found = [(raw.find(each.encode()), each) for each in ([stops] if isinstance(stops, str) else stops) if each]
        if cuts := [cut for cut in found if cut[0] >= 0]:
            shown, stop = min(cuts, key=lambda cut: (cut[0], len(cut[1].encode())))
            ids = ids[: shown + len(stop.encode())]
        if len(ids) > self._max_tokens:
            ids, finish, stop = ids[: self._max_tokens], "length", None
        shown = min(shown, len(ids))
        text = codecs.getincrementaldecoder("utf-8")("replace")
        pieces = [text.decode(bytes([token]), final=place == shown - 1) for place, token in enumerate(ids[:shown])]
        tool_call = _parsed_call("".join(pieces), seed) if self._tool else None
        drawn_at = at if at is not None and at < len(ids) else None
        draft = Draft(
            index=len(self.drafts),
            ids=ids,
            logprobs=[logprob if place == drawn_at else 0.0 for place in range(len(ids))],
            drawn_at=drawn_at,
            other=(IM_END if at is None else others[at], other_logprob),
            pieces=pieces,
            finish_reason="tool_calls" if tool_call and finish == "stop" else finish,
            stop=stop,
            tool_call=tool_call,
        )
        self.drafts.append(draft)

    def whole(self) -> Json:
        """Return the `chat.completion` or `text_completion` object."""
        choices = []
        for draft in self.drafts:
            text, calls = "".join(draft.pieces), draft.tool_call
            message = (
                {"role": "assistant", "content": None, "tool_calls": [calls]}
                if calls
                else {"role": "assistant", "content": text}
            )
            shown = {"message": message} if self._chat else {"text": text}
            choices.append(self._choice(draft, shown, range(len(draft.ids)), draft.finish_reason))
        return self._framed("chat.completion", choices) | {"usage": self._usage()}

    def chunk(self, draft: Draft, position: int) -> Json | None:
        """Return the stream's chunk for the token at `position`, or None if there is nothing new to show."""
        finish = draft.finish_reason if position == len(draft.ids) - 1 else None
        text = draft.pieces[position] if position < len(draft.pieces) and draft.tool_call is None else ""
        if position and not (text or finish or (self._logprobs and draft.tool_call is None)):
            return None
        delta: Json = {"role": "assistant", "content": text} if position == 0 else {"content": text}
        if draft.tool_call is not None and finish:
            delta = {"tool_calls": [{"index": 0, **draft.tool_call}]}
        choice = self._choice(
            draft, {"delta": delta} if self._chat else {"text": text}, range(position, position + 1), finish
        )
        return self._framed("chat.completion.chunk", [choice])

    def usage_chunk(self) -> Json:
        return self._framed("chat.completion.chunk", []) | {"usage": self._usage()}

    def _framed(self, kind: str, choices: list[Json]) -> Json:
        return self._head | {"object": kind if self._chat else "text_completion", "choices": choices}

    def _choice(self, draft: Draft, shown: Json, places: range, finish: str | None) -> Json:
        logprobs = self._logprob_content(draft, places) if self._logprobs and places else None
        return {
            "index": draft.index,
            **shown,
            "logprobs": logprobs,
            "finish_reason": finish,
            "stop_reason": draft.stop if finish else None,
        }

    def _logprob_content(self, draft: Draft, places: range) -> Json:
        content = []
        for place in places:
            own = _logprob_entry(draft.ids[place], draft.logprobs[place])
            ranked = [own, _logprob_entry(*draft.other)] if place == draft.drawn_at else [own]
            ranked.sort(key=lambda entry: -float(entry["logprob"]))
            content.append(own | {"top_logprobs": ranked[: self._top]})
        if self._chat:
            return {"content": content}
        offsets = list(accumulate(map(len, draft.pieces), initial=0))
        return {
            "text_offset": [offsets[min(place, len(draft.pieces))] for place in places],
            "tokens": [entry["token"] for entry in content],
            "token_logprobs": [entry["logprob"] for entry in content],
            "top_logprobs": [
                {top["token"]: top["logprob"] for top in (each, *each["top_logprobs"])} for each in content
            ],
        }

    def _usage(self) -> dict[str, int]:
        prompt, sampled = len(self.prompt_ids), sum(len(draft.ids) for draft in self.drafts)
        return {"prompt_tokens": prompt, "completion_tokens": sampled, "total_tokens": prompt + sampled}

    def _text(self, word: str) -> str:
        if self._tool is not None:
            return _call_text(self._tool["name"], json.dumps(_filled(self._tool.get("parameters"), word)))
        form = _object(self._body.get("response_format"))
        if form.get("type", "text") == "text":
            return word
        return json.dumps(_filled(_object(form.get("json_schema")).get("schema"), word))


def _logprob_entry(token: int, logprob: float) -> Json:
    text = decode([token])
    return {"token": text, "logprob": max(logprob, -9999.0), "bytes": [token] if token < 256 else list(text.encode())}


def _forced_tool(body: Json) -> Json | None:
    """Return the tool that must be called, or None for free text."""
    choice = body.get("tool_choice")
    tools = {tool["function"]["name"]: tool["function"] for tool in body.get("tools") or ()}
    if choice in (None, "none", "auto") or (isinstance(choice, dict) and "function" not in choice):
        return None
    name = str(next(iter(tools), None) if choice == "required" else choice.get("function", {}).get("name"))
    if name not in tools:
        raise refused(f"tool_choice names {name!r}, which is not among the tools {sorted(tools)}")
    return dict(tools[name])


def _parsed_call(text: str, seed: int) -> Json | None:
    """Return the tool call in a complete answer, or None if the answer was cut off."""
    if not (text.startswith(_TOOL_OPEN) and text.endswith(_TOOL_CLOSE)):
        return None
    call = json.loads(text.removeprefix(_TOOL_OPEN).removesuffix(_TOOL_CLOSE))
    function = {"name": call["name"], "arguments": json.dumps(call["arguments"])}
    return {"id": f"call_{seed:08x}", "type": "function", "function": function}


def _filled(schema: Any, word: str = "") -> Json:
    """Return an object with every required field. If none is required, it has one field, preferably a string. The first string holds
    `word`."""
    properties = _object(_object(schema).get("properties")) or {"value": {}}
    required = _object(schema).get("required")
    strings = [name for name, wanted in properties.items() if _plainest(wanted) == ""]
    names = [name for name in properties if isinstance(required, list) and name in required]
    names = names or strings[:1] or list(properties)[:1]
    filled = {name: _plainest(properties[name]) for name in names}
    return filled | dict.fromkeys([name for name in names if name in strings][:1], word)


def _plainest(schema: Any) -> Any:
    """Return a minimal value for a schema: its constant, else its first enum value, else a value of its type. A number is its minimum
    or 0, an object is `_filled`, a boolean False, an array empty; a value of unknown type is an empty string."""
    wanted = _object(schema)
    if "const" in wanted:
        return wanted["const"]
    if wanted.get("enum"):
        return wanted["enum"][0]
    kind = wanted.get("type")
    kind = kind[0] if isinstance(kind, list) and kind else kind
    if kind in ("integer", "number"):
        return wanted.get("minimum", 0)
    plain: Json = {"boolean": False, "array": [], "null": None}
    return _filled(schema) if kind == "object" else plain.get(str(kind), "")


def _object(value: Any) -> Json:
    return value if isinstance(value, dict) else {}


def _number(body: Json, name: str, default: Any, *, least: float, whole: bool = False) -> Any:
    value = body.get(name)
    if value is None:
        return default
    kinds = (int,) if whole else (int, float)
    if isinstance(value, bool) or not isinstance(value, kinds) or not value >= least:
        raise refused(
            f"{name} must be {'a whole number' if whole else 'a number'} of at least {least:g}, got {value!r}"
        )
    return value
