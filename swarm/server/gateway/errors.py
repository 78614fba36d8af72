"""Errors in the forms that agents' SDKs expect: OpenAI's everywhere, inside Anthropic's envelope on the Messages API.

Knows statuses and bodies, but no HTTP framework.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from swarm.engine.seam import EngineDown, RequestRefused
from swarm.protocol.episodes import POLICY_MODEL
from swarm.protocol.errors import HTTP_STATUS, BodyTooLarge, ErrorCode, Refusal, SwarmError
from swarm.server.keys import KeyRefused

_STATUS = HTTP_STATUS | {ErrorCode.LEASE_LOST: 403, ErrorCode.INVALID_SPEC: 400, ErrorCode.OVER_LIMIT: 403}
"""HTTP status by error code, with some that differ from the control API's: SDKs would retry a 409, but a lost episode stays lost."""
_NO_RETRY = {"x-should-retry": "false"}
_ANTHROPIC_TYPES = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    405: "invalid_request_error",
    409: "invalid_request_error",
    413: "request_too_large",
    415: "invalid_request_error",
    429: "rate_limit_error",
    503: "overloaded_error",
}


@dataclass(frozen=True, slots=True)
class ErrorAnswer:
    """An error as the client gets it. `body` has OpenAI's form, with OpenAI's error code if there is one, else with ours."""

    status: int
    body: dict[str, Any]
    headers: dict[str, str] = field(default_factory=dict)


def refused(
    status: int, message: str, kind: str, parameter: str | None = None, *, code: str | None = None
) -> RequestRefused:
    """Return the error for a request that we refuse ourselves. `kind` is vLLM's name for the error; `code` is OpenAI's, if any."""
    return RequestRefused(status, {"error": {"message": message, "type": kind, "param": parameter, "code": code}})


def unknown_model(wanted: str, hosted: str) -> RequestRefused:
    """Return the error for a request that names a model which this server does not host."""
    text = (
        f"The model `{wanted}` does not exist; this server hosts `{hosted}`. Ask for `{hosted}` or `{POLICY_MODEL}`, "
        "and append `@agent` to name an agent."
    )
    return refused(404, text, "NotFoundError", "model", code="model_not_found")


def bad_request(message: str, parameter: str) -> RequestRefused:
    return refused(400, message, "BadRequestError", parameter)


def answer_of(error: SwarmError) -> ErrorAnswer:
    """Convert one of our errors to the answer that an agent gets."""
    if isinstance(error, RequestRefused):
        return ErrorAnswer(error.status, _with_our_code(error.status, error.body))
    if isinstance(error, KeyRefused):
        return _ours(401, str(error), "invalid_api_key", "authentication_error", _NO_RETRY)
    if isinstance(error, EngineDown):
        return _ours(503, str(error), ErrorCode.ENGINE_FAILED, "server_error", {"Retry-After": "1"})
    if isinstance(error, Refusal):
        status = error.status if isinstance(error, BodyTooLarge) else _STATUS[error.code]
        kind = "invalid_request_error" if status < 500 else "server_error"
        stays = status < 500 or error.code is ErrorCode.SERVER_FAULT
        return _ours(status, error.detail, error.code, kind, _NO_RETRY if stays else {})
    return answer_of(fault())


def fault() -> Refusal:
    """Return the generic error that clients get for an internal error; only the log has details."""
    return Refusal(ErrorCode.SERVER_FAULT, "the server failed on this request; its log says why")


def anthropic_body(status: int, body: dict[str, Any]) -> dict[str, Any]:
    """Put an error body in OpenAI's form into Anthropic's envelope. The error code stays next to the message."""
    error = body.get("error") or {}
    shown = {"type": _ANTHROPIC_TYPES.get(status, "api_error"), "message": str(error.get("message", ""))}
    if isinstance(error.get("code"), str):
        shown["code"] = error["code"]
    return {"type": "error", "error": shown}


def _with_our_code(status: int, body: dict[str, Any]) -> dict[str, Any]:
    """Replace the HTTP status that vLLM sets as the error code by our code. Keep the code if it is one of OpenAI's."""
    error = body.get("error")
    if not isinstance(error, dict) or isinstance(error.get("code"), str):
        return body
    code = ErrorCode.NOT_FOUND if status == 404 else ErrorCode.INVALID_SPEC
    return body | {"error": error | {"code": str(code)}}


def _ours(status: int, message: str, code: str, kind: str, headers: dict[str, str]) -> ErrorAnswer:
    error = {"message": message, "type": kind, "param": None, "code": str(code)}
    return ErrorAnswer(status, {"error": error}, headers)
