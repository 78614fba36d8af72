"""Every dialect over real vLLM with the SDK that speaks it: each prompt is what was prompted, what was sampled, and what is new."""

from __future__ import annotations

import json
from itertools import pairwise
from typing import Any

import pytest

from swarm.protocol.episodes import RecordedCall
from tests.swarm.server.gateway.conftest import Episode, Served, assert_drawn_from_a_part

WAYS = [pytest.param(False, marks=pytest.mark.campaign), True]
"""Whole, and streamed."""

SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {"b": {"type": "integer"}, "a": {"type": "integer"}},
    "required": ["b", "a"],
    "additionalProperties": False,
}
ADD: Any = {"type": "function", "name": "add", "description": "Add two numbers.", "parameters": SCHEMA, "strict": True}
ADD_BLOCKS: Any = {"name": "add", "description": "Add two numbers.", "input_schema": SCHEMA, "strict": True}


def assert_exact(calls: list[RecordedCall]) -> None:
    for call in calls:
        assert call.fork_cause is None
        assert call.complete
        assert len(call.sampled_ids) == len(call.logprobs) == call.versions[-1].end
    for before, call in pairwise(calls):
        held = [*before.prompt_ids, *before.sampled_ids]
        assert call.parent_call_id == before.call_id
        assert call.prompt_ids[: len(held)] == held


def respond(episode: Episode, stream: bool, **fields: Any) -> Any:
    asked = {"model": "policy", "max_output_tokens": 80} | fields
    if not stream:
        return episode.sdk.responses.create(**asked)
    with episode.sdk.responses.stream(**asked) as events:
        for _ in events:
            pass
        return events.get_final_response()


def say(episode: Episode, stream: bool, **fields: Any) -> Any:
    asked = {"model": "policy", "max_tokens": 80} | fields
    if not stream:
        return episode.claude.messages.create(**asked)
    with episode.claude.messages.stream(**asked) as events:
        return events.get_final_message()


@pytest.mark.parametrize("stream", WAYS)
def test_responses_with_a_tool(served_vllm: Served, stream: bool) -> None:
    episode = served_vllm.claim()
    first = respond(episode, stream, input="What is 17 + 25? Use the tool.", tools=[ADD], tool_choice="required")
    calls = [item for item in first.output if item.type == "function_call"]
    assert calls[0].name == "add"
    assert set(json.loads(calls[0].arguments)) == {"a", "b"}
    results: Any = [{"type": "function_call_output", "call_id": call.call_id, "output": "42"} for call in calls]
    second = respond(episode, stream, input=results, tools=[ADD], previous_response_id=first.id)
    items: Any = [
        {"role": "user", "content": "What is 17 + 25? Use the tool."},
        *[item.model_dump() for item in first.output],
        *results,
        *[item.model_dump() for item in second.output],
        {"role": "user", "content": "Thank you. Say a word."},
    ]
    respond(episode, stream, input=items, tools=[ADD])
    recorded = episode.trace().calls
    assert len(recorded) == 3
    assert_exact(recorded)
    assert_drawn_from_a_part(episode.trace())
    assert second.usage.output_tokens == len(recorded[1].sampled_ids)


@pytest.mark.parametrize("stream", WAYS)
def test_messages_with_a_tool(served_vllm: Served, stream: bool) -> None:
    episode = served_vllm.claim()
    messages: list[Any] = [{"role": "user", "content": "What is 17 + 25? Use the tool."}]
    fields: Any = {"tools": [ADD_BLOCKS]}
    first = say(episode, stream, messages=messages, tool_choice={"type": "any"}, system="Be brief.", **fields)
    assert first.stop_reason == "tool_use"
    used = [block for block in first.content if block.type == "tool_use"]
    assert set(used[0].input) == {"a", "b"}
    results = [{"type": "tool_result", "tool_use_id": block.id, "content": "42"} for block in used]
    messages += [
        {"role": "assistant", "content": [block.model_dump() for block in first.content]},
        {"role": "user", "content": results},
    ]
    counted = episode.claude.messages.count_tokens(model="policy", messages=messages, system="Be brief.", **fields)
    second = say(episode, stream, messages=messages, system="Be brief.", **fields)
    recorded = episode.trace().calls
    assert len(recorded) == 2
    assert_exact(recorded)
    assert_drawn_from_a_part(episode.trace())
    assert second.usage.input_tokens == counted.input_tokens == len(recorded[1].prompt_ids)
    assert second.usage.output_tokens == len(recorded[1].sampled_ids)


