"""Every dialect with the SDK that speaks it, over the echo engine: whole and streamed, continued token by token, one trace."""

from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from typing import Any

import anthropic
import openai
import pytest

from swarm.protocol.episodes import RecordedCall
from swarm.server.gateway.request import AgentRequest
from tests.swarm.server.gateway.conftest import Episode, Served, assert_drawn_from_a_part

SCHEMA: dict[str, Any] = {"type": "object", "properties": {"word": {"type": "string"}}}
FLAT_TOOL: Any = {"type": "function", "name": "say", "parameters": SCHEMA}
BLOCK_TOOL: Any = {"name": "say", "input_schema": SCHEMA}


def assert_exact(calls: list[RecordedCall]) -> None:
    """Each call continues the one before: its prompt begins with what was prompted and sampled."""
    for call in calls:
        assert call.complete
        assert call.fork_cause is None
        assert len(call.sampled_ids) == len(call.logprobs) == call.versions[-1].end
    for before, call in pairwise(calls):
        held = [*before.prompt_ids, *before.sampled_ids]
        assert call.parent_call_id == before.call_id
        assert call.prompt_ids[: len(held)] == held


# -- text completions ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("stream", [False, True])
def test_a_text_goes_on_from_the_ids_that_were_sampled(served: Served, stream: bool) -> None:
    episode, text = served.claim(), "Repeat red"
    for turn in range(3):
        text += complete(episode, text, stream) + f"\nRepeat blue{turn}"
    calls = episode.trace().calls
    assert [call.dialect for call in calls] == ["completions"] * 3
    for before, call in pairwise(calls):
        held = [*before.prompt_ids, *before.sampled_ids[:-1]]  # the end token is not in the text
        assert call.prompt_ids[: len(held)] == held
        assert call.parent_call_id == before.call_id
        assert call.fork_cause is None


def complete(episode: Episode, prompt: Any, stream: bool = False, **fields: Any) -> str:
    if not stream:
        return episode.sdk.completions.create(model="policy", prompt=prompt, **fields).choices[0].text
    chunks = episode.sdk.completions.create(model="policy", prompt=prompt, stream=True, **fields)
    return "".join(choice.text for chunk in chunks for choice in chunk.choices)


def test_a_stop_string_that_the_client_writes_again_counts_as_sampled(served: Served) -> None:
    again, other = served.claim(), served.claim()
    for episode, following in ((again, "-stop then"), (other, " then")):
        prompt = "Repeat red-stop"
        answer = episode.sdk.completions.create(model="policy", prompt=prompt, stop=["-stop", "pots-"], seed=1)
        text = prompt + answer.choices[0].text + following
        episode.sdk.completions.create(model="policy", prompt=text)
    for episode in (again, other):
        first, second = episode.trace().calls
        assert second.parent_call_id == first.call_id
        assert second.fork_cause is None
        assert second.prompt_ids[: len(first.prompt_ids) + 1] == [*first.prompt_ids, first.sampled_ids[0]]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("prompt", [["Repeat red", "Repeat blue"], [list(b"Repeat red"), list(b"Repeat blue")]])
def test_several_prompts_are_answered_at_once_and_recorded_each(served: Served, prompt: Any, stream: bool) -> None:
    episode = served.claim()
    fields: dict[str, Any] = {"model": "policy", "prompt": prompt, "n": 2, "seed": 3}
    texts = dict.fromkeys(range(4), "")
    if stream:
        usage = None
        for chunk in episode.sdk.completions.create(stream=True, stream_options={"include_usage": True}, **fields):
            usage = chunk.usage or usage
            for choice in chunk.choices:
                texts[choice.index] += choice.text
    else:
        answer = episode.sdk.completions.create(**fields)
        usage = answer.usage
        texts = {choice.index: choice.text for choice in answer.choices}
    calls = episode.trace().calls
    assert usage is not None
    assert usage.completion_tokens == sum(len(call.sampled_ids) for call in calls)
    assert usage.prompt_tokens == sum(len(call.prompt_ids) for call in calls[::2])
    assert [call.prompt_ids for call in calls] == [list(b"Repeat red")] * 2 + [list(b"Repeat blue")] * 2
    assert [texts[index] for index in range(4)] == [call.answer["choices"][0]["text"] for call in calls]
    assert set(texts.values()) <= {"red", "~der", "blue", "~eulb"}


