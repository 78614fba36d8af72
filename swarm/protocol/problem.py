"""A refusal as a problem document."""

from __future__ import annotations

from collections.abc import Sequence

from pydantic import BaseModel, ConfigDict

from foundation.strict import FieldError
from swarm.protocol.errors import ErrorCode, Refusal


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


def invalid_spec(errors: Sequence[FieldError], detail: str = "") -> Refusal:
    """A refusal that names each bad field. detail: replaces the text made from the errors."""
    text = detail or "; ".join(map(str, errors))
    return Refusal(ErrorCode.INVALID_SPEC, text, errors=[error.model_dump() for error in errors])
