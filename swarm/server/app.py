"""The HTTP application: both surfaces on one port, problem documents for every refusal, and the OpenAPI document.

Puts routes together; knows no engine and keeps no state of its own.
"""

from __future__ import annotations

import asyncio
import logging
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from fastapi import APIRouter, FastAPI
from fastapi.openapi.utils import get_openapi
from pydantic.json_schema import models_json_schema
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Match, Route

from foundation.clock import Clock
from foundation.nearest import nearest
from swarm.engine.seam import EngineDown, EngineInfo, RequestRefused
from swarm.protocol.errors import ErrorCode, Refusal, SwarmError
from swarm.protocol.problem import Problem
from swarm.server.gateway.errors import fault
from swarm.server.gateway.gateway import Gateway
from swarm.server.keys import ControlTokens, Keyring
from swarm.server.routes import inference, wire
from swarm.server.routes.control import ControlRoutes
from swarm.server.routes.inference import InferenceRoutes
from swarm.server.routes.metrics import MetricsRoutes
from swarm.server.routes.teams import TeamRoutes
from swarm.server.routes.wire import Operation
from swarm.server.service import Service
from swarm.server.team_resolver import Peers

_log = logging.getLogger(__name__)
_REF = "#/components/schemas/{model}"
_INFERENCE = "/v1/"
_PATH_NAME = re.compile(r"{(\w+)")


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
) -> FastAPI:
    """Routes over one service and one gateway. When `closing` is set, waiting requests are answered at once."""
    asked = peers or Peers(keys, any_loopback=not tokens.required)
    teams = TeamRoutes(service=service, keys=keys, tokens=tokens, peers=asked)
    control = ControlRoutes(
        service=service,
        keys=keys,
        tokens=tokens,
        closing=closing,
        decode=gateway.decode,
        public_url=public_url,
        state_dir=state_dir,
    )
    agents = InferenceRoutes(gateway=gateway, keys=keys, info=info, started_at=clock.now())
    measures = MetricsRoutes(service=service, tokens=tokens)
    operations = [*agents.operations(), *control.operations(), *teams.operations(), *measures.operations()]
    app = FastAPI(title="Swarm server", version="1", docs_url=None, redoc_url=None, redirect_slashes=False)
    app.state.public_url = public_url
    app.add_middleware(wire.StraightSend)
    for operation in operations:
        _serve(app, operation)
    app.openapi = lambda: _document(app, operations)  # type: ignore[method-assign]
    app.add_exception_handler(SwarmError, _refused)
    app.add_exception_handler(HTTPException, _unroutable)
    app.add_exception_handler(Exception, _failed)
    return app


def _serve(app: FastAPI, operation: Operation) -> None:
    """By a plain route: endpoints read their requests themselves, so that FastAPI's dependencies would only cost time."""
    for path in (operation.path, *operation.aliases):
        route = Route(path, operation.endpoint, methods=[operation.method], name=operation.endpoint.__name__)
        route.methods = {operation.method}  # without the HEAD that comes with every GET
        app.router.routes.append(route)


def _describe(router: APIRouter, operation: Operation) -> None:
    """For the OpenAPI document alone."""
    router.add_api_route(
        operation.path,
        operation.endpoint,
        methods=[operation.method],
        summary=operation.summary,
        status_code=operation.status,
        response_class=Response,
        response_model=None,
        responses=_answers(operation),
        openapi_extra=_inputs(operation),
        name=operation.endpoint.__name__,
        operation_id=operation.endpoint.__name__,
    )


def _answers(operation: Operation) -> dict[int | str, dict[str, Any]]:
    """What comes back, for the OpenAPI document."""
    schema: dict[str, Any] = {}
    if operation.answer is not None:
        schema = {"$ref": _REF.format(model=operation.answer.__name__)}
    if operation.answer_list:
        schema = {"type": "array", "items": schema}
    described: dict[int | str, dict[str, Any]] = {
        operation.status: {"description": operation.summary, "content": {operation.media_type: {"schema": schema}}}
    }
    if operation.path.startswith(_INFERENCE):
        return described | {"default": {"description": "An error in the dialect's own format"}}
    codes = ", ".join(operation.every_code) or "none of its own"
    problem = {"application/problem+json": {"schema": {"$ref": _REF.format(model=Problem.__name__)}}}
    text = f"A problem document. Codes beside unauthorized, forbidden, storage_full, engine_failed and server_fault: {codes}"
    return described | {"default": {"description": text, "content": problem}}


