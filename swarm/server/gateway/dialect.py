"""The interface of a dialect: it translates requests into one of the engine's forms, and the engine's answers back."""

from __future__ import annotations

import reprlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import orjson

from foundation import strict_json
from swarm.engine.seam import RequestRefused
from swarm.protocol.episodes import RecordedCall
from swarm.server.gateway.errors import ErrorAnswer, bad_request, refused
from swarm.server.gateway.forms import Form, JsonObject
from swarm.server.gateway.message_form import MOST_DEPTH

MOST_CHOICES = 1024
"""Most answers that one request may ask for, over all its prompts."""


class AnswerStream(Protocol):
    """A stream in the dialect's own events, encoded."""

    def frames(self, chunk: JsonObject, prompt_tokens: int) -> list[bytes]:
        """The events for one chunk of the engine's stream."""

    def end(self, answer: JsonObject) -> list[bytes]:
        """The last events, sent once the whole answer is recorded."""

    def broken(self, error: ErrorAnswer) -> list[bytes]:
        """The events of an answer that breaks off."""


class Dialect(ABC):
    """The rules of one dialect. Methods that read a body raise RequestRefused."""

    name: str
    form: Form

    @abstractmethod
    def check(self, body: JsonObject) -> None:
        """Refuse malformed requests, before anything is counted."""

    @abstractmethod
    def check_end(self, body: JsonObject) -> None:
        """Refuse to continue an answer whose beginning the client wrote. Counting tokens does not ask this."""

    @abstractmethod
    def requests(self, body: JsonObject, earlier: Sequence[RecordedCall]) -> list[JsonObject]:
        """The engine's requests, one for each prompt. earlier: the episode's calls so far."""

    @abstractmethod
    def answer(self, body: JsonObject, asked: JsonObject, answer: JsonObject) -> JsonObject:
        """A whole answer of the engine in the dialect. asked: the engine's request, defaults filled in."""

    @abstractmethod
    def stream(self, body: JsonObject, asked: JsonObject) -> AnswerStream:
        """Begin a stream."""


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
    """Raises: RequestRefused for a field that is set and not a number of 64 bits."""
    _require(body, names, "a number", lambda value: isinstance(value, int | float) and not isinstance(value, bool))
    _require(body, names, "a number of 64 bits", lambda value: -(2**63) <= value < 2**64)


def check_count(body: JsonObject, name: str) -> None:
    """Raises: RequestRefused for a field that is set and not a whole number of at least 1."""
    _require(body, [name], "a whole number of at least 1", lambda value: type(value) is int and value >= 1)


def check_objects(body: JsonObject, *names: str) -> None:
    """Raises: RequestRefused for a field that is set and not a JSON object."""
    _require(body, names, "an object", lambda value: isinstance(value, dict))


def check_object_lists(body: JsonObject, *names: str) -> None:
    """Raises: RequestRefused for a field that is set and not a list of JSON objects."""
    _require(body, names, "a list of objects", lambda value: value == [] or has_items(value))


def check_stops(body: JsonObject, name: str) -> None:
    """Raises: RequestRefused for a field that is set and neither a text nor a list of texts."""
    _require(body, [name], "a text or a list of texts", _is_text_or_texts)


def _is_text_or_texts(value: object) -> bool:
    return isinstance(value, str) or (isinstance(value, list) and all(isinstance(text, str) for text in value))


def has_items(value: object) -> bool:
    """Whether it is a list of at least one object."""
    return isinstance(value, list) and bool(value) and all(isinstance(item, dict) for item in value)


def _require(body: JsonObject, names: Sequence[str], what: str, fits: Callable[[Any], bool]) -> None:
    for name in names:
        if body.get(name) is not None and not fits(body[name]):
            raise bad_request(f"{name} must be {what}, got {reprlib.repr(body[name])}", name)


def check_sampling(body: JsonObject, prompts: int = 1) -> None:
    """Refuse a completion's sampling fields with invalid values, or more answers than one request may ask for."""
    check_count(body, "n")
    wanted = prompts * int(body.get("n") or 1)
    if wanted > MOST_CHOICES:
        raise bad_request(f"one request may ask for {MOST_CHOICES} answers, not {wanted}; send several", "n")
    check_stops(body, "stop")
    check_numbers(body, "temperature", "top_p", "top_k", "seed", "max_tokens", "max_completion_tokens")
    check_objects(body, "response_format", "stream_options", "chat_template_kwargs", "logit_bias")
    check_objects(body.get("response_format") or {}, "json_schema")
    _refuse_former_fields(body)
    if body.get("thinking_token_budget") is not None:
        text = "thinking_token_budget is not served here; bound thoughts and answer together, with max_tokens"
        raise bad_request(text, "thinking_token_budget")


def _refuse_former_fields(body: JsonObject) -> None:
    """Refuse fields that vLLM once read and now ignores: the answer would not be restricted."""
    for kind in ("json", "regex", "choice", "grammar"):
        if body.get(f"guided_{kind}") is not None:
            raise bad_request(
                f'guided_{kind} has no effect; give structured_outputs: {{"{kind}": ...}}', f"guided_{kind}"
            )


def no_prefill(parameter: str) -> RequestRefused:
    """The refusal of a request whose client wrote the beginning of the answer."""
    text = (
        "an answer that the client began is not continued here: prompts are recorded as the model's own template makes "
    )
    return bad_request(text + "them; end with what the user or a tool says", parameter)


def without_none(data: JsonObject) -> JsonObject:
    return {name: value for name, value in data.items() if value is not None}
