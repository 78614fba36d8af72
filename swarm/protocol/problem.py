"""A refusal as the document that travels."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict

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
