"""What the gateway needs of a dialect, and of the form of answer behind it.

An engine answers in two forms: chat completions and text completions. A dialect puts its requests into one of them and tells
the answers in its own words. What is recorded is the engine's form: one trace, whatever the dialect.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, Protocol

import orjson

from foundation import strict_json
from swarm.engine.seam import Dialect as EngineDialect
from swarm.engine.seam import RequestRefused, SampledEvent
from swarm.protocol.episodes import RecordedCall
from swarm.server.gateway.errors import ErrorAnswer, bad_request, refused

JsonObject = dict[str, Any]
MOST_CHOICES = 1024
"""Answers that one request may ask for, over all of its prompts."""
MOST_DEPTH = 128
"""Lists and objects within each other. Translations and traces put a body some levels deeper, and who reads a trace ends at 200."""


class Assembly(Protocol):
    """Puts a stream's events together to the answer that they amount to."""

    def add(self, event: SampledEvent) -> None: ...

    @property
    def finished(self) -> bool:
        """Whether every choice has its finish reason: no token will follow."""

    def answer(self) -> JsonObject: ...


class Form(Protocol):
    """One of the engine's two forms of request and answer."""

    engine_dialect: EngineDialect

    def choices(self, body: JsonObject) -> int:
        """How many answers to each prompt are asked for."""

    def assembly(self, body: JsonObject) -> Assembly:
        """Begin to put a stream together."""

    def choice_of(self, answer: JsonObject, index: int) -> JsonObject:
        """The answer with one of its choices alone, as it is recorded."""

    def joined(self, answers: Sequence[JsonObject]) -> JsonObject:
        """Answers to several prompts of one request as one; choices are numbered through."""

    def replay(self, answer: JsonObject, body: JsonObject) -> Iterator[JsonObject]:
        """A recorded answer as the chunks of a stream."""


class AnswerStream(Protocol):
    """A stream in the dialect's own events, encoded."""

    def frames(self, chunk: JsonObject, prompt_tokens: int) -> list[bytes]:
        """What the client hears of one chunk of the engine's stream."""

    def end(self, answer: JsonObject) -> list[bytes]:
        """What it hears once the whole answer is recorded."""

    def broken(self, error: ErrorAnswer) -> list[bytes]:
        """What it hears when the answer breaks off."""


class Dialect(Protocol):
    """The rules of one dialect. Methods that read a body raise RequestRefused."""

    name: str
    form: Form

    def check(self, body: JsonObject) -> None:
        """Refuse what is no request at all, before anything is counted."""

    def check_end(self, body: JsonObject) -> None:
        """Refuse to sample the rest of an answer whose beginning the client wrote. What only counts tokens does not ask."""

    def requests(self, body: JsonObject, earlier: Sequence[RecordedCall]) -> list[JsonObject]:
        """The engine's requests, one for each prompt. earlier: the episode's calls so far."""

    def answer(self, body: JsonObject, asked: JsonObject, answer: JsonObject) -> JsonObject:
        """A whole answer of the engine in the dialect. asked: the engine's request, defaults filled in."""

    def stream(self, body: JsonObject, asked: JsonObject) -> AnswerStream:
        """Begin to tell a stream."""


def data_frame(data: JsonObject) -> bytes:
    """A server-sent event without a name."""
    return b"data: " + orjson.dumps(data) + b"\n\n"


def named_frame(data: JsonObject) -> bytes:
    """A server-sent event that is named as its data's `type`."""
    return b"event: " + str(data["type"]).encode() + b"\ndata: " + orjson.dumps(data) + b"\n\n"


def check_depth(body: JsonObject) -> None:
    """Raises: RequestRefused for a body that is nested too deeply to be recorded."""
    if strict_json.is_deeper(body, MOST_DEPTH):
        text = f"lists and objects may be nested {MOST_DEPTH} deep in a request; send what is deeper as text"
        raise refused(400, text, "BadRequestError")


def check_numbers(body: JsonObject, *names: str) -> None:
    """Raises: RequestRefused for a field that is there and no number of 64 bits."""
    for name in names:
        value = body.get(name)
        if value is None:
            continue
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise bad_request(f"{name} must be a number, got {value!r}", name)
        if not -(2**63) <= value < 2**64:
            raise bad_request(f"{name} must be a number of 64 bits, got {value:.6g}", name)


def check_objects(body: JsonObject, *names: str) -> None:
    """Raises: RequestRefused for a field that is there and no JSON object."""
    for name in names:
        if body.get(name) is not None and not isinstance(body[name], dict):
            raise bad_request(f"{name} must be an object, got {body[name]!r}", name)


def check_object_lists(body: JsonObject, *names: str) -> None:
    """Raises: RequestRefused for a field that is there and no list of JSON objects."""
    for name in names:
        value = body.get(name)
        if value is not None and not (isinstance(value, list) and all(isinstance(item, dict) for item in value)):
            raise bad_request(f"{name} must be a list of objects", name)


def check_count(body: JsonObject, name: str) -> None:
    """Raises: RequestRefused for a field that is there and no whole number of at least 1."""
    value = body.get(name)
    if value is not None and (isinstance(value, bool) or not isinstance(value, int) or value < 1):
        raise bad_request(f"{name} must be a whole number of at least 1, got {value!r}", name)


def check_choices(body: JsonObject, prompts: int = 1) -> None:
    """Raises: RequestRefused for an `n` that is no count, or more answers than one request may ask for."""
    check_count(body, "n")
    wanted = prompts * int(body.get("n") or 1)
    if wanted > MOST_CHOICES:
        raise bad_request(f"one request may ask for {MOST_CHOICES} answers, not {wanted}; send several", "n")


def check_stops(body: JsonObject, name: str) -> None:
    """Raises: RequestRefused for a field that is there and neither a text nor a list of texts."""
    value = body.get(name)
    texts = [value] if isinstance(value, str) else value
    if value is not None and not (isinstance(texts, list) and all(isinstance(text, str) for text in texts)):
        raise bad_request(f"{name} must be a text or a list of texts", name)


def check_no_thinking_budget(body: JsonObject) -> None:
    """Raises: RequestRefused for a budget of thoughts, which no engine here counts by themselves."""
    name = "thinking_token_budget"
    if body.get(name) is not None:
        raise bad_request(f"{name} is not served here; bound thoughts and answer together, with max_tokens", name)


def no_prefill(parameter: str) -> RequestRefused:
    """What to tell a client that would have an answer of its own continued."""
    text = (
        "an answer that the client began is not continued here: prompts are recorded as the model's own template makes "
    )
    return bad_request(text + "them; end with what the user or a tool says", parameter)


def without_none(data: JsonObject) -> JsonObject:
    return {name: value for name, value in data.items() if value is not None}
