"""Who lost an attempt, by the error that ended it: whatever the agent's library is, and however deep the error is wrapped."""

from __future__ import annotations

import asyncio
import math
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from typing import Any

import httpx
import pytest

from foundation.clock import ManualClock
from swarm.client import (
    Cause,
    Episode,
    EpisodeUnfinished,
    GraderFailed,
    Outcome,
    SwarmClient,
    Task,
    grading,
    sync,
    team,
)
from swarm.client.errors import EngineFailed, InvalidSpec, LeaseLost, NoReward, ServerUnreachable, TeamOver
from swarm.client.join import PersonLeft, TooLate
from swarm.client.losses import cause_of
from swarm.protocol.errors import ErrorCode
from tests.fakes.swarm_stub import SwarmStub

pytestmark = pytest.mark.anyio

OURS = "http://127.0.0.1:8642"
ADDRESSES = (f"{OURS}/v1", OURS)
CALL = httpx.Request("POST", f"{OURS}/v1/chat/completions")
ELSEWHERE = httpx.Request("POST", "http://127.0.0.1:9000/v1/chat/completions")


@dataclass
class LikeOpenAi(Exception):
    """openai and anthropic: the httpx request, and for statuses the response too."""

    request: httpx.Request
    response: httpx.Response | None = None
    status_code: int | None = None


@dataclass
class Prepared:
    """As requests has it: the url is text."""

    url: str


@dataclass
class LikeRequests(OSError):
    request: Prepared
    response: Any = None


@dataclass
class LikeAiohttp(OSError):
    host: str
    port: int
    ssl: bool = False


@dataclass
class LikeUrllib(OSError):
    url: str
    code: int
    headers: dict[str, str] = field(default_factory=dict)


def status_error(request: httpx.Request, status: int) -> httpx.HTTPStatusError:
    return httpx.HTTPStatusError("no", request=request, response=httpx.Response(status, request=request))


def wrapped(error: Exception) -> Exception:
    """As frameworks do it: another error, raised while the first is handled, which it hides."""
    try:
        try:
            raise error
        except (httpx.HTTPError, GraderFailed):
            raise RuntimeError("the agent's framework failed") from None
    except RuntimeError as outer:
        return outer


@pytest.mark.parametrize(
    ("error", "cause"),
    [
        (httpx.ConnectError("refused", request=CALL), Cause.NETWORK),
        (httpx.ReadError("reset", request=CALL), Cause.NETWORK),
        (httpx.ConnectTimeout("nobody there", request=CALL), Cause.NETWORK),
        (httpx.ReadTimeout("slow", request=CALL), Cause.LIMIT),
        (wrapped(httpx.ReadTimeout("slow", request=CALL)), Cause.LIMIT),
        (httpx.ReadTimeout("slow", request=ELSEWHERE), Cause.ROLLOUT),
        (httpx.PoolTimeout("all taken", request=CALL), Cause.LIMIT),
        (LikeOpenAi(httpx.Request("POST", f"{OURS.replace('http', 'https')}/v1/completions")), Cause.ROLLOUT),
        (wrapped(httpx.ConnectError("refused", request=CALL)), Cause.NETWORK),
        (ExceptionGroup("both", [ValueError(), httpx.ReadError("reset", request=CALL)]), Cause.NETWORK),
        (LikeOpenAi(CALL), Cause.NETWORK),
        (LikeRequests(Prepared(f"{OURS}/v1/completions")), Cause.NETWORK),
        (LikeRequests(Prepared("http://localhost:8642/v1/completions")), Cause.NETWORK),
        (LikeAiohttp("127.0.0.1", 8642), Cause.NETWORK),
        (ServerUnreachable("nobody there"), Cause.NETWORK),
        (status_error(CALL, 503), Cause.SERVER),
        (LikeOpenAi(CALL, httpx.Response(500), 500), Cause.SERVER),
        (LikeOpenAi(CALL, None, 502), Cause.SERVER),
        (LikeUrllib(f"{OURS}/v1/completions", 503), Cause.SERVER),
        (EngineFailed(ErrorCode.ENGINE_FAILED, "it failed"), Cause.SERVER),
        (TeamOver(ErrorCode.OVER_LIMIT, "over"), Cause.SERVER),
        (status_error(CALL, 400), Cause.ROLLOUT),
        (LikeOpenAi(CALL, httpx.Response(200), 200), Cause.ROLLOUT),
        (httpx.ConnectError("refused", request=ELSEWHERE), Cause.ROLLOUT),
        (status_error(ELSEWHERE, 503), Cause.ROLLOUT),
        (LikeAiohttp("127.0.0.1", 9000), Cause.ROLLOUT),
        (httpx.ConnectError("of no request"), Cause.ROLLOUT),
        (httpx.UnsupportedProtocol("ftp", request=CALL), Cause.ROLLOUT),
        (httpx.DecodingError("no gzip", request=CALL), Cause.ROLLOUT),
        (ConnectionResetError("of something"), Cause.ROLLOUT),
        (KeyError("answer"), Cause.ROLLOUT),
        (EpisodeUnfinished("no reward"), Cause.ROLLOUT),
        (LeaseLost(ErrorCode.LEASE_LOST, "gone"), Cause.ROLLOUT),
        (GraderFailed("the judge is away"), Cause.GRADER),
        (wrapped(GraderFailed("the judge is away")), Cause.GRADER),
        (NoReward("nan"), Cause.GRADER),
        (InvalidSpec(ErrorCode.INVALID_SPEC, "an integer exceeds 64 bits"), Cause.GRADER),
        (PersonLeft("bye"), Cause.PERSON),
        (KeyboardInterrupt(), Cause.PERSON),
        (TooLate("the person took longer"), Cause.LIMIT),
    ],
)
def test_an_error_tells_who_lost_the_attempt(error: BaseException, cause: Cause) -> None:
    assert cause_of(error, ADDRESSES) is cause


