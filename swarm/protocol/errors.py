"""Refusals of a server, with one code per reason. Callers branch only on `code`.

SwarmError
└── Refusal(code, detail, fields)    raised by the server's own parts, and by the client for any response with a code
    ├── InvalidSpec                  fields or keywords are wrong
    └── BodyTooLarge(limit_bytes)    invalid_spec, but with HTTP status 413
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from enum import StrEnum
from typing import Any, ClassVar


class Cause(StrEnum):
    """Who or what is to blame for an attempt that ended without a reward."""

    SERVER = "server"
    """The server restarted, its engine failed, or the server closed the episode on its own."""
    NETWORK = "network"
    """Client and server could not reach each other."""
    CLIENT = "client"
    """The client crashed, was killed, or stopped responding."""
    ROLLOUT = "rollout"
    """The agent raised an exception, gave up, or never called the model."""
    GRADER = "grader"
    """The grader raised an exception, returned no number, exited with an error or timed out."""
    LIMIT = "limit"
    """The episode or one of its calls exceeded its time limit."""
    PERSON = "person"
    """A person declined the task or stopped the client."""


class ErrorCode(StrEnum):
    UNAUTHORIZED = "unauthorized"
    FORBIDDEN = "forbidden"
    NOT_FOUND = "not_found"
    INVALID_SPEC = "invalid_spec"
    SERVER_BUSY = "server_busy"
    NOT_ROLLING = "not_rolling"
    DRAINING = "draining"
    MIX_FULL = "mix_full"
    LEASE_LOST = "lease_lost"
    IDEMPOTENCY_CONFLICT = "idempotency_conflict"
    CONFIG_CONFLICT = "config_conflict"
    OVER_LIMIT = "over_limit"
    ENGINE_FAILED = "engine_failed"
    STORAGE_FULL = "storage_full"
    SERVER_FAULT = "server_fault"


HTTP_STATUS: dict[ErrorCode, int] = {
    ErrorCode.UNAUTHORIZED: 401,
    ErrorCode.FORBIDDEN: 403,
    ErrorCode.NOT_FOUND: 404,
    ErrorCode.INVALID_SPEC: 422,
    ErrorCode.SERVER_BUSY: 409,
    ErrorCode.NOT_ROLLING: 503,
    ErrorCode.DRAINING: 503,
    ErrorCode.MIX_FULL: 503,
    ErrorCode.LEASE_LOST: 409,
    ErrorCode.IDEMPOTENCY_CONFLICT: 409,
    ErrorCode.CONFIG_CONFLICT: 409,
    ErrorCode.OVER_LIMIT: 409,
    ErrorCode.ENGINE_FAILED: 503,
    ErrorCode.STORAGE_FULL: 507,
    ErrorCode.SERVER_FAULT: 500,
}


class SwarmError(Exception):
    """Base class of all errors that our code raises on purpose.

    Callers branch on `code`: one of `ErrorCode` for a refusal, else the name of the error, such as `server_unreachable`. `cause` says
    who is to blame if the error ended an attempt; None if unknown. `nearest` lists names that the user may have meant.
    """

    code: str = "failed"
    cause: ClassVar[Cause | None] = None

    def __init__(self, *words: object, nearest: Iterable[str] = ()) -> None:
        super().__init__(*words)
        self.nearest = tuple(nearest)

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        if "code" not in vars(cls):
            cls.code = re.sub(r"(?<=[a-z])(?=[A-Z])", "_", cls.__name__).lower()


class Refusal(SwarmError):
    """The server refused a request. `detail` says what to do next; which `fields` there are depends on the code."""

    def __init__(self, code: ErrorCode, detail: str, **fields: Any) -> None:
        errors = fields.get("errors")
        faults = [each for each in errors if isinstance(each, dict)] if isinstance(errors, list) else []
        super().__init__(detail, nearest=[str(each["nearest"]) for each in faults if each.get("nearest")])
        self.code: ErrorCode = code
        self.detail = detail
        self.fields = fields

    @property
    def status(self) -> int:
        return HTTP_STATUS[self.code]


class InvalidSpec(Refusal):
    """One or more fields are wrong; `fields["errors"]` lists them."""

    cause = Cause.GRADER


class BodyTooLarge(Refusal):
    """The request body is too large, and the server has stopped reading it."""

    def __init__(self, limit_bytes: int) -> None:
        super().__init__(ErrorCode.INVALID_SPEC, f"the body is larger than {limit_bytes / 2**20:g} MiB; send less")

    @property
    def status(self) -> int:
        return 413
