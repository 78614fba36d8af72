"""How often a task is tried, by who lost its attempts: what is nobody's fault is offered again, what is its own uses it up."""

from __future__ import annotations

import asyncio
import itertools
from collections import Counter
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from swarm.client import Cause, Episode, GraderFailed, RolloutsFailing, Task, grading
from swarm.client.errors import ServerUnreachable
from swarm.client.losses import LONGEST_PAUSE_S, Tries, tries_of
from swarm.protocol.episodes import LedgerEntry
from tests.fakes.swarm_stub import SwarmStub
from tests.swarm.client.test_rollouts import RushedClock, endless, tasks

pytestmark = pytest.mark.anyio


def entry(claimed_at: float, ended_at: float | None = None, cause: Cause | None = None, **fields: Any) -> LedgerEntry:
    state = "running" if ended_at is None else "dropped" if cause else "trained"
    stated: dict[str, Any] = {
        "episode_id": f"ep-{claimed_at}",
        "run_id": "run-1",
        "kind": "train",
        "task_id": "t",
        "mix": None,
        "client_id": "c",
        "client_version": "0",
        "config_version": 1,
        "group_id": "g",
        "slot": 0,
        "state": state,
        "cause": cause,
        "reward": 1.0 if state == "trained" else None,
        "claimed_step": 0,
        "claimed_at": claimed_at,
        "ended_at": ended_at,
    }
    return LedgerEntry.model_validate(stated | fields)


def used(*entries: LedgerEntry) -> tuple[int, int]:
    tries = tries_of(entries)
    return tries.charged, tries.deaths


def test_tries_are_counted_from_the_ledger_since_the_task_last_ended() -> None:
    lost = [entry(at, at + 1, Cause.GRADER) for at in (0, 2, 4)]
    assert used(*lost) == (3, 0)
    assert used(*lost, entry(6, 7)) == (0, 0)
    assert used(lost[0], entry(2, 3), entry(4, 5, Cause.LIMIT)) == (1, 0)
    assert used(
        *(entry(at, at + 1, cause) for at, cause in enumerate((Cause.SERVER, Cause.NETWORK, Cause.PERSON)))
    ) == (0, 0)


def test_attempts_that_were_open_at_one_moment_were_lost_once() -> None:
    assert used(*(entry(at, 10, Cause.CLIENT) for at in range(8))) == (0, 1)
    assert used(entry(0, 5, Cause.CLIENT), entry(4, 9, Cause.CLIENT), entry(6, 8, Cause.CLIENT)) == (0, 2)
    assert used(entry(0, 5, Cause.ROLLOUT), entry(1, 5, Cause.GRADER)) == (1, 0)


def test_who_lets_others_lose_it_again_and_again_waits_longer_and_longer() -> None:
    tries, pauses = Tries(), []
    for _ in range(12):
        tries.lost(Cause.SERVER)
        pauses.append(tries.pause_s)
    assert pauses[0] == 0.0
    assert pauses == sorted(pauses)
    assert pauses[-1] == LONGEST_PAUSE_S
    assert not tries.used_up(0)


# -- many tasks ------------------------------------------------------------------------------------------------------------


class Losing:
    """A rollout of which the first attempts at a task are lost by `cause`, and the others end."""

    def __init__(self, stub: SwarmStub, cause: Cause, times: int, bad: str = "t-1") -> None:
        self.played: Counter[str] = Counter()
        self._stub = stub
        self._cause = cause
        self._times = times
        self._bad = bad

    async def __call__(self, episode: Episode, task: Task) -> float:
        self.played[task.id] += 1
        if task.id != self._bad or self.played[task.id] > self._times:
            return 1.0
        match self._cause:
            case Cause.ROLLOUT:
                raise KeyError("answer")
            case Cause.GRADER:
                with grading():
                    raise ZeroDivisionError
            case Cause.NETWORK:
                request = httpx.Request("POST", f"{episode.base_url}/chat/completions")
                raise httpx.ConnectError("refused", request=request)
            case Cause.PERSON:
                episode.abort("not this one", cause=Cause.PERSON)
            case _:
                self._stub.drop(episode.id, self._cause)
        return 1.0


FREE = (Cause.SERVER, Cause.NETWORK, Cause.PERSON)


