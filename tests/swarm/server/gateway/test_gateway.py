"""The gateway over HTTP with the echo engine: defaults, agents, retries, streams, disconnects, lost leases."""

from __future__ import annotations

import asyncio
import gzip
import json
import socket
import threading
from collections.abc import AsyncIterator, Callable, MutableMapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from swarm.engine.echo.engine import EchoEngine
from swarm.engine.seam import Dialect, Engine, EngineDown, EngineHealth, Sampled, SampledEvent, SampleRequest
from swarm.protocol.runspec import SamplingSpec
from swarm.server.gateway.request import AgentRequest
from swarm.server.gateway.sampling import recorded_sampling, with_defaults
from swarm.server.routes import wire
from tests.swarm.server.gateway.conftest import SPEC, Episode, Served, served_by
from tests.vllm_fixture import LoopThread

ASK: list[Any] = [{"role": "user", "content": "Repeat red"}]


def body(**fields: Any) -> dict[str, Any]:
    return {"model": "policy", "messages": ASK, **fields}


def events(answer: httpx.Response) -> list[dict[str, Any]]:
    lines = [line[6:] for line in answer.text.splitlines() if line.startswith("data: ")]
    assert lines[-1] == "[DONE]"
    return [json.loads(line) for line in lines[:-1]]


def text_of(chunks: list[dict[str, Any]]) -> str:
    return "".join(choice["delta"].get("content") or "" for chunk in chunks for choice in chunk["choices"])


def test_a_call_is_recorded_with_the_runs_defaults_and_the_episodes_seed(served: Served) -> None:
    episode = served.claim()
    answer = episode.raw(body()).raise_for_status().json()
    (call,) = episode.trace().calls
    assert call.sampling.temperature == SPEC["sampling"]["temperature"]  # type: ignore[index]
    assert call.sampling.max_tokens == 24
    assert call.sampling.seed is not None
    assert call.sampling.reproducible
    assert call.complete
    assert (call.index, call.agent, call.dialect) == (0, None, "chat.completions")
    assert len(call.sampled_ids) == len(call.logprobs) == answer["usage"]["completion_tokens"]
    assert call.versions[-1].end == len(call.sampled_ids)
    assert call.answer["choices"][0]["message"] == answer["choices"][0]["message"]
    assert call.request["messages"] == ASK


def test_an_engine_that_draws_seeded_calls_slowly_gets_a_seed_only_where_one_is_stated(
    serve: Callable[[Engine], AbstractContextManager[Served]],
) -> None:
    engine = EchoEngine(model="echo")
    engine.info = replace(engine.info, default_seeds=False)
    with serve(engine) as served:
        episode = served.claim()
        for stated in ({}, {"n": 2}, {"seed": 4}):
            episode.raw(body(**stated)).raise_for_status()
        assert [call.sampling.seed for call in episode.trace().calls] == [None, None, None, 4]


def test_what_the_client_states_wins_and_bent_sampling_is_marked(served: Served) -> None:
    episode = served.claim()
    episode.raw(body(temperature=0.5, max_completion_tokens=9, seed=4)).raise_for_status()
    forced = {"tool_choice": "required", "tools": [tool()]}
    for bent in ({"temperature": 0}, {"temperature": 0.005}, {"top_p": 0.9}, {"top_k": 5}, forced):
        episode.raw(body(**bent)).raise_for_status()
    stated, *bent_calls = episode.trace().calls
    assert (stated.sampling.temperature, stated.sampling.max_tokens, stated.sampling.seed) == (0.5, 9, 4)
    assert stated.sampling.reproducible
    assert [call.sampling.reproducible for call in bent_calls] == [False] * 5
    assert [call.mask is None for call in bent_calls] == [True, True, False, False, False]


def tool() -> dict[str, Any]:
    parameters = {"type": "object", "properties": {"word": {"type": "string"}}}
    return {"type": "function", "function": {"name": "say", "parameters": parameters}}


class StopTokenEngine(EchoEngine):
    """Stops at the tokens of the given strings, as vLLM does for `stop_token_ids`."""

    async def sample(self, request: SampleRequest) -> Sampled:
        sampled = await super().sample(request)
        sampled.answer["choices"][0]["stop_reason"] = sampled.choices[0].sampled_ids[-1]
        return sampled