def test_equal_prompts_of_one_request_are_drawn_apart_unless_the_client_states_a_seed(served: Served) -> None:
    episode = served.claim()
    for seed in (None, 3):
        body = {"model": "policy", "prompt": ["Repeat red"] * 3, "n": 2, "seed": seed}
        episode.raw(body, path="completions").raise_for_status()
    calls = episode.trace().calls
    free, stated = [[call.sampling.seed for call in part[::2]] for part in (calls[:6], calls[6:])]
    assert len({seed + choice for seed in free for choice in range(2)}) == 6
    assert stated == [3] * 3


def test_text_logprobs_and_echo_are_told_as_openai_tells_them(served: Served) -> None:
    episode = served.claim()
    answer = episode.sdk.completions.create(model="policy", prompt="Repeat red", logprobs=1)
    (call,) = episode.trace().calls
    logprobs = answer.choices[0].logprobs
    assert logprobs is not None
    assert logprobs.token_logprobs == pytest.approx(call.logprobs)
    assert complete(episode, "Repeat red", stream=True, echo=True).startswith("Repeat red")
    assert complete(episode, "Repeat red", echo=True).startswith("Repeat red")
    assert not episode.trace().calls[-1].answer["choices"][0]["text"].startswith("Repeat")


@pytest.mark.parametrize("prompt", [5, "Repeat red"])
def test_what_only_the_other_form_reads_changes_nothing(served: Served, prompt: Any) -> None:
    episode = served.claim()
    chat: dict[str, Any] = {"model": "policy", "messages": [{"role": "user", "content": "Repeat blue"}]}
    said = episode.raw(chat | {"prompt": prompt}).raise_for_status().json()["choices"][0]["message"]
    for messages in (0.5, [*chat["messages"], said, {"role": "user", "content": "Repeat green"}]):
        body = {"model": "policy", "prompt": "Repeat red", "messages": messages}
        episode.raw(body, path="completions").raise_for_status()
    for call in episode.trace().calls[1:]:
        assert (call.prompt_ids, call.parent_call_id, call.fork_cause) == (list(b"Repeat red"), None, None)


@pytest.mark.parametrize("prompt", [None, 5, [], [[]], ["a", [1]], [-1], {"a": 1}])
def test_what_is_no_prompt_is_refused(served: Served, prompt: Any) -> None:
    episode = served.claim()
    answer = episode.raw({"model": "policy", "prompt": prompt, "max_tokens": 3}, path="completions")
    if prompt == ["a", [1]]:
        assert answer.status_code == 200
    else:
        assert (answer.status_code, answer.json()["error"]["param"]) == (400, "prompt")


@pytest.mark.parametrize(
    ("name", "value"),
    [("tools", 0.5), ("tools", [5]), ("tools", [{"function": "x"}]), ("tool_choice", 5), ("tool_choice", [])],
)
def test_tools_of_a_text_are_refused_where_they_are_none(served: Served, name: str, value: Any) -> None:
    answer = served.claim().raw({"model": "policy", "prompt": "Repeat red", name: value}, path="completions")
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, name)


# -- responses ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("stream", [False, True])
def test_responses_go_on_by_previous_id_and_by_items(served: Served, stream: bool) -> None:
    episode = served.claim()
    first = respond(episode, stream, input="Repeat red", instructions="Be brief.")
    second = respond(episode, stream, input="Repeat blue", instructions="Be brief.", previous_response_id=first.id)
    items: Any = [
        {"role": "user", "content": "Repeat red"},
        *[item.model_dump() for item in first.output],
        {"role": "user", "content": [{"type": "input_text", "text": "Repeat blue"}]},
        *[item.model_dump() for item in second.output],
        {"role": "user", "content": "Repeat green"},
    ]
    third = respond(episode, stream, input=items, instructions="Be brief.")
    calls = episode.trace().calls
    assert_exact(calls)
    assert [call.dialect for call in calls] == ["responses"] * 3
    assert [message["role"] for message in calls[1].request["messages"]] == ["system", "user", "assistant", "user"]
    assert third.output_text in ("green", "~neerg")
    assert third.status == "completed"
    assert third.usage.input_tokens == len(calls[2].prompt_ids)
    assert third.usage.output_tokens == len(calls[2].sampled_ids)


