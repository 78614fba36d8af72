"""The client of one server: typed refusals, retries, keys, episodes that end or abort, and what importing it costs."""

from __future__ import annotations

import asyncio
from typing import Any

import httpx
import pytest

from foundation.clock import ManualClock
from swarm.client import (
    Episode,
    EpisodeUnfinished,
    InvalidSpec,
    LeaseLost,
    NotASwarmServer,
    NotRolling,
    OverLimit,
    Patience,
    RunSpec,
    ServerUnreachable,
    SwarmClient,
    Task,
)
from swarm.protocol.episodes import EpisodeClaim
from swarm.protocol.errors import ErrorCode, Refusal
from tests.cpu_time import runs_within
from tests.fakes import swarm_stub
from tests.fakes.swarm_stub import RUN, SwarmStub

pytestmark = pytest.mark.anyio


class RushedClock(ManualClock):
    """Sleeping takes no time, and is remembered."""

    def __init__(self) -> None:
        super().__init__()
        self.slept: list[float] = []

    async def sleep(self, seconds: float) -> None:
        self.slept.append(seconds)
        self.advance(seconds)
        await asyncio.sleep(0)


class PatientClock(ManualClock):
    """For renewals: sleepers wake when a test advances it."""


def client(stub: SwarmStub, *, clock: ManualClock | None = None, patience: Patience | None = None) -> SwarmClient:
    return stub.client(clock=clock or RushedClock(), patience=patience)


def claim(**fields: object) -> EpisodeClaim:
    return EpisodeClaim.model_validate({"run_id": RUN, "client_id": "c-1", "task_id": "t", **fields})


# -- refusals and retries ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("code", [ErrorCode.NOT_ROLLING, ErrorCode.DRAINING, ErrorCode.MIX_FULL])
async def test_a_claim_is_tried_again_when_the_code_says_later_and_waits_as_long_as_it_says(code: ErrorCode) -> None:
    stub = SwarmStub(before=[(":claim", Refusal(code, "the text says: lease_lost, give up", retry_after_s=7.0))])
    clock = RushedClock()
    async with client(stub, clock=clock) as swarm:
        grant = await swarm.claim(claim())
    assert grant.episode_id == "ep-0"
    (pause,) = clock.slept
    assert 0.75 * 7 <= pause <= 1.25 * 7


async def test_patience_with_a_server_that_says_later_ends_with_its_own_refusal() -> None:
    stub = SwarmStub(before=[(":claim", Refusal(ErrorCode.NOT_ROLLING, "booting", retry_after_s=4.0))] * 10)
    async with client(stub, patience=Patience(later_s=10.0)) as swarm:
        with pytest.raises(NotRolling) as caught:
            await swarm.claim(claim())
    assert caught.value.retry_after_s == 4.0
    assert 2 <= len(stub.requests) <= 5


@pytest.mark.parametrize(
    "code", sorted(set(ErrorCode) - {ErrorCode.NOT_ROLLING, ErrorCode.DRAINING, ErrorCode.MIX_FULL})
)
async def test_every_other_code_is_raised_at_once_as_its_own_type(code: ErrorCode) -> None:
    stub = SwarmStub(before=[(":claim", Refusal(code, "no", run_id="r"))])
    async with client(stub) as swarm:
        with pytest.raises(Refusal) as caught:
            await swarm.claim(claim())
    assert type(caught.value).__name__ == code.title().replace("_", "")
    assert (caught.value.code, caught.value.fields) == (code, {"run_id": "r"})
    assert len(stub.requests) == 1


async def test_a_claim_whose_answer_was_lost_is_repeated_with_its_key_and_finds_the_same_episode() -> None:
    stub = SwarmStub(lose=[":claim"])
    async with client(stub) as swarm:
        grant = await swarm.claim(claim())
    assert grant.episode_id == "ep-0"
    assert len(stub.episodes) == 1
    first, again = (body["idempotency_key"] for _, _, body in stub.requests)
    assert first == again is not None