def test_what_a_grader_raises_is_the_graders_failure_unless_it_is_ours() -> None:
    with pytest.raises(GraderFailed, match="ZeroDivisionError") as failed, grading():
        raise ZeroDivisionError
    assert cause_of(failed.value, ADDRESSES) is Cause.GRADER
    with pytest.raises(GraderFailed) as failed, grading():
        raise httpx.ConnectError("refused", request=ELSEWHERE)
    assert cause_of(failed.value, ADDRESSES) is Cause.GRADER
    with pytest.raises(GraderFailed) as failed, grading():
        raise httpx.ConnectError("refused", request=CALL)
    assert cause_of(failed.value, ADDRESSES) is Cause.NETWORK
    with pytest.raises(KeyboardInterrupt), grading():
        raise KeyboardInterrupt


def test_an_error_that_is_its_own_cause_is_looked_at_once() -> None:
    one, other = ValueError("one"), ValueError("other")
    one.__cause__, other.__context__ = other, one
    assert cause_of(one, ADDRESSES) is Cause.ROLLOUT


# -- as they are sent -------------------------------------------------------------------------------------------------


async def ended_with(error: BaseException | None) -> str | None:
    """The cause that the server hears of, when a block ends so."""
    stub = SwarmStub()

    async def play(swarm: SwarmClient) -> None:
        async with swarm.episode(task_id="t"):
            if error is not None:
                raise error

    async with stub.client() as swarm:
        with pytest.raises(type(error or EpisodeUnfinished())):
            await play(swarm)
    return stub.episodes["ep-0"].cause


@pytest.mark.parametrize(
    ("error", "cause"),
    [
        (None, "rollout"),
        (ValueError(), "rollout"),
        (GraderFailed("no number"), "grader"),
        (KeyboardInterrupt(), "person"),
        (asyncio.CancelledError(), "rollout"),
        (httpx.ConnectError("refused", request=httpx.Request("POST", "http://stub/v1/completions")), "network"),
    ],
)
async def test_a_block_that_ends_without_a_reward_states_its_cause(error: BaseException | None, cause: str) -> None:
    assert await ended_with(error) == cause


async def test_an_episode_whose_task_is_cancelled_from_outside_was_stopped_by_a_person() -> None:
    stub, begun = SwarmStub(), asyncio.Event()

    async def play(swarm: SwarmClient) -> None:
        async with swarm.episode(task_id="t"):
            begun.set()
            await asyncio.Event().wait()

    async with stub.client() as swarm:
        playing = asyncio.create_task(play(swarm))
        await begun.wait()
        playing.cancel()
        await asyncio.gather(playing, return_exceptions=True)
    assert stub.episodes["ep-0"].cause == "person"