def respond(episode: Episode, stream: bool, **fields: Any) -> Any:
    if not stream:
        return episode.sdk.responses.create(model="policy", **fields)
    with episode.sdk.responses.stream(model="policy", **fields) as events:
        for _ in events:
            pass
        return events.get_final_response()


@pytest.mark.parametrize("stream", [False, True])
def test_responses_go_on_by_references_to_items(served: Served, stream: bool) -> None:
    episode = served.claim()
    custom = {"type": "custom", "name": "patch"}
    fields: Any = {"tools": [FLAT_TOOL, custom], "max_output_tokens": 90}
    items: list[Any] = [{"role": "user", "content": "Repeat red"}]
    for name, kind, reference in (("say", "function", {"type": "item_reference"}), ("patch", "custom", {})):
        answer = respond(episode, stream, input=items, tool_choice={"type": kind, "name": name}, **fields)
        (call,) = answer.output
        output = {"type": f"{call.type}_output", "call_id": call.call_id, "output": "said"}
        items += [reference | {"id": call.id}, output]
    last = respond(episode, stream, input=items, **fields)
    calls = episode.trace().calls
    assert_exact(calls)
    assert [message["role"] for message in calls[2].request["messages"]] == ["user", *["assistant", "tool"] * 2]
    items += [{"type": "item_reference", "id": last.output[0].id}, {"role": "user", "content": "Repeat blue"}]
    respond(episode, stream, input=items, **fields)
    assert_exact(episode.trace().calls)


def test_an_unknown_item_is_not_found(served: Served) -> None:
    episode, other = served.claim(), served.claim()
    theirs = other.sdk.responses.create(model="policy", input="Repeat red").output[0].id
    own = str(episode.sdk.responses.create(model="policy", input="Repeat red").output[0].id)
    for unknown in (theirs, "msg_0", "", own + "0", own.rpartition("_")[0]):
        body = {"model": "policy", "input": [{"type": "item_reference", "id": unknown}]}
        answer = episode.raw(body, path="responses")
        assert (answer.status_code, answer.json()["error"]["param"]) == (404, "input")


def test_a_response_is_told_in_the_full_set_of_events(served: Served) -> None:
    episode = served.claim()
    events = list(episode.sdk.responses.create(model="policy", input="Repeat red", stream=True))
    assert [event.sequence_number for event in events] == list(range(len(events)))
    kinds = [event.type for event in events]
    deltas = [event.delta for event in events if event.type == "response.output_text.delta"]
    assert len(deltas) > 1
    assert list(dict.fromkeys(kinds)) == [
        "response.created",
        "response.in_progress",
        "response.output_item.added",
        "response.content_part.added",
        "response.output_text.delta",
        "response.output_text.done",
        "response.content_part.done",
        "response.output_item.done",
        "response.completed",
    ]
    final: Any = events[-1]
    assert final.response.output_text == "".join(deltas)
    assert {event.item_id for event in events if hasattr(event, "item_id")} == {final.response.output[0].id}


@pytest.mark.parametrize("stream", [False, True])
def test_a_responses_tool_call_and_its_output_go_on_token_by_token(served: Served, stream: bool) -> None:
    episode = served.claim()
    fields: Any = {"tools": [FLAT_TOOL], "max_output_tokens": 90}
    first = respond(episode, stream, input="Repeat red", tool_choice={"type": "function", "name": "say"}, **fields)
    (call,) = first.output
    assert (call.type, call.name) == ("function_call", "say")
    assert set(json.loads(call.arguments)) == {"word"}
    items: Any = [
        {"role": "user", "content": "Repeat red"},
        {"type": "function_call", "call_id": "other", "name": "say", "arguments": call.arguments.replace(" ", "")},
        {"type": "function_call_output", "call_id": "other", "output": "said"},
    ]
    respond(episode, stream, input=items, **fields)
    by_id: Any = [{"type": "function_call_output", "call_id": call.call_id, "output": "said"}]
    respond(episode, stream, input=by_id, previous_response_id=first.id, **fields)
    calls = episode.trace().calls
    assert_exact(calls[:2])
    assert calls[2].prompt_ids == calls[1].prompt_ids
    assert calls[2].parent_call_id == calls[0].call_id


