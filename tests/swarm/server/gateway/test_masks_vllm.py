"""Every way to restrict what is drawn, in every dialect, over real vLLM: each sampled token has its row, and all of them are trained."""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from swarm.protocol.episodes import EpisodeTrace, RecordedCall
from swarm.protocol.sampling_mask import size
from tests.swarm.server.gateway.conftest import Episode, Served, assert_drawn_from_a_part

WAYS = [pytest.param(False, marks=pytest.mark.campaign), True]
"""Whole, and streamed."""

VOCABULARY = 49152
NUMBERS: dict[str, Any] = {
    "type": "object",
    "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}},
    "required": ["a", "b"],
    "additionalProperties": False,
}
ADD: dict[str, Any] = {"name": "add", "description": "Add two numbers.", "parameters": NUMBERS}
STRICT = {"type": "function", "function": ADD | {"strict": True}}
SCHEMA = {"type": "json_schema", "json_schema": {"name": "sum", "schema": NUMBERS, "strict": True}}
TOOLS: dict[str, Any] = {"tools": [{"type": "function", "function": ADD}]}
NAMED = {"type": "function", "function": {"name": "add"}}
BLOCKS: dict[str, Any] = {"tools": [{"name": "add", "description": "Add two numbers.", "input_schema": NUMBERS}]}
COLOURS = {"structured_outputs": {"choice": ["red", "green", "blue"]}}

CHAT: dict[str, dict[str, Any]] = {
    "json_schema": {"response_format": SCHEMA},
    "json_object": {"response_format": {"type": "json_object"}},
    "required tool": TOOLS | {"tool_choice": "required"},
    "named tool": TOOLS | {"tool_choice": NAMED},
    "strict tool": {"tools": [STRICT]},
    "choice": COLOURS,
    "regex, twice": {"structured_outputs": {"regex": "[a-z]{1,9}"}, "n": 2},
    "schema, twice": {"response_format": SCHEMA, "n": 2},
    "top_p": {"top_p": 0.9},
    "top_k, thrice": {"top_k": 5, "n": 3},
    "min_p": {"min_p": 0.2},
    "penalties": {"presence_penalty": 0.5, "frequency_penalty": 0.5, "repetition_penalty": 1.2},
    "bias": {"logit_bias": {"28": -100, "42": 5}},
    "least length": {"min_tokens": 6},
    "words": {"bad_words": ["the", " is"]},
    "allowed tokens": {"allowed_token_ids": list(range(100, 900))},
    "stop string": {"top_p": 0.95, "stop": ["e", "."]},
    "all at once": TOOLS | {"tool_choice": "required", "top_p": 0.8, "repetition_penalty": 1.1, "stop": [","], "n": 2},
}
RESPONSES: dict[str, dict[str, Any]] = {
    "text.format": {"text": {"format": {"type": "json_schema", "name": "sum", "schema": NUMBERS, "strict": True}}},
    "required tool": {"tools": [ADD | {"type": "function"}], "tool_choice": "required"},
    "named tool": {"tools": [ADD | {"type": "function"}], "tool_choice": {"type": "function", "name": "add"}},
    "strict tool": {"tools": [ADD | {"type": "function", "strict": True}]},
    "top_p": {"top_p": 0.9},
}
MESSAGES: dict[str, dict[str, Any]] = {
    "any tool": BLOCKS | {"tool_choice": {"type": "any"}},
    "named tool": BLOCKS | {"tool_choice": {"type": "tool", "name": "add"}},
    "strict tool": {"tools": [BLOCKS["tools"][0] | {"strict": True}]},
    "schema": {"output_config": {"format": {"type": "json_schema", "schema": NUMBERS}}},
    "top_k": {"top_k": 5, "top_p": 0.9},
    "stop sequence": {"top_k": 20, "stop_sequences": ["e", "."]},
}
TEXTS: dict[str, dict[str, Any]] = {
    "bias": {"logit_bias": {"28": -100, "42": 5}},
    "choice": COLOURS,
    "json_schema": {"response_format": SCHEMA},
    "stop string, twice": {"top_p": 0.95, "stop": ["e", "."], "n": 2},
    "two prompts, twice": COLOURS | {"prompt": ["My colour: ", "Yours: "], "n": 2},
}
ASK = [{"role": "user", "content": "What is 17 + 25? Use the tool."}]
DIALECTS: dict[str, tuple[dict[str, Any], dict[str, dict[str, Any]]]] = {
    "chat/completions": ({"messages": ASK, "max_tokens": 24}, CHAT),
    "responses": ({"input": ASK, "max_output_tokens": 24}, RESPONSES),
    "messages": ({"messages": ASK, "max_tokens": 24}, MESSAGES),
    "completions": ({"prompt": "A colour of the rainbow is", "max_tokens": 12}, TEXTS),
}


def played(episode: Episode, path: str, body: dict[str, Any]) -> EpisodeTrace:
    answer = episode.raw({"model": "policy"} | body, path=path)
    assert answer.status_code == 200, (path, body, answer.text)
    return episode.trace()