async def test_an_end_whose_answer_was_lost_is_repeated_and_stored_once() -> None:
    stub = SwarmStub(lose=[":end"])
    async with client(stub) as swarm:
        async with swarm.episode(task_id="t") as episode:
            episode.end(reward=1.0)
        assert episode.receipt is not None
        assert episode.receipt.status == "already_ended"
    assert stub.by_state() == {"ended": 1}


async def test_a_server_that_is_away_is_waited_for_with_growing_pauses() -> None:
    away = httpx.ConnectError("refused")
    stub = SwarmStub(before=[("/status", away)] * 4)
    clock = RushedClock()
    async with client(stub, clock=clock) as swarm:
        await swarm.status()
    assert len(clock.slept) == 4
    assert clock.slept[-1] > 3 * clock.slept[0]


async def test_a_server_that_stays_away_is_an_error_that_says_what_to_do() -> None:
    stub = SwarmStub(before=[("/status", httpx.ConnectError("refused"))] * 1000)
    clock = RushedClock()
    async with client(stub, clock=clock, patience=Patience(connect_s=20.0)) as swarm:
        with pytest.raises(ServerUnreachable, match="swarm serve"):
            await swarm.status()
    assert sum(clock.slept) == pytest.approx(20.0, abs=0.01)  # and not a pause longer


async def test_patience_with_silence_begins_when_the_server_was_last_heard_of() -> None:
    later = (":claim", Refusal(ErrorCode.NOT_ROLLING, "training", retry_after_s=4.0))
    stub = SwarmStub(before=[*[later] * 10, (":claim", httpx.ReadError("reset")), later])
    async with client(stub, patience=Patience(connect_s=20.0)) as swarm:
        grant = await swarm.claim(claim())
    assert grant.episode_id == "ep-0"


async def test_patience_with_a_server_that_says_later_begins_when_it_first_says_so() -> None:
    away, later = httpx.ConnectError("refused"), Refusal(ErrorCode.NOT_ROLLING, "booting", retry_after_s=4.0)
    stub = SwarmStub(before=[*[(":claim", away)] * 20, *[(":claim", later)] * 2])
    async with client(stub, patience=Patience(connect_s=1_000.0, later_s=30.0)) as swarm:
        grant = await swarm.claim(claim())
    assert grant.episode_id == "ep-0"


async def test_a_patch_that_is_no_json_is_refused_before_anything_is_sent() -> None:
    stub = SwarmStub()
    async with client(stub) as swarm:
        for learning_rate in (float("nan"), object()):
            with pytest.raises(InvalidSpec, match="cannot be sent as JSON"):
                await swarm.patch_run(RUN, {"optimizer": {"learning_rate": learning_rate}})
    assert stub.requests == []


async def test_a_patch_whose_answer_was_lost_is_not_sent_twice() -> None:
    stub = SwarmStub(lose=["/runs/"])
    async with client(stub) as swarm:
        with pytest.raises(ServerUnreachable):
            await swarm.patch_run(RUN, {"max_staleness": 0}, config_version=1)
    assert [method for method, _, _ in stub.requests] == ["PATCH"]


async def test_an_answer_of_something_else_is_not_taken_for_a_server() -> None:
    transport = httpx.MockTransport(lambda _: httpx.Response(404, text="<html>"))
    async with SwarmClient("http://elsewhere", transport=transport) as swarm:
        with pytest.raises(NotASwarmServer, match="404"):
            await swarm.status()


async def test_an_error_of_a_proxy_is_waited_out_where_a_server_has_answered_before() -> None:
    stub, failing = SwarmStub(), [500, 599, 200, 500, 500]

    async def proxied(request: httpx.Request) -> httpx.Response:
        status = failing.pop() if failing else 200
        return httpx.Response(status, text="oops") if status != 200 else await stub._serve(request)

    transport = httpx.MockTransport(proxied)
    async with SwarmClient("http://proxied", transport=transport, clock=RushedClock()) as swarm:
        for _ in range(2):
            with pytest.raises(NotASwarmServer, match="HTTP 500"):
                await swarm.status()
        await swarm.status()
        await swarm.status()
    assert failing == []
    assert len(stub.paths("/status")) == 2


