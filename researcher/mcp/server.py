"""The MCP server: offers our tools and reports through the SDK, and words errors as the command line does."""

from __future__ import annotations

import json
import re
from typing import Any

import anyio.to_thread
from mcp import MCPError
from mcp.server.context import ServerRequestContext
from mcp.server.lowlevel import Server
from mcp_types import (
    INVALID_PARAMS,
    CallToolRequestParams,
    CallToolResult,
    ListResourcesResult,
    ListResourceTemplatesResult,
    ListToolsResult,
    PaginatedRequestParams,
    ReadResourceRequestParams,
    ReadResourceResult,
    Resource,
    ResourceTemplate,
    TextContent,
    TextResourceContents,
    ToolAnnotations,
)
from mcp_types import Tool as ToolListing
from pydantic import ValidationError

from foundation.logs import redact
from foundation.nearest import nearest
from foundation.streams import one_line
from foundation.strict import explain
from researcher.cli import DELIBERATE, USAGE, Refusal, refusal_of
from researcher.home import Home
from researcher.mcp.tools import TOOLS, Research, Tool
from researcher.store.errors import StoreError

_INSTRUCTIONS = """\
Answers questions about training LLM agents with reinforcement learning by experiment.
Usual order: findings (is the answer known?), instruments, draft, price, start, status with wait_s until it is done, report, verify.
A study file is text that you pass along. Never state a number that is not in a report. Refusals say what to do next."""
_KINDS = {"studies": "study", "campaigns": "campaign"}
_ADDRESS = re.compile(rf"researcher://({'|'.join(_KINDS)})/([^/]+)/report")
_MARKDOWN = "text/markdown"
_MOST_LISTED = 50
_COMMAND = re.compile(r"`researcher ((?:campaign )?\w+)((?: [\w./=…]+)*)`")
_BEGIN = '`researcher start --topic "..."`'
_TOOLS_OF = {"list": "studies", **{tool.name.replace("campaign_", "campaign "): tool.name for tool in TOOLS}}
"""Name of the tool that replaces each command."""


def create_server(research: Research) -> Server[dict[str, Any]]:
    """Create the server, not yet connected to a client."""
    tools = {tool.name: tool for tool in TOOLS}

    async def list_tools(context: object, params: PaginatedRequestParams | None) -> ListToolsResult:
        return ListToolsResult(tools=[_listing(tool) for tool in TOOLS])

    async def call_tool(context: ServerRequestContext[dict[str, Any]], params: CallToolRequestParams) -> CallToolResult:
        tool = tools.get(params.name)
        if tool is None:
            guess = nearest(params.name, tools)
            hint = f"did you mean {guess!r}?" if guess else f"there are {', '.join(tools)}"
            return _refused(Refusal(text=f"there is no tool {params.name!r}; {hint}", code=USAGE))
        only_looks = tool.effect == "none"  # a read-only call may be abandoned
        return await anyio.to_thread.run_sync(
            _called, tool, research, params.arguments or {}, abandon_on_cancel=only_looks
        )

    async def list_resources(context: object, params: PaginatedRequestParams | None) -> ListResourcesResult:
        return ListResourcesResult(resources=await anyio.to_thread.run_sync(_reports, research.home))

    async def list_templates(context: object, params: PaginatedRequestParams | None) -> ListResourceTemplatesResult:
        return ListResourceTemplatesResult(resource_templates=_TEMPLATES)

    async def read_resource(context: object, params: ReadResourceRequestParams) -> ReadResourceResult:
        text = await anyio.to_thread.run_sync(_report_at, research.home, params.uri)
        return ReadResourceResult(contents=[TextResourceContents(uri=params.uri, mime_type=_MARKDOWN, text=text)])

    return Server(
        "researcher",
        title="Researcher",
        instructions=_INSTRUCTIONS,
        on_list_tools=list_tools,
        on_call_tool=call_tool,
        on_list_resources=list_resources,
        on_list_resource_templates=list_templates,
        on_read_resource=read_resource,
    )