@pytest.mark.parametrize("stream", WAYS)
def test_texts_go_on_from_the_ids_that_were_sampled(served_vllm: Served, stream: bool) -> None:
    episode, text = served_vllm.claim(), "Numbers in words: one, two, three,"
    for _ in range(3):
        asked: dict[str, Any] = {"model": "policy", "prompt": text, "max_tokens": 12, "stop": [".", "\n\n"]}
        if stream:
            chunks = episode.sdk.completions.create(stream=True, **asked)
            said = "".join(choice.text for chunk in chunks for choice in chunk.choices)
        else:
            said = episode.sdk.completions.create(**asked).choices[0].text
        text += said + " and then,"
    recorded = episode.trace().calls
    assert len(recorded) == 3
    for number, call in enumerate(recorded):
        # An answer that was cut before its first word leaves nothing to go on from.
        heard = [before for before in recorded[:number] if before.answer["choices"][0]["text"].strip()]
        if not heard:
            assert call.parent_call_id is None
        elif call.fork_cause != "stop_string_cut":
            assert call.parent_call_id == heard[-1].call_id
        for parent in recorded[:number]:
            if parent.call_id == call.parent_call_id:
                kept = [*parent.prompt_ids, *parent.sampled_ids[:-1]]
                assert call.prompt_ids[: len(kept)] == kept


@pytest.mark.parametrize("stream", WAYS)
def test_several_texts_and_a_schema(served_vllm: Served, stream: bool) -> None:
    episode = served_vllm.claim()
    schema = {"response_format": {"type": "json_schema", "json_schema": {"name": "sum", "schema": SCHEMA}}}
    asked: dict[str, Any] = {"model": "policy", "prompt": ["A sum: ", "Another: "], "max_tokens": 60, "n": 2}
    texts = dict.fromkeys(range(4), "")
    if stream:
        for chunk in episode.sdk.completions.create(stream=True, extra_body=schema, **asked):
            for choice in chunk.choices:
                texts[choice.index] += choice.text
    else:
        answer = episode.sdk.completions.create(extra_body=schema, **asked)
        texts = {choice.index: choice.text for choice in answer.choices}
    recorded = episode.trace().calls
    assert [texts[index] for index in range(4)] == [call.answer["choices"][0]["text"] for call in recorded]
    for text, call in zip(texts.values(), recorded, strict=True):
        assert len(call.sampled_ids) == len(call.logprobs) > 0
        assert call.finish_reason == "length" or set(json.loads(text)) == {"a", "b"}
    assert_drawn_from_a_part(episode.trace())


def test_a_response_and_a_message_with_a_schema_and_logprobs(served_vllm: Served) -> None:
    episode = served_vllm.claim()
    shape: Any = {"format": {"type": "json_schema", "name": "sum", "schema": SCHEMA, "strict": True}}
    include: Any = ["message.output_text.logprobs"]
    for stream in (False, True):
        answer = respond(episode, stream, input="Two numbers.", text=shape, include=include, top_logprobs=2)
        told = answer.output[0].content[0].logprobs
        assert [entry.logprob for entry in told] == episode.trace().calls[-1].logprobs[: len(told)]
        assert answer.status == "incomplete" or set(json.loads(answer.output_text)) == {"a", "b"}
    config: Any = {"format": {"type": "json_schema", "schema": SCHEMA}}
    message = say(episode, True, messages=[{"role": "user", "content": "Two numbers."}], output_config=config)
    assert message.stop_reason == "max_tokens" or set(json.loads(message.content[0].text)) == {"a", "b"}
    assert len(episode.trace().calls) == 3
    assert_drawn_from_a_part(episode.trace())


def test_errors_of_vllm_come_in_the_dialects_envelope(served_vllm: Served) -> None:
    episode = served_vllm.claim()
    long = "word " * 3000
    message = episode.raw({"model": "policy", "messages": [{"role": "user", "content": long}]}, path="messages")
    assert (message.status_code, message.json()["error"]["type"]) == (400, "invalid_request_error")
    assert message.json()["error"]["code"] == "invalid_spec"
    for path, field in (("responses", "input"), ("completions", "prompt")):
        answer = episode.raw({"model": "policy", field: long, "stream": True}, path=path)
        assert (answer.status_code, answer.json()["error"]["code"]) == (400, "invalid_spec")
        assert answer.json()["error"]["message"]
    assert episode.trace().calls == []
