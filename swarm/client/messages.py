"""What is said to a server, and what it answers, as JSON. Knows no HTTP."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, TypeVar

from pydantic import BaseModel, ValidationError
from pydantic_core import PydanticSerializationError, to_jsonable_python

from swarm.client.errors import InvalidSpec, NotASwarmServer
from swarm.protocol.errors import ErrorCode
from swarm.protocol.runspec import AS_STORED

Model = TypeVar("Model", bound=BaseModel)


def written(message: BaseModel) -> bytes:
    """Raises: InvalidSpec for what JSON cannot carry."""
    try:
        return message.model_dump_json().encode()
    except PydanticSerializationError as error:
        raise _unsendable(error) from error


def require_finite_metadata(metadata: Mapping[str, Any]) -> None:
    """Raises: InvalidSpec for a number that would be stored as null, or for what JSON cannot carry."""
    try:
        plain = to_jsonable_python(metadata)
    except PydanticSerializationError as error:
        raise _unsendable(error) from error
    _require_finite(plain, "metadata")


def _unsendable(error: PydanticSerializationError) -> InvalidSpec:
    return InvalidSpec(ErrorCode.INVALID_SPEC, f"it cannot be sent: {error}; give plain JSON values")


def _require_finite(value: object, where: str) -> None:
    """Raises: InvalidSpec for a number that would be stored as null."""
    if isinstance(value, float) and not math.isfinite(value):
        raise InvalidSpec(
            ErrorCode.INVALID_SPEC, f"{where} is {value}, which is no number in JSON; leave it out or give null"
        )
    for key, part in value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ():
        _require_finite(part, f"{where}[{key!r}]")


def with_text_keys(metadata: Mapping[str, Any] | None) -> dict[str, Any]:
    """Raises: InvalidSpec where a key is no text."""
    for key in metadata or ():
        if not isinstance(key, str):
            raise InvalidSpec(ErrorCode.INVALID_SPEC, f"metadata has the key {key!r}; keys are texts")
    return dict(metadata or {})


def read(model: type[Model], raw: bytes) -> Model:
    """An answer. Raises: NotASwarmServer where it is none of this protocol, as a web page is."""
    try:
        return model.model_validate_json(raw, context=AS_STORED)
    except ValidationError as error:
        raise NotASwarmServer(f"something else than a {model.__name__} came; is this a swarm server?") from error


def sendable(text: str) -> str:
    """`text` with its half characters (lone surrogates, which no JSON can carry) as their escapes."""
    return text.encode("utf-8", "backslashreplace").decode()
