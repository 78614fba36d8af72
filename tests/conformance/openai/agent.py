"""The openai SDK: a tool in two turns, whole and streamed; a schema and its sequel; two choices with log-probabilities;
Responses with a tool, its items sent back."""

from __future__ import annotations

import json
import os
from typing import Any

from openai import OpenAI

PARAMETERS: dict[str, Any] = {
    "type": "object",
    "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}},
    "required": ["a", "b"],
    "additionalProperties": False,
}
ADD: dict[str, Any] = {"name": "add", "description": "Add two numbers.", "parameters": PARAMETERS, "strict": True}
MODEL = os.environ["MODEL"]
SAMPLING: dict[str, Any] = {"temperature": float(os.environ["TEMPERATURE"])} if "TEMPERATURE" in os.environ else {}


def add(arguments: str) -> str:
    numbers = json.loads(arguments)
    if not (isinstance(numbers, dict) and set(numbers) == {"a", "b"}):  # a small model may write what it likes
        return "Give two numbers, a and b."
    return str(numbers["a"] + numbers["b"])


def whole(client: OpenAI) -> str:
    fields: dict[str, Any] = {"model": MODEL, "tools": [{"type": "function", "function": ADD}]} | SAMPLING
    messages: list[Any] = [{"role": "user", "content": "What is 17 + 25? Use the tool."}]
    turn = client.chat.completions.create(messages=messages, tool_choice="required", max_tokens=120, **fields)
    message = turn.choices[0].message
    messages.append(message)
    for call in message.tool_calls or []:
        messages.append({"role": "tool", "tool_call_id": call.id, "content": add(call.function.arguments)})
    turn = client.chat.completions.create(messages=messages, max_tokens=40, **fields)
    return turn.choices[0].message.content or ""


def streamed(client: OpenAI) -> str:
    fields: dict[str, Any] = {"model": MODEL, "tools": [{"type": "function", "function": ADD}]} | SAMPLING
    messages: list[Any] = [{"role": "user", "content": "What is 3 + 8? Use the tool."}]
    named = {"type": "function", "function": {"name": "add"}}
    with client.chat.completions.stream(messages=messages, tool_choice=named, max_tokens=120, **fields) as events:
        for _ in events:
            pass
        message = events.get_final_completion().choices[0].message
    messages.append(message.model_dump(exclude_none=True))
    for call in message.tool_calls or []:
        messages.append({"role": "tool", "tool_call_id": call.id, "content": add(call.function.arguments)})
    usage, answer = None, ""
    options = {"include_usage": True}
    for chunk in client.chat.completions.create(
        messages=messages, stream=True, stream_options=options, max_tokens=40, **fields
    ):
        answer += "".join(choice.delta.content or "" for choice in chunk.choices)
        usage = chunk.usage or usage
    assert usage is not None
    assert usage.completion_tokens > 0
    return answer


def schema(client: OpenAI) -> str:
    wanted: Any = {"type": "json_schema", "json_schema": {"name": "sum", "schema": PARAMETERS, "strict": True}}
    messages: list[Any] = [{"role": "user", "content": "Two numbers as JSON, please."}]
    turn = client.chat.completions.create(
        model=MODEL, messages=messages, response_format=wanted, max_tokens=60, **SAMPLING
    )
    assert set(json.loads(turn.choices[0].message.content or "")) == {"a", "b"}
    messages += [turn.choices[0].message, {"role": "user", "content": "And their sum?"}]
    turn = client.chat.completions.create(model=MODEL, messages=messages, max_tokens=30, **SAMPLING)
    return turn.choices[0].message.content or ""


def choices(client: OpenAI) -> int:
    messages: list[Any] = [{"role": "user", "content": "Name a colour."}]
    turn = client.chat.completions.create(
        model=MODEL,
        messages=messages,
        n=2,
        logprobs=True,
        top_logprobs=2,
        seed=7,
        temperature=0.8,
        stop=["\n"],
        max_tokens=12,
    )
    for choice in turn.choices:
        assert choice.logprobs is not None
        assert choice.logprobs.content
    return len(turn.choices)


def responses(client: OpenAI) -> str:
    items: list[Any] = [{"role": "user", "content": "What is 40 + 2? Use the tool."}]
    fields: dict[str, Any] = {"model": MODEL, "tools": [ADD | {"type": "function"}]} | SAMPLING
    with client.responses.stream(input=items, tool_choice="required", max_output_tokens=120, **fields) as events:
        for _ in events:
            pass
        first = events.get_final_response()
    items += [item.to_dict(exclude_none=True) for item in first.output]
    for item in first.output:
        if item.type == "function_call":
            result = add(item.arguments)
            items.append({"type": "function_call_output", "call_id": item.call_id, "output": result})
    return client.responses.create(input=items, max_output_tokens=40, **fields).output_text


with OpenAI(base_url=os.environ["BASE_URL"], api_key=os.environ["API_KEY"], max_retries=0) as sdk:
    answers = {"whole": whole(sdk), "streamed": streamed(sdk), "schema": schema(sdk), "responses": responses(sdk)}
    print(json.dumps({"answers": answers, "choices": choices(sdk)}))
