"""The inference API, `/v1`, for agents' SDKs, authorised by an episode's api_key.

Decodes requests, calls the gateway and encodes answers. Errors have OpenAI's format, with our error code as `code`; those of the
Messages API have Anthropic's format.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from swarm.engine.seam import EngineDown, EngineInfo
from swarm.protocol.episodes import EpisodeRenewal
from swarm.protocol.errors import SwarmError
from swarm.server.gateway.dialect import check_depth
from swarm.server.gateway.errors import answer_of, anthropic_body, bad_request, refused
from swarm.server.gateway.gateway import Gateway
from swarm.server.gateway.request import agent_behind
from swarm.server.keys import EpisodeKey, Keyring, bearer
from swarm.server.routes import wire
from swarm.server.routes.operations import Operation
from swarm.server.service import Service
from swarm.server.state.leases import API_KEY_PREFIX

_MESSAGES = "/v1/messages"
_MODELS = "/v1/models"
_AGAIN = "/v1"
"""Prefix under which we also serve `/v1/v1/…`: Anthropic's SDK appends `/v1/…` even to an episode's base_url, which ends with `/v1`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class InferenceRoutes:
    """Endpoints that do their own authorising and decoding, because each dialect has its own form for errors."""

    gateway: Gateway
    service: Service
    keys: Keyring
    info: EngineInfo
    started_at: float

    @Operation("POST", "/v1/chat/completions", "OpenAI's chat completions, streaming or not", body="object")
    async def chat_completions(self, request: Request) -> Response:
        return await self._call("chat.completions", request)

    @Operation("POST", "/v1/completions", "OpenAI's text completions, streaming or not", body="object")
    async def completions(self, request: Request) -> Response:
        return await self._call("completions", request)

    @Operation("POST", "/v1/responses", "OpenAI's responses, streaming or not", body="object")
    async def responses(self, request: Request) -> Response:
        return await self._call("responses", request)

    @Operation(
        "POST", _MESSAGES, "Anthropic's messages, streaming or not", body="object", aliases=(_AGAIN + _MESSAGES,)
    )
    async def messages(self, request: Request) -> Response:
        return await self._call("messages", request)

    @Operation(
        "POST", f"{_MESSAGES}/count_tokens", "How many tokens the prompt of a message would have",
        body="object", aliases=(f"{_AGAIN}{_MESSAGES}/count_tokens",),
    )  # fmt: skip
    async def count_tokens(self, request: Request) -> Response:
        key = await self._key(request)
        with self.gateway.noting_refusals(key):
            body = await _body(request)
            counting = self.gateway.count_tokens("messages", key, body, request.headers)
            count = await wire.until_gone(request, counting)
        return wire.answer_json({"input_tokens": count, "context_management": {"original_input_tokens": count}})

    @Operation("GET", _MODELS, "The hosted model", aliases=(_AGAIN + _MODELS,))
    async def models(self, request: Request) -> Response:
        await self._require_open(request)
        return wire.answer_json({"object": "list", "data": [self._card()]})

    @Operation("GET", f"{_MODELS}/{{model:path}}", "The hosted model", aliases=(f"{_AGAIN}{_MODELS}/{{model:path}}",))
    async def model(self, request: Request) -> Response:
        key = await self._require_open(request)
        agent_behind(request.path_params["model"], self.info.model, any_model=key.any_model)
        return wire.answer_json(self._card())

    async def _call(self, dialect: str, request: Request) -> Response:
        key = await self._key(request)
        with self.gateway.noting_refusals(key):
            body = await _body(request)
            if body.get("stream"):
                frames = self.gateway.stream(dialect, key, body, request.headers)
                first = await wire.until_gone(request, _first(frames))
                return wire.EventStream(frames, first=first)
            call = self.gateway.complete(dialect, key, body, request.headers)
            answer, delivered = await wire.until_gone(request, call)
            return wire.WatchedAnswer(answer, delivered)

    def _card(self) -> dict[str, Any]:
        return {
            "id": self.info.model,
            "object": "model",
            "created": int(self.started_at),
            "owned_by": "swarm",
            "max_model_len": self.info.max_model_len,
        }

    async def _require_open(self, request: Request) -> EpisodeKey:
        """Check that the key's episode is open, and renew its lease. Raises: KeyRefused; Refusal(lease_lost) if it is over."""
        key = await self._key(request)
        await self.service.renew(key.episode_id, EpisodeRenewal(lease=key.lease))
        return key

    async def _key(self, request: Request) -> EpisodeKey:
        """Return the episode key from `Authorization: Bearer`, or from `x-api-key`, which Anthropic's SDK sends.

        Raises: KeyRefused, Refusal(lease_lost).
        """
        token = bearer(request.headers.get("authorization"))
        if not token.startswith(API_KEY_PREFIX):
            token = request.headers.get("x-api-key") or token
        old = self.keys.episode_of_old_key(token)
        if old is not None:  # a key from an older server, whose open episodes were closed at the next start
            raise await self.service.why_lost(old)
        return await self.service.access(token)


def error_response(
    error: SwarmError, path: str = "", *, status: int | None = None, headers: Mapping[str, str] | None = None
) -> Response:
    """Encode an error in the format of the API at `path`. If `status` is None, use the error's own status."""
    answer = answer_of(error)
    status = status or answer.status
    of_anthropic = path.startswith((_MESSAGES, f"{_AGAIN}/v1/"))
    body = anthropic_body(status, answer.body) if of_anthropic else answer.body
    return wire.answer_json(body, status=status, headers={**answer.headers, **(headers or {})})


async def _body(request: Request) -> dict[str, Any]:
    """Decode a request's body as a JSON object. Raises: RequestRefused, Refusal(invalid_spec)."""
    encoding = request.headers.get("content-encoding", "identity").strip().lower()
    if encoding not in ("", "identity"):
        text = f"this server does not decode the Content-Encoding {encoding!r}; send the body uncompressed"
        raise refused(415, text, "BadRequestError")
    body = await wire.decode_object(request, check=check_depth)
    if not isinstance(body.get("stream"), bool | None):
        raise bad_request(f"stream must be true or false, got {body['stream']!r}", "stream")
    return body


async def _first(frames: AsyncIterator[bytes]) -> bytes:
    """Wait for the first frame, so that a refusal still gets its own HTTP status. A stream without frames is a bug in the gateway."""
    async for frame in frames:
        return frame
    raise EngineDown("the stream ended without any output")