def test_custom_tools_and_namespaces_come_back_as_they_were_given(served: Served) -> None:
    episode = served.claim()
    custom: Any = [{"type": "custom", "name": "patch", "description": "free text"}]
    spaced: Any = [{"type": "namespace", "name": "mail", "description": "mail", "tools": [FLAT_TOOL]}]
    for stream in (False, True):
        first = respond(episode, stream, input="Repeat red", tools=custom, tool_choice="required", max_output_tokens=90)
        assert (first.output[0].type, first.output[0].name) == ("custom_tool_call", "patch")
        assert first.output[0].input in ("red", "~der")
    body = {"model": "policy", "input": "Repeat red", "tools": spaced, "tool_choice": "required"}
    (call,) = episode.raw(body | {"max_output_tokens": 90}, path="responses").raise_for_status().json()["output"]
    assert (call["namespace"], call["name"]) == ("mail", "say")


@pytest.mark.parametrize("mode", ["auto", "required"])
def test_of_the_tools_those_that_are_allowed_are_handed_on(served: Served, mode: str) -> None:
    episode = served.claim()
    other = {"type": "function", "name": "other", "parameters": SCHEMA}
    space = {"type": "namespace", "name": "mail", "tools": [{"type": "function", "name": "send"}]}
    allowed: list[Any] = [{"type": "function", "name": "say"}, {"type": "function", "name": "send"}]
    choice = {"type": "allowed_tools", "mode": mode, "tools": [*allowed, {"type": "web_search"}]}
    body = {"model": "policy", "input": "Repeat red", "tools": [other, FLAT_TOOL, space], "tool_choice": choice}
    answer = episode.raw(body | {"max_output_tokens": 90}, path="responses").raise_for_status().json()
    (call,) = episode.trace().calls
    assert [tool["function"]["name"] for tool in call.request["tools"]] == ["say", "mail__send"]
    assert (answer["output"][0].get("name"), call.request["tool_choice"]) == (
        "say" if mode == "required" else None,
        mode,
    )


def test_an_unknown_previous_response_is_not_found(served: Served) -> None:
    episode, other = served.claim(), served.claim()
    theirs = other.sdk.responses.create(model="policy", input="Repeat red")
    for unknown in ("resp_0", theirs.id):
        with pytest.raises(openai.NotFoundError, match="not found") as refused:
            episode.sdk.responses.create(model="policy", input="Repeat red", previous_response_id=unknown)
        assert refused.value.code == "previous_response_not_found"
    assert episode.trace().calls == []


def test_a_response_that_was_cut_is_incomplete_and_logprobs_are_told(served: Served) -> None:
    episode = served.claim()
    for stream in (False, True):
        answer = respond_raw(episode, stream, max_output_tokens=2, include=["message.output_text.logprobs"])
        assert answer["status"] == "incomplete"
        assert answer["incomplete_details"] == {"reason": "max_output_tokens"}
        logprobs = answer["output"][0]["content"][0]["logprobs"]
        assert [entry["logprob"] for entry in logprobs] == episode.trace().calls[-1].logprobs


def respond_raw(episode: Episode, stream: bool, **fields: Any) -> Any:
    body = {"model": "policy", "input": "Repeat red", "stream": stream, **fields}
    answer = episode.raw(body, path="responses").raise_for_status()
    if not stream:
        return answer.json()
    return json.loads(answer.text.strip().splitlines()[-1].removeprefix("data: "))["response"]


def test_a_json_schema_is_kept_in_every_dialect(served: Served) -> None:
    episode = served.claim()
    chat_format: Any = {"type": "json_schema", "json_schema": {"name": "word", "schema": SCHEMA}}
    asked: list[Any] = [{"role": "user", "content": "Repeat red"}]
    texts = [
        episode.sdk.chat.completions.create(model="policy", messages=asked, response_format=chat_format)
        .choices[0]
        .message.content,
        complete(episode, "Repeat red", extra_body={"response_format": chat_format}),
        respond(
            episode,
            False,
            input="Repeat red",
            text={"format": {"type": "json_schema", "name": "word", "schema": SCHEMA}},
        ).output_text,
        episode.claude.messages.create(
            model="policy",
            messages=asked,
            max_tokens=60,
            output_config={"format": {"type": "json_schema", "schema": SCHEMA}},
        )
        .content[0]
        .text,  # type: ignore[union-attr]
    ]
    assert [list(json.loads(str(text))) for text in texts] == [["word"]] * 4
    assert len(episode.trace().calls) == 4
    assert_drawn_from_a_part(episode.trace())