@pytest.mark.parametrize("stream", WAYS)
@pytest.mark.parametrize("path", DIALECTS)
def test_every_restriction_is_recorded_and_trained(served_vllm: Served, path: str, stream: bool) -> None:
    common, forms = DIALECTS[path]
    bodies = [common | form | {"stream": stream} for form in forms.values()]
    episodes = [served_vllm.claim() for _ in bodies]
    with ThreadPoolExecutor(len(bodies)) as together:  # rows of one batch have masks of their own
        traces = list(together.map(played, episodes, [path] * len(bodies), bodies))
    for name, form, trace in zip(forms, forms.values(), traces, strict=True):
        prompts = form.get("prompt")
        choices = form.get("n", 1) * (len(prompts) if isinstance(prompts, list) else 1)
        assert len(trace.calls) == choices, name
        assert_drawn_from_a_part(trace, name)


def sizes_of(call: RecordedCall) -> list[int]:
    """Among how many tokens each one was drawn."""
    assert call.mask is not None
    return [size(call.mask.rows[row]) for row in call.mask.row_of]


def test_what_a_row_allows(served_vllm: Served) -> None:
    forms: list[dict[str, Any]] = [
        COLOURS,
        {"top_k": 5},
        {"logit_bias": {"42": 5}},
        {"allowed_token_ids": [42, 43, 44]},
        {},
        {"temperature": 0, "top_k": 5},
        {"vllm_xargs": {"mine": 1}, "top_k": 5},
    ]
    episodes = [served_vllm.claim() for _ in forms]
    bodies = [{"messages": ASK, "max_tokens": 4} | form for form in forms]
    with ThreadPoolExecutor(len(forms)) as together:
        traces = list(together.map(played, episodes, ["chat/completions"] * len(forms), bodies))
    choice, top_k, bias, allowed, whole, greedy, unknown = [trace.calls[0] for trace in traces]
    assert choice.mask is not None
    sizes = sizes_of(choice)
    assert sizes[0] < 20
    assert choice.mask.forced == sizes.count(1) > 0
    assert set(sizes_of(top_k)) == {5}
    assert set(sizes_of(bias)) == {VOCABULARY}
    assert set(sizes_of(allowed)) == {3}
    assert (whole.mask, greedy.mask, unknown.mask) == (None, None, None)
    reasons = [list(trace.untrained.values()) for trace in traces]
    assert reasons == [[], [], [], [], [], ["greedy"], ["unreproducible_sampling"]]


def forced(path: str, schema: dict[str, Any], **strict: bool) -> dict[str, Any]:
    """A request in which the tool has to be called."""
    if path == "messages":
        return {"tools": [{"name": "add", "input_schema": schema} | strict], "tool_choice": {"type": "any"}}
    function = {"name": "add", "parameters": schema} | strict
    if path == "responses":
        return {"tools": [{"type": "function"} | function], "tool_choice": {"type": "function", "name": "add"}}
    return {"tools": [{"type": "function", "function": function}], "tool_choice": NAMED}


@pytest.mark.parametrize("path", ["chat/completions", "responses", "messages"])
def test_a_forced_tool_is_held_to_its_schema_only_if_it_is_strict(served_vllm: Served, path: str) -> None:
    unknown_type = {"type": "object", "properties": {"a": {"type": "strng"}}, "required": ["a"]}
    episode, refused = served_vllm.claim(), served_vllm.claim()
    common = DIALECTS[path][0]
    assert_drawn_from_a_part(played(episode, path, common | forced(path, unknown_type)))
    answer = refused.raw({"model": "policy"} | common | forced(path, unknown_type, strict=True), path=path)
    assert (answer.status_code, answer.json()["error"]["code"]) == (400, "invalid_spec"), answer.text
    assert refused.end().json()["dropped"] == "no_calls"
    assert answer.json()["error"]["message"][:80] in (refused.trace().entry.detail or "")


@pytest.mark.parametrize("stream", WAYS)
def test_a_forced_tool_call_that_is_cut_short_is_trained(served_vllm: Served, stream: bool) -> None:
    episode = served_vllm.claim()
    body = TOOLS | {"messages": ASK, "tool_choice": "required", "max_tokens": 7, "stream": stream}
    trace = played(episode, "chat/completions", body)
    (call,) = trace.calls
    assert (call.finish_reason, len(call.sampled_ids)) == ("length", 7)
    assert_drawn_from_a_part(trace, "cut short")


@pytest.mark.parametrize("form", [{"top_k": 50}, {"structured_outputs": {"regex": "[a-z ]+"}}], ids=str)
def test_a_stream_that_the_client_leaves_is_trained_as_far_as_it_was_sampled(
    served_vllm: Served, form: dict[str, Any]
) -> None:
    episode = served_vllm.claim()
    restricted: dict[str, Any] = form | {"min_tokens": 900}
    with episode.sdk.chat.completions.create(
        model="policy", messages=ASK, max_tokens=1000, stream=True, extra_body=restricted
    ) as chunks:
        for number, chunk in enumerate(chunks):
            if number > 5 and chunk.choices[0].delta.content:
                break
    until = time.monotonic() + 30
    while not (trace := episode.trace()).calls:
        assert time.monotonic() < until, "it was not recorded"
    (call,) = trace.calls
    assert not call.complete
    assert 0 < len(call.sampled_ids) < 900
    assert_drawn_from_a_part(trace, "left")