async def test_a_stated_cause_stands_whatever_is_raised_after_it() -> None:
    stub = SwarmStub()

    async def play(swarm: SwarmClient) -> None:
        async with swarm.episode(task_id="t") as episode:
            episode.abort("the judge is away", cause=Cause.GRADER)
            raise ValueError("afterwards")

    async with stub.client() as swarm:
        with pytest.raises(ValueError, match="afterwards"):
            await play(swarm)
        async with swarm.episode(task_id="t") as episode:
            episode.abort("I gave up")
    assert [one.cause for one in stub.episodes.values()] == ["grader", "rollout"]


@pytest.mark.parametrize("reward", [float("nan"), float("inf"), "much", None, True])
async def test_a_reward_that_is_no_number_is_the_graders_failure(reward: Any) -> None:
    stub = SwarmStub()
    async with stub.client() as swarm:
        with pytest.raises(NoReward) as refused:
            async with swarm.episode(task_id="t") as episode:
                episode.end(reward=reward)
    assert isinstance(refused.value, ValueError)
    assert stub.episodes["ep-0"].cause == "grader"


@pytest.mark.parametrize(
    ("returned", "cause"),
    [
        (None, "rollout"),
        ("good", "rollout"),
        (True, "rollout"),
        ([1.0], "rollout"),
        (math.nan, "grader"),
        (Outcome(reward=math.inf), "grader"),
        (Outcome(reward="good"), "grader"),  # type: ignore[arg-type]
    ],
)
async def test_what_is_no_reward_is_the_rollouts_failure_and_a_wrong_one_the_graders(returned: Any, cause: str) -> None:
    async def rollout(episode: Episode, task: Task) -> Any:
        return returned

    stub = SwarmStub()
    async with stub.client() as swarm:
        report = await swarm.run_tasks([Task("t", "q")], rollout, retries=0, episodes_per_task=1)
    assert report.causes == {cause: 1}
    assert stub.episodes["ep-0"].cause == cause


async def test_the_servers_word_on_a_cause_is_the_one_that_counts() -> None:
    stub = SwarmStub()
    async with stub.client() as swarm:
        async with swarm.episode(task_id="t") as episode:
            stub.drop(episode.id, "limit")
            episode.abort("whatever")
        assert await episode.find_cause() is Cause.LIMIT


def test_the_synchronous_twin_states_causes_too(monkeypatch: pytest.MonkeyPatch) -> None:
    stub = SwarmStub()

    def play(episode: sync.Episode) -> None:
        with episode:
            episode.abort("the judge is away", cause=Cause.GRADER)

    inner = stub.client()
    with sync.SwarmClient("http://stub") as swarm:
        monkeypatch.setattr(swarm, "inner", inner)
        play(swarm.episode(task_id="t"))
        with pytest.raises(KeyboardInterrupt), swarm.episode(task_id="t"):
            raise KeyboardInterrupt
        swarm.thread.call(inner.close)
    assert [one.cause for one in stub.episodes.values()] == ["grader", "person"]


# -- teams ------------------------------------------------------------------------------------------------------------


async def team_that_ended_with(error: Exception, *, lost_beside: str | None = None) -> list[str | None]:
    """The causes on the servers of both members. lost_beside: who lost the second before the error came."""
    stub, beside = SwarmStub(), SwarmStub()

    async def play(one: SwarmClient, other: SwarmClient) -> None:
        async with team(task_id="t", planner=one, solver=other):
            if lost_beside is not None:
                beside.drop("ep-0", lost_beside, "server_restarted")
            raise error

    async with (
        stub.client() as one,
        beside.client("http://beside") as other,
    ):
        with pytest.raises(type(error)):
            await play(one, other)
    return [each.episodes["ep-0"].cause for each in (stub, beside)]


async def test_a_team_is_lost_by_one_cause_on_all_its_servers() -> None:
    assert await team_that_ended_with(KeyError("answer")) == ["rollout", "rollout"]
    assert await team_that_ended_with(GraderFailed("the judge is away")) == ["grader", "grader"]
    unreached = httpx.ConnectError("refused", request=httpx.Request("POST", "http://beside/v1/completions"))
    assert await team_that_ended_with(unreached) == ["network", "network"]