def test_every_field_that_a_schema_requires_is_filled_by_its_type(served: Served) -> None:
    fields = {
        "count": {"type": "integer", "minimum": 1},
        "kind": {"enum": ["a", "b"]},
        "tags": {"type": "array"},
        "inner": {"type": "object", "properties": {"ok": {"type": "boolean"}}, "required": ["ok"]},
        "word": {"type": "string"},
        "more": {"type": "string"},
    }
    schema = {"type": "object", "properties": fields, "required": ["count", "kind", "tags", "inner", "word"]}
    wanted: Any = {"type": "json_schema", "json_schema": {"name": "all", "schema": schema}}
    answer = served.claim().sdk.chat.completions.create(
        model="policy", messages=[{"role": "user", "content": "Repeat red"}], response_format=wanted, max_tokens=200
    )
    said = json.loads(str(answer.choices[0].message.content))
    assert {name: value for name, value in said.items() if name != "word"} == {
        "count": 1,
        "kind": "a",
        "tags": [],
        "inner": {"ok": False},
    }
    assert said["word"]


@pytest.mark.parametrize("stream", [False, True])
def test_a_schema_without_room_for_a_word_is_filled_in_every_dialect(served: Served, stream: bool) -> None:
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
    ask: dict[str, Any] = {"model": "policy", "stream": stream}
    said = {"messages": [{"role": "user", "content": "Add"}], "max_tokens": 90}
    function = {"name": "add", "parameters": schema}
    bodies: list[tuple[str, dict[str, Any]]] = [
        ("chat/completions", {"tools": [{"type": "function", "function": function}], "tool_choice": "required"} | said),
        ("responses", {"input": "Add", "tools": [{"type": "function", **function}], "tool_choice": "required"}),
        ("messages", {"tools": [{"name": "add", "input_schema": schema}], "tool_choice": {"type": "any"}} | said),
    ]
    for path, body in bodies:
        episode = served.claim()
        answer = episode.raw(ask | body, path=path)
        assert answer.status_code == 200, answer.text
        assert "add" in answer.text
        assert set(episode.trace().calls[0].logprobs) == {0.0}


# -- messages -----------------------------------------------------------------------------------------------------------


def say(episode: Episode, stream: bool, **fields: Any) -> anthropic.types.Message:
    asked = {"model": "policy", "max_tokens": 90} | fields
    if not stream:
        return episode.claude.messages.create(**asked)
    with episode.claude.messages.stream(**asked) as events:
        return events.get_final_message()


@pytest.mark.parametrize("stream", [False, True])
def test_messages_with_a_tool_go_on_token_by_token(served: Served, stream: bool) -> None:
    episode = served.claim()
    messages: list[Any] = [{"role": "user", "content": "Repeat red"}]
    fields: Any = {"tools": [BLOCK_TOOL], "system": [{"type": "text", "text": "Be brief."}]}
    first = say(episode, stream, messages=messages, tool_choice={"type": "tool", "name": "say"}, **fields)
    assert first.stop_reason == "tool_use"
    (call,) = [block for block in first.content if block.type == "tool_use"]
    assert call.input in ({"word": "red"}, {"word": "~der"})
    messages.append({"role": "assistant", "content": [block.model_dump() for block in first.content]})
    result = {"type": "tool_result", "tool_use_id": call.id, "content": [{"type": "text", "text": "said"}]}
    messages.append({"role": "user", "content": [result, {"type": "text", "text": "Repeat blue"}]})
    counted = episode.claude.messages.count_tokens(model="policy", messages=messages, **fields)
    second = say(episode, stream, messages=messages, **fields)
    assert second.content[0].text in ("blue", "~eulb")  # type: ignore[union-attr]
    assert second.stop_reason == "end_turn"
    calls = episode.trace().calls
    assert_exact(calls)
    assert [call.dialect for call in calls] == ["messages"] * 2
    assert second.usage.input_tokens == counted.input_tokens == len(calls[1].prompt_ids)
    assert second.usage.output_tokens == len(calls[1].sampled_ids)