def _inputs(operation: Operation) -> dict[str, Any]:
    """Path, query, headers and body, for the OpenAPI document. The schemas themselves are added by `_document`."""
    text = {"type": "string"}
    parameters: list[dict[str, Any]] = [
        {"name": name, "in": "path", "required": True, "schema": text} for name in _PATH_NAME.findall(operation.path)
    ]
    parameters += [{"name": name, "in": "header", "required": False, "schema": text} for name in operation.headers]
    if operation.query is not None:
        described = operation.query.model_json_schema(ref_template=_REF)["properties"]
        parameters += [
            {"name": name, "in": "query", "required": False, "schema": schema} for name, schema in described.items()
        ]
    extra: dict[str, Any] = {"parameters": parameters} if parameters else {}
    if operation.path != "/health":
        extra["security"] = [{"bearer": []}]
    schema = {"$ref": _REF.format(model=operation.body.__name__)} if operation.body else {"type": "object"}
    if operation.body is not None or operation.free_body:
        extra["requestBody"] = {"required": True, "content": {"application/json": {"schema": schema}}}
    return extra


def _document(app: FastAPI, operations: Sequence[Operation]) -> dict[str, Any]:
    """The OpenAPI document, made once."""
    if app.openapi_schema is None:
        described = APIRouter()
        for operation in operations:
            _describe(described, operation)
        document = get_openapi(title=app.title, version=app.version, routes=described.routes)
        said = [(shape.body, "validation") for shape in operations] + [
            (shape.query, "validation") for shape in operations
        ]
        told = [(shape.answer, "serialization") for shape in operations] + [(Problem, "serialization")]
        shapes = dict.fromkeys((model, mode) for model, mode in said + told if model is not None)
        _, schemas = models_json_schema(list(shapes), ref_template=_REF)  # type: ignore[arg-type]
        queries = {operation.query.__name__ for operation in operations if operation.query is not None}
        components = document.setdefault("components", {})
        components["schemas"] = {name: schema for name, schema in schemas["$defs"].items() if name not in queries}
        components["securitySchemes"] = {"bearer": {"type": "http", "scheme": "bearer"}}
        app.openapi_schema = document
    return app.openapi_schema


def _is_inference(request: Request) -> bool:
    return request.url.path.startswith(_INFERENCE)


async def _refused(request: Request, error: Exception) -> Response:
    """What this product raised on purpose, in the format of the surface."""
    if isinstance(error, wire.ClientGone):
        return Response(status_code=499)
    assert isinstance(error, SwarmError)
    if _is_inference(request):
        return inference.error_response(error, request.url.path)
    if isinstance(error, Refusal):
        return wire.problem(error)
    if isinstance(error, RequestRefused):
        return wire.answer_json(error.body, status=error.status)
    return wire.problem(
        Refusal(ErrorCode.ENGINE_FAILED if isinstance(error, EngineDown) else ErrorCode.SERVER_FAULT, str(error))
    )


async def _unroutable(request: Request, error: Exception) -> Response:
    """No such path, or not with this method."""
    assert isinstance(error, HTTPException)
    if error.status_code == 405:
        allowed = ", ".join(_methods(request))
        detail = f"{request.method} is not served at {request.url.path}; allowed: {allowed}"
        refusal = Refusal(ErrorCode.NOT_FOUND, detail)
        headers = {"Allow": allowed}
    else:
        guess = nearest(request.url.path, [path for path in _paths(request) if "{" not in path])
        hint = f"; did you mean {guess}?" if guess else "; /openapi.json lists what is"
        refusal, headers = Refusal(ErrorCode.NOT_FOUND, f"nothing is served at {request.url.path}{hint}"), {}
    if _is_inference(request):
        return inference.error_response(refusal, request.url.path, status=error.status_code, headers=headers)
    return wire.problem(refusal, status=error.status_code, headers=headers)


async def _failed(request: Request, error: Exception) -> Response:
    """A fault of ours. It is logged whole by the server; the client learns that it happened."""
    _log.error("%s %s failed", request.method, request.url.path, exc_info=error)
    headers = {"Connection": "close"}  # as uvicorn will, whose next request would be lost with it
    if _is_inference(request):
        return inference.error_response(fault(), request.url.path, headers=headers)
    return wire.problem(fault(), headers=headers)


def _paths(request: Request) -> list[str]:
    return [path for route in request.app.routes if isinstance(path := getattr(route, "path", None), str)]


def _methods(request: Request) -> list[str]:
    """The methods that the path of this request is served with."""
    found: set[str] = set()
    for route in request.app.routes:
        match, _ = route.matches(request.scope)
        if match is not Match.NONE:
            found |= getattr(route, "methods", None) or set()
    return sorted(found)
