"""The engine's two forms of request and answer, chat completions and text completions. Every recorded call has one of them.

Pure functions over JSON objects; vLLM's answers are kept unchanged.
"""

from __future__ import annotations

import bisect
import itertools
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from typing import Any

from swarm.engine.seam import Dialect as EngineDialect
from swarm.engine.seam import SampledEvent
from swarm.server.gateway.message_form import Message

JsonObject = dict[str, Any]
_HEAD = ("id", "created", "model")
_SETTINGS = ("tools", "chat_template_kwargs", "documents", "reasoning_effort")
_LOGPROBS = ("text_offset", "token_logprobs", "tokens", "top_logprobs")
_COUNTS = ("prompt_tokens", "completion_tokens", "total_tokens")


class Form(ABC):
    """One form of request and answer: one prompt and `n` choices."""

    engine_dialect: EngineDialect

    def choices(self, body: JsonObject) -> int:
        """Return the number of answers requested per prompt."""
        return int(body.get("n") or 1)

    @abstractmethod
    def assembly(self, body: JsonObject) -> Assembly:
        """Start assembling a stream."""

    def choice_of(self, answer: JsonObject, index: int) -> JsonObject:
        """Return the answer with only one of its choices, as we record it."""
        return answer | {"choices": [choice for choice in answer["choices"] if choice["index"] == index]}

    def joined(self, answers: Sequence[JsonObject]) -> JsonObject:
        """Join the answers to several prompts of one request; choices are numbered consecutively."""
        if len(answers) == 1:
            return answers[0]
        choices = itertools.chain.from_iterable(answer["choices"] for answer in answers)
        numbered = [choice | {"index": number} for number, choice in enumerate(choices)]
        usage = {name: sum(answer["usage"][name] for answer in answers) for name in _COUNTS}
        return answers[0] | {"choices": numbered, "usage": usage}

    @abstractmethod
    def replay(self, answer: JsonObject, body: JsonObject) -> Iterator[JsonObject]:
        """Yield a recorded answer as the chunks of a stream."""


class Assembly(ABC):
    """Assembles the chunks of a stream into a whole answer. `wanted` is the number of choices requested."""

    kind: str
    """Value of the answer's `object` field."""

    def __init__(self, wanted: int) -> None:
        self._wanted = wanted
        self._head: JsonObject = {}
        self._choices: dict[int, JsonObject] = {}
        self._prompt_tokens = 0
        self._sampled_tokens = 0
        self._done: set[int] = set()

    def add(self, event: SampledEvent) -> None:
        if event.prompt_ids is not None:
            self._prompt_tokens = len(event.prompt_ids)
        for sampled in event.choices:
            self._sampled_tokens += len(sampled.sampled_ids)
        data = event.data
        if data is None:
            return
        if len(self._head) < len(_HEAD):
            self._head = {name: data[name] for name in _HEAD if name in data} | self._head
        for chunk in data.get("choices") or ():
            index = chunk["index"]
            choice = self._choices.get(index)
            if choice is None:
                choice = self._choices[index] = {"index": index} | self._begun()
            self._grow(choice, chunk)
            if chunk.get("finish_reason") is not None:
                choice["finish_reason"] = chunk["finish_reason"]
                self._done.add(index)
            if chunk.get("stop_reason") is not None:
                choice["stop_reason"] = chunk["stop_reason"]

    @property
    def finished(self) -> bool:
        """Whether every choice has its finish reason, so that no more tokens will follow."""
        return len(self._done) == self._wanted

    def answer(self) -> JsonObject:
        counts = (self._prompt_tokens, self._sampled_tokens, self._prompt_tokens + self._sampled_tokens)
        choices = [self._choices[index] for index in sorted(self._choices)]
        return self._head | {"object": self.kind, "choices": choices, "usage": dict(zip(_COUNTS, counts, strict=True))}

    @abstractmethod
    def _begun(self) -> JsonObject:
        """Return a choice as it is before its first chunk, with `finish_reason` None."""

    @abstractmethod
    def _grow(self, choice: JsonObject, chunk: JsonObject) -> None:
        """Add a chunk to its choice, except the finish and stop reasons."""


# -- text completions ---------------------------------------------------------------------------------------------------


class TextForm(Form):
    engine_dialect: EngineDialect = "completions"

    def assembly(self, body: JsonObject) -> Assembly:
        return _TextAssembly(self.choices(body))

    def replay(self, answer: JsonObject, body: JsonObject) -> Iterator[JsonObject]:
        head = {name: answer.get(name) for name in ("id", "object", "created", "model")}
        for choice in answer["choices"]:
            yield head | {"choices": [choice]}