@pytest.mark.parametrize("cause", FREE)
async def test_what_server_network_or_a_person_lost_is_offered_again_without_limit(cause: Cause) -> None:
    stub, clock = SwarmStub(), RushedClock()
    rollout = Losing(stub, cause, 40)
    report = await stub.play(tasks(3), rollout, retries=0, episodes_per_task=1, clock=clock)
    assert (report.ended, report.given_up, report.set_aside) == (3, 0, 0)
    assert report.causes == {cause: 40}
    assert (report.crashed, report.lost) == (0, 40)
    assert clock.monotonic() > 200  # it did not spin


@pytest.mark.parametrize("cause", [Cause.ROLLOUT, Cause.GRADER, Cause.LIMIT])
async def test_what_rollout_grader_or_a_limit_lost_uses_up_the_tries_of_its_task(cause: Cause) -> None:
    stub = SwarmStub()
    rollout = Losing(stub, cause, 100)
    report = await stub.play(tasks(3), rollout, retries=2, episodes_per_task=1, clock=RushedClock())
    assert (report.ended, report.given_up, report.set_aside) == (2, 1, 1)
    assert report.causes == {cause: 3}
    assert report.crashed == (0 if cause is Cause.LIMIT else 3)


async def test_a_task_over_which_the_client_was_lost_three_times_is_set_aside_whatever_its_retries() -> None:
    stub = SwarmStub()
    rollout = Losing(stub, Cause.CLIENT, 100)
    report = await stub.play(tasks(3), rollout, retries=50, episodes_per_task=1, clock=RushedClock())
    assert (report.ended, report.set_aside, report.causes) == (2, 1, {Cause.CLIENT: 3})


async def test_a_bad_task_that_comes_again_is_passed_over_and_the_run_goes_on() -> None:
    stub = SwarmStub(group_size=2, train_limit=20)
    rollout = Losing(stub, Cause.ROLLOUT, 10_000, bad="t-0")
    stream = (Task(f"t-{number % 3}", "") for number in itertools.count())
    report = await stub.play(stream, rollout, concurrency=2, retries=1, clock=RushedClock())
    assert report.run_over
    assert (report.set_aside, report.crashed) == (1, rollout.played["t-0"])
    assert rollout.played["t-0"] <= 4


async def test_a_set_aside_task_stays_so_when_the_client_is_started_again() -> None:
    stub = SwarmStub(group_size=2)
    rollout = Losing(stub, Cause.GRADER, 10_000)
    for _ in range(3):
        report = await stub.play(tasks(3), rollout, concurrency=1, retries=1, clock=RushedClock())
        assert (report.ended + report.resumed, report.given_up, report.set_aside) == (4, 2, 1)
    assert rollout.played["t-1"] == 2


async def test_a_client_that_was_started_again_has_the_tries_that_are_left() -> None:
    stub = SwarmStub()
    rollout = Losing(stub, Cause.GRADER, 10_000, bad="t-0")
    stop = asyncio.Event()

    async def until_stopped(episode: Episode, task: Task) -> float:
        if rollout.played["t-0"] == 2:
            stop.set()
            await asyncio.Event().wait()
        return await rollout(episode, task)

    async with stub.client(clock=RushedClock()) as swarm:
        working = asyncio.create_task(swarm.run_tasks(tasks(1), until_stopped, retries=2, episodes_per_task=1))
        await stop.wait()
        working.cancel()
        await asyncio.gather(working, return_exceptions=True)
    assert [one.cause for one in stub.episodes.values()] == ["grader", "grader", "person"]
    report = await stub.play(tasks(1), rollout, retries=2, episodes_per_task=1, clock=RushedClock())
    assert (rollout.played["t-0"], report.set_aside) == (3, 1)


async def test_a_mended_client_tries_all_tasks_anew() -> None:
    stub = SwarmStub()
    await stub.play(tasks(2), Losing(stub, Cause.ROLLOUT, 100), retries=0, episodes_per_task=1, clock=RushedClock())
    report = await stub.play(
        tasks(2), Losing(stub, Cause.ROLLOUT, 0), retries=0, episodes_per_task=1, version="mended", clock=RushedClock()
    )
    assert (report.ended, report.resumed, report.set_aside) == (1, 1, 0)


