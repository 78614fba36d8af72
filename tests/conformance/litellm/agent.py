"""litellm: completion with a tool in two turns, whole and streamed."""

from __future__ import annotations

import json
import os
from typing import Any

os.environ["LITELLM_LOCAL_MODEL_COST_MAP"] = "True"

import litellm

litellm.telemetry = False
SAMPLING: dict[str, Any] = {"temperature": float(os.environ["TEMPERATURE"])} if "TEMPERATURE" in os.environ else {}
WHERE: dict[str, Any] = {
    "model": f"openai/{os.environ['MODEL']}",
    "api_base": os.environ["BASE_URL"],
    "api_key": os.environ["API_KEY"],
    "max_retries": 0,
    "max_tokens": 120,
} | SAMPLING
PARAMETERS: dict[str, Any] = {
    "type": "object",
    "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}},
    "required": ["a", "b"],
    "additionalProperties": False,
}
ADD: dict[str, Any] = {"name": "add", "description": "Add two numbers.", "parameters": PARAMETERS, "strict": True}


def add(arguments: str) -> str:
    numbers = json.loads(arguments)
    if not (isinstance(numbers, dict) and set(numbers) == {"a", "b"}):  # a small model may write what it likes
        return "Give two numbers, a and b."
    return str(numbers["a"] + numbers["b"])


def episode(question: str, *, stream: bool) -> str:
    messages: list[Any] = [{"role": "user", "content": question}]

    def complete(**fields: Any) -> Any:
        answer = litellm.completion(
            messages=messages, tools=[{"type": "function", "function": ADD}], stream=stream, **(WHERE | fields)
        )
        return litellm.stream_chunk_builder(list(answer), messages=messages) if stream else answer

    message = complete(tool_choice="required").choices[0].message
    assert message.tool_calls, message
    messages.append(message.model_dump())
    for call in message.tool_calls:
        messages.append({"role": "tool", "tool_call_id": call.id, "content": add(call.function.arguments)})
    return complete().choices[0].message.content or ""


print(
    json.dumps(
        {
            "answers": [
                episode("What is 17 + 25? Use the tool.", stream=False),
                episode("What is 3 + 8? Use the tool.", stream=True),
            ]
        }
    )
)