@pytest.mark.parametrize("engine", [EchoEngine(model="echo"), StopTokenEngine(model="echo")], ids=["string", "token"])
def test_a_stop_of_one_token_that_the_client_was_not_shown_is_not_in_its_next_prompt(
    serve: Callable[[Engine], AbstractContextManager[Served]], engine: EchoEngine
) -> None:
    with serve(engine) as served:
        episode = served.claim()
        said = episode.raw(body(stop=["e"], stop_token_ids=[ord("e")])).raise_for_status().json()["choices"][0]
        assert "e" not in said["message"]["content"]
        episode.raw(body(messages=[*ASK, said["message"], *ASK])).raise_for_status()
        first, second = episode.trace().calls
    assert first.sampled_ids[-1] == ord("e")
    assert (second.parent_call_id, second.fork_cause) == (None, "stop_string_cut")


def test_agents_are_named_by_header_or_by_model(served: Served) -> None:
    episode = served.claim()
    episode.raw(body(), **{"X-Agent-Name": "judge"}).raise_for_status()
    episode.raw(body(model="echo@solver")).raise_for_status()
    episode.raw(body(model="policy@critic")).raise_for_status()
    assert [call.agent for call in episode.trace().calls] == ["judge", "solver", "critic"]


def test_an_agents_name_may_have_any_letters(served: Served) -> None:
    episode = served.claim()
    for name in ("prüfer 裁判".encode(), "prüfer".encode("latin-1")):
        auth = {b"authorization": f"Bearer {episode.grant['api_key']}".encode(), b"x-agent-name": name}
        url = f"{episode.grant['base_url']}/chat/completions"
        served.http.post(url, json=body(), headers=list(auth.items())).raise_for_status()
    assert [call.agent for call in episode.trace().calls] == ["prüfer 裁判", "prüfer"]


@pytest.mark.parametrize("path", ["chat/completions", "messages", "messages/count_tokens"])
def test_what_is_no_plain_json_is_refused_and_says_what_to_send(served: Served, path: str) -> None:
    episode = served.claim()
    streamed = episode.raw(body(stream="false"), path=path)
    assert (streamed.status_code, "stream must be" in streamed.json()["error"]["message"]) == (400, True)
    headers = {"Content-Encoding": "gzip", "authorization": f"Bearer {episode.grant['api_key']}"}
    packed = gzip.compress(json.dumps(body()).encode())
    answer = served.http.post(f"{episode.grant['base_url']}/{path}", content=packed, headers=headers)
    assert (answer.status_code, "Content-Encoding" in answer.json()["error"]["message"]) == (415, True)


def test_a_conflict_of_keys_is_the_clients_fault_in_messages_too(served: Served) -> None:
    episode = served.claim()
    for tokens in (3, 4):
        answer = episode.raw(body(max_tokens=tokens), path="messages", **{"Idempotency-Key": "k"})
    assert (answer.status_code, answer.json()["error"]["type"]) == (409, "invalid_request_error")


@pytest.mark.parametrize(
    "stated",
    [{}, {"temperature": 0}, {"temperature": 0.01}, {"top_p": 0.99}, {"top_k": 0}, {"top_k": 1}, {"max_tokens": 1}],
)
def test_a_run_says_so_when_calls_at_its_own_defaults_are_not_trained(stated: dict[str, Any]) -> None:
    defaults = SamplingSpec.model_validate(stated | {"train": "off"})
    assert recorded_sampling(with_defaults(body(), defaults, 0)).reproducible == (not defaults.untrained)
    for train in ("exact", "policy"):
        other = SamplingSpec.model_validate(stated | {"train": train})
        assert bool(other.untrained) == (other.temperature == 0)


@pytest.mark.parametrize(
    ("default", "asked", "sent"),
    [
        (None, {}, None),
        (False, {}, {"enable_thinking": False}),
        (False, {"chat_template_kwargs": {"enable_thinking": True}}, {"enable_thinking": True}),
        (True, {"chat_template_kwargs": {"date": "today"}}, {"enable_thinking": True, "date": "today"}),
    ],
)
def test_a_run_says_whether_models_think_where_a_call_does_not(
    default: bool | None, asked: dict[str, Any], sent: dict[str, Any] | None
) -> None:
    filled = with_defaults(body(**asked), SamplingSpec(thinking=default), 0)
    assert filled.get("chat_template_kwargs") == sent
    assert "chat_template_kwargs" not in with_defaults({"prompt": "2+3="}, SamplingSpec(thinking=default), 0)


