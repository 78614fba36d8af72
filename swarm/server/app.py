"""The HTTP application: every route on one port, a problem document for every refusal, and the OpenAPI document."""

from __future__ import annotations

import asyncio
import logging
from pathlib import Path

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Match, Route

from foundation.clock import Clock
from foundation.nearest import nearest
from swarm.engine.seam import EngineDown, EngineInfo, RequestRefused
from swarm.protocol.errors import ErrorCode, Refusal, SwarmError
from swarm.server.gateway.errors import fault
from swarm.server.gateway.gateway import Gateway
from swarm.server.keys import ControlTokens, Keyring
from swarm.server.routes import inference, operations, wire
from swarm.server.routes.control import EpisodeRoutes, RunRoutes, StatusRoutes, TeamRoutes
from swarm.server.routes.inference import InferenceRoutes
from swarm.server.routes.metrics import MetricsRoutes
from swarm.server.service import Service
from swarm.server.team_resolver import Peers

_log = logging.getLogger(__name__)
_BUSIEST = ("/v1/chat/completions", "/swarm/v1/episodes:claim", "/swarm/v1/episodes/{episode_id}:end")
"""Paths whose routes come first, because starlette tries routes in order."""


def create_app(
    *,
    service: Service,
    gateway: Gateway,
    info: EngineInfo,
    keys: Keyring,
    tokens: ControlTokens,
    clock: Clock,
    closing: asyncio.Event,
    public_url: str | None = None,
    peers: Peers | None = None,
    state_dir: Path | None = None,
) -> Starlette:
    """Build the application over one service and one gateway. Once `closing` is set, waiting requests are answered immediately."""
    asked = peers or Peers(keys, any_loopback=not tokens.required)
    groups: list[object] = [
        InferenceRoutes(gateway=gateway, service=service, keys=keys, info=info, started_at=clock.now()),
        EpisodeRoutes(service=service, keys=keys, closing=closing, decode=gateway.decode, public_url=public_url),
        RunRoutes(service=service, closing=closing),
        StatusRoutes(service=service, closing=closing, state_dir=state_dir),
        TeamRoutes(service=service, keys=keys, peers=asked),
        MetricsRoutes(service=service),
    ]
    document = operations.Document(groups)
    served = [route for group in groups for route in operations.routes(group, tokens)]
    app = Starlette(
        routes=[
            *sorted(served, key=lambda route: route.path not in _BUSIEST),
            Route("/openapi.json", document.answer, methods=["GET"]),
        ],
        middleware=[Middleware(wire.StraightSend)],
        exception_handlers={SwarmError: _refused, HTTPException: _unroutable, Exception: _failed},
    )
    app.router.redirect_slashes = False
    app.state.public_url = public_url
    return app


def _is_inference(request: Request) -> bool:
    return request.url.path.startswith(operations.INFERENCE)


async def _refused(request: Request, error: Exception) -> Response:
    """Answer an error that our code raised on purpose, in the format of the API that was called."""
    if isinstance(error, wire.ClientGone):
        return Response(status_code=499)
    assert isinstance(error, SwarmError)
    if _is_inference(request):
        return inference.error_response(error, request.url.path)
    if isinstance(error, Refusal):
        return wire.problem(error)
    if isinstance(error, RequestRefused):
        return wire.answer_json(error.body, status=error.status)
    code = ErrorCode.ENGINE_FAILED if isinstance(error, EngineDown) else ErrorCode.SERVER_FAULT
    return wire.problem(Refusal(code, str(error)))


async def _unroutable(request: Request, error: Exception) -> Response:
    """Answer a request for an unknown path, or with a method that the path does not support."""
    assert isinstance(error, HTTPException)
    headers: dict[str, str] = {}
    if error.status_code == 405:
        allowed = ", ".join(_methods(request))
        detail = f"{request.method} is not supported at {request.url.path}; allowed: {allowed}"
        headers["Allow"] = allowed
    else:
        guess = nearest(request.url.path, [route.path for route in _routes(request) if "{" not in route.path])
        hint = f"; did you mean {guess}?" if guess else "; /openapi.json lists all paths"
        detail = f"nothing is served at {request.url.path}{hint}"
    refusal = Refusal(ErrorCode.NOT_FOUND, detail)
    if _is_inference(request):
        return inference.error_response(refusal, request.url.path, status=error.status_code, headers=headers)
    return wire.problem(refusal, status=error.status_code, headers=headers)


async def _failed(request: Request, error: Exception) -> Response:
    """Answer an internal error: log the traceback, and tell the client only that an error happened."""
    _log.error("%s %s failed", request.method, request.url.path, exc_info=error)
    # uvicorn closes the connection after a fault, and would lose the next request on it.
    headers = {"Connection": "close"}
    if _is_inference(request):
        return inference.error_response(fault(), request.url.path, headers=headers)
    return wire.problem(fault(), headers=headers)


def _routes(request: Request) -> list[Route]:
    return [route for route in request.app.routes if isinstance(route, Route)]


def _methods(request: Request) -> list[str]:
    """Return the methods that this request's path supports."""
    found = [route.methods or set() for route in _routes(request) if route.matches(request.scope)[0] is not Match.NONE]
    return sorted(set().union(*found))