def _listing(tool: Tool) -> ToolListing:
    hints = ToolAnnotations(
        read_only_hint=tool.effect == "none", destructive_hint=tool.effect == "ends", open_world_hint=False
    )
    schema = tool.arguments.model_json_schema()
    schema.pop("description", None)
    return ToolListing(name=tool.name, description=tool.description, input_schema=schema, annotations=hints)


def _called(tool: Tool, research: Research, arguments: dict[str, Any]) -> CallToolResult:
    """Run the tool; an expected error becomes an error result."""
    try:
        given = tool.arguments.model_validate(arguments)
    except ValidationError as error:
        found = explain(error, tool.arguments)
        near = tuple(each.nearest for each in found if each.nearest)
        return _refused(Refusal(text="; ".join(map(str, found)), code=USAGE, nearest=near))
    try:
        answer = tool.work(research, given)
    except DELIBERATE as error:
        refusal = refusal_of(error)
        if refusal is None:
            raise
        return _refused(refusal)
    document = json.loads(redact(json.dumps(answer.document, default=str)))
    text = "\n".join(filter(None, [answer.text, *map(in_tools, answer.hints)]))
    return CallToolResult(content=[TextContent(type="text", text=redact(text))], structured_content=document)


def _refused(refusal: Refusal) -> CallToolResult:
    text = in_tools(refusal.text)
    said = {"error": text, "nearest": list(refusal.nearest), "exit_code": refusal.code}
    return CallToolResult(content=[TextContent(type="text", text=text)], structured_content=said, is_error=True)


def in_tools(text: str) -> str:
    """Replace commands with the names of their tools in an error or hint.

    Commands with options, and commands without a tool, are for people and stay as they are. Never pass reports, topics or a model's
    words.
    """

    def named(match: re.Match[str]) -> str:
        tool, rest = _TOOLS_OF.get(match[1]), match[2].strip()
        return match[0] if tool is None else f"`{tool}`{f' of {rest}' if rest else ''}"

    return _COMMAND.sub(named, text.replace(_BEGIN, "`draft`"))


# -- reports --------------------------------------------------------------------------------------------------------------

_TEMPLATES = [
    ResourceTemplate(
        uri_template=f"researcher://{kind}/{{id}}/report",
        name=f"report of a {word}",
        description=f"The report as last written. {{id}}: the id of a {word}, a prefix of it, or latest.",
        mime_type=_MARKDOWN,
    )
    for kind, word in _KINDS.items()
]


def _reports(home: Home) -> list[Resource]:
    """List the existing reports of the newest studies and campaigns. Clients reach the others through resource templates."""
    known = [("studies", study.id, study.topic) for study in home.store.studies.all()[:_MOST_LISTED]]
    known += [("campaigns", each.id, each.goal["goal"]) for each in home.store.campaigns.all()[:_MOST_LISTED]]
    return [
        Resource(
            uri=f"researcher://{kind}/{name}/report",
            name=f"report of {name}",
            description=one_line(said),
            mime_type=_MARKDOWN,
        )
        for kind, name, said in known
        if (home.studies / name / "report.md").is_file()
    ]


def _report_at(home: Home, address: str) -> str:
    """Read the newest written report. Raises: MCPError."""
    match = _ADDRESS.fullmatch(address)
    if match is None:
        raise MCPError(
            INVALID_PARAMS,
            f"{address!r} is not a report; write researcher://studies/ID/report or researcher://campaigns/ID/report",
        )
    store = home.store.studies if match[1] == "studies" else home.store.campaigns
    try:
        name = store.resolve(match[2])
        return redact((home.studies / name / "report.md").read_text(encoding="utf-8"))
    except StoreError as error:
        raise MCPError(INVALID_PARAMS, str(error)) from error
    except FileNotFoundError as error:
        raise MCPError(
            INVALID_PARAMS,
            f"{name} has no report yet; one is written every night and when the {_KINDS[match[1]]} ends",
        ) from error
