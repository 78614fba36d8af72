"""smolagents: a ToolCallingAgent, which asks for a tool at each step, and answers from its memory when its steps are used up."""

from __future__ import annotations

import json
import os
from typing import Any

from smolagents import OpenAIModel, ToolCallingAgent, tool

SAMPLING: dict[str, Any] = {"temperature": float(os.environ["TEMPERATURE"])} if "TEMPERATURE" in os.environ else {}
USED: list[int] = []


@tool
def add(a: int, b: int) -> int:
    """Add two numbers.

    Args:
        a: The first number.
        b: The second number.
    """
    USED.append(a + b)
    return a + b


model = OpenAIModel(
    os.environ["MODEL"],
    api_base=os.environ["BASE_URL"],
    api_key=os.environ["API_KEY"],
    client_kwargs={"max_retries": 0},
    max_tokens=120,
    **SAMPLING,
)
agent = ToolCallingAgent(tools=[add], model=model, max_steps=2, verbosity_level=0)
answer = agent.run("What is 17 + 25? Call add.")
print(json.dumps({"answers": [str(answer)], "tools": USED, "steps": len(agent.memory.steps)}))