async def test_a_web_page_is_not_taken_for_a_server() -> None:
    transport = httpx.MockTransport(lambda _: httpx.Response(200, html="<h1>Welcome</h1>"))
    async with SwarmClient("http://elsewhere", transport=transport) as swarm:
        for asked in (swarm.status(), swarm.tasks(), swarm.renew("ep-0", "swl_1")):
            with pytest.raises(NotASwarmServer, match="is this a swarm server"):
                await asked


async def test_an_id_that_no_url_can_hold_is_refused() -> None:
    async with SwarmStub().client() as swarm:
        for asked in (swarm.run("run-1\n"), swarm.tasks(client_id="\udcff")):
            with pytest.raises(InvalidSpec, match="is not a valid request path"):
                await asked


@pytest.mark.parametrize("url", ["127.0.0.1:8642", "ftp://host", "http://", "http://host:port", "http://host:70000"])
async def test_what_is_no_url_is_refused_before_anything_is_sent(url: str) -> None:
    with pytest.raises(NotASwarmServer, match="http://"):
        SwarmClient(url)


async def test_the_token_travels_as_a_bearer_and_nowhere_else() -> None:
    seen: list[httpx.Request] = []

    def answer(request: httpx.Request) -> httpx.Response:
        seen.append(request)
        return httpx.Response(500, text="")

    async with SwarmClient("http://x", "swt_secret", transport=httpx.MockTransport(answer)) as swarm:
        with pytest.raises(NotASwarmServer) as caught:
            await swarm.status()
    assert seen[0].headers["authorization"] == "Bearer swt_secret"
    assert "swt_secret" not in f"{caught.value} {seen[0].url}"


async def test_a_ledger_is_read_page_after_page() -> None:
    stub = SwarmStub(page_size=2)
    async with client(stub) as swarm:
        for number in range(5):
            async with swarm.episode(task_id=f"t-{number}", run_id=RUN) as episode:
                episode.end(reward=0.0)
        assert [entry.task_id async for entry in swarm.ledger()] == [f"t-{number}" for number in range(5)]
    assert len(stub.paths("/ledger")) == 3


async def test_starting_a_run_answers_with_its_report() -> None:
    async with client(SwarmStub()) as swarm:
        run = await swarm.start_run(RunSpec(), idempotency_key="k")
    assert (run.run_id, run.status) == (RUN, "running")


# -- episodes ---------------------------------------------------------------------------------------------------------


async def test_a_result_that_was_handed_in_without_await_is_stored_when_the_block_is_left() -> None:
    stub = SwarmStub()
    async with client(stub) as swarm:
        async with swarm.episode(task_id="t-17") as episode:
            assert (episode.base_url, episode.api_key) == ("http://stub/v1", "swk_ep-0")
            episode.end(reward=0.5, metrics={"turns": 3})
            assert stub.paths(":end") == []
        assert episode.receipt is not None
        assert episode.receipt.status == "pooled"


async def test_an_awaited_end_is_stored_at_once_and_only_once() -> None:
    stub = SwarmStub()
    async with client(stub) as swarm:
        async with swarm.episode(task_id="t") as episode:
            receipt = await episode.end(reward=1.0)
            assert receipt.status == "pooled"
        assert episode.receipt == receipt
    assert len(stub.paths(":end")) == 1


async def test_an_exception_aborts_the_episode_with_its_type_and_message_but_no_key_of_ours() -> None:
    stub = SwarmStub()
    async with client(stub) as swarm:
        with pytest.raises(RuntimeError):  # noqa: PT012 - the block is the point
            async with swarm.episode(task_id="t") as episode:
                episode.end(reward=1.0)
                raise RuntimeError(f"boom with {episode.api_key}")
    assert stub.episodes["ep-0"].detail == "RuntimeError: boom with [redacted]"
    assert stub.paths(":end") == []