def test_a_deferred_tool_is_shown_once_a_result_refers_to_it(served: Served) -> None:
    """As command-line agents that search for tools send them; the list of tools has changed then."""
    episode = served.claim()
    later = {**BLOCK_TOOL, "name": "whisper", "defer_loading": True}
    tools: list[Any] = [BLOCK_TOOL, later]
    messages: list[Any] = [{"role": "user", "content": "Repeat red"}]
    first = say(episode, False, messages=messages, tools=tools, tool_choice={"type": "tool", "name": "say"})
    (call,) = [block for block in first.content if block.type == "tool_use"]
    messages.append({"role": "assistant", "content": [block.model_dump() for block in first.content]})
    found = {"type": "tool_reference", "tool_name": "whisper"}
    messages.append({"role": "user", "content": [{"type": "tool_result", "tool_use_id": call.id, "content": [found]}]})
    with pytest.raises(anthropic.BadRequestError, match="not one of"):
        say(episode, False, messages=messages[:1], tools=tools, tool_choice={"type": "tool", "name": "whisper"})
    second = say(episode, False, messages=messages, tools=tools, tool_choice={"type": "tool", "name": "whisper"})
    assert [block.name for block in second.content if block.type == "tool_use"] == ["whisper"]
    calls = episode.trace().calls
    assert [len(call.request["tools"]) for call in calls] == [1, 2]
    assert [call.fork_cause for call in calls] == [None, "tools_changed"]
    assert calls[1].request["messages"][-1]["content"] == "The tool whisper can be called now."


def test_messages_are_told_in_anthropics_events(served: Served) -> None:
    episode = served.claim()
    messages: list[Any] = [{"role": "user", "content": "Repeat red"}]
    events: list[Any] = list(
        episode.claude.messages.create(model="policy", max_tokens=20, messages=messages, stream=True)
    )
    assert list(dict.fromkeys(event.type for event in events)) == [
        "message_start",
        "content_block_start",
        "content_block_delta",
        "content_block_stop",
        "message_delta",
        "message_stop",
    ]
    (call,) = episode.trace().calls
    assert events[0].message.usage.input_tokens == len(call.prompt_ids)
    assert events[-2].usage.output_tokens == len(call.sampled_ids)
    assert sum(event.type == "content_block_delta" for event in events) > 1


@pytest.mark.parametrize("stream", [False, True])
def test_messages_tell_where_they_stopped(served: Served, stream: bool) -> None:
    episode = served.claim()
    messages: list[Any] = [{"role": "user", "content": "Repeat red-stop"}]
    stopped = say(episode, stream, messages=messages, stop_sequences=["-stop", "pots-"])
    cut = say(episode, stream, messages=messages, max_tokens=2)
    assert (stopped.stop_reason, stopped.stop_sequence in ("-stop", "pots-")) == ("stop_sequence", True)
    assert (cut.stop_reason, cut.stop_sequence) == ("max_tokens", None)


def test_anthropics_sdk_lists_the_hosted_model(served: Served) -> None:
    models = served.claim().claude.models
    assert [model.id for model in models.list()] == [models.retrieve("policy").id] == ["echo"]
    for name in ("gpt-0", "v1/models"):
        with pytest.raises(anthropic.NotFoundError) as refused:
            models.retrieve(name)
        assert refused.value.type == "not_found_error"


def test_errors_come_in_the_dialects_own_envelope(served: Served) -> None:
    episode = served.claim()
    asked: list[Any] = [{"role": "user", "content": "Repeat red"}]
    with pytest.raises(anthropic.NotFoundError, match="policy"):
        episode.claude.messages.create(model="gpt-0", max_tokens=5, messages=asked)
    with pytest.raises(anthropic.BadRequestError) as refused:
        episode.claude.messages.create(model="policy", max_tokens=5, messages=[])
    assert refused.value.body["error"]["type"] == "invalid_request_error"  # type: ignore[index]
    long: list[Any] = [{"role": "user", "content": "x" * 40_000}]
    with pytest.raises(anthropic.BadRequestError, match="context"):
        episode.claude.messages.create(model="policy", max_tokens=5, messages=long)
    with pytest.raises(anthropic.AuthenticationError):
        episode.claude.with_options(api_key="swk_wrong").messages.create(model="policy", max_tokens=5, messages=asked)
    assert episode.trace().calls == []
    episode.end().raise_for_status()
    with pytest.raises(anthropic.PermissionDeniedError) as lost:
        episode.claude.messages.create(model="policy", max_tokens=5, messages=asked)
    assert lost.value.body["error"]["code"] == "lease_lost"  # type: ignore[index]
    for path, field in (("responses", "input"), ("completions", "prompt"), ("chat/completions", "messages")):
        answer = episode.raw({"model": "policy", field: "x" if field != "messages" else asked}, path=path)
        assert (answer.status_code, answer.json()["error"]["code"]) == (403, "lease_lost")


