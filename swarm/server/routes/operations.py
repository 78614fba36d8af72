"""Declares each operation of the HTTP API once; its route and the OpenAPI document both follow from the declaration."""

from __future__ import annotations

import re
from collections.abc import Awaitable, Callable, Iterator, Sequence
from dataclasses import KW_ONLY, dataclass
from typing import Any, Literal, TypeVar

from pydantic import BaseModel
from pydantic.json_schema import JsonSchemaMode, models_json_schema
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from foundation.strict import StrictModel
from swarm.protocol.errors import ErrorCode
from swarm.protocol.problem import Problem
from swarm.server.keys import ControlTokens, Role
from swarm.server.routes import wire

Endpoint = Callable[..., Awaitable[Any]]
"""Takes (self, request), then the query and the body if there are any. Returns a response, a model or a list of models."""
Declared = TypeVar("Declared", bound=Endpoint)

INFERENCE = "/v1/"
_REF = "#/components/schemas/{model}"
_PARAMETER = re.compile(r"{(\w+)(?::\w+)?}")
_ATTRIBUTE = "operation"


class NoQuery(StrictModel):
    """The query string of an operation without parameters."""


@dataclass(frozen=True, slots=True)
class Operation:
    """Input, output and required role of one operation. Use it as a decorator to declare a method as the operation's endpoint."""

    method: Literal["GET", "POST", "PATCH"]
    path: str
    summary: str
    answer: type[BaseModel] | None = None
    _: KW_ONLY
    answer_list: bool = False
    """Whether the answer is a list of `answer`."""
    media_type: str = "application/json"
    status: int = 200
    body: type[BaseModel] | Literal["object"] | None = None
    """Model of the body; "object" for any JSON object, whose fields a dialect or a merge patch defines."""
    query: type[StrictModel] | None = None
    headers: tuple[str, ...] = ()
    aliases: tuple[str, ...] = ()
    """Undocumented paths that give the same answer."""
    codes: tuple[ErrorCode, ...] = ()
    """Codes of its refusals, in addition to those for a bad body or query."""
    role: Role | None = Role.CLIENT
    """Required role; None if the endpoint checks a key itself, or is open to all."""

    def __call__(self, endpoint: Declared) -> Declared:
        setattr(endpoint, _ATTRIBUTE, self)
        return endpoint

    @property
    def inference(self) -> bool:
        return self.path.startswith(INFERENCE)

    @property
    def every_code(self) -> tuple[ErrorCode, ...]:
        of_body = (ErrorCode.INVALID_SPEC, ErrorCode.OVER_LIMIT) if self.body is not None else ()
        of_query = (ErrorCode.INVALID_SPEC,) if self.query is not None else ()
        return tuple(dict.fromkeys((*self.codes, *of_body, *of_query)))


def declared(group: object) -> list[tuple[Operation, Endpoint]]:
    """Return the operations among an object's methods, in the order of their definition."""
    found = [(getattr(method, _ATTRIBUTE, None), getattr(group, name)) for name, method in vars(type(group)).items()]
    return [(operation, endpoint) for operation, endpoint in found if operation is not None]


def routes(group: object, tokens: ControlTokens) -> Iterator[Route]:
    """Yield the routes. Each one authorises, decodes, calls the endpoint and encodes."""
    for operation, endpoint in declared(group):
        serve = endpoint if operation.inference else _decoded(operation, endpoint, tokens)
        for path in (operation.path, *operation.aliases):
            route = Route(path, serve, methods=[operation.method], name=endpoint.__name__)
            route.methods = {operation.method}  # starlette would add HEAD to every GET
            yield route


def _decoded(
    operation: Operation, endpoint: Endpoint, tokens: ControlTokens
) -> Callable[[Request], Awaitable[Response]]:
    async def serve(request: Request) -> Response:
        if operation.role is not None:
            request.state.by = wire.require(tokens, request, operation.role)
        given: list[Any] = []
        if operation.query is not None:
            query = wire.decode_query(request, operation.query)
            given += [query] if operation.query is not NoQuery else []
        if operation.body == "object":
            given.append(await wire.decode_object(request, control=True))
        elif operation.body is not None:
            given.append(await wire.decode(request, operation.body))
        answer = await endpoint(request, *given)
        return answer if isinstance(answer, Response) else wire.answer(answer, status=operation.status)

    return serve