def test_another_model_is_refused_and_counts_nothing(served: Served) -> None:
    episode = served.claim()
    with pytest.raises(openai.NotFoundError, match="does not exist") as unknown:
        episode.sdk.chat.completions.create(model="gpt-0", messages=ASK)
    with pytest.raises(openai.NotFoundError, match="does not exist") as unlisted:
        episode.sdk.models.retrieve("gpt-0")
    assert unknown.value.code == unlisted.value.code == "model_not_found"
    with pytest.raises(openai.BadRequestError, match="messages") as malformed:
        episode.sdk.chat.completions.create(model="policy", messages=[])
    assert malformed.value.code == "invalid_spec"
    for model in (5, 0, False, ["x"], {}):
        answer = episode.raw(body(model=model))
        assert (answer.status_code, answer.json()["error"]["param"]) == (400, "model")
    assert episode.trace().calls == []


REFUSALS = [
    pytest.param("chat/completions", body(guided_json={}), "guided_json has no effect", id="the gateway's"),
    pytest.param("chat/completions", body(max_tokens=10**6), "context holds", id="the engine's"),
    pytest.param("chat/completions", body(model="gpt-0"), "`gpt-0` does not exist", id="another model"),
    pytest.param("chat/completions", body(stream=5), "stream must be true or false", id="before it is read"),
    pytest.param("completions", {"model": "policy"}, "prompt", id="completions"),
    pytest.param("responses", {"model": "policy", "input": 5}, "input", id="responses"),
    pytest.param("messages", body(max_tokens=5, tools="x"), "tools", id="messages"),
    pytest.param("messages/count_tokens", body(tools="x"), "tools", id="count_tokens"),
]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(("path", "asked", "why"), REFUSALS)
def test_the_ledger_says_why_the_requests_of_an_episode_without_calls_were_refused(
    served: Served, path: str, asked: dict[str, Any], why: str, stream: bool
) -> None:
    episode = served.claim()
    answer = episode.raw({"stream": stream} | asked, path=path)
    assert answer.status_code in (400, 404)
    assert episode.end().json()["dropped"] == "no_calls"
    detail = episode.trace().entry.detail or ""
    assert f"its last request was refused: {answer.json()['error']['message']} ({answer.status_code})" in detail
    assert why in detail


def test_every_choice_is_a_record_of_its_own(served: Served) -> None:
    episode = served.claim()
    answer = episode.raw(body(n=3)).raise_for_status().json()
    records = episode.trace().calls
    assert [record.answer["choices"] for record in records] == [[choice] for choice in answer["choices"]]
    assert len({record.call_id for record in records}) == 3
    echo = {"role": "assistant", "content": answer["choices"][1]["message"]["content"]}
    episode.raw(body(messages=[*ASK, echo, *ASK])).raise_for_status()
    assert episode.trace().calls[-1].parent_call_id in {record.call_id for record in records}


def test_a_stream_gives_what_a_whole_answer_gives(served: Served) -> None:
    whole, stream = served.claim(), served.claim()
    answer = whole.raw(body(seed=5)).raise_for_status().json()
    chunks = events(stream.raw(body(seed=5, stream=True, stream_options={"include_usage": True})).raise_for_status())
    assert text_of(chunks) == answer["choices"][0]["message"]["content"]
    assert chunks[-1]["usage"] == answer["usage"]
    (one,), (other,) = whole.trace().calls, stream.trace().calls
    assert (one.sampled_ids, one.logprobs, one.finish_reason) == (
        other.sampled_ids,
        other.logprobs,
        other.finish_reason,
    )
    assert other.answer["choices"][0]["message"]["content"] == answer["choices"][0]["message"]["content"]


def test_an_episode_may_end_as_soon_as_the_finish_reason_is_seen(served: Served) -> None:
    episode = served.claim()
    with episode.sdk.chat.completions.create(model="policy", messages=ASK, stream=True) as chunks:
        for chunk in chunks:
            if chunk.choices and chunk.choices[0].finish_reason:
                episode.end().raise_for_status()
                break
    assert episode.trace().entry.calls == 1