@pytest.mark.parametrize("in_team", [True, False])
async def test_a_time_limit_that_a_rollout_sets_itself_uses_up_its_retries(in_team: bool) -> None:
    stub, beside = SwarmStub(), SwarmStub()
    other = beside.client("http://beside")

    async def rollout(episode: Episode, task: Task) -> float:
        async with asyncio.timeout(0):
            async with team(planner=other, solver=episode) if in_team else other.episode(task_id=task.id):
                await asyncio.Event().wait()
        return 1.0

    async with stub.client() as swarm, other:
        report = await swarm.run_tasks([Task("t", "q")], rollout, retries=1, episodes_per_task=1)
    assert (report.causes, report.given_up) == ({Cause.ROLLOUT: 2}, 1)
    assert {one.cause for server in (stub, beside) for one in server.episodes.values()} == {"rollout"}


async def test_a_time_limit_that_cuts_a_partners_claim_short_is_the_rollouts() -> None:
    stub, beside = SwarmStub(), SwarmStub()
    other = beside.client("http://beside")
    claim = other.claim

    async def slow(*given: Any, **named: Any) -> Any:
        granted = await claim(*given, **named)
        if len(beside.episodes) == 1 and beside.episodes["ep-0"].cause is None and not waited.is_set():
            waited.set()
            await asyncio.Event().wait()
        return granted

    waited = asyncio.Event()
    other.claim = slow  # type: ignore[method-assign]

    async def rollout(episode: Episode, task: Task) -> float:
        async with asyncio.timeout(0.05):
            async with team(planner=other, solver=episode):
                raise AssertionError("the partner was claimed")

    async with stub.client() as swarm, other:
        report = await swarm.run_tasks([Task("t", "q")], rollout, retries=0, episodes_per_task=1)
    assert report.causes == {Cause.ROLLOUT: 1}
    assert beside.episodes["ep-0"].cause == "rollout"


async def test_a_lease_that_runs_out_is_the_same_cause_for_all_members_of_the_team() -> None:
    stub, beside, clock = SwarmStub(), SwarmStub(), ManualClock()
    other = beside.client("http://beside")

    async def rollout(episode: Episode, task: Task) -> float:
        async with team(planner=other, solver=episode):
            stub.drop(episode.id, "limit", "expired")
            while True:
                await asyncio.sleep(0)
                clock.advance(1)

    async with stub.client(clock=clock) as swarm, other:
        report = await swarm.run_tasks([Task("t", "q")], rollout, retries=0, episodes_per_task=1, idle_limit_s=60)
    assert report.causes == {Cause.LIMIT: 1}
    assert beside.episodes["ep-0"].cause == "limit"


@pytest.mark.parametrize("stopped_by", ["person", "client"])
@pytest.mark.parametrize("then", ["ends", "crashes", "returns"])
async def test_a_team_whose_rollouts_are_stopped_is_lost_by_who_stopped_them(stopped_by: str, then: str) -> None:
    stub, beside, begun = SwarmStub(), SwarmStub(), asyncio.Event()
    other = beside.client("http://beside")

    async def rollout(episode: Episode, task: Task) -> float | None:
        try:
            async with team(planner=other, solver=episode):
                begun.set()
                await asyncio.Event().wait()
        except asyncio.CancelledError:
            if then == "returns":
                return None
            raise
        finally:
            if then == "crashes":
                raise LookupError("cannot clean up")
        return 1.0

    async def tasks() -> AsyncIterator[Task]:
        yield Task("t", "q")
        await begun.wait()
        if stopped_by == "client":
            raise LookupError("the stream is broken")
        await asyncio.Event().wait()

    async with stub.client() as swarm, other:
        playing = asyncio.create_task(swarm.run_tasks(tasks(), rollout, episodes_per_task=1))
        await begun.wait()
        if stopped_by == "person":
            playing.cancel()
        await asyncio.gather(playing, return_exceptions=True)
    assert [one.cause for server in (stub, beside) for one in server.episodes.values()] == [stopped_by] * 2


async def test_an_agent_that_fails_since_a_member_is_gone_did_not_lose_the_team() -> None:
    forbidden = status_error(httpx.Request("POST", "http://beside/v1/completions"), 403)
    assert await team_that_ended_with(forbidden, lost_beside="server") == ["server", "server"]
