"""The riskiest bet, over real vLLM and the openai SDK: every prompt is what was prompted, what was sampled, and what is new.

The agent sends its answers back stripped, re-serialised and renamed, as agents do.
"""

from __future__ import annotations

import json
from itertools import pairwise
from typing import Any

import pytest

from swarm.engine.local.inference import VllmInference
from swarm.protocol.episodes import RecordedCall
from tests.swarm.server.gateway.conftest import Episode, Served, assert_drawn_from_a_part
from tests.vllm_fixture import LoopThread

WAYS = [pytest.param(False, marks=pytest.mark.campaign), True]
"""Whole, and streamed."""

ADD: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": "add",
        "description": "Add two numbers.",
        "parameters": {
            "type": "object",
            "properties": {"b": {"type": "integer"}, "a": {"type": "integer"}},
            "required": ["b", "a"],
            "additionalProperties": False,
        },
        "strict": True,
    },
}


def ask(episode: Episode, messages: list[Any], *, stream: bool, **fields: Any) -> dict[str, Any]:
    """One turn through the SDK; the message that came back."""
    if not stream:
        answer = episode.sdk.chat.completions.create(model="policy", messages=messages, **fields)
        return answer.choices[0].message.model_dump(exclude_none=True)
    content, calls = "", dict[int, dict[str, Any]]()
    for chunk in episode.sdk.chat.completions.create(model="policy", messages=messages, stream=True, **fields):
        for choice in chunk.choices:
            content += choice.delta.content or ""
            for part in choice.delta.tool_calls or ():
                call = calls.setdefault(part.index, {"id": part.id, "name": part.function.name, "arguments": ""})
                call["arguments"] += part.function.arguments or ""
    message: dict[str, Any] = {"role": "assistant", "content": content}
    if calls:
        message["tool_calls"] = [
            {"id": call["id"], "type": "function", "function": {"name": call["name"], "arguments": call["arguments"]}}
            for call in calls.values()
        ]
    return message


def assert_exact(calls: list[RecordedCall], vllm: VllmInference, loop: LoopThread) -> None:
    """Each call continues the one before, token by token; what is new is the template's own words."""
    for call in calls:
        assert len(call.sampled_ids) == len(call.logprobs) > 0
        assert [span.end for span in call.versions][-1] == len(call.sampled_ids)
        assert call.fork_cause is None
        assert call.complete
    for before, call in pairwise(calls):
        assert call.parent_call_id == before.call_id
        held = [*before.prompt_ids, *before.sampled_ids]
        assert call.prompt_ids[: len(held)] == held
        new = vllm.decode(call.prompt_ids[len(held) :])
        assert new.endswith("<|im_start|>assistant\n")
        assert str(call.request["messages"][-1]["content"]) in new
        rendered = loop.run(vllm.render("chat.completions", call.request))
        assert without_space(vllm.decode(call.prompt_ids)) == without_space(vllm.decode(rendered))


def without_space(text: str) -> str:
    """A character that was cut in two cannot be sent back, and does not count."""
    return "".join(text.replace("�", "").split())


@pytest.mark.parametrize("stream", WAYS)
@pytest.mark.parametrize("turns", [pytest.param(2, marks=pytest.mark.campaign), 4])
def test_an_echo_that_was_stripped_keeps_the_sampled_ids(
    served_vllm: Served, vllm: VllmInference, vllm_loop: LoopThread, turns: int, stream: bool
) -> None:
    episode = served_vllm.claim()
    messages: list[dict[str, Any]] = [{"role": "user", "content": "Reply with the number 0 only."}]
    for turn in range(turns):
        message = ask(episode, messages, stream=stream, temperature=1.0, max_tokens=48 if turn % 2 == 0 else 1)
        parts = [{"type": "text", "text": message["content"].strip()}]
        echo = {"role": "assistant", "content": parts if turn % 2 else f"  {message['content'].strip()}\n"}
        messages += [echo, {"role": "user", "content": f"Now reply with the number {turn + 1} only."}]
    calls = episode.trace().calls
    assert [call.finish_reason for call in calls].count("length") >= turns // 2
    assert_exact(calls, vllm, vllm_loop)


@pytest.mark.parametrize("stream", WAYS)
def test_a_tool_call_with_reordered_arguments_keeps_the_sampled_ids(
    served_vllm: Served, vllm: VllmInference, vllm_loop: LoopThread, stream: bool
) -> None:
    episode = served_vllm.claim()
    messages: list[dict[str, Any]] = [{"role": "user", "content": "What is 17 + 25? Use the tool."}]
    fields: dict[str, Any] = {"tools": [ADD], "max_tokens": 120}
    for _ in range(2):
        message = ask(episode, messages, stream=stream, tool_choice="required", **fields)
        (call,) = message["tool_calls"][:1]
        arguments = json.loads(call["function"]["arguments"])
        assert list(arguments) == ["b", "a"]
        echoed = [
            {
                "id": f"renamed-{number}",
                "type": "function",
                "function": {
                    "name": each["function"]["name"],
                    "arguments": json.dumps(json.loads(each["function"]["arguments"]), sort_keys=True, indent=2),
                },
            }
            for number, each in enumerate(message["tool_calls"])
        ]
        messages.append({"role": "assistant", "content": None, "tool_calls": echoed})
        messages.append({"role": "tool", "tool_call_id": "renamed-0", "content": "42"})
    ask(episode, messages, stream=stream, **fields)
    calls = episode.trace().calls
    assert len(calls) == 3
    assert_drawn_from_a_part(episode.trace())
    for before, call in pairwise(calls):
        held = [*before.prompt_ids, *before.sampled_ids]
        assert call.fork_cause is None, (vllm.decode(before.sampled_ids), before.answer)
        assert call.prompt_ids[: len(held)] == held
        assert "<tool_response>\n42\n</tool_response>" in vllm.decode(call.prompt_ids[len(held) :])


def test_an_edited_echo_is_prompted_as_it_was_sent(served_vllm: Served, vllm: VllmInference) -> None:
    episode = served_vllm.claim()
    messages: list[dict[str, Any]] = [{"role": "user", "content": "Name a colour."}]
    ask(episode, messages, stream=False)
    messages += [{"role": "assistant", "content": "Ultraviolet."}, {"role": "user", "content": "Another?"}]
    ask(episode, messages, stream=False)
    first, second = episode.trace().calls
    assert (second.parent_call_id, second.fork_cause) == (None, "answer_edited")
    assert "Ultraviolet." in vllm.decode(second.prompt_ids)
    assert second.prompt_ids[: len(first.prompt_ids)] == first.prompt_ids


def test_logprobs_and_stop_strings_reach_the_client_as_vllm_gives_them(served_vllm: Served) -> None:
    episode = served_vllm.claim()
    messages: list[Any] = [{"role": "user", "content": "Count: one, two, three, four, five."}]
    answer = episode.sdk.chat.completions.create(
        model="policy", messages=messages, logprobs=True, top_logprobs=1, stop=[","], max_tokens=40, n=2
    )
    records = episode.trace().calls
    assert len(records) == 2
    for choice, record in zip(answer.choices, records, strict=True):
        assert choice.logprobs is not None
        assert [entry.logprob for entry in choice.logprobs.content or ()] == record.logprobs
        if choice.finish_reason == "stop" and choice.message.content:
            assert "," not in choice.message.content