async def test_two_bad_tasks_among_good_ones_do_not_end_the_others() -> None:
    async def rollout(episode: Episode, task: Task) -> float:
        if int(task.id[2:]) % 2:
            raise ValueError
        return 1.0

    report = await SwarmStub(group_size=4).play(tasks(60), rollout, concurrency=1, retries=0)
    assert (report.set_aside, report.ended) == (30, 120)


async def test_a_stream_of_nothing_but_tasks_that_were_set_aside_ends_run_tasks_in_words() -> None:
    async def rollout(episode: Episode, task: Task) -> float:
        raise GraderFailed("the judge is away")

    def stream() -> Iterator[Task]:
        return (Task(f"t-{number % 2}", "") for number in itertools.count())

    async with SwarmStub().client() as swarm:
        with pytest.raises(RolloutsFailing, match=r"set aside.*the judge is away"):
            await swarm.run_tasks(stream(), rollout)


async def test_what_the_network_loses_never_counts_as_a_rollout_that_fails() -> None:
    stub = SwarmStub(train_limit=6)
    played: Counter[str] = Counter()

    async def rollout(episode: Episode, task: Task) -> float:
        played[task.id] += 1
        if played[task.id] <= 5:
            raise httpx.ReadError("reset", request=httpx.Request("POST", f"{episode.base_url}/completions"))
        return 1.0

    report = await stub.play(endless(), rollout, concurrency=2, retries=0, episodes_per_task=1, clock=RushedClock())
    assert report.run_over
    assert (report.crashed, report.given_up) == (0, 0)


@pytest.mark.parametrize(("dropped", "cause"), [("no_calls", Cause.ROLLOUT), ("tainted", Cause.SERVER)])
async def test_an_end_that_does_not_count_is_tried_again_and_charged_to_who_lost_it(dropped: str, cause: Cause) -> None:
    stub = SwarmStub(group_size=2, dropped=[dropped, dropped])

    async def rollout(episode: Episode, task: Task) -> None:
        await episode.end(reward=1.0)

    report = await stub.play(tasks(2), rollout, clock=RushedClock())
    assert (report.ended, report.causes) == (4, {cause: 2})


async def test_what_run_tasks_that_failed_gives_back_was_lost_by_the_client_and_not_by_a_person() -> None:
    stub, waiting = SwarmStub(), asyncio.Event()

    async def rollout(episode: Episode, task: Task) -> float:
        if task.id != "t-0":
            await waiting.wait()
            raise ServerUnreachable("its partner is away")
        waiting.set()
        await asyncio.Event().wait()
        return 1.0

    def failing() -> Iterator[Task]:
        yield from tasks(1)
        raise OSError("the stream of tasks broke")

    async with stub.client(clock=RushedClock()) as swarm:
        with pytest.raises(OSError, match="the stream"):
            await swarm.run_tasks(failing(), rollout, episodes_per_task=1)
    assert [one.cause for one in stub.episodes.values()] == ["client"]


async def test_what_a_restarted_client_gives_back_was_lost_by_the_client(monkeypatch: pytest.MonkeyPatch) -> None:
    stub, held = SwarmStub(), asyncio.Event()

    async def rollout(episode: Episode, task: Task) -> float:
        held.set()
        await asyncio.Event().wait()
        return 1.0

    async def unheard(*arguments: object) -> object:
        raise ServerUnreachable("dead clients say nothing")

    dead = stub.client()
    monkeypatch.setattr(dead, "abort", unheard)
    async with dead as swarm:
        working = asyncio.create_task(swarm.run_tasks(tasks(1), rollout, episodes_per_task=1))
        await held.wait()
        working.cancel()
        await asyncio.gather(working, return_exceptions=True)

    async def right(episode: Episode, task: Task) -> float:
        return 1.0

    async with stub.client(clock=RushedClock()) as swarm:
        await swarm.run_tasks(tasks(1), right, episodes_per_task=1)
    assert [one.cause for one in stub.episodes.values()] == ["client", None]


async def test_an_evaluation_of_other_weights_tries_a_task_anew() -> None:
    stub = SwarmStub()
    rollout = Losing(stub, Cause.GRADER, 1)
    async with stub.client(clock=RushedClock()) as swarm:
        before = await swarm.run_tasks(tasks(2), rollout, kind="eval", retries=0)
        stub.step = 5
        after = await swarm.run_tasks(tasks(2), rollout, kind="eval", retries=0)
    assert (before.set_aside, after.set_aside) == (1, 0)
    assert rollout.played["t-1"] == 2
