"""A refusal as a problem document, and models that are refused where their keywords are wrong."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from pydantic import BaseModel, ConfigDict, ValidationError

from foundation.strict import FieldError, StrictModel, explain
from swarm.protocol.errors import ErrorCode, InvalidSpec, Refusal


class Problem(BaseModel):
    """RFC 9457 problem document. Fields of one code (`run_id`, `errors`, `retry_after_s`) stand beside these."""

    model_config = ConfigDict(extra="allow")

    type: str = "about:blank"
    title: str
    status: int
    code: ErrorCode | str
    """A newer server may have more codes than this version knows."""
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
    """A refusal that names each bad field. detail: replaces the text made from the errors."""
    text = detail or "; ".join(map(str, errors))
    return InvalidSpec(ErrorCode.INVALID_SPEC, text, errors=[error.model_dump() for error in errors])


class ClientModel(StrictModel):
    """Base of specs and requests, which clients make from keywords. `model_validate` raises pydantic's own error.

    Raises: InvalidSpec naming each bad keyword, with the nearest name.
    """

    def __init__(self, /, **fields: Any) -> None:
        try:
            super().__init__(**fields)
        except ValidationError as error:
            raise invalid_spec(explain(error, type(self))) from error

    # Otherwise pydantic would call it for nested models too, and not collect all errors of the whole.
    __init__.__pydantic_base_init__ = True  # type: ignore[attr-defined]
