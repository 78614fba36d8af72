"""autogen-agentchat: an AssistantAgent that thinks again with its tools, and one that reflects without them."""

from __future__ import annotations

import asyncio
import json
import os
from typing import Any

from autogen_agentchat.agents import AssistantAgent
from autogen_core.models import CreateResult, FunctionExecutionResultMessage
from autogen_core.tools import FunctionTool
from autogen_ext.models.openai import OpenAIChatCompletionClient

SAMPLING: dict[str, Any] = {"temperature": float(os.environ["TEMPERATURE"])} if "TEMPERATURE" in os.environ else {}
USED: list[int] = []


def add(a: int, b: int) -> int:
    USED.append(a + b)
    return a + b


class ToolFirst(OpenAIChatCompletionClient):
    """AssistantAgent leaves tool_choice to the model; `create` takes one."""

    async def create(self, messages: Any, **fields: Any) -> CreateResult:
        used = any(isinstance(message, FunctionExecutionResultMessage) for message in messages)
        if fields.get("tools") and not used:
            fields["tool_choice"] = "required"
        return await super().create(messages, **fields)


async def main() -> None:
    client = ToolFirst(
        model=os.environ["MODEL"],
        base_url=os.environ["BASE_URL"],
        api_key=os.environ["API_KEY"],
        max_retries=0,
        max_tokens=120,
        model_info={
            "vision": False,
            "function_calling": True,
            "json_output": True,
            "structured_output": True,
            "family": "unknown",
        },
        **SAMPLING,
    )
    tool = FunctionTool(add, description="Add two numbers.", strict=True)
    answers = []
    for question, how in (
        ("What is 17 + 25? Use the tool.", {"max_tool_iterations": 2, "reflect_on_tool_use": False}),
        ("What is 3 + 8? Use the tool.", {"reflect_on_tool_use": True}),
    ):
        agent = AssistantAgent("adder", client, tools=[tool], system_message="Be brief.", **how)
        result = await agent.run(task=question)
        answers.append(str(result.messages[-1].content))
    await client.close()
    assert USED, answers
    print(json.dumps({"answers": answers, "tools": USED}))


asyncio.run(main())
