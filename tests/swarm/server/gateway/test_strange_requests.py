"""Whatever is sent, the inference surface answers 2xx or 4xx in its dialect's form: nothing makes it fail."""

from __future__ import annotations

import copy
import random
import threading
import time
from typing import Any

import httpx
import pytest

from swarm.server.gateway.message_form import MOST_DEPTH
from tests.swarm.server.gateway.conftest import Served

SCHEMA = {"type": "object", "properties": {"word": {"type": "string"}}}
CALL = {"id": "c", "type": "function", "function": {"name": "say", "arguments": '{"word": "red"}'}}
ITEMS: list[dict[str, Any]] = [
    {"role": "user", "content": [{"type": "input_text", "text": "Repeat red"}]},
    {"type": "reasoning", "summary": [], "content": [{"type": "reasoning_text", "text": "hm"}]},
    {"type": "function_call", "call_id": "c", "name": "say", "arguments": '{"word": "red"}'},
    {"type": "function_call_output", "call_id": "c", "output": [{"type": "input_text", "text": "said"}]},
]
BLOCKS: list[dict[str, Any]] = [
    {"role": "user", "content": [{"type": "text", "text": "Repeat red"}]},
    {
        "role": "assistant",
        "content": [
            {"type": "thinking", "thinking": "hm", "signature": "s"},
            {"type": "tool_use", "id": "c", "name": "say", "input": {"word": "red"}},
        ],
    },
    {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "c", "content": "said"}]},
]
BODIES: dict[str, dict[str, Any]] = {
    "chat/completions": {
        "messages": [
            {"role": "user", "content": [{"type": "text", "text": "Repeat red"}]},
            {"role": "assistant", "content": None, "tool_calls": [CALL]},
            {"role": "tool", "tool_call_id": "c", "content": "said"},
        ],
        "tools": [{"type": "function", "function": {"name": "say", "parameters": SCHEMA}}],
        "tool_choice": {"type": "function", "function": {"name": "say"}},
        "response_format": {"type": "json_schema", "json_schema": {"name": "w", "schema": SCHEMA}},
        "stop": ["x"],
        "logprobs": True,
        "top_logprobs": 1,
        "stream_options": {"include_usage": True},
        "n": 2,
        "prompt": "Repeat green",
        "seed": 1,
        "temperature": 1.0,
        "top_p": 0.9,
    },
    "completions": {
        "prompt": ["Repeat red", "Repeat blue"],
        "messages": [{"role": "user", "content": "Repeat green"}],
        "tools": [{"type": "function", "function": {"name": "say", "parameters": SCHEMA}}],
        "tool_choice": {"type": "function", "function": {"name": "say"}},
        "n": 2,
        "logprobs": 1,
        "echo": False,
        "stop": "x",
        "seed": 1,
        "stream_options": {"include_usage": True},
        "response_format": {"type": "json_object"},
    },
    "responses": {
        "input": ITEMS,
        "instructions": "Be brief.",
        "tools": [
            {"type": "function", "name": "say", "parameters": SCHEMA},
            {"type": "custom", "name": "patch", "format": {"type": "text"}},
            {"type": "namespace", "name": "mail", "tools": [{"type": "function", "name": "send"}]},
        ],
        "tool_choice": {"type": "function", "name": "say"},
        "text": {"format": {"type": "json_schema", "name": "w", "schema": SCHEMA}},
        "include": ["message.output_text.logprobs"],
        "reasoning": {"effort": "low"},
        "top_logprobs": 1,
        "metadata": {"a": "b"},
    },
    "messages": {
        "messages": BLOCKS,
        "system": [{"type": "text", "text": "Be brief."}],
        "tools": [{"name": "say", "input_schema": SCHEMA}],
        "tool_choice": {"type": "tool", "name": "say"},
        "thinking": {"type": "enabled", "budget_tokens": 5},
        "output_config": {"format": {"type": "json_schema", "schema": SCHEMA}, "effort": "low"},
        "stop_sequences": ["x"],
        "max_tokens": 60,
    },
}
STRANGE: list[Any] = [
    None,
    0,
    -1,
    1.5,
    10**30,
    True,
    "",
    "x",
    "é\x00",
    [],
    [None],
    ["x"],
    [5],
    {},
    {"a": 1},
    [[]],
    [{}],
]


