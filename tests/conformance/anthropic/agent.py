"""The anthropic SDK: a tool in two turns, whole and streamed; tokens counted beforehand."""

from __future__ import annotations

import json
import os
from typing import Any

from anthropic import Anthropic

SAMPLING: dict[str, Any] = {"temperature": float(os.environ["TEMPERATURE"])} if "TEMPERATURE" in os.environ else {}
SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}},
    "required": ["a", "b"],
    "additionalProperties": False,
}
ADD: Any = {"name": "add", "description": "Add two numbers.", "input_schema": SCHEMA, "strict": True}


def add(numbers: object) -> str:
    if not (isinstance(numbers, dict) and set(numbers) == {"a", "b"}):  # a small model may write what it likes
        return "Give two numbers, a and b."
    return str(numbers["a"] + numbers["b"])


def episode(client: Anthropic, question: str, *, stream: bool) -> str:
    fields: dict[str, Any] = {"model": os.environ["MODEL"], "system": "Be brief.", "tools": [ADD], "max_tokens": 120}
    fields["extra_body"] = SAMPLING
    messages: list[Any] = [{"role": "user", "content": question}]

    def say(**more: Any) -> Any:
        if not stream:
            return client.messages.create(messages=messages, **fields, **more)
        with client.messages.stream(messages=messages, **fields, **more) as events:
            return events.get_final_message()

    first = say(tool_choice={"type": "any"})
    used = [block for block in first.content if block.type == "tool_use"]
    assert used, first
    results = [{"type": "tool_result", "tool_use_id": block.id, "content": add(block.input)} for block in used]
    messages += [{"role": "assistant", "content": first.content}, {"role": "user", "content": results}]
    counted = client.messages.count_tokens(
        model=fields["model"], messages=messages, system=fields["system"], tools=fields["tools"]
    )
    second = say()
    assert second.usage.input_tokens == counted.input_tokens, (second.usage, counted)
    return "".join(block.text for block in second.content if block.type == "text")


# the SDK adds /v1 itself
root = os.environ["BASE_URL"].removesuffix("/v1")
with Anthropic(base_url=root, api_key=os.environ["API_KEY"], max_retries=0) as sdk:
    answers = [
        episode(sdk, "What is 17 + 25? Use the tool.", stream=False),
        episode(sdk, "What is 3 + 8? Use the tool.", stream=True),
    ]
    print(json.dumps({"answers": answers}))