async def test_a_block_that_is_left_without_a_reward_is_no_success() -> None:
    stub = SwarmStub()
    async with client(stub) as swarm:
        with pytest.raises(EpisodeUnfinished):
            async with swarm.episode(task_id="t"):
                pass
    assert stub.by_state() == {"aborted": 1}


async def test_a_cancelled_block_aborts_its_episode() -> None:
    stub, inside = SwarmStub(), asyncio.Event()

    async def hold(swarm: SwarmClient) -> None:
        async with swarm.episode(task_id="t"):
            inside.set()
            await asyncio.Event().wait()

    async with client(stub, clock=PatientClock()) as swarm:
        holding = asyncio.create_task(hold(swarm))
        await inside.wait()
        holding.cancel()
        with pytest.raises(asyncio.CancelledError):
            await holding
    assert stub.by_state() == {"aborted": 1}


@pytest.mark.parametrize(
    ("path", "becomes"),
    [(":claim", "aborted"), (":end", "ended"), (":abort", "aborted")],
    ids=["claim", "end", "abort"],
)
async def test_a_client_that_is_cancelled_leaves_no_lease_behind(path: str, becomes: str) -> None:
    arrived = asyncio.Event()
    stub = SwarmStub(hold=(path, arrived))

    async def play(swarm: SwarmClient) -> None:
        async with swarm.episode(task_id="t") as episode:
            if path == ":abort":
                episode.abort("no use")
            else:
                episode.end(reward=1.0)

    async with client(stub, clock=PatientClock()) as swarm:
        playing = asyncio.create_task(play(swarm))
        await settle()
        assert len(stub.paths(path)) == 1
        playing.cancel()
        await settle()
        arrived.set()
        with pytest.raises(asyncio.CancelledError):
            await playing
    assert stub.by_state() == {becomes: 1}
    assert (len(stub.paths(":end")), len(stub.paths(":abort"))) == ((1, 0) if path == ":end" else (0, 1))


async def test_an_abort_that_fails_does_not_hide_why_the_block_was_left() -> None:
    stub = SwarmStub(before=[(":abort", Refusal(ErrorCode.ENGINE_FAILED, "down"))])
    async with client(stub) as swarm:
        with pytest.raises(ZeroDivisionError):
            async with swarm.episode(task_id="t"):
                raise ZeroDivisionError


async def test_a_reward_under_a_lost_lease_is_refused_aloud() -> None:
    stub = SwarmStub()
    async with client(stub) as swarm:
        with pytest.raises(LeaseLost):  # noqa: PT012 - the block is the point
            async with swarm.episode(task_id="t") as episode:
                stub.episodes["ep-0"].state = "dropped"
                episode.end(reward=1.0)
        assert episode.receipt is None


async def test_a_lease_is_renewed_while_its_block_is_alive_and_not_after() -> None:
    stub, clock = SwarmStub(), PatientClock()
    async with client(stub, clock=clock) as swarm:
        async with swarm.episode(task_id="t", idle_limit_s=90) as episode:
            for _ in range(3):
                await settle()
                clock.advance(30)
            await settle()
            assert len(stub.paths(":renew")) == 3
            episode.end(reward=0.0)
        clock.advance(300)
        await settle()
    assert len(stub.paths(":renew")) == 3


