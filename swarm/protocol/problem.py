"""Refusals as problem documents, and a base class for messages that reject wrong keywords."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from pydantic import BaseModel, ConfigDict, ValidationError

from foundation.strict import FieldError, StrictModel, explain
from swarm.protocol.errors import ErrorCode, InvalidSpec, Refusal


class Problem(BaseModel):
    """An RFC 9457 problem document. Some codes add their own fields, such as `run_id`, `errors` or `retry_after_s`."""

    model_config = ConfigDict(extra="allow")

    type: str = "about:blank"
    title: str
    status: int
    code: ErrorCode | str
    """A plain string if a newer server uses a code that this version does not know."""
    detail: str

    @classmethod
    def of(cls, refusal: Refusal) -> Problem:
        return cls(
            title=refusal.code.replace("_", " "),
            status=refusal.status,
            code=refusal.code,
            detail=refusal.detail,
            **refusal.fields,
        )


def invalid_spec(errors: Sequence[FieldError], detail: str = "") -> InvalidSpec:
    """Return a refusal that names each bad field. Its text is `detail`, or by default the errors joined together."""
    text = detail or "; ".join(map(str, errors))
    return InvalidSpec(ErrorCode.INVALID_SPEC, text, errors=[error.model_dump() for error in errors])


class ClientModel(StrictModel):
    """Base class of specs and requests, which clients create from keyword arguments.

    Raises: InvalidSpec that names each bad keyword and the nearest known name. `model_validate` raises pydantic's own error instead.
    """

    def __init__(self, /, **fields: Any) -> None:
        try:
            super().__init__(**fields)
        except ValidationError as error:
            raise invalid_spec(explain(error, type(self))) from error

    # Otherwise pydantic would call this `__init__` for nested models too, and would not collect the errors of the whole document.
    __init__.__pydantic_base_init__ = True  # type: ignore[attr-defined]