def test_an_equal_key_gives_the_recorded_answer_and_another_body_is_a_conflict(served: Served) -> None:
    episode = served.claim()
    first = episode.raw(body(), **{"Idempotency-Key": "k"}).raise_for_status()
    again = episode.raw(body(), **{"Idempotency-Key": "k"}).raise_for_status()
    other = episode.raw(body(max_tokens=2), **{"Idempotency-Key": "k"})
    assert first.json() == again.json()
    assert other.status_code == 409
    assert other.json()["error"]["code"] == "idempotency_conflict"
    assert len(episode.trace().calls) == 1


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    "wrong",
    [{"messages": [{"role": "user", "content": "x" * 40_000}]}, {"temperature": -1}],
    ids=["too long", "impossible"],
)
def test_the_key_of_a_request_that_was_refused_is_free_for_the_corrected_one(
    served: Served, wrong: dict[str, Any], stream: bool
) -> None:
    episode = served.claim()
    key = {"Idempotency-Key": "k"}
    assert episode.raw(body(stream=stream) | wrong, **key).status_code == 400
    answer = episode.raw(body(), **key).raise_for_status().json()
    assert episode.raw(body(), **key).json() == answer
    assert episode.raw(body() | wrong, **key).status_code == 409
    assert len(episode.trace().calls) == 1


def test_no_agent_gets_what_was_answered_to_another(served: Served) -> None:
    episode = served.claim()
    key = {"Idempotency-Key": "k"}
    episode.raw(body(), **{"X-Agent-Name": "a"}, **key).raise_for_status()
    episode.raw(body(), **{"X-Agent-Name": "b", "x-stainless-retry-count": "1"}).raise_for_status()
    assert [call.agent for call in episode.trace().calls] == ["a", "b"]
    assert episode.raw(body(), **{"X-Agent-Name": "b"}, **key).json()["error"]["code"] == "idempotency_conflict"


def test_an_empty_key_is_none(served: Served) -> None:
    episode = served.claim()
    for tokens in (3, 4):
        episode.raw(body(max_tokens=tokens), **{"Idempotency-Key": ""}).raise_for_status()
    assert len(episode.trace().calls) == 2


@pytest.mark.parametrize("stream", [False, True])
def test_a_retry_of_a_request_that_never_arrived_gets_an_answer_of_its_own(served: Served, stream: bool) -> None:
    episode = served.claim()
    fields = body(stream=stream)
    answers = [episode.raw(fields).raise_for_status() for _ in range(2)]
    answers.append(episode.raw(fields, **{"x-stainless-retry-count": "1"}).raise_for_status())
    assert len(episode.trace().calls) == 3
    ids = {(events(answer)[0] if stream else answer.json())["id"] for answer in answers}
    assert len(ids) == 3


def test_an_answer_whose_client_is_gone_before_it_is_sent_is_given_again() -> None:
    """The server only learns of some disconnects while it sends."""

    async def sent(connected: bool) -> list[str]:
        heard: list[str] = []

        async def receive() -> dict[str, Any]:
            if connected:
                await asyncio.Event().wait()
            return {"type": "http.disconnect"}

        async def send(message: MutableMapping[str, Any]) -> None:
            heard.append(f"{message['type']} {message.get('more_body')}")

        answer = wire.WatchedAnswer({"id": 1}, lambda: heard.append("delivered"))
        await answer({"type": "http", "method": "POST", "path": "/", "headers": []}, receive, send)
        return heard

    parts = [f"http.response.{part}" for part in ("start None", "body True", "body False")]
    assert asyncio.run(sent(connected=False)) == parts
    assert asyncio.run(sent(connected=True)) == [*parts[:2], "delivered", parts[2]]