async def test_a_client_asks_just_after_its_episode_ran_out_of_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not at its next usual renewal: until then a rollout that hangs would keep its slot from the next attempt."""
    stub, clock = SwarmStub(), PatientClock()
    usual = swarm_stub._grant
    monkeypatch.setattr(swarm_stub, "_grant", lambda episode: {**usual(episode), "expires_at": clock.now() + 10})
    async with client(stub, clock=clock) as swarm, swarm.episode(task_id="t", max_episode_s=10) as episode:
        await settle()
        clock.advance(10)
        await settle()
        assert stub.paths(":renew") == []
        clock.advance(1)
        await settle()
        assert len(stub.paths(":renew")) == 1
        episode.end(reward=0.0)


async def test_an_episode_learns_that_its_lease_is_lost() -> None:
    stub, clock = SwarmStub(), PatientClock()
    async with client(stub, clock=clock) as swarm:
        with pytest.raises(LeaseLost):  # noqa: PT012 - the block is the point
            async with swarm.episode(task_id="t", idle_limit_s=90) as episode:
                await settle()
                stub.episodes["ep-0"].state = "dropped"
                clock.advance(30)
                await episode.lost.wait()
                episode.end(reward=0.0)


class SlowToStop(httpx.AsyncBaseTransport):
    """A renewal that takes its time to stop when it is cancelled."""

    def __init__(self, stub: SwarmStub) -> None:
        self.stub = stub
        self.renewing, self.stopping, self.stopped = asyncio.Event(), asyncio.Event(), asyncio.Event()

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        if not request.url.path.endswith(":renew"):
            return await self.stub.transport().handle_async_request(request)
        self.renewing.set()
        try:
            await asyncio.Event().wait()
        finally:
            self.stopping.set()
            await self.stopped.wait()
        raise AssertionError("it is never answered")


async def test_whoever_is_cancelled_while_a_renewal_stops_is_cancelled() -> None:
    clock, slow = PatientClock(), SlowToStop(SwarmStub())

    async def play(swarm: SwarmClient) -> None:
        async with swarm.episode(task_id="t", idle_limit_s=90) as episode:
            await settle()
            clock.advance(30)
            await slow.renewing.wait()
            await episode.end(reward=1.0)

    async with SwarmClient("http://stub", transport=slow, clock=clock) as swarm:
        playing = asyncio.create_task(play(swarm))
        await slow.stopping.wait()
        playing.cancel()
        await settle()
        slow.stopped.set()
        with pytest.raises(asyncio.CancelledError):
            await playing


@pytest.mark.parametrize(("wanted", "said"), [({"tsk_id": "t"}, "task_id"), ({"state": "over"}, "state")])
async def test_a_filter_that_is_none_is_refused_before_anything_is_sent(wanted: Any, said: str) -> None:
    stub = SwarmStub()
    async with client(stub) as swarm:
        with pytest.raises(InvalidSpec, match=said):
            await swarm.summary(**wanted)
    assert stub.requests == []


@pytest.mark.parametrize(
    ("wrong", "nearest"),
    [
        ({"idle_limit": 5.0}, ("idle_limit_s",)),
        ({"samplng": {}}, ("sampling",)),
        ({"kind": "evl"}, ("eval",)),
        ({"idle_limit_s": -1.0}, ()),
        ({"concurency": 3}, ("concurrency",)),
    ],
)
async def test_a_wrong_keyword_is_refused_before_anything_is_sent_with_the_nearest_name(
    wrong: Any, nearest: tuple[str, ...]
) -> None:
    stub = SwarmStub()
    async with client(stub) as swarm:
        with pytest.raises(InvalidSpec) as refused:
            await swarm.run_tasks([], rewarded, run_id=RUN, **wrong)
        assert refused.value.nearest == nearest
        if "concurency" not in wrong:
            with pytest.raises(InvalidSpec) as refused:
                swarm.episode(task_id="t", **wrong)
            assert refused.value.nearest == nearest
    assert stub.requests == []


async def rewarded(episode: Episode, task: Task) -> float:
    return 1.0


async def settle() -> None:
    """Let everything that can run, run."""
    for _ in range(20):
        await asyncio.sleep(0)


async def test_a_run_that_is_over_refuses_train_claims_with_over_limit() -> None:
    async with client(SwarmStub(train_limit=0)) as swarm:
        with pytest.raises(OverLimit):
            await swarm.claim(claim())


# -- weight -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("module", ["swarm.client", "swarm.client.sync", "swarm.client.trial"])
def test_a_client_process_starts_in_under_a_second_and_loads_nothing_heavy(module: str) -> None:
    heavy = ("torch", "vllm", "transformers", "fastapi", "starlette", "openai", "numpy", "langgraph", "sqlalchemy")
    runs_within(1.0, f"import {module}", forbidden=heavy)