def places(value: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """Every place in a JSON value."""
    inside: list[tuple[Any, Any]] = []
    if isinstance(value, dict):
        inside = list(value.items())
    elif isinstance(value, list):
        inside = list(enumerate(value))
    return [place for key, each in inside for place in [(*path, key), *places(each, (*path, key))]]


def put(value: Any, place: tuple[Any, ...], strange: Any) -> Any:
    changed = copy.deepcopy(value)
    at = changed
    for key in place[:-1]:
        at = at[key]
    at[place[-1]] = strange
    return changed


@pytest.mark.parametrize("path", [*BODIES, "messages/count_tokens"])
def test_no_strange_value_anywhere_makes_the_server_fail(served: Served, path: str) -> None:
    draw = random.Random(1)
    body = BODIES[path.removesuffix("/count_tokens")]
    episode = served.claim()
    episode.raw(body | {"model": "policy"}, path=path).raise_for_status()
    for place in places(body):
        for strange in draw.sample(STRANGE, 3):
            changed = put(body, place, strange) | {"model": "policy", "stream": draw.random() < 0.3}
            answer = episode.raw(changed, path=path)
            assert answer.status_code in (200, 400, 404, 409), (answer.status_code, place, strange, answer.text)
            assert answer.status_code == 200 or answer.json()["error"]["message"]
            if answer.headers["content-type"].startswith("text/event-stream"):
                assert "engine_failed" not in answer.text
                assert "server_error" not in answer.text, (place, strange, answer.text[-500:])
        if len(episode.trace().calls) > 40:
            episode = served.claim()


def nested(depth: int) -> Any:
    """An object with so many levels."""
    value: Any = {}
    for _ in range(depth - 1):
        value = {"a": value}
    return value


DEEP = {
    "chat/completions": lambda value: {"metadata": value},
    "completions": lambda value: {"metadata": value},
    "responses": lambda value: {"metadata": value},
    "messages": lambda value: {"tools": [{"name": "say", "input_schema": value}]},
    "messages/count_tokens": lambda value: {"tools": [{"name": "say", "input_schema": value}]},
}


@pytest.mark.parametrize("path", DEEP)
def test_however_deep_a_request_is_nested_it_is_recorded_whole_or_refused(served: Served, path: str) -> None:
    body = BODIES[path.removesuffix("/count_tokens")] | {"model": "policy"}
    body = {name: value for name, value in body.items() if name not in ("tools", "tool_choice")}
    for depth in (100, *range(125, 130), 253, 254, 900):
        episode = served.claim()
        strange = DEEP[path](nested(depth))
        answer = episode.raw(body | strange, path=path)
        deep = depth + (3 if "tools" in strange else 1) > MOST_DEPTH
        assert answer.status_code == (400 if deep else 200), (depth, answer.text)
        assert not deep or "nested" in answer.json()["error"]["message"]
        episode.trace()
        assert episode.end().status_code == 200


def test_ids_that_no_record_can_hold_are_refused(served: Served) -> None:
    episode = served.claim()
    for prompt in ([2**31], [[1], [3_000_000_000]]):
        answer = episode.raw({"model": "policy", "prompt": prompt}, path="completions")
        assert (answer.status_code, answer.json()["error"]["param"]) == (400, "prompt")
    assert episode.end().status_code == 200


@pytest.mark.parametrize("number", [2**64, -(2**63) - 1, 10**30])
@pytest.mark.parametrize("path", BODIES)
def test_an_integer_of_more_than_64_bits_is_refused_wherever_it_stands(served: Served, path: str, number: int) -> None:
    episode = served.claim()
    answer = episode.raw(BODIES[path] | {"model": "policy", "metadata": {"n": [number]}}, path=path)
    assert (answer.status_code, "64-bit" in answer.json()["error"]["message"]) == (400, True)
    assert episode.raw(BODIES[path] | {"model": "policy", "metadata": {"n": [2**64 - 1]}}, path=path).status_code == 200


def test_a_request_of_many_small_values_lets_others_be_answered(served: Served) -> None:
    """Read at once, it would take seconds in which nobody else is answered."""
    episode, waited, done, began = served.claim(), [0.0], threading.Event(), time.monotonic()

    def ask_meanwhile() -> None:
        while not done.is_set():
            asked = time.monotonic()
            served.http.get("/health")
            waited.append(time.monotonic() - asked)

    other = threading.Thread(target=ask_meanwhile)
    other.start()
    try:
        body = b'{"model": "policy", "messages": [{"role": "user", "content": "hi"}], "metadata": [%s{}]}'
        headers = {"authorization": f"Bearer {episode.grant['api_key']}"}
        url = f"{episode.grant['base_url']}/chat/completions"
        answer = httpx.post(url, content=body % (b'{"a":1},' * 2_000_000), headers=headers, timeout=120)
    finally:
        done.set()
        other.join()
    assert answer.status_code == 200
    assert max(waited) < (time.monotonic() - began) / 3