@pytest.mark.parametrize(
    "fields",
    [
        {"messages": "x"},
        {"messages": [{"role": "robot", "content": "x"}]},
        {"messages": [{"role": "user", "content": [{"type": "video"}]}]},
        {"messages": [{"role": "user", "content": 5}]},
        {"messages": [{"role": "user", "content": []}]},
        {"messages": [{"role": "user", "content": "x"}, {"role": "user", "content": []}]},
        {"tools": [{"type": "web_search_20250305", "name": "web_search"}]},
        {"tools": "x"},
        {"tool_choice": {"type": "tool", "name": "none"}},
        {"tool_choice": {"type": "some"}},
        {"system": 5},
        {"stop_sequences": "x"},
        {"max_tokens": "many"},
        {"output_config": {"format": 5}},
    ],
)
def test_what_is_no_message_is_refused_with_400(served: Served, fields: dict[str, Any]) -> None:
    body = {"model": "policy", "max_tokens": 5, "messages": [{"role": "user", "content": "Repeat red"}]} | fields
    answer = served.claim().raw(body, path="messages")
    assert answer.status_code == 400, answer.text
    assert answer.json()["type"] == "error"


def test_an_answer_that_the_client_began_is_refused_and_only_counted(served: Served) -> None:
    episode, ask = served.claim(), {"role": "user", "content": "Repeat red"}
    begun = [ask, {"role": "assistant", "content": [{"type": "text", "text": "re"}]}]
    body = {"model": "policy", "max_tokens": 5, "messages": begun}
    told = [episode.raw(body, path="messages")]
    for status in ("in_progress", "incomplete"):
        item = {"type": "message", "role": "assistant", "content": "re", "status": status}
        told.append(episode.raw({"model": "policy", "input": [ask, item]}, path="responses"))
    assert [answer.status_code for answer in told] == [400] * 3
    assert all("does not continue" in answer.json()["error"]["message"] for answer in told)
    assert episode.trace().calls == []
    episode.raw(body, path="messages/count_tokens").raise_for_status()
    for empty in ("", [], [{"type": "text", "text": ""}]):
        episode.raw(
            body | {"messages": [ask, {"role": "assistant", "content": empty}]}, path="messages"
        ).raise_for_status()


def test_a_budget_of_thoughts_is_left_out_of_messages_and_refused_where_it_stands_by_itself(served: Served) -> None:
    episode = served.claim()
    say(
        episode,
        stream=False,
        messages=[{"role": "user", "content": "Repeat red"}],
        max_tokens=2_000,
        thinking={"type": "enabled", "budget_tokens": 1_024},
    )
    (call,) = episode.trace().calls
    assert call.sampling.reproducible
    assert not [name for name in call.request if "thinking" in name]
    asks: dict[str, dict[str, Any]] = {
        "chat/completions": {"messages": [{"role": "user", "content": "Repeat red"}]},
        "completions": {"prompt": "Repeat red"},
        "responses": {"input": "Repeat red"},
    }
    for path, ask in asks.items():
        answer = episode.raw({"model": "policy", "thinking_token_budget": 5} | ask, path=path)
        assert answer.status_code == 400
        assert "max_tokens" in answer.json()["error"]["message"]


