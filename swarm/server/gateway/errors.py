"""Errors as agents' SDKs know them: OpenAI's form everywhere, Anthropic's envelope on the messages surface.

Knows statuses and bodies, and no HTTP framework.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from swarm.engine.seam import EngineDown, RequestRefused
from swarm.protocol.episodes import POLICY_MODEL
from swarm.protocol.errors import HTTP_STATUS, BodyTooLarge, ErrorCode, Refusal, SwarmError
from swarm.server.keys import KeyRefused

_STATUS = HTTP_STATUS | {ErrorCode.LEASE_LOST: 403, ErrorCode.INVALID_SPEC: 400, ErrorCode.OVER_LIMIT: 403}
"""Statuses that differ from the control surface's. SDKs would retry a 409, but a lost episode stays lost."""
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
    """What the client gets: `body` in OpenAI's form, with OpenAI's code if it has one, else ours."""

    status: int
    body: dict[str, Any]
    headers: dict[str, str] = field(default_factory=dict)


def refused(
    status: int, message: str, kind: str, parameter: str | None = None, *, code: str | None = None
) -> RequestRefused:
    """The refusal of a request before any engine sees it. kind: vLLM's name for it; code: OpenAI's, if it has one."""
    return RequestRefused(status, {"error": {"message": message, "type": kind, "param": parameter, "code": code}})


def unknown_model(wanted: str, hosted: str) -> RequestRefused:
    """The refusal of a request for a model that is not hosted here."""
    text = (
        f"The model `{wanted}` does not exist; this server hosts `{hosted}`. Ask for `{hosted}` or `{POLICY_MODEL}`, "
        "with `@agent` behind it to name an agent."
    )
    return refused(404, text, "NotFoundError", "model", code="model_not_found")


def bad_request(message: str, parameter: str) -> RequestRefused:
    return refused(400, message, "BadRequestError", parameter)


def answer_of(error: SwarmError) -> ErrorAnswer:
    """An error of this product as an agent gets it."""
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
    """The only text that a client gets about an internal error."""
    return Refusal(ErrorCode.SERVER_FAULT, "the server failed on this request; its log says why")


def anthropic_body(status: int, body: dict[str, Any]) -> dict[str, Any]:
    """An error body in OpenAI's form, in Anthropic's envelope. Our own code stays beside the message."""
    error = body.get("error") or {}
    shown = {"type": _ANTHROPIC_TYPES.get(status, "api_error"), "message": str(error.get("message", ""))}
    if isinstance(error.get("code"), str):
        shown["code"] = error["code"]
    return {"type": "error", "error": shown}


def _with_our_code(status: int, body: dict[str, Any]) -> dict[str, Any]:
    """The body with our code, unless it has OpenAI's own. vLLM puts the HTTP status there."""
    error = body.get("error")
    if not isinstance(error, dict) or isinstance(error.get("code"), str):
        return body
    code = ErrorCode.NOT_FOUND if status == 404 else ErrorCode.INVALID_SPEC
    return body | {"error": error | {"code": str(code)}}


def _ours(status: int, message: str, code: str, kind: str, headers: dict[str, str]) -> ErrorAnswer:
    error = {"message": message, "type": kind, "param": None, "code": str(code)}
    return ErrorAnswer(status, {"error": error}, headers)
