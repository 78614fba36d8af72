"""The inference surface, `/v1`: what an agent's SDK talks to. Authorised by an episode's api_key.

Decodes, hands to the gateway, encodes. Every error is in OpenAI's own format, with ours as its `code`.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from swarm.engine.seam import EngineDown, EngineInfo, RequestRefused
from swarm.protocol.errors import HTTP_STATUS, ErrorCode, Refusal, SwarmError
from swarm.server.gateway.gateway import Gateway
from swarm.server.keys import EpisodeKey, KeyRefused, Keyring, bearer
from swarm.server.routes import wire
from swarm.server.routes.wire import Operation

_STATUS = HTTP_STATUS | {ErrorCode.LEASE_LOST: 403, ErrorCode.INVALID_SPEC: 400, ErrorCode.OVER_LIMIT: 403}
"""SDKs send a 409 again by themselves; an episode that is lost stays lost."""
_NO_RETRY = {"x-should-retry": "false"}


@dataclass(frozen=True, slots=True, kw_only=True)
class InferenceRoutes:
    """The endpoints, over one gateway."""

    gateway: Gateway
    keys: Keyring
    info: EngineInfo
    started_at: float

    def operations(self) -> list[Operation]:
        return [
            Operation(
                method="POST",
                path="/v1/chat/completions",
                endpoint=self.chat_completions,
                summary="OpenAI's chat completions, streaming or not",
                free_body=True,
            ),
            Operation(method="GET", path="/v1/models", endpoint=self.models, summary="The hosted model"),
            Operation(method="GET", path="/v1/models/{model:path}", endpoint=self.model, summary="The hosted model"),
        ]

    async def chat_completions(self, request: Request) -> Response:
        key = self._key(request)
        body = await wire.decode_object(request)
        if body.get("stream"):
            frames = self.gateway.stream("chat.completions", key.episode_id, key.lease, body, request.headers)
            first = await wire.until_gone(request, _first(frames))
            return wire.EventStream(_resumed(first, frames))
        call = self.gateway.complete("chat.completions", key.episode_id, key.lease, body, request.headers)
        return wire.answer_json(await wire.until_gone(request, call))

    async def models(self, request: Request) -> Response:
        self._key(request)
        return wire.answer_json({"object": "list", "data": [self._card()]})

    async def model(self, request: Request) -> Response:
        self._key(request)
        wanted = request.path_params["model"]
        if wanted != self.info.model:
            raise Refusal(ErrorCode.NOT_FOUND, f"the model {wanted!r} does not exist; here is {self.info.model!r}")
        return wire.answer_json(self._card())

    def _card(self) -> dict[str, Any]:
        return {
            "id": self.info.model,
            "object": "model",
            "created": int(self.started_at),
            "owned_by": "swarm",
            "max_model_len": self.info.max_model_len,
        }

    def _key(self, request: Request) -> EpisodeKey:
        return self.keys.read(bearer(request.headers.get("authorization")))


def error_response(error: SwarmError) -> Response:
    """An error as OpenAI's SDKs know it."""
    if isinstance(error, RequestRefused):
        return wire.answer_json(error.body, status=error.status)
    if isinstance(error, KeyRefused):
        return _error(401, str(error), "invalid_api_key", "authentication_error", headers=_NO_RETRY)
    if isinstance(error, EngineDown):
        return _error(503, str(error), str(ErrorCode.ENGINE_FAILED), "server_error", headers={"Retry-After": "1"})
    if isinstance(error, Refusal):
        status = _STATUS[error.code]
        kind = "invalid_request_error" if status < 500 else "server_error"
        return _error(status, error.detail, str(error.code), kind, headers=_NO_RETRY if status < 500 else {})
    return _error(500, "the server failed; its log says why", str(ErrorCode.ENGINE_FAILED), "server_error")


def _error(status: int, message: str, code: str, kind: str, headers: dict[str, str] | None = None) -> Response:
    error = {"message": message, "type": kind, "param": None, "code": code}
    return wire.answer_json({"error": error}, status=status, headers=headers)


async def _first(frames: AsyncIterator[bytes]) -> bytes:
    """The first frame, so that a refusal still gets its own status. A stream without any is a fault of the gateway."""
    async for frame in frames:
        return frame
    raise EngineDown("the stream ended before it began")


async def _resumed(first: bytes, frames: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
    """`first`, then the rest. What fails on the way is told as a last event, since the status is already sent."""
    try:
        yield first
        async for frame in frames:
            yield frame
    except SwarmError as error:
        yield b"data: " + bytes(error_response(error).body) + b"\n\n"
    finally:
        close = getattr(frames, "aclose", None)
        if close is not None:
            await close()
