"""Converts tools of the Responses dialect to chat functions: plain tools, tools in a namespace, and tools with free-text input."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from swarm.server.gateway.dialect import check_object_lists, check_objects, without_none
from swarm.server.gateway.errors import bad_request
from swarm.server.gateway.forms import JsonObject
from swarm.server.gateway.message_form import read_json

_INPUT = "input"
_SEPARATOR = "__"
_ALLOWED = "allowed_tools"
_OF_THE_CLIENT = ("function", "custom")
"""Types of tools that the client runs itself. Other tools are omitted."""
_FREE_TEXT: JsonObject = {
    "type": "object",
    "properties": {_INPUT: {"type": "string", "description": "The tool's input, as free text."}},
    "required": [_INPUT],
    "additionalProperties": False,
}


@dataclass(frozen=True, slots=True)
class ToolNames:
    """Maps the functions that the model calls to the client's tools."""

    custom: frozenset[str]
    spaced: dict[str, tuple[str, str]]
    """Maps a flat name to (namespace, name)."""

    @classmethod
    def of(cls, tools: Sequence[JsonObject]) -> ToolNames:
        spaced = {
            cls.flat(str(tool.get("name")), str(each.get("name"))): (str(tool.get("name")), str(each.get("name")))
            for tool in tools
            if tool.get("type") == "namespace"
            for each in tool.get("tools") or ()
        }
        return cls(frozenset(str(tool.get("name")) for tool in tools if tool.get("type") == "custom"), spaced)

    @staticmethod
    def flat(namespace: str, name: str) -> str:
        return f"{namespace}{_SEPARATOR}{name}"


def chat_tools(tools: Sequence[JsonObject]) -> list[JsonObject]:
    """Return the functions to show the model. Omits tools that a provider would run itself, because this server cannot run them."""
    functions: list[JsonObject] = []
    for tool in tools:
        kind = tool.get("type")
        if kind == "function":
            functions.append(_function(tool, str(tool.get("name") or "")))
        elif kind == "custom":
            check_objects(tool, "format")
            if (tool.get("format") or {}).get("type") == "grammar":
                raise bad_request("custom tools with a grammar are not supported; use free text", "tools")
            functions.append(_function(tool | {"parameters": _FREE_TEXT}, str(tool.get("name") or "")))
        elif kind == "namespace":
            check_object_lists(tool, "tools")
            functions += [
                _function(each, ToolNames.flat(str(tool.get("name")), str(each.get("name"))))
                for each in tool.get("tools") or ()
                if each.get("type") == "function"
            ]
    return functions


def offered_tools(body: JsonObject) -> list[JsonObject]:
    """Return the functions of a request that its `tool_choice` allows. Raises: RequestRefused."""
    tools, choice = chat_tools(body.get("tools") or []), body.get("tool_choice")
    if not isinstance(choice, dict) or choice.get("type") != _ALLOWED:
        return tools
    check_object_lists(choice, "tools")
    allowed = [_named(each, tools) for each in choice.get("tools") or () if each.get("type") in _OF_THE_CLIENT]
    return [tool for tool in tools if tool["function"]["name"] in allowed]


def chat_tool_choice(choice: Any, tools: Sequence[JsonObject]) -> Any:
    """Convert `tool_choice` to chat form; None means chat's default. Raises: RequestRefused for an unknown tool."""
    if isinstance(choice, dict) and choice.get("type") == _ALLOWED:
        choice = choice.get("mode", "auto")
        if choice not in ("auto", "required"):
            raise bad_request("the mode of allowed_tools must be auto or required", "tool_choice")
    if not tools:
        if choice in (None, "auto", "none"):
            return None
        raise bad_request("tool_choice requires a tool call, but tools is empty", "tool_choice")
    if choice in (None, "auto", "none", "required"):
        return choice
    if not isinstance(choice, dict):
        raise bad_request("tool_choice must be none, auto, required, or name a function", "tool_choice")
    return {"type": "function", "function": {"name": _named(choice, tools)}}


def _named(choice: JsonObject, tools: Sequence[JsonObject]) -> str:
    """Return the name of the function that a choice refers to. Raises: RequestRefused if it is unknown or ambiguous."""
    names = [tool["function"]["name"] for tool in tools]
    wanted = str(choice.get("name") or "")
    found = [name for name in names if name == wanted] or [
        name for name in names if name.endswith(_SEPARATOR + wanted) and wanted
    ]
    if len(found) != 1:
        raise bad_request(f"tool_choice names {wanted!r}, which is not one of the tools {names}", "tool_choice")
    return str(found[0])


def custom_arguments(text: str) -> str:
    """Encode a custom tool's input as the function's arguments."""
    return json.dumps({_INPUT: text}, ensure_ascii=False)


def custom_input(arguments: str) -> str:
    """Return the custom tool's input from a function's arguments. Arguments in any other form are returned unchanged, as the input."""
    try:
        value = read_json(arguments)
    except ValueError:
        return arguments
    found = value.get(_INPUT) if isinstance(value, dict) else None
    return found if isinstance(found, str) else arguments


def _function(tool: JsonObject, name: str) -> JsonObject:
    if not isinstance(tool.get("name"), str):
        raise bad_request("each tool must have a name", "tools")
    described = without_none({field: tool.get(field) for field in ("description", "parameters", "strict")})
    return {"type": "function", "function": {"name": name} | described}
