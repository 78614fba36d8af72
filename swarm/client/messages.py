"""What is said to a server, and what it answers, as JSON. Knows no HTTP."""

from __future__ import annotations

from typing import TypeVar

from pydantic import BaseModel, ValidationError
from pydantic_core import PydanticSerializationError

from swarm.client.errors import InvalidSpec, NotASwarmServer
from swarm.protocol.errors import ErrorCode
from swarm.protocol.runspec import AS_STORED

Model = TypeVar("Model", bound=BaseModel)


def written(message: BaseModel) -> bytes:
    """Raises: InvalidSpec for what JSON cannot carry."""
    try:
        return message.model_dump_json().encode()
    except PydanticSerializationError as error:
        detail = f"it cannot be sent: {error}; give plain JSON values"
        raise InvalidSpec(ErrorCode.INVALID_SPEC, detail) from error


def read(model: type[Model], raw: bytes) -> Model:
    """An answer. Raises: NotASwarmServer where it is none of this protocol, as a web page is."""
    try:
        return model.model_validate_json(raw, context=AS_STORED)
    except ValidationError as error:
        raise NotASwarmServer(f"something else than a {model.__name__} came; is this a swarm server?") from error


def sendable(text: str) -> str:
    """`text` with its half characters (lone surrogates, which no JSON can carry) as their escapes."""
    return text.encode("utf-8", "backslashreplace").decode()
