"""Calls that failed on the server's side: they stand in the trace, and taint their episode unless they were made good."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import httpx
import pytest

from foundation.clock import SystemClock
from foundation.ids import RandomIds
from swarm.engine.echo.engine import EchoEngine
from swarm.engine.seam import Engine, EngineHealth, ReplicaHealth, RequestFailed, Sampled, SampledEvent, SampleRequest
from swarm.protocol.episodes import CallFailure, LedgerEntry, RecordedCall
from swarm.server.service import Service
from tests.fakes.ailing_engine import AilingEngine
from tests.swarm.server.gateway.conftest import Episode, Served

IMPATIENT_S = 0.4
ASK = [{"role": "user", "content": "Repeat hello"}]
DIALECTS: dict[str, dict[str, Any]] = {
    "chat/completions": {"messages": ASK},
    "completions": {"prompt": "Repeat hello"},
    "responses": {"input": "Repeat hello"},
    "messages": {"messages": ASK, "max_tokens": 16},
}
EVERY_WAY = [(path, stream) for path in DIALECTS for stream in (False, True)]


@pytest.fixture
def engine() -> AilingEngine:
    return AilingEngine()


@pytest.fixture
def ailing(engine: AilingEngine, serve: Callable[[Engine], AbstractContextManager[Served]]) -> Iterator[Served]:
    with serve(engine) as served:
        yield served


def ask(episode: Episode, path: str = "chat/completions", *, wait_s: float = 30.0, **fields: Any) -> httpx.Response:
    """One request of a client that waits so long, and does not try again."""
    headers = {"authorization": f"Bearer {episode.grant['api_key']}", **fields.pop("headers", {})}
    body = {"model": "policy", **DIALECTS[path], **fields}
    return httpx.post(f"{episode.grant['base_url']}/{path}", json=body, headers=headers, timeout=wait_s)


def gives_up(episode: Episode, path: str = "chat/completions", **fields: Any) -> None:
    with pytest.raises(httpx.TimeoutException):
        ask(episode, path, wait_s=IMPATIENT_S, **fields)


def failures(episode: Episode) -> list[CallFailure]:
    return [call.failure for call in episode.trace().calls if call.failure is not None]


def reasons(episode: Episode) -> list[str]:
    return [failure.reason for failure in failures(episode)]


def until(condition: Callable[[], object]) -> None:
    deadline = time.monotonic() + 20
    while not condition():
        assert time.monotonic() < deadline, "it never came true"


def until_failed(episode: Episode, calls: int = 1) -> None:
    until(lambda: len(reasons(episode)) == calls)


def is_dropped_as_tainted(episode: Episode) -> bool:
    entry = episode.trace().entry
    return (entry.state, entry.reason, entry.cause, entry.tainted) == ("dropped", "tainted", "server", True)


@pytest.mark.parametrize(("path", "stream"), EVERY_WAY)
def test_a_client_that_gives_up_while_the_engine_is_down_leaves_a_failed_call(
    ailing: Served, engine: AilingEngine, path: str, stream: bool
) -> None:
    episode = ailing.claim()
    assert ask(episode, path).status_code == 200
    engine.falls("down", reason="killed", failures=1)
    gives_up(episode, path, stream=stream)
    ended = episode.end().json()
    assert (ended["status"], ended["dropped"]) == ("pooled", "tainted")
    whole, failed = episode.trace().calls
    assert whole.failure is None
    assert failed.failure == CallFailure(cause="server", reason="engine_down", detail="no child is there")
    assert not failed.complete
    assert failed.sampled_ids == []
    assert is_dropped_as_tainted(episode)
    assert episode.trace().entry.reward == 1.0
    assert episode.end().json()["dropped"] == "tainted"


@pytest.mark.parametrize("path", DIALECTS)
def test_an_engine_that_failed_for_good_fails_calls_that_come_later(
    ailing: Served, engine: AilingEngine, path: str
) -> None:
    episode = ailing.claim()
    engine.falls("down", reason="crashed five times", failures=5, failed_for_good=True)
    assert [ask(episode, path, stream=stream).status_code for stream in (False, True)] == [503, 503]
    assert reasons(episode) == ["engine_down", "engine_down"]


@pytest.mark.parametrize(("path", "stream"), EVERY_WAY)
def test_a_fault_of_our_own_is_a_failed_call(ailing: Served, engine: AilingEngine, path: str, stream: bool) -> None:
    episode = ailing.claim()
    engine.falls("faulty")
    assert ask(episode, path, stream=stream).status_code == 500
    (failure,) = failures(episode)
    assert failure.detail == "RuntimeError: a bug"
    assert episode.end().json()["dropped"] == "tainted"


@pytest.mark.parametrize("path", DIALECTS)
def test_an_answer_that_breaks_off_in_the_middle_is_a_failed_call(
    ailing: Served, engine: AilingEngine, path: str
) -> None:
    episode = ailing.claim()
    engine.cut_after = 3
    assert ask(episode, path, stream=True).status_code == 200
    assert reasons(episode) == ["cut_off"]
    (call,) = episode.trace().calls
    assert call.sampled_ids
    assert episode.end().json()["dropped"] == "tainted"


@pytest.mark.parametrize("stream", [False, True])
def test_a_server_that_stops_cuts_calls_off_and_refuses_later_ones(
    ailing: Served, engine: AilingEngine, stream: bool
) -> None:
    episode = ailing.claim()
    engine.falls("hung")
    with ThreadPoolExecutor() as pool:
        answer = pool.submit(ask, episode, stream=stream)
        assert engine.asked.wait(20)
        ailing.stop_calls()
        assert answer.result(20).status_code == 503
    assert ask(episode, stream=stream).status_code == 503
    assert reasons(episode) == ["cut_off", "refused"]


@pytest.mark.parametrize(("path", "stream"), EVERY_WAY)
def test_calls_given_up_on_an_engine_that_is_then_found_hung_are_marked_afterwards(
    ailing: Served, engine: AilingEngine, path: str, stream: bool
) -> None:
    open_one, ended, despite = ailing.claim(), ailing.claim(), ailing.claim()
    healthy = time.time()
    engine.falls("hung")
    for episode in (open_one, ended, despite):
        gives_up(episode, path, stream=stream)
    assert "dropped" not in {key for key, value in ended.end().json().items() if value}
    assert not ended.trace().entry.tainted
    ailing.http.post(
        f"/swarm/v1/episodes/{despite.id}:end",
        json={"lease": despite.grant["lease"], "reward": 1.0, "despite": "it asked somebody else"},
    ).raise_for_status()
    until(lambda: [call.complete for call in open_one.trace().calls] == [False])
    engine.tell(EngineHealth(ready=False, hung_since=healthy, failures=1, reason="hangs"))
    until(lambda: ended.trace().entry.tainted and despite.trace().entry.tainted)
    for episode in (open_one, ended, despite):
        assert reasons(episode) == ["engine_hung"]
    assert is_dropped_as_tainted(ended)
    assert despite.trace().entry.state != "dropped"
    assert open_one.end().json()["dropped"] == "tainted"


def test_calls_given_up_before_the_engine_hung_are_no_failures(ailing: Served, engine: AilingEngine) -> None:
    episode, other = ailing.claim(), ailing.claim()
    engine.ailment = "hung"
    gives_up(episode)
    until(lambda: len(episode.trace().calls) == 1)
    engine.ailment = None
    assert ask(other).status_code == 200  # it lives
    engine.tell(EngineHealth(ready=False, hung_since=time.time(), failures=1, reason="hangs"))
    assert reasons(episode) == []
    assert episode.end().json()["dropped"] is None


@pytest.mark.parametrize("lives", [False, True])
def test_calls_given_up_on_an_engine_that_is_never_found_hung_since_the_server_is_restarted_are_marked_then(
    serve: Callable[[Engine], AbstractContextManager[Served]], engine: AilingEngine, tmp_path: Path, lives: bool
) -> None:
    with serve(engine) as served:
        episode, other = served.claim(), served.claim()
        engine.ailment = "hung"
        gives_up(episode)
        assert episode.end().json()["dropped"] is None
        if lives:
            engine.ailment = None
            assert ask(other).status_code == 200
    entry = asyncio.run(after_a_restart(tmp_path, episode.id))
    assert (entry.state, entry.tainted) == (("ended", False) if lives else ("dropped", True))


async def after_a_restart(state_dir: Path, episode_id: str) -> LedgerEntry:
    service = Service.open(state_dir / "pool", EchoEngine(model="echo").info, clock=SystemClock(), ids=RandomIds())
    try:
        return await service.entry(episode_id)
    finally:
        await service.close()


def test_a_token_of_one_replica_says_nothing_of_calls_given_up_on_another_that_hangs(
    ailing: Served, engine: AilingEngine
) -> None:
    episode, other = ailing.claim(), ailing.claim()
    healthy = time.time()
    engine.ailment = "hung"
    gives_up(episode)
    until(lambda: len(episode.trace().calls) == 1)
    engine.ailment = None
    assert ask(other).status_code == 200
    engine.tell(EngineHealth(ready=False, hung_since=healthy, failures=1, reason="a replica hangs"))
    assert reasons(episode) == ["engine_hung"]
    assert reasons(other) == []


@pytest.mark.parametrize("reason", ["engine_hung", "engine_down"])
def test_calls_given_up_while_one_replica_of_several_hung_or_crashed_may_have_met_it(
    ailing: Served, engine: AilingEngine, reason: str
) -> None:
    episode, other = ailing.claim(), ailing.claim()
    healthy = time.time() if reason == "engine_hung" else None
    well = ReplicaHealth(device="cuda:1", ready=True)
    engine.ailment = "hung"
    gives_up(episode)
    until(lambda: len(episode.trace().calls) == 1)
    engine.ailment = None
    assert ask(other).status_code == 200  # by the replica that is well
    ill = ReplicaHealth(device="cuda:2", ready=False, failures=1, hung_since=healthy, reason="it is away")
    engine.tell(EngineHealth(ready=True, failures=1, hung_since=healthy, replicas=(well, ill)))
    assert reasons(episode) == [reason]
    assert reasons(other) == []
    engine.ailment = "hung"
    gives_up(other)
    engine.tell(
        EngineHealth(ready=False, failures=2, inference_ready=True, replicas=(well, ill))
    )  # the trainer's crash
    assert "engine_down" not in reasons(other)


def test_a_call_given_up_before_the_last_token_did_not_meet_a_crash(ailing: Served, engine: AilingEngine) -> None:
    episode, other = ailing.claim(), ailing.claim()
    engine.ailment = "hung"
    gives_up(episode)
    until(lambda: len(episode.trace().calls) == 1)
    engine.ailment = None
    assert ask(other).status_code == 200
    engine.tell(EngineHealth(ready=False, failures=1, reason="ended by SIGKILL"))
    assert reasons(episode) == []


def test_a_crash_that_is_noticed_just_after_the_client_left_is_what_it_met(
    ailing: Served, engine: AilingEngine
) -> None:
    episode = ailing.claim()
    engine.falls("hung")
    gives_up(episode)
    until(lambda: len(episode.trace().calls) == 1)
    engine.tell(EngineHealth(ready=False, failures=1, reason="ended by SIGKILL"))
    assert reasons(episode) == ["engine_down"]


def test_a_client_that_leaves_a_healthy_engine_and_a_bad_request_are_no_failures(
    ailing: Served, engine: AilingEngine
) -> None:
    episode = ailing.claim()
    engine.falls("hung")
    gives_up(episode)
    until(lambda: len(episode.trace().calls) == 1)
    engine.ailment = None
    assert ask(episode, temperature="warm").status_code == 400
    assert ask(episode, messages=[{"role": "user", "content": "x " * 40_000}]).status_code == 400
    assert ask(episode).status_code == 200
    assert reasons(episode) == []
    assert episode.end().json()["dropped"] is None


def test_several_prompts_and_choices_leave_a_failed_record_for_each_prompt(
    ailing: Served, engine: AilingEngine
) -> None:
    episode = ailing.claim()
    engine.falls("down", failures=1)
    gives_up(episode, "completions", prompt=["one", "two"], n=3)
    episode.end()
    assert reasons(episode) == ["engine_down", "engine_down"]


def test_a_failure_that_a_retry_made_good_stands_in_the_trace_and_taints_nothing(
    ailing: Served, engine: AilingEngine
) -> None:
    for headers in ({"x-stainless-retry-count": "1"}, {"idempotency-key": "k"}, {}):
        episode = ailing.claim()
        engine.falls("down", failures=1)
        gives_up(episode, headers={"idempotency-key": "k"} if "idempotency-key" in headers else {})
        until_failed(episode)
        engine.recovers()
        assert ask(episode, headers=headers).status_code == 200
        assert episode.end().json()["dropped"] is None
        assert reasons(episode) == ["engine_down"]
        assert not episode.trace().entry.tainted


def test_only_an_answer_to_the_same_request_of_the_same_agent_makes_a_failure_good(
    ailing: Served, engine: AilingEngine
) -> None:
    def another_body(episode: Episode) -> None:
        ask(episode, temperature=0.5)

    def another_agent(episode: Episode) -> None:
        ask(episode, headers={"x-agent-name": "critic", "x-stainless-retry-count": "1"})

    def one_of_several_equal_ones(episode: Episode) -> None:
        for _ in range(2):
            ask(episode)

    for then in (another_body, another_agent, one_of_several_equal_ones):
        episode = ailing.claim()
        engine.falls("down", failures=1)
        gives_up(episode)
        until_failed(episode)
        engine.recovers()
        then(episode)
        assert episode.end().json()["dropped"] == "tainted", then.__name__


def test_failures_in_a_row_are_made_good_by_one_answer(ailing: Served, engine: AilingEngine) -> None:
    episode = ailing.claim()
    engine.falls("down", failures=1)
    gives_up(episode)
    until_failed(episode)
    gives_up(episode, headers={"x-stainless-retry-count": "1"})
    until_failed(episode, 2)
    engine.recovers()
    ask(episode, headers={"x-stainless-retry-count": "2"})
    assert episode.end().json()["dropped"] is None


def test_a_count_of_tokens_that_failed_taints_too_and_may_be_made_good(ailing: Served, engine: AilingEngine) -> None:
    def count(episode: Episode) -> int:
        headers = {"authorization": f"Bearer {episode.grant['api_key']}"}
        url = f"{episode.grant['base_url']}/messages/count_tokens"
        return httpx.post(url, json={"model": "policy", "messages": ASK}, headers=headers).status_code

    async def broken(*_: Any, **__: Any) -> list[int]:
        raise RuntimeError("no template")

    tainted, recovered = ailing.claim(), ailing.claim()
    render = engine.render
    engine.render = broken  # type: ignore[method-assign]
    assert [count(tainted), count(recovered)] == [500, 500]
    engine.render = render  # type: ignore[method-assign]
    assert count(recovered) == 200
    for episode in (tainted, recovered):
        assert ask(episode).status_code == 200
    assert tainted.end().json()["dropped"] == "tainted"
    assert recovered.end().json()["dropped"] is None
    assert reasons(recovered) == ["refused"]


def test_a_count_of_tokens_that_its_client_leaves_is_no_call(ailing: Served, engine: AilingEngine) -> None:
    left = threading.Event()

    async def endless(*_: Any, **__: Any) -> list[int]:
        try:
            await asyncio.Event().wait()
        finally:
            left.set()
        return []

    episode = ailing.claim(kind="eval")
    engine.render = endless  # type: ignore[method-assign]
    headers = {"authorization": f"Bearer {episode.grant['api_key']}"}
    url = f"{episode.grant['base_url']}/messages/count_tokens"
    with pytest.raises(httpx.ReadTimeout):
        httpx.post(url, json={"model": "policy", "messages": ASK}, headers=headers, timeout=1)
    assert left.wait(20)
    assert episode.end().json()["dropped"] == "no_calls"
    assert episode.trace().calls == []


def test_despite_puts_a_tainted_episode_into_the_pool(ailing: Served, engine: AilingEngine) -> None:
    episode = ailing.claim()
    assert ask(episode).status_code == 200
    engine.falls("down", failures=1)
    gives_up(episode)
    ended = ailing.http.post(
        f"/swarm/v1/episodes/{episode.id}:end",
        json={"lease": episode.grant["lease"], "reward": 1.0, "despite": "the agent asked again in other words"},
    ).json()
    assert (ended["status"], ended["dropped"]) == ("pooled", None)
    entry = episode.trace().entry
    assert (entry.state, entry.tainted, entry.despite) == ("ended", True, "the agent asked again in other words")
    assert list(episode.trace().untrained.values()) == ["tainted"]


def test_failed_calls_are_counted_by_reason(ailing: Served, engine: AilingEngine) -> None:
    episode = ailing.claim()
    engine.falls("faulty")
    ask(episode)
    metrics = ailing.http.get("/metrics").text
    assert 'swarm_failed_calls_total{reason="cut_off"} 1.0' in metrics
    assert 'swarm_failed_calls_total{reason="engine_hung"} 0.0' in metrics


def test_an_abort_after_a_failed_call_is_the_servers_unless_it_has_another_cause(
    ailing: Served, engine: AilingEngine
) -> None:
    stated = {None: "server", "rollout": "server", "client": "server", "network": "server", "grader": "grader"}
    stated |= {"limit": "server", "person": "person"}
    engine.falls("faulty")
    for cause, found in stated.items():
        episode = ailing.claim()
        ask(episode)
        abort = {"lease": episode.grant["lease"], "reason": "it failed", "cause": cause}
        entry = ailing.http.post(f"/swarm/v1/episodes/{episode.id}:abort", json=abort).raise_for_status().json()
        assert (entry["cause"], entry["tainted"]) == (found, True)


def test_failed_calls_are_not_continued(ailing: Served, engine: AilingEngine) -> None:
    """What was sampled of a failed answer never stands in a later prompt."""
    episode = ailing.claim()
    engine.cut_after = 3
    ask(episode, stream=True)
    engine.cut_after = None
    (broken,) = episode.trace().calls
    said = {"role": "assistant", "content": "hel"}
    assert ask(episode, messages=[*ASK, said, *ASK]).status_code == 200
    later: RecordedCall = episode.trace().calls[-1]
    assert later.parent_call_id is None
    assert broken.failure is not None


# -- calls on which a running engine fails ------------------------------------------------------------------------------


class RefusingEngine(EchoEngine):
    """It fails on every call, as vLLM does where a grammar leaves no token, and goes on running."""

    async def sample(self, request: SampleRequest) -> Sampled:
        raise RequestFailed("the inference engine failed: Internal server error")

    async def stream(self, request: SampleRequest) -> AsyncIterator[SampledEvent]:
        raise RequestFailed("the inference engine failed: Internal server error")
        yield


@pytest.mark.parametrize("stream", [False, True])
def test_a_call_on_which_a_running_engine_keeps_failing_is_not_tried_for_minutes(
    serve: Callable[[Engine], AbstractContextManager[Served]], monkeypatch: pytest.MonkeyPatch, stream: bool
) -> None:
    monkeypatch.setattr("swarm.server.gateway.failures.FAILING_S", 0.6)
    with serve(RefusingEngine(model="echo")) as served:
        blamed, plain = served.claim(), served.claim()
        forbidding = {"structured_outputs": {"choice": ["7"]}, "bad_words": ["7"]}
        refused = ask(blamed, stream=stream, **forbidding)
        assert refused.status_code == 400, refused.text
        assert "bad_words and structured_outputs may forbid every token" in refused.json()["error"]["message"]
        assert failures(blamed) == []
        assert ask(plain, stream=stream).status_code == 503
        assert [each.cause for each in failures(plain)] == ["server"]


class BreakingEngine(EchoEngine):
    """It breaks off each stream with an error, as vLLM does when its core dies."""

    async def stream(self, request: SampleRequest) -> AsyncIterator[SampledEvent]:
        async for event in super().stream(request):
            yield event
            if event.data is not None:
                raise RequestFailed("the inference engine failed: EngineCore died")


def test_a_crash_in_the_middle_of_a_restricted_call_is_not_blamed_on_it(
    serve: Callable[[Engine], AbstractContextManager[Served]],
) -> None:
    with serve(BreakingEngine(model="echo", tokens_per_s=50)) as served:
        episode = served.claim()
        ask(episode, stream=True, bad_words=["7"])
        assert [each.cause for each in failures(episode)] == ["server"]


@pytest.mark.parametrize("kind", ["json", "regex", "choice", "grammar"])
def test_fields_that_vllm_ignores_by_now_are_refused(ailing: Served, kind: str) -> None:
    refused = ask(ailing.claim(), **{f"guided_{kind}": "a"})
    assert refused.status_code == 400
    assert f'use structured_outputs: {{"{kind}": ...}}' in refused.json()["error"]["message"]