@pytest.mark.parametrize(
    "fields",
    [
        {"input": 5},
        {"input": [{"role": "assistant", "content": 5}]},
        {"input": [{"type": "reasoning", "summary": 5}]},
        {"include": 5},
        {"input": []},
        {"input": [{"type": "computer_call"}]},
        {"input": [{"role": "user", "content": [{"type": "input_file"}]}]},
        {"input": [{"type": "reasoning", "encrypted_content": "x", "summary": []}]},
        {"background": True},
        {"conversation": "c"},
        {"previous_response_id": 5},
        {"tools": [{"type": "custom", "name": "p", "format": {"type": "grammar"}}]},
        {"tool_choice": "required"},
        {"tools": [FLAT_TOOL], "tool_choice": {"type": "function", "name": "other"}},
        {
            "tools": [FLAT_TOOL],
            "tool_choice": {"type": "allowed_tools", "mode": "auto", "tools": [{"type": "function"}]},
        },
        {"tools": [FLAT_TOOL], "tool_choice": {"type": "allowed_tools", "mode": "some", "tools": [FLAT_TOOL]}},
        {"tools": [FLAT_TOOL], "tool_choice": {"type": "allowed_tools", "mode": "required", "tools": []}},
        {"text": {"format": 5}},
        {"text": {"format": {"type": "grammar"}}},
        {"max_output_tokens": "many"},
    ],
)
def test_what_is_no_response_request_is_refused_with_400(served: Served, fields: dict[str, Any]) -> None:
    answer = served.claim().raw({"model": "policy", "input": "Repeat red"} | fields, path="responses")
    assert answer.status_code == 400, answer.text
    assert answer.json()["error"]["message"]


# -- one trace ----------------------------------------------------------------------------------------------------------


def test_one_episode_may_speak_every_dialect_and_has_one_timeline(served: Served) -> None:
    episode = served.claim()
    messages: list[Any] = [{"role": "user", "content": "Repeat red"}]
    first = episode.sdk.chat.completions.create(model="policy", messages=messages)
    messages += [
        {"role": "assistant", "content": first.choices[0].message.content},
        {"role": "user", "content": "Repeat blue"},
    ]
    second = say(episode, True, messages=messages)
    messages += [
        {"role": "assistant", "content": [block.model_dump() for block in second.content]},
        {"role": "user", "content": "Repeat green"},
    ]
    items = [{"role": each["role"], "content": text_of(each["content"])} for each in messages]
    respond(episode, True, input=items)
    calls = episode.trace().calls
    assert_exact(calls)
    assert [call.dialect for call in calls] == ["chat.completions", "messages", "responses"]
    assert all(set(call.answer["choices"][0]) >= {"message", "finish_reason"} for call in calls)


def text_of(content: Any) -> str:
    return content if isinstance(content, str) else "".join(block["text"] for block in content)


def test_parallel_calls_of_every_dialect_are_all_recorded(served: Served) -> None:
    episode = served.claim()
    work: list[Any] = [
        lambda: complete(episode, ["Repeat a", "Repeat b"]),
        lambda: respond(episode, True, input="Repeat c"),
        lambda: say(episode, True, messages=[{"role": "user", "content": "Repeat d"}]),
    ]
    with ThreadPoolExecutor(12) as pool:
        for done in [pool.submit(each) for each in work * 4]:
            done.result()
    calls = episode.trace().calls
    assert len(calls) == 16
    assert len({call.index for call in calls}) == 12


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("path", "fields"),
    [
        ("completions", {"prompt": ["Repeat red", "Repeat blue"]}),
        ("responses", {"input": "Repeat red"}),
        ("messages", {"messages": [{"role": "user", "content": "Repeat red"}]}),
    ],
)
def test_a_marked_retry_gets_the_lost_answer_in_its_dialect(
    served: Served, path: str, fields: dict[str, Any], stream: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    episode = served.claim()
    body = {"model": "policy", "max_tokens": 20, "stream": stream} | fields
    monkeypatch.setattr(AgentRequest, "delivered", lambda request: None)  # as where the connection broke
    lost = episode.raw(body, path=path).raise_for_status()
    known = len(episode.trace().calls)
    again = episode.raw(body, path=path, **{"x-stainless-retry-count": "1"}).raise_for_status()
    assert len(episode.trace().calls) == known
    if stream:
        assert last_data(again.text) == last_data(lost.text)
        assert len(again.text) > 100
    else:
        assert again.json() == lost.json()


def last_data(text: str) -> Any:
    """What a stream ends with, however many events it took."""
    data = text.strip().splitlines()[-1].removeprefix("data: ")
    return data if data == "[DONE]" else json.loads(data) | {"sequence_number": None}