# -- OpenAPI ------------------------------------------------------------------------------------------------------------


class Document:
    """Serves `/openapi.json`, which it builds on the first request."""

    def __init__(self, groups: Sequence[object]) -> None:
        self._operations = [each for group in groups for each in declared(group)]
        self._made: dict[str, Any] | None = None

    async def answer(self, request: Request) -> Response:
        self._made = self._made or _document([(operation, method.__name__) for operation, method in self._operations])
        return wire.answer_json(self._made)


def _document(operations: Sequence[tuple[Operation, str]]) -> dict[str, Any]:
    """Build the OpenAPI document. `operations` pairs each operation with the name of its endpoint."""
    paths: dict[str, dict[str, Any]] = {}
    shapes: dict[tuple[type[BaseModel], JsonSchemaMode], None] = {(Problem, "serialization"): None}
    for operation, name in operations:
        path = _PARAMETER.sub(r"{\1}", operation.path)
        paths.setdefault(path, {})[operation.method.lower()] = _described(operation, name)
        for given in (operation.body, operation.query):
            if isinstance(given, type):
                shapes[given, "validation"] = None
        if operation.answer is not None:
            shapes[operation.answer, "serialization"] = None
    _, schemas = models_json_schema(list(shapes), ref_template=_REF)
    queries = {operation.query.__name__ for operation, _ in operations if operation.query is not None}
    shown = {name: schema for name, schema in schemas["$defs"].items() if name not in queries}
    bearer = {"type": "http", "scheme": "bearer"}
    return {
        "openapi": "3.1.0",
        "info": {"title": "Swarm server", "version": "1"},
        "paths": paths,
        "components": {"schemas": shown, "securitySchemes": {"bearer": bearer}},
    }


def _described(operation: Operation, name: str) -> dict[str, Any]:
    described: dict[str, Any] = {"summary": operation.summary, "operationId": name}
    if parameters := _parameters(operation):
        described["parameters"] = parameters
    if operation.body is not None:
        schema = (
            {"type": "object"} if operation.body == "object" else {"$ref": _REF.format(model=operation.body.__name__)}
        )
        described["requestBody"] = {"required": True, "content": {"application/json": {"schema": schema}}}
    if operation.path != "/health":
        described["security"] = [{"bearer": []}]
    return described | {"responses": _responses(operation)}


def _parameters(operation: Operation) -> list[dict[str, Any]]:
    text = {"type": "string"}
    named = [
        {"name": name, "in": "path", "required": True, "schema": text} for name in _PARAMETER.findall(operation.path)
    ]
    named += [{"name": name, "in": "header", "required": False, "schema": text} for name in operation.headers]
    query = {} if operation.query is None else operation.query.model_json_schema(ref_template=_REF)
    for name, schema in query.get("properties", {}).items():
        named.append({"name": name, "in": "query", "required": False, "schema": schema})
    return named


def _responses(operation: Operation) -> dict[str, Any]:
    schema: dict[str, Any] = {}
    if operation.answer is not None:
        schema = {"$ref": _REF.format(model=operation.answer.__name__)}
    if operation.answer_list:
        schema = {"type": "array", "items": schema}
    answered = {"description": operation.summary, "content": {operation.media_type: {"schema": schema}}}
    if operation.inference:
        return {str(operation.status): answered, "default": {"description": "An error in the dialect's own format"}}
    codes = ", ".join(operation.every_code) or "none"
    text = f"A problem document. Codes besides unauthorized, forbidden, storage_full, engine_failed and server_fault: {codes}"
    problem = {"application/problem+json": {"schema": {"$ref": _REF.format(model=Problem.__name__)}}}
    return {str(operation.status): answered, "default": {"description": text, "content": problem}}
