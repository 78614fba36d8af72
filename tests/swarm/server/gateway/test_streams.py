"""What clients hear of thoughts, of several calls, and of a stream that breaks off: whole and streamed alike."""

from __future__ import annotations

import json
import time
import timeit
from typing import Any

import orjson
import pytest

from foundation import strict_json
from swarm.engine.seam import EngineDown, RequestRefused, SampledEvent
from swarm.protocol.episodes import RecordedCall, RecordedSampling
from swarm.server.gateway.anthropic import AnthropicMessages, chat_messages
from swarm.server.gateway.dialect import Dialect
from swarm.server.gateway.errors import answer_of, anthropic_body
from swarm.server.gateway.forms import ChatForm, message_of
from swarm.server.gateway.message_form import normal_message, normal_text
from swarm.server.gateway.responses import Responses, input_messages

DELTAS: list[dict[str, Any]] = [
    {"role": "assistant", "content": ""},
    {"reasoning": "Let me "},
    {"reasoning": "see."},
    {"content": "I "},
    {"content": "look."},
    {"tool_calls": [{"index": 0, "id": "c0", "type": "function", "function": {"name": "look"}}]},
    {"tool_calls": [{"index": 0, "function": {"arguments": '{"at": '}}]},
    {"content": "\n"},
    {"tool_calls": [{"index": 0, "function": {"arguments": '"it"}'}}]},
    {"tool_calls": [{"index": 1, "id": "c1", "type": "function", "function": {"name": "look", "arguments": "{}"}}]},
]
BODY: dict[str, Any] = {"model": "policy", "input": "x", "messages": [], "tools": []}


def chunks() -> list[dict[str, Any]]:
    ended = [(delta, None) for delta in DELTAS] + [({}, "tool_calls")]
    head = {"id": "chatcmpl-7", "created": 1, "model": "m", "object": "chat.completion.chunk"}
    return [
        head | {"choices": [{"index": 0, "delta": delta, "logprobs": None, "finish_reason": finish}]}
        for delta, finish in ended
    ]


def assembled() -> dict[str, Any]:
    assembly = ChatForm().assembly({})
    for chunk in chunks():
        assembly.add(SampledEvent(data=chunk))
    return assembly.answer()


def streamed(dialect: Dialect) -> list[dict[str, Any]]:
    stream = dialect.stream(BODY, BODY)
    frames = [frame for chunk in chunks() for frame in stream.frames(chunk, 5)] + stream.end(assembled())
    assert all(frame.startswith(b"event: ") and frame.endswith(b"\n\n") for frame in frames)
    return [json.loads(frame.split(b"data: ", 1)[1]) for frame in frames]


def recorded_call() -> RecordedCall:
    return RecordedCall(
        call_id="call-1",
        episode_id="ep-1",
        index=0,
        agent=None,
        dialect="responses",
        prompt_ids=[1],
        sampled_ids=[2],
        logprobs=[-1.0],
        sampling=RecordedSampling(temperature=1.0),
        versions=[],
        finish_reason="tool_calls",
        started_at=0.0,
        latency_s=0.0,
        request=BODY,
        answer=assembled(),
    )


def test_a_response_has_an_item_for_each_thought_text_and_call() -> None:
    events = streamed(Responses())
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    added = [event["item"]["type"] for event in events if event["type"] == "response.output_item.added"]
    done = [event["item"] for event in events if event["type"] == "response.output_item.done"]
    final = events[-1]["response"]
    assert added[:3] == ["reasoning", "message", "function_call"]
    assert final["output"] == done
    assert [event["output_index"] for event in events if event["type"] == "response.output_item.added"] == list(
        range(len(done))
    )
    calls = [item for item in done if item["type"] == "function_call"]
    assert [(call["call_id"], json.loads(call["arguments"])) for call in calls] == [("c0", {"at": "it"}), ("c1", {})]
    assert done[0]["content"] == [{"type": "reasoning_text", "text": "Let me see."}]
    assert len({item["id"] for item in done}) == len(done)


