"""pydantic-ai: an Agent with a plain tool over chat completions, whole and streamed, and over Responses."""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from openai import AsyncOpenAI
from pydantic_ai import Agent, RunContext, Tool
from pydantic_ai.capabilities import AbstractCapability
from pydantic_ai.models.openai import OpenAIChatModel, OpenAIResponsesModel
from pydantic_ai.providers.openai import OpenAIProvider
from pydantic_ai.settings import ModelSettings

SAMPLING: dict[str, Any] = {"temperature": float(os.environ["TEMPERATURE"])} if "TEMPERATURE" in os.environ else {}
USED: list[int] = []


def add(a: int, b: int) -> int:
    """Add two numbers."""
    USED.append(a + b)
    return a + b


@dataclass
class ToolFirst(AbstractCapability[Any]):
    """A tool at the first step, whatever the model likes afterwards."""

    def get_model_settings(self) -> Callable[[RunContext[Any]], ModelSettings]:
        return lambda context: ModelSettings(tool_choice="required" if context.run_step == 1 else "auto")


async def main() -> None:
    client = AsyncOpenAI(base_url=os.environ["BASE_URL"], api_key=os.environ["API_KEY"], max_retries=0)
    provider = OpenAIProvider(openai_client=client)
    settings = ModelSettings(max_tokens=120, **SAMPLING)
    agent = Agent(
        OpenAIChatModel(os.environ["MODEL"], provider=provider),
        instructions="Be brief.",
        tools=[Tool(add, strict=True)],
        model_settings=settings,
        capabilities=[ToolFirst()],
    )
    answers = [(await agent.run("What is 17 + 25? Use the tool.")).output]
    async with agent.run_stream("What is 3 + 8? Use the tool.") as streamed:
        answers.append(await streamed.get_output())
    with agent.override(model=OpenAIResponsesModel(os.environ["MODEL"], provider=provider)):
        answers.append((await agent.run("What is 40 + 2? Use the tool.")).output)
    await client.close()
    assert USED, answers
    print(json.dumps({"answers": answers, "tools": USED}))


asyncio.run(main())