class _TextAssembly(Assembly):
    kind = "text_completion"

    def _begun(self) -> JsonObject:
        return {"text": "", "logprobs": None, "finish_reason": None}

    def _grow(self, choice: JsonObject, chunk: JsonObject) -> None:
        choice["text"] += chunk.get("text") or ""
        if logprobs := chunk.get("logprobs"):
            choice["logprobs"] = choice["logprobs"] or {name: [] for name in _LOGPROBS}
            for name in _LOGPROBS:
                choice["logprobs"][name] += logprobs.get(name) or ()


# -- chat completions ---------------------------------------------------------------------------------------------------


class ChatForm(Form):
    engine_dialect: EngineDialect = "chat.completions"

    def assembly(self, body: JsonObject) -> Assembly:
        return _ChatAssembly(self.choices(body))

    def replay(self, answer: JsonObject, body: JsonObject) -> Iterator[JsonObject]:
        head = {name: answer.get(name) for name in _HEAD} | {"object": "chat.completion.chunk"}
        for choice in answer["choices"]:
            yield head | {"choices": [_delta(choice, {"role": "assistant", "content": ""})]}
            for delta, logprobs in _parts(choice):
                yield head | {"choices": [_delta(choice, delta) | {"logprobs": logprobs}]}
            end = {"finish_reason": choice.get("finish_reason"), "stop_reason": choice.get("stop_reason")}
            yield head | {"choices": [_delta(choice, {}) | end]}
        if (body.get("stream_options") or {}).get("include_usage") and answer.get("usage"):
            yield head | {"choices": [], "usage": answer["usage"]}


def prompt_settings(body: JsonObject) -> JsonObject:
    """Return the settings besides the messages that a prompt depends on: tools and template settings."""
    return {name: body[name] for name in _SETTINGS if body.get(name)}


def prompt_body(body: JsonObject, messages: list[Message]) -> JsonObject:
    """Build a request body that renders `messages` with the settings of `body`."""
    return {"messages": messages, "tool_choice": "none"} | prompt_settings(body)


def message_of(answer: JsonObject) -> Message | None:
    """Return the message that a client would send back for a recorded answer; None if the answer has no message."""
    choices = answer.get("choices") or ()
    if not choices or not choices[0].get("message"):
        return None
    message = {name: value for name, value in choices[0]["message"].items() if value is not None}
    return message if message.get("tool_calls") else {"content": ""} | message


def _delta(choice: JsonObject, delta: JsonObject) -> JsonObject:
    return {"index": choice["index"], "delta": delta, "logprobs": None, "finish_reason": None}


def _parts(choice: JsonObject) -> Iterator[tuple[JsonObject, JsonObject | None]]:
    """Yield the thought, the text and the tool calls of a choice, in this order, as deltas with the log-probabilities of each."""
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
    """Return the range of log-probability entries that belong to `text`: all but those of earlier thoughts and later calls."""
    spelt = [bytes(entry.get("bytes") or ()) for entry in entries]
    ends = list(itertools.accumulate(map(len, spelt)))
    whole = b"".join(spelt)
    after = max(0, whole.find(thought.encode())) + len(thought.encode())
    at = whole.find(text.encode(), after)
    if not text or at < 0:  # the text's tokens cannot be found: show none
        return (len(entries), len(entries)) if thought or called else (0, len(entries))
    begin = bisect.bisect_right(ends, at) if thought else 0
    return begin, bisect.bisect_left(ends, at + len(text.encode())) + 1 if called else len(entries)


class _ChatAssembly(Assembly):
    kind = "chat.completion"

    def _begun(self) -> JsonObject:
        return {"message": {"role": "assistant", "content": None}, "finish_reason": None}

    def _grow(self, choice: JsonObject, chunk: JsonObject) -> None:
        message, delta = choice["message"], chunk.get("delta") or {}
        for name in ("content", "reasoning", "refusal"):
            if delta.get(name):
                message[name] = (message.get(name) or "") + delta[name]
        for part in delta.get("tool_calls") or ():
            _grow_call(message.setdefault("tool_calls", []), part)
        if (logprobs := chunk.get("logprobs")) and logprobs.get("content"):
            choice.setdefault("logprobs", {"content": []})["content"] += logprobs["content"]


def _grow_call(calls: list[JsonObject], part: JsonObject) -> None:
    position = int(part.get("index", len(calls)))
    while len(calls) <= position:
        calls.append({"id": None, "type": "function", "function": {"name": "", "arguments": ""}})
    call, function = calls[position], part.get("function") or {}
    call["id"] = part.get("id") or call["id"]
    call["function"]["name"] += function.get("name") or ""
    call["function"]["arguments"] += function.get("arguments") or ""
