"""The interface of a dialect, which translates requests into one of the engine's forms and the engine's answers back."""

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
"""Maximum number of answers that one request may ask for, over all its prompts."""


class AnswerStream(Protocol):
    """A stream of the dialect's own events, encoded as bytes."""

    def frames(self, chunk: JsonObject, prompt_tokens: int) -> list[bytes]:
        """Return the events for one chunk of the engine's stream."""

    def end(self, answer: JsonObject) -> list[bytes]:
        """Return the last events, to be sent once the whole answer is recorded."""

    def broken(self, error: ErrorAnswer) -> list[bytes]:
        """Return the events for an answer that is cut off by an error."""


class Dialect(ABC):
    """The rules of one dialect. Methods that read a body raise RequestRefused."""

    name: str
    form: Form

    @abstractmethod
    def check(self, body: JsonObject) -> None:
        """Refuse malformed requests, before any tokens are counted."""

    @abstractmethod
    def check_end(self, body: JsonObject) -> None:
        """Refuse to continue an answer whose beginning the client wrote. Requests that only count tokens skip this check."""

    @abstractmethod
    def requests(self, body: JsonObject, earlier: Sequence[RecordedCall]) -> list[JsonObject]:
        """Translate a request into the engine's requests, one for each prompt. `earlier` holds the episode's calls so far."""

    @abstractmethod
    def answer(self, body: JsonObject, asked: JsonObject, answer: JsonObject) -> JsonObject:
        """Translate the engine's complete answer, one that is not streamed, into the dialect. `asked` is the engine's request, with defaults filled in."""

    @abstractmethod
    def stream(self, body: JsonObject, asked: JsonObject) -> AnswerStream:
        """Begin a stream of the dialect's events. `asked` is the engine's request, with defaults filled in."""


def data_frame(data: JsonObject) -> bytes:
    """Encode a server-sent event without a name."""
    return b"data: " + orjson.dumps(data) + b"\n\n"


def named_frame(data: JsonObject) -> bytes:
    """Encode a server-sent event whose name is the `type` of its data."""
    return b"event: " + str(data["type"]).encode() + b"\ndata: " + orjson.dumps(data) + b"\n\n"


def check_depth(body: JsonObject) -> None:
    """Refuse a body that is nested too deeply to be recorded. Raises: RequestRefused."""
    if strict_json.is_deeper(body, MOST_DEPTH):
        text = f"lists and objects in a request may be nested at most {MOST_DEPTH} levels deep; send anything deeper as text"
        raise refused(400, text, "BadRequestError")


def check_numbers(body: JsonObject, *names: str) -> None:
    """Refuse each named field that is set but is not a 64-bit number. Raises: RequestRefused."""
    _require(body, names, "a number", lambda value: isinstance(value, int | float) and not isinstance(value, bool))
    _require(body, names, "a 64-bit number", lambda value: -(2**63) <= value < 2**64)


def check_count(body: JsonObject, name: str) -> None:
    """Refuse the named field if it is set but is not a whole number of at least 1. Raises: RequestRefused."""
    _require(body, [name], "a whole number of at least 1", lambda value: type(value) is int and value >= 1)


def check_objects(body: JsonObject, *names: str) -> None:
    """Refuse each named field that is set but is not a JSON object. Raises: RequestRefused."""
    _require(body, names, "an object", lambda value: isinstance(value, dict))


def check_object_lists(body: JsonObject, *names: str) -> None:
    """Refuse each named field that is set but is not a list of JSON objects. Raises: RequestRefused."""
    _require(body, names, "a list of objects", lambda value: value == [] or has_items(value))


def check_stops(body: JsonObject, name: str) -> None:
    """Refuse the named field if it is set but is neither a string nor a list of strings. Raises: RequestRefused."""
    _require(body, [name], "a string or a list of strings", _is_text_or_texts)


def _is_text_or_texts(value: object) -> bool:
    return isinstance(value, str) or (isinstance(value, list) and all(isinstance(text, str) for text in value))


def has_items(value: object) -> bool:
    """True if the value is a list of objects and is not empty."""
    return isinstance(value, list) and bool(value) and all(isinstance(item, dict) for item in value)


def _require(body: JsonObject, names: Sequence[str], what: str, fits: Callable[[Any], bool]) -> None:
    for name in names:
        if body.get(name) is not None and not fits(body[name]):
            raise bad_request(f"{name} must be {what}, got {reprlib.repr(body[name])}", name)


def check_sampling(body: JsonObject, prompts: int = 1) -> None:
    """Refuse sampling fields with invalid values, and requests for more than MOST_CHOICES answers. Raises: RequestRefused."""
    check_count(body, "n")
    wanted = prompts * int(body.get("n") or 1)
    if wanted > MOST_CHOICES:
        raise bad_request(f"one request may ask for at most {MOST_CHOICES} answers, not {wanted}; send several", "n")
    check_stops(body, "stop")
    check_numbers(body, "temperature", "top_p", "top_k", "seed", "max_tokens", "max_completion_tokens")
    check_objects(body, "response_format", "stream_options", "chat_template_kwargs", "logit_bias")
    check_objects(body.get("response_format") or {}, "json_schema")
    _refuse_former_fields(body)
    if body.get("thinking_token_budget") is not None:
        text = "thinking_token_budget is not supported; use max_tokens, which limits thoughts and answer together"
        raise bad_request(text, "thinking_token_budget")


def _refuse_former_fields(body: JsonObject) -> None:
    """Refuse the `guided_*` fields of older vLLM versions. vLLM now ignores them, so the answer would be unrestricted."""
    for kind in ("json", "regex", "choice", "grammar"):
        if body.get(f"guided_{kind}") is not None:
            raise bad_request(
                f'guided_{kind} has no effect; use structured_outputs: {{"{kind}": ...}}', f"guided_{kind}"
            )


def no_prefill(parameter: str) -> RequestRefused:
    """Return the error for a request in which the client wrote the beginning of the answer."""
    text = (
        "this server does not continue an answer that the client began: prompts must be exactly what the model's own "
    )
    return bad_request(text + "template renders; end with a user or tool message", parameter)


def without_none(data: JsonObject) -> JsonObject:
    return {name: value for name, value in data.items() if value is not None}
