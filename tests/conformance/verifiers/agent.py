"""verifiers: a ToolEnv, one rollout of two turns, each with the tool, scored by a rubric."""

from __future__ import annotations

import asyncio
import json
import os
from typing import Any

import verifiers as vf
from datasets import Dataset
from openai import AsyncOpenAI

SAMPLING: dict[str, Any] = {"temperature": float(os.environ["TEMPERATURE"])} if "TEMPERATURE" in os.environ else {}
USED: list[int] = []


def add(a: int, b: int) -> int:
    """Add two numbers.

    Args:
        a: The first number.
        b: The second number.
    """
    USED.append(a + b)
    return a + b


def says_something(completion: list[Any]) -> float:
    return float(bool(completion))


async def main() -> None:
    questions = Dataset.from_list([{"question": "What is 17 + 25? Use the tool.", "answer": "42"}])
    environment = vf.ToolEnv(dataset=questions, tools=[add], max_turns=2, rubric=vf.Rubric(funcs=[says_something]))
    client = AsyncOpenAI(base_url=os.environ["BASE_URL"], api_key=os.environ["API_KEY"], max_retries=0)
    outputs = await environment.generate(
        environment.get_dataset(),
        vf.OpenAIChatCompletionsClient(client),
        os.environ["MODEL"],
        sampling_args={"tool_choice": "required", "max_tokens": 120} | SAMPLING,
    )
    (rollout,) = outputs["outputs"]
    told = [dict(message) for message in rollout["completion"]]
    roles = [message["role"] for message in told]
    assert roles[:2] == ["assistant", "tool"], rollout
    assert "assistant" in roles[2:], rollout
    await client.close()
    print(json.dumps({"answers": [rollout["reward"]], "tools": USED, "turns": len(told)}))


asyncio.run(main())