def test_an_item_that_is_referred_to_is_the_one_that_was_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(f"{__name__}.DELTAS", [DELTAS[0], *DELTAS[5:]])
    items = streamed(Responses())[-1]["response"]["output"]
    assert [item["type"] for item in items] == ["function_call", "message", "function_call"]
    for item in items:
        given = [{"type": "item_reference", "id": item["id"]}]
        (asked,) = Responses().requests({"input": given}, [recorded_call()])
        assert asked["messages"] == input_messages([item])


def test_a_reference_to_a_kind_of_item_that_the_answer_has_not_says_what_to_send() -> None:
    given = [{"type": "item_reference", "id": "rs_7_1"}]
    with pytest.raises(RequestRefused, match="send the item itself"):
        Responses().requests({"input": given}, [recorded_call()])


def test_a_message_has_a_block_for_each_and_text_waits_for_the_call() -> None:
    events = streamed(AnthropicMessages())
    started = [event["content_block"]["type"] for event in events if event["type"] == "content_block_start"]
    assert started == ["thinking", "text", "tool_use", "text", "tool_use"]
    open_block = None
    for event in events:
        if event["type"] == "content_block_start":
            assert open_block is None
            open_block = event["index"]
        if event["type"] == "content_block_delta":
            assert event["index"] == open_block
        if event["type"] == "content_block_stop":
            assert event["index"] == open_block
            open_block = None
    (signed,) = [event for event in events if (event.get("delta") or {}).get("type") == "signature_delta"]
    assert signed["delta"]["signature"]
    assert events[-2]["delta"]["stop_reason"] == "tool_use"


def test_whole_answers_sent_back_are_the_message_that_was_recorded() -> None:
    answer, recorded = assembled(), message_of(assembled())
    assert recorded is not None
    blocks = AnthropicMessages().answer(BODY, BODY, answer)["content"]
    assert normal_message(chat_messages([{"role": "assistant", "content": blocks}])[0]) == normal_message(recorded)
    items = Responses().answer(BODY, BODY, answer)["output"]
    (sent_back,) = input_messages(items)
    assert normal_message(sent_back) == normal_message(recorded)


SPELT: list[tuple[dict[str, Any], list[str]]] = [
    ({"reasoning": "Let me see: it?"}, ["<think>", "Let me", " see: it?", "</think>"]),
    ({"content": "I see"}, ["I", " see"]),
    ({"content": ": it."}, [": it."]),
    ({"tool_calls": [{"index": 0, "id": "c0", "function": {"name": "look", "arguments": "{}"}}]}, ["<call>", "look{}"]),
    ({}, ["<end>"]),
]


