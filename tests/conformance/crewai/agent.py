"""crewai: a Crew of one Agent with a tool: one turn for the tool and one for the answer."""

from __future__ import annotations

import json
import os
from typing import Any

os.environ |= {"CREWAI_DISABLE_TELEMETRY": "true", "OTEL_SDK_DISABLED": "true", "CREWAI_TRACING_ENABLED": "false"}

import httpx
from crewai import LLM, Agent, Crew, Task
from crewai.llms.hooks.base import BaseInterceptor
from crewai.tools import tool

SAMPLING: dict[str, Any] = {"temperature": float(os.environ["TEMPERATURE"])} if "TEMPERATURE" in os.environ else {}
USED: list[int] = []
RESULTS: list[int] = []
"""Requests that carried a tool's result."""


@tool("add")
def add(a: int, b: int) -> int:
    """Add two numbers."""
    USED.append(a + b)
    return a + b


class ToolFirst(BaseInterceptor[httpx.Request, httpx.Response]):
    """crewai leaves tool_choice to the model; what goes out may be changed on its way."""

    def on_outbound(self, message: httpx.Request) -> httpx.Request:
        body = json.loads(message.content)
        if any(said["role"] == "tool" for said in body["messages"]):
            RESULTS.append(len(body["messages"]))
        elif body.get("tools"):
            body["tool_choice"] = {"type": "function", "function": {"name": body["tools"][0]["function"]["name"]}}
        content = json.dumps(body).encode()
        headers = {**message.headers, "content-length": str(len(content))}
        return httpx.Request(
            message.method, message.url, headers=headers, content=content, extensions=message.extensions
        )

    def on_inbound(self, message: httpx.Response) -> httpx.Response:
        return message


model = LLM(
    model=os.environ["MODEL"],
    provider="openai",
    base_url=os.environ["BASE_URL"],
    api_key=os.environ["API_KEY"],
    max_tokens=120,
    max_retries=0,
    interceptor=ToolFirst(),
    **SAMPLING,
)
agent = Agent(
    role="adder", goal="Add numbers.", backstory="You add.", tools=[add], llm=model, max_iter=3, max_retry_limit=0
)
task = Task(description="What is 17 + 25? Use the tool.", expected_output="A number.", agent=agent)
answer = Crew(agents=[agent], tasks=[task]).kickoff()
assert RESULTS, answer
print(json.dumps({"answers": [answer.raw], "tools": USED}))