@pytest.mark.parametrize("stream", [False, True])
def test_a_marked_retry_gets_the_lost_answer_and_an_equal_body_a_new_one(
    served: Served, stream: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    episode = served.claim()
    fields = body(stream=stream)
    first = episode.raw(fields).raise_for_status()
    monkeypatch.setattr(AgentRequest, "delivered", lambda request: None)  # as where the connection broke
    lost = episode.raw(fields).raise_for_status()
    assert len(episode.trace().calls) == 2
    retried = episode.raw(fields, **{"x-stainless-retry-count": "1"}).raise_for_status()
    assert len(episode.trace().calls) == 2
    if stream:
        assert text_of(events(retried)) == text_of(events(lost))
        assert events(retried)[-1]["choices"][0]["finish_reason"] == "stop"
    else:
        assert retried.json() == lost.json()
        assert first.json()["id"] != lost.json()["id"]


def test_parallel_calls_of_an_episode_are_all_recorded(served: Served) -> None:
    episode = served.claim()
    with ThreadPoolExecutor(8) as pool:
        answers = list(pool.map(lambda _: episode.raw(body()).raise_for_status().json(), range(16)))
    calls = episode.trace().calls
    assert sorted(call.index for call in calls) == list(range(16))
    assert len({call.sampling.seed for call in calls}) == 16
    assert len(answers) == 16


def test_a_client_that_hangs_up_leaves_a_partial_record(
    serve: Callable[[Engine], AbstractContextManager[Served]],
) -> None:
    with serve(EchoEngine(model="echo", tokens_per_s=20)) as served:
        episode = served.claim()
        long = [{"role": "user", "content": "Repeat " + "x" * 200}]
        with episode.sdk.chat.completions.create(
            model="policy", messages=long, stream=True, max_tokens=150, timeout=20
        ) as chunks:
            for chunk in chunks:
                if chunk.choices[0].delta.content:
                    break
        call = until_recorded(episode)
        assert not call.complete
        assert call.finish_reason is None
        assert 0 < len(call.sampled_ids) == len(call.logprobs) < 150


@pytest.mark.parametrize("stream", [True, False])
def test_a_call_that_is_hung_up_on_just_before_the_end_leaves_a_partial_record(
    serve: Callable[[Engine], AbstractContextManager[Served]], stream: bool
) -> None:
    engine = StalledEngine(tokens=2)
    with serve(engine) as served:
        episode = served.claim()
        address, key = httpx.URL(episode.grant["base_url"]), episode.grant["api_key"]
        asked = json.dumps(body(stream=stream))
        head = f"POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\nAuthorization: Bearer {key}\r\n"
        with socket.create_connection((address.host, address.port)) as agent:
            agent.sendall(f"{head}Content-Length: {len(asked)}\r\n\r\n{asked}".encode())
            assert engine.stalled.wait(10)
        assert episode.end().json()["status"] == "pooled"
        entry, calls = episode.trace().entry, episode.trace().calls
        assert (entry.state, [call.complete for call in calls]) == ("ended", [False])
        assert bool(calls[0].sampled_ids) == stream


class HaltingEngine(EchoEngine):
    """Stops at the second token after the end of the first of several choices."""

    async def stream(self, request: SampleRequest) -> AsyncIterator[SampledEvent]:
        after = 0
        async for event in super().stream(request):
            yield event
            assert event.data is not None
            after += bool(after) or any(choice["finish_reason"] for choice in event.data["choices"])
            if after == 3:
                await asyncio.Event().wait()


def test_a_choice_that_had_ended_is_whole_though_another_was_broken_off(
    serve: Callable[[Engine], AbstractContextManager[Served]],
) -> None:
    with serve(HaltingEngine(model="echo")) as served:
        episode = served.claim()
        with episode.sdk.chat.completions.create(model="policy", messages=ASK, stream=True, n=2) as chunks:
            for chunk in chunks:
                if chunk.choices[0].index == 1 and chunk.choices[0].delta.content:
                    break
        until_recorded(episode)
        records = sorted(episode.trace().calls, key=lambda call: call.complete)
        assert [(call.complete, call.finish_reason) for call in records] == [(False, None), (True, "stop")]


class HalfFaultyEngine(EchoEngine):
    """Answers one prompt, and then has a fault at the next."""

    asked = 0

    async def sample(self, request: SampleRequest) -> Sampled:
        self.asked += 1
        if self.asked == 1:
            self.answered = asyncio.Event()
            sampled = await super().sample(request)
            self.answered.set()
            return sampled
        await self.answered.wait()
        raise LookupError("a fault")


def test_a_prompt_that_was_answered_is_not_whole_where_its_request_was_not_answered(
    serve: Callable[[Engine], AbstractContextManager[Served]],
) -> None:
    with serve(HalfFaultyEngine(model="echo")) as served:
        episode = served.claim()
        told = episode.raw({"model": "policy", "prompt": ["Repeat red", "Repeat blue"]}, path="completions")
        assert told.status_code == 500
        records = episode.trace().calls
        assert any(call.sampled_ids for call in records)
        assert not any(call.complete for call in records)


def until_recorded(episode: Episode) -> Any:
    for _ in range(200):
        if calls := episode.trace().calls:
            return calls[0]
    raise AssertionError("nothing was recorded")


def test_a_call_of_an_ended_episode_is_refused(served: Served) -> None:
    episode = served.claim()
    episode.raw(body()).raise_for_status()
    episode.end().raise_for_status()
    answer = episode.raw(body())
    assert answer.status_code == 403
    assert answer.json()["error"]["code"] == "lease_lost"


class StalledEngine(EchoEngine):
    """Samples `tokens` tokens of an answer, and no more."""

    def __init__(self, tokens: int) -> None:
        super().__init__(model="echo")
        self.tokens = tokens
        self.stalled = threading.Event()
        self.stopped = threading.Event()

    async def _stall(self) -> None:
        self.stalled.set()
        try:
            await asyncio.Event().wait()
        finally:
            self.stopped.set()

    async def sample(self, request: SampleRequest) -> Sampled:
        await self._stall()
        return await super().sample(request)

    async def stream(self, request: SampleRequest) -> AsyncIterator[SampledEvent]:
        async for number, event in aenumerate(super().stream(request)):
            if number > self.tokens:
                await self._stall()
            yield event


async def aenumerate(events: AsyncIterator[SampledEvent]) -> AsyncIterator[tuple[int, SampledEvent]]:
    number = 0
    async for event in events:
        yield number, event
        number += 1


@pytest.mark.parametrize("over", ["abort", "end", "expire"])
def test_a_stream_ends_at_once_when_its_episode_does(
    serve: Callable[[Engine], AbstractContextManager[Served]], over: str
) -> None:
    engine = StalledEngine(tokens=2)
    with serve(engine) as served:
        episode = served.claim(**({"max_call_s": 0.5} if over == "expire" else {}))
        close = {"abort": episode.abort, "end": episode.end, "expire": episode.trace}[over]
        with pytest.raises(openai.APIError, match="ended while") as told:
            at_the_first_token(episode, close)
        assert told.value.code == "lease_lost"
        assert engine.stopped.wait(10)
        assert [call.complete for call in episode.trace().calls] == ([] if over == "abort" else [False])


def at_the_first_token(episode: Episode, do: Callable[[], object]) -> None:
    ask: Any = [{"role": "user", "content": "Repeat " + "x" * 20}]
    with episode.sdk.chat.completions.create(model="policy", messages=ask, stream=True) as chunks:
        for chunk in chunks:
            if chunk.choices[0].delta.content:
                do()


def test_a_whole_answer_is_not_waited_for_when_its_episode_ends(
    serve: Callable[[Engine], AbstractContextManager[Served]],
) -> None:
    engine = StalledEngine(tokens=0)
    with serve(engine) as served:
        episode = served.claim(max_call_s=0.5)
        for stream in (False, True):
            answer = episode.raw(body(stream=stream))
            assert (answer.status_code, answer.json()["error"]["code"]) == (403, "lease_lost")
        assert engine.stopped.wait(10)


class CrashingEngine(EchoEngine):
    """Crashes at the first call, and is back a moment later."""

    def __init__(self) -> None:
        super().__init__(model="echo")
        self.crashes = 1
        self._heard: list[Callable[[EngineHealth], None]] = []

    def subscribe(self, on_health: Callable[[EngineHealth], None]) -> None:
        super().subscribe(on_health)
        self._heard.append(on_health)

    async def sample(self, request: SampleRequest) -> Sampled:
        if self.crashes:
            self.crashes -= 1
            raise EngineDown("crashed")
        return await super().sample(request)


def test_a_call_that_meets_a_crashed_engine_is_answered_when_it_is_back(
    serve: Callable[[Engine], AbstractContextManager[Served]],
) -> None:
    engine = CrashingEngine()
    with serve(engine) as served:
        episode = served.claim()
        episode.raw(body()).raise_for_status()
        assert engine.crashes == 0
        assert len(episode.trace().calls) == 1


class FaultyEngine(EchoEngine):
    """From the second call on it has a fault of its own, and none of EngineDown's."""

    asked = 0

    async def sample(self, request: SampleRequest) -> Sampled:
        self.asked += 1
        if self.asked > 1:
            raise LookupError("a fault")
        return await super().sample(request)

    def decode(self, ids: list[int]) -> str:
        if self.asked > 1:
            raise LookupError("a fault")
        return super().decode(ids)


def test_a_fault_of_the_servers_own_is_told_as_one_and_not_asked_for_again(
    serve: Callable[[Engine], AbstractContextManager[Served]],
) -> None:
    with serve(FaultyEngine(model="echo")) as served:
        episode = served.claim()
        episode.raw(body()).raise_for_status()
        told = episode.raw(body())
        assert (told.status_code, told.json()["error"]["code"]) == (500, "server_fault")
        assert told.headers["x-should-retry"] == "false"
        told = episode.raw(body(max_tokens=5), path="messages")
        assert (told.status_code, told.json()["error"]["type"]) == (500, "api_error")
        assert told.headers["x-should-retry"] == "false"
        told = served.http.get(f"/swarm/v1/episodes/{episode.id}/trace", params={"text": "true"})
        assert (told.status_code, told.json()["code"]) == (500, "server_fault")


class EngineWithoutTemplate(EchoEngine):
    """Is away for as many renders as `away` says."""

    away = 0

    async def render(self, dialect: Dialect, body: dict[str, Any], *, add_generation_prompt: bool = True) -> list[int]:
        if self.away:
            self.away -= 1
            raise EngineDown("restarting")
        return await super().render(dialect, body, add_generation_prompt=add_generation_prompt)


class ThinkingTemplate(EchoEngine):
    """Its template writes one token more for a prompt that asks for an answer without thoughts."""

    async def render(self, dialect: Dialect, body: dict[str, Any], *, add_generation_prompt: bool = True) -> list[int]:
        ids = await super().render(dialect, body, add_generation_prompt=add_generation_prompt)
        thinks = (body.get("chat_template_kwargs") or {}).get("enable_thinking", True)
        return ids if thinks or not add_generation_prompt else [*ids, ord(" ")]


def test_the_tokens_of_a_prompt_are_counted_under_the_runs_template_settings(tmp_path: Path) -> None:
    thread = LoopThread()
    spec = {**SPEC, "sampling": {"max_tokens": 24, "thinking": False}}
    with served_by(thread, ThinkingTemplate(model="echo"), tmp_path, spec) as served:
        episode = served.claim()
        said = episode.claude.messages.create(model="policy", max_tokens=24, messages=ASK)
        counted = episode.claude.messages.count_tokens(model="policy", messages=ASK)
        assert counted.input_tokens == said.usage.input_tokens
    thread.close()


@pytest.mark.parametrize("stream", [False, True])
def test_a_second_turn_that_meets_a_crashed_engine_is_answered_when_it_is_back(
    serve: Callable[[Engine], AbstractContextManager[Served]], stream: bool
) -> None:
    engine = EngineWithoutTemplate(model="echo")
    with serve(engine) as served:
        episode = served.claim()
        said = episode.raw(body()).raise_for_status().json()["choices"][0]["message"]
        engine.away = 2
        again = [*ASK, said, {"role": "user", "content": "Repeat blue"}]
        episode.raw(body(messages=again, stream=stream)).raise_for_status()
        first, second = episode.trace().calls
        assert engine.away == 0
        assert second.parent_call_id == first.call_id


def test_the_tokens_of_a_prompt_are_counted_when_a_crashed_engine_is_back(
    serve: Callable[[Engine], AbstractContextManager[Served]],
) -> None:
    engine = EngineWithoutTemplate(model="echo")
    with serve(engine) as served:
        episode = served.claim()
        engine.away = 1
        assert episode.claude.messages.count_tokens(model="policy", messages=ASK).input_tokens > 0
