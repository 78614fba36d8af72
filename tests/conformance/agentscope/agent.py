"""agentscope: an Agent with a function tool, streamed, one turn for the tool and one for the answer."""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import AsyncGenerator, Callable
from typing import Any

from agentscope.agent import Agent
from agentscope.credential import OpenAICredential
from agentscope.message import ToolResultBlock, UserMsg
from agentscope.middleware import MiddlewareBase
from agentscope.model import OpenAIChatModel
from agentscope.permission import PermissionBehavior, PermissionDecision
from agentscope.tool import FunctionTool, ToolChoice, Toolkit

SAMPLING: dict[str, Any] = {"temperature": float(os.environ["TEMPERATURE"])} if "TEMPERATURE" in os.environ else {}
USED: list[int] = []


def add(a: int, b: int) -> str:
    """Add two numbers.

    Args:
        a (int): The first number.
        b (int): The second number.
    """
    USED.append(a + b)
    return str(a + b)


class ToolFirst(MiddlewareBase):
    """A tool at the first step, whatever the model likes afterwards."""

    def __init__(self) -> None:
        self.steps = 0

    async def on_reasoning(
        self, agent: Agent, input_kwargs: dict[str, Any], next_handler: Callable[..., AsyncGenerator[Any, None]]
    ) -> AsyncGenerator[Any, None]:
        self.steps += 1
        choice = ToolChoice(mode="add" if self.steps == 1 else "auto")
        async for event in next_handler(tool_choice=choice):
            yield event


async def main() -> None:
    model = OpenAIChatModel(
        OpenAICredential(api_key=os.environ["API_KEY"], base_url=os.environ["BASE_URL"]),
        os.environ["MODEL"],
        OpenAIChatModel.Parameters(max_tokens=120, **SAMPLING),
        max_retries=0,
        context_size=8192,
    )
    allowed = PermissionDecision(behavior=PermissionBehavior.ALLOW, message="it only adds")
    first = ToolFirst()
    agent = Agent(
        "adder", "Be brief.", model, Toolkit(tools=[FunctionTool(add, permission=allowed)]), middlewares=[first]
    )
    answer = await agent.reply(UserMsg("user", "What is 17 + 25? Call add."))
    told = any(isinstance(block, ToolResultBlock) for message in agent.state.context for block in message.content)
    assert told, agent.state.context
    assert first.steps >= 2
    print(json.dumps({"answers": [answer.get_text_content()], "tools": USED}))


asyncio.run(main())
