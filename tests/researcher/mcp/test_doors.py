"""`researcher mcp` in processes of its own: a study over stdio and over HTTP, and who may come in by HTTP."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import httpx2
import pytest
from mcp import Client
from mcp.client.stdio import StdioServerParameters
from mcp.client.streamable_http import streamable_http_client
from mcp_types import TextContent, TextResourceContents

from bench.serving import ServerProcess
from researcher.cli.drafting import TextDrafting
from researcher.mcp.server import create_server
from researcher.mcp.tools import LONGEST_WAIT_S, Research
from researcher.mcp.transports import http_app
from researcher.serving import MCP_TOKEN, Access
from tests.fakes import shown_study

pytestmark = pytest.mark.anyio

ROOT = Path(__file__).parents[3]
TOKEN = "a-token-of-some-length"
STUDY = f"""\
question: Does a higher learning rate help?
instrument: {ROOT / "tests" / "instruments" / "repeat"}
compare: {{learning_rate: {{baseline: 1e-5, levels: [1e-3]}}}}
claim: increase
steps: 2
seeds: {{min: 2, max: 2}}
budget: {{wall: 1h}}
"""
COMMAND = ["-m", "researcher.main", "mcp"]


def environ(home: Path) -> dict[str, str]:
    return {"RESEARCHER_HOME": str(home), "PYTHONPATH": str(ROOT), "PATH": os.environ["PATH"]}


@contextmanager
def over_http(home: Path) -> Iterator[str]:
    """Its address, with TOKEN as the token."""
    command = [sys.executable, *COMMAND, "--http", "--port", "0", "--json"]
    with subprocess.Popen(
        command, env={**environ(home), MCP_TOKEN: TOKEN}, stdout=subprocess.PIPE, text=True
    ) as server:
        assert server.stdout is not None
        try:
            yield json.loads(server.stdout.readline())["url"]
        finally:
            server.send_signal(signal.SIGTERM)
            assert server.wait(20) == 0


async def told(client: Client, tool: str, **arguments: Any) -> tuple[str, dict[str, Any]]:
    """What a call that succeeds says, as text and as a document."""
    answer = await client.call_tool(tool, arguments)
    (part,) = answer.content
    assert isinstance(part, TextContent)
    assert not answer.is_error, part.text
    return part.text, answer.structured_content


async def test_an_agent_plans_prices_runs_and_reports_a_study_over_stdio_and_over_http(
    echo_server: ServerProcess, tmp_path: Path
) -> None:
    """Begun by one agent over stdio, which is gone while it runs; followed and reported by another over HTTP."""
    home = tmp_path / "home"
    stdio = StdioServerParameters(command=sys.executable, args=COMMAND, env=environ(home), cwd=tmp_path)
    headers = {"authorization": f"Bearer {TOKEN}"}
    with over_http(home) as url:
        async with Client(stdio, mode="legacy") as client:
            asked = {"study": STUDY, "servers": [echo_server.url]}
            assert (await told(client, "price", **asked))[1]["price"]["trials"] == [4, 4]
            study = (await told(client, "start", **asked))[1]["study"]
        async with (
            httpx2.AsyncClient(headers=headers, timeout=60) as http,
            Client(streamable_http_client(url, http_client=http)) as client,
        ):
            while (status := (await told(client, "status", study=study, wait_s=LONGEST_WAIT_S))[1])["ended_at"] is None:
                assert status["exit_code"] == 0 or status["worker"] is None, status
            assert status["status"] == "done"
            report, _ = await told(client, "report")
            (content,) = (await client.read_resource(f"researcher://studies/{study}/report")).contents
            assert isinstance(content, TextResourceContents)
            assert content.text == report
            assert f"Study `{study}`" in report


async def test_over_http_strangers_other_sites_and_wrong_tokens_are_refused(tmp_path: Path) -> None:
    home, _ = shown_study.opened(tmp_path)
    server = create_server(Research(home, TextDrafting(home), "1h", "ada"))
    open_to_all = {"host": "127.0.0.1:8644"}
    for access, headers, status, says in (
        (Access(host="127.0.0.1", port=8644), {"host": "evil.example:8644"}, 403, "http://127.0.0.1:8644/mcp"),
        (Access(host="127.0.0.1", port=8644), {**open_to_all, "origin": "https://evil.example"}, 403, "another site"),
        (Access(host="127.0.0.1", port=8644), {**open_to_all, "sec-fetch-site": "cross-site"}, 403, "another site"),
        (guarded(), {}, 401, MCP_TOKEN),
        (guarded(), {"authorization": f"Bearer {TOKEN}s"}, 401, MCP_TOKEN),
        (guarded(), {"authorization": f"Basic {TOKEN}"}, 401, MCP_TOKEN),
    ):
        transport = httpx.ASGITransport(app=http_app(server, access))
        async with httpx.AsyncClient(transport=transport, base_url="http://10.0.0.9:8644") as http:
            for method in ("GET", "POST", "DELETE"):
                refused = await http.request(method, "/mcp", headers=headers)
                assert (refused.status_code, says in refused.text) == (status, True), (method, headers, refused.text)


def guarded() -> Access:
    return Access(host="0.0.0.0", port=8644, token=TOKEN, variable=MCP_TOKEN)