@pytest.mark.parametrize(
    ("left_out", "told"),
    [
        ((), ["I", " see", ": it."]),
        (("reasoning",), ["I", " see", ": it."]),
        (("tool_calls",), ["I", " see", ": it.", "<end>"]),
        (("content",), []),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
def test_a_responses_text_has_the_logprobs_of_its_own_tokens(
    left_out: tuple[str, ...], told: list[str], stream: bool
) -> None:
    head = {"id": "chatcmpl-7", "created": 1, "model": "m"}
    assembly, stream = ChatForm().assembly({}), Responses().stream(BODY, BODY)
    for delta, tokens in SPELT:
        if not set(delta) & set(left_out):
            content = [{"token": token, "bytes": list(token.encode()), "logprob": -1.0} for token in tokens]
            chunk = head | {"choices": [{"index": 0, "delta": delta, "logprobs": {"content": content}}]}
            stream.frames(chunk, 5)
            assembly.add(SampledEvent(data=chunk))
    answer = assembly.answer()
    response = stream.whole(answer) if stream else Responses().answer(BODY, BODY, answer)
    texts = [part for item in response["output"] if item["type"] == "message" for part in item["content"]]
    assert [entry["token"] for part in texts for entry in part["logprobs"]] == told


def test_a_call_that_is_no_json_is_shown_as_it_is_and_a_stop_string_wins() -> None:
    answer = assembled()
    answer["choices"][0]["message"]["tool_calls"][1]["function"]["arguments"] = '{"at": '
    answer["choices"][0] |= {"finish_reason": "stop", "stop_reason": "###"}
    message = AnthropicMessages().answer(BODY, BODY, answer)
    assert message["content"][-1]["input"] == '{"at": '
    assert (message["stop_reason"], message["stop_sequence"]) == ("stop_sequence", "###")


STRANGE_ARGUMENTS = [
    '{"a": 18446744073709551616, "b": -98765432109876543210.5}',
    r'{"a": "\ud83d"}',
    r'{"a": ["\ude00\ud83d", "\ud83d\ude00"]}',
    '{"a": NaN}',
    '{"a": %s}' % ("[" * 100 + "]" * 100),
    '{"a": 1E400}',
    '{"a": 1.0}{"b": 2}',
    "not json",
    '"json"',
    "[]",
    "0",
    "null",
    "false",
    "",
]


def calling(arguments: str) -> dict[str, Any]:
    """An answer that calls a function with these arguments alone."""
    answer = assembled()
    (call, _) = answer["choices"][0]["message"]["tool_calls"]
    call["function"]["arguments"] = arguments
    answer["choices"][0]["message"] = {"role": "assistant", "content": None, "tool_calls": [call]}
    return answer


@pytest.mark.parametrize("arguments", STRANGE_ARGUMENTS)
def test_strange_arguments_go_to_an_agent_and_come_back_as_the_message_that_was_recorded(arguments: str) -> None:
    answer = calling(arguments)
    told = strict_json.loads_plain(orjson.dumps(AnthropicMessages().answer(BODY, BODY, answer)))
    (sent_back,) = chat_messages([{"role": "assistant", "content": told["content"]}])
    assert normal_message(sent_back) == normal_message(message_of(answer) or {})


@pytest.mark.parametrize(
    "system",
    [
        "x-anthropic-billing-header: cch=1;\nBe brief.",
        [{"type": "text", "text": "x-anthropic-billing-header: cch=1;"}, {"type": "text", "text": "Be brief."}],
    ],
)
def test_a_hash_of_the_request_is_left_out_of_the_system_prompt_and_nothing_else(system: Any) -> None:
    assert chat_messages([{"role": "system", "content": system}]) == [{"role": "system", "content": "Be brief."}]


def test_a_call_without_an_input_is_one_without_arguments() -> None:
    (sent_back,) = chat_messages([{"role": "assistant", "content": [{"type": "tool_use", "id": "c", "name": "look"}]}])
    assert sent_back["tool_calls"][0]["function"]["arguments"] == "{}"


def test_arguments_with_an_integer_that_no_request_may_hold_are_shown_as_text() -> None:
    (block,) = AnthropicMessages().answer(BODY, BODY, calling(STRANGE_ARGUMENTS[0]))["content"]
    assert block["input"] == STRANGE_ARGUMENTS[0]


@pytest.mark.parametrize("arguments", ["[" + "1" * 5_000 + "]", "[" * 5_000, "[" * 900 + "]" * 900])
@pytest.mark.parametrize("dialect", [Responses(), AnthropicMessages()], ids=["responses", "messages"])
def test_arguments_that_cannot_be_read_are_shown_as_they_are(dialect: Dialect, arguments: str) -> None:
    told = json.loads(orjson.dumps(dialect.answer(BODY, BODY, calling(arguments))))
    shown = told["output"][-1]["arguments"] if "output" in told else told["content"][-1]["input"]
    assert shown == arguments
    stream = dialect.stream(BODY, BODY)
    assert stream.end(calling(arguments))
    assert normal_message({"role": "assistant", "content": arguments})["content"] == arguments
    assert normal_text(json.dumps({"a": arguments})) == json.dumps({"a": arguments}, separators=(",", ":"))


@pytest.mark.parametrize(
    ("arguments", "comes_back"), [(r'{"input": "\ud83d"}', True), ('{"input": %s}' % ("1" * 5_000), False)]
)
def test_a_custom_tools_input_can_be_told_whatever_the_model_wrote(arguments: str, comes_back: bool) -> None:
    answer = calling(arguments)
    body = BODY | {"tools": [{"type": "custom", "name": "look"}]}
    told = strict_json.loads_plain(orjson.dumps(Responses().answer(body, BODY, answer)))
    (sent_back,) = input_messages(told["output"])
    assert told["output"][0]["type"] == "custom_tool_call"
    assert (normal_message(sent_back) == normal_message(message_of(answer) or {})) is comes_back


def test_text_full_of_one_bracket_costs_no_more_than_its_length() -> None:
    text = "array[i] " * 40_000

    def took(size: int) -> float:
        return min(timeit.repeat(lambda: normal_text(text[:size]), number=1, repeat=3))

    assert took(len(text)) < 16 * took(len(text) // 4)


@pytest.mark.parametrize(
    ("dialect", "kind"),
    [(Responses(), "response.failed"), (AnthropicMessages(), "error")],
    ids=["responses", "messages"],
)
def test_a_stream_that_breaks_off_says_so_in_its_own_words(dialect: Dialect, kind: str) -> None:
    stream = dialect.stream(BODY, BODY)
    stream.frames(chunks()[0], 5)
    (frame,) = stream.broken(answer_of(EngineDown("it crashed")))
    event = json.loads(frame.split(b"data: ", 1)[1])
    assert event["type"] == kind
    error = event["response"]["error"] if kind == "response.failed" else event["error"]
    assert error["code"] == "engine_failed"
    assert "crashed" in error["message"]


@pytest.mark.parametrize(("status", "code"), [(400, "invalid_spec"), (404, "not_found"), (422, "invalid_spec")])
@pytest.mark.parametrize("told", [None, 400])
def test_a_refusal_without_a_code_gets_ours_also_where_the_engine_wrote_its_status(
    status: int, code: str, told: int | None
) -> None:
    error = {"message": "too long", "type": "BadRequestError", "param": None}
    answer = answer_of(RequestRefused(status, {"error": error | {"code": told}}))
    assert answer.body == {"error": error | {"code": code}}
    assert anthropic_body(status, answer.body)["error"]["code"] == code


def test_a_code_of_openais_stands() -> None:
    named = {"error": {"message": "too long", "code": "context_length_exceeded"}}
    assert answer_of(RequestRefused(400, named)).body == named


@pytest.mark.parametrize("stream", [False, True])
def test_what_is_cut_at_the_limit_is_incomplete_and_what_stood_before_it_is_not(stream: bool) -> None:
    cut = chunks()[:-4]
    cut[-1]["choices"][0]["finish_reason"] = "length"
    assembly = ChatForm().assembly({})
    for chunk in cut:
        assembly.add(SampledEvent(data=chunk))
    if stream:
        stream = Responses().stream(BODY, BODY)
        frames = [frame for chunk in cut for frame in stream.frames(chunk, 5)] + stream.end(assembly.answer())
        told = [json.loads(frame.split(b"data: ", 1)[1]) for frame in frames]
        response = told[-1]["response"]
        assert [event["item"] for event in told if event["type"] == "response.output_item.done"] == response["output"]
    else:
        response = Responses().answer(BODY, BODY, assembly.answer())
    assert response["status"] == "incomplete"
    assert [(item["type"], item["status"]) for item in response["output"]] == [
        ("reasoning", "completed"),
        ("message", "completed"),
        ("function_call", "incomplete"),
    ]


@pytest.mark.parametrize("block", ["[" * 900 + "1x", '{"a":[' * 400 + "1x", '["' + "[" * 900 + "1x", "[[] ", '{"'])
def test_text_that_only_looks_like_json_is_compared_in_little_time(block: str) -> None:
    text = block * (90_000 // len(block))
    began = time.process_time()
    assert normal_text(text) == text.replace(" ", "")
    assert time.process_time() - began < 3.0


@pytest.mark.parametrize("role", ["tool", "assistant"])
def test_a_long_log_is_compared_in_no_time(role: str) -> None:
    began = time.process_time()
    normal_message({"role": role, "content": 'array[i] [1, 2] {"a": 1}\n' * 400_000})
    assert time.process_time() - began < 1.0


@pytest.mark.parametrize(
    ("text", "normal"),
    [
        ('[{"b": 1, "a": [2, 3]}, x', '[{"a":[2,3],"b":1},x'),
        ('[[1, "]"], "[2 \n', '[[1,"]"],"[2'),
        ('{"a": {"c": 1, "b": "\\"}"}, "d" [0x', '{"a":{"b":"\\"}","c":1},"d"[0x'),
    ],
)
def test_json_within_what_is_none_is_written_in_one_way(text: str, normal: str) -> None:
    assert normal_text(text) == normal
