"""openai-agents: an Agent with a function tool, over chat completions and over Responses."""

from __future__ import annotations

import asyncio
import json
import os
from typing import Any

from agents import (
    Agent,
    ModelSettings,
    OpenAIChatCompletionsModel,
    OpenAIResponsesModel,
    Runner,
    function_tool,
    set_tracing_disabled,
)
from openai import AsyncOpenAI

SAMPLING: dict[str, Any] = {"temperature": float(os.environ["TEMPERATURE"])} if "TEMPERATURE" in os.environ else {}
USED: list[int] = []


@function_tool
def add(a: int, b: int) -> int:
    """Add two numbers."""
    USED.append(a + b)
    return a + b


async def main() -> None:
    set_tracing_disabled(True)
    answers = []
    async with AsyncOpenAI(base_url=os.environ["BASE_URL"], api_key=os.environ["API_KEY"], max_retries=0) as client:
        chat = OpenAIChatCompletionsModel(model=os.environ["MODEL"], openai_client=client)
        responses = OpenAIResponsesModel(model=os.environ["MODEL"], openai_client=client)
        for model, question in ((chat, "What is 17 + 25?"), (responses, "What is 3 + 8?")):
            agent = Agent(
                name="adder",
                instructions="Be brief. Use the tool.",
                tools=[add],
                model=model,
                # the tool is asked for once: the SDK resets tool_choice after a tool was used
                model_settings=ModelSettings(tool_choice="required", max_tokens=120, **SAMPLING),
            )
            answers.append((await Runner.run(agent, question, max_turns=3)).final_output)
        streamed = Runner.run_streamed(agent.clone(model=chat), "What is 40 + 2?", max_turns=3)
        async for _ in streamed.stream_events():
            pass
        answers.append(streamed.final_output)
    assert USED, answers
    print(json.dumps({"answers": answers, "tools": USED}))


asyncio.run(main())
