"""Many episodes at once: order, groups, retries, crashes of rollouts and of the client itself, and a clean end."""

from __future__ import annotations

import asyncio
import contextlib
import io
import itertools
import sys
from collections import Counter
from collections.abc import AsyncIterator, Iterator
from dataclasses import replace
from typing import Any

import pytest

from foundation.clock import ManualClock
from swarm.client import Cause, Episode, Outcome, Refusal, RolloutsFailing, Task, TeamOver, grading, team
from swarm.client.claims import READ_AHEAD
from swarm.client.client import ROLLOUT_PATIENCE
from swarm.client.errors import EngineFailed, InvalidSpec, LeaseLost, NotFound, StorageFull
from swarm.client.progress import ProgressLine
from swarm.client.tasks import Rollout
from swarm.protocol.errors import ErrorCode
from tests.fakes.swarm_stub import RUN, SwarmStub

pytestmark = pytest.mark.anyio


class RushedClock(ManualClock):
    """Sleeping takes no time of ours; renewals of an hour's limit never come."""

    async def sleep(self, seconds: float) -> None:
        if seconds >= 1_200:
            await asyncio.Event().wait()
        self.advance(seconds)
        await asyncio.sleep(0)


def tasks(count: int) -> list[Task]:
    return [Task(f"t-{number}", f"question {number}") for number in range(count)]


def endless() -> Iterator[Task]:
    return (Task(f"t-{number}", "") for number in itertools.count())


async def right(episode: Episode, task: Task) -> Outcome:
    await asyncio.sleep(0)
    return Outcome(reward=1.0, success=True, metrics={"turns": 1.0})


async def test_each_task_gets_group_size_episodes_claimed_in_task_order() -> None:
    stub = SwarmStub(group_size=3)
    report = await stub.play(tasks(5), right, concurrency=4)
    assert (report.ended, report.run_over) == (15, False)
    claimed = [body["task_id"] for _, path, body in stub.requests if path.endswith(":claim")]
    assert claimed == [task.id for task in tasks(5) for _ in range(3)]
    assert stub.by_state() == {"ended": 15}


def refuses_who_is_ahead(stub: SwarmStub) -> None:
    """As a mix does: no family may have more groups than another."""

    def judge() -> None:
        task, wanted = stub.requests[-1][2]["task_id"], stub.requests[-1][2]["mix"]
        groups = {(one.claim["mix"], one.claim["task_id"]) for one in stub.episodes.values()}
        begun = Counter(mix for mix, _ in groups)
        if (wanted, task) not in groups and begun[wanted] > min(begun["a"], begun["b"]):
            raise Refusal(ErrorCode.MIX_FULL, f"family {wanted} is ahead", retry_after_s=1.0)

    stub.on_claim = judge


@pytest.mark.parametrize("name", ["{mix}-{number}", "{number}"], ids=["ids of their own", "equal ids"])
async def test_a_family_that_is_ahead_in_its_mix_does_not_hold_up_the_others_whatever_the_order_of_the_tasks(
    name: str,
) -> None:
    stub, clock = SwarmStub(), RushedClock()
    refuses_who_is_ahead(stub)
    stream = [Task(name.format(mix=mix, number=number), "", mix=mix) for mix in "ab" for number in range(6)]
    report = await stub.play(stream, right, concurrency=4, clock=clock)
    assert report.ended == 24
    for mix in "ab":
        claimed = [one.claim["task_id"] for one in stub.episodes.values() if one.claim["mix"] == mix]
        assert claimed == [name.format(mix=mix, number=number // 2) for number in range(12)]


async def test_tasks_of_families_that_do_not_wait_claim_in_the_order_of_the_stream() -> None:
    stub = SwarmStub(group_size=2)
    stream = [Task(f"t-{number}", "", mix="abb"[number % 3]) for number in range(9)]
    await stub.play(stream, right, concurrency=3)
    assert [one.claim["task_id"] for one in stub.episodes.values()] == [task.id for task in stream for _ in range(2)]


async def test_while_a_family_waits_no_more_than_a_bounded_number_of_tasks_is_taken_from_the_stream() -> None:
    stub, clock, taken = SwarmStub(train_limit=5), RushedClock(), 0
    stub.hold = (":claim", asyncio.Event())

    async def stream() -> AsyncIterator[Task]:
        nonlocal taken
        for number in itertools.count():
            taken += 1
            yield Task(f"t-{number}", "", mix="a")

    async with stub.client(clock=clock) as swarm:
        working = asyncio.create_task(swarm.run_tasks(stream(), right))
        for _ in range(3_000):
            await asyncio.sleep(0)
        assert 1 < taken <= READ_AHEAD + 1
        stub.hold[1].set()
        assert (await working).run_over


async def test_at_most_concurrency_rollouts_run_at_once_and_that_many_do() -> None:
    running, most = 0, 0

    async def rollout(episode: Episode, task: Task) -> float:
        nonlocal running, most
        running += 1
        most = max(most, running)
        for _ in range(50):
            await asyncio.sleep(0)
        running -= 1
        return 1.0

    await SwarmStub().play(tasks(10), rollout, concurrency=5)
    assert most == 5


async def test_an_endless_stream_stops_cleanly_when_the_run_is_over() -> None:
    stub = SwarmStub(train_limit=7)
    report = await stub.play(endless(), right, concurrency=3)
    assert report.run_over
    assert stub.by_state()["ended"] == report.ended >= 7
    assert stub.by_state()["running"] == 0


async def test_a_stream_may_be_asynchronous() -> None:
    async def stream() -> AsyncIterator[Task]:
        for task in tasks(2):
            yield task

    async with SwarmStub().client() as swarm:
        assert (await swarm.run_tasks(stream(), right)).ended == 4


async def test_evaluations_take_one_episode_of_each_task_unless_told_otherwise_and_carry_their_sampling() -> None:
    seen: list[Any] = []

    async def rollout(episode: Episode, task: Task) -> None:
        seen.append(dict(episode.sampling))
        episode.end(reward=0.0)

    stub = SwarmStub(group_size=8)
    async with stub.client() as swarm:
        await swarm.run_tasks(tasks(3), rollout, kind="eval", sampling={"temperature": 0.0})
        await swarm.run_tasks(tasks(3)[:1], rollout, kind="eval", episodes_per_task=4)
    assert seen[0] == {"temperature": 0.0}
    assert Counter(one.claim["task_id"] for one in stub.episodes.values()) == {"t-0": 4, "t-1": 1, "t-2": 1}


async def test_one_crashing_rollout_costs_one_episode_and_its_traceback_is_in_the_ledger() -> None:
    crashed = False

    async def rollout(episode: Episode, task: Task) -> Outcome:
        nonlocal crashed
        if task.id == "t-1" and not crashed:
            crashed = True
            raise ValueError(f"bad answer, key {episode.api_key}")
        return Outcome(reward=1.0)

    stub = SwarmStub()
    report = await stub.play(tasks(3), rollout)
    assert (report.ended, report.crashed, report.given_up) == (6, 1, 0)
    assert stub.by_state() == {"ended": 6, "aborted": 1}
    (detail,) = (one.detail for one in stub.episodes.values() if one.detail)
    assert "Traceback" in detail
    assert "ValueError: bad answer" in detail
    assert "swk_" not in detail


async def test_a_rollout_that_raises_after_its_end_was_stored_has_not_crashed(caplog: pytest.LogCaptureFixture) -> None:
    async def rollout(episode: Episode, task: Task) -> None:
        await episode.end(reward=1.0)
        raise LookupError("while it cleaned up")

    async with SwarmStub().client() as swarm:
        report = await swarm.run_tasks(tasks(2), rollout)
    assert (report.ended, report.crashed) == (4, 0)
    assert "raised an error after it had ended episode" in caplog.text
    assert "while it cleaned up" in caplog.text
    assert "crashed" not in caplog.text


async def test_run_tasks_that_has_nothing_to_play_says_why(caplog: pytest.LogCaptureFixture) -> None:
    stub = SwarmStub(train_limit=4)
    async with stub.client() as swarm:
        await swarm.run_tasks(tasks(2), right)
        assert "nothing was played" not in caplog.text
    async with stub.client() as swarm:
        assert (await swarm.run_tasks(tasks(2), right)).resumed == 4
    assert "earlier processes of client 'c-1' have already ended all 4 episodes" in caplog.text
    async with stub.client(client_id="c-2") as swarm:
        assert (await swarm.run_tasks(tasks(2), right)).run_over
    assert f"run {RUN} is complete" in caplog.text


async def test_a_rollout_that_exits_has_crashed() -> None:
    async def rollout(episode: Episode, task: Task) -> float:
        if task.id == "t-1":
            sys.exit("agent: bad flag")
        return 1.0

    stub = SwarmStub()
    report = await stub.play(tasks(3), rollout, kind="eval", retries=0)
    assert (report.ended, report.crashed, report.given_up) == (2, 1, 1)
    (detail,) = (one.detail for one in stub.episodes.values() if one.detail)
    assert detail.count("Traceback") == 1
    assert 'sys.exit("agent: bad flag")' in detail


async def test_a_task_that_always_crashes_is_given_up_and_the_others_go_on() -> None:
    async def rollout(episode: Episode, task: Task) -> float:
        if task.id == "t-1":
            raise ValueError
        return 1.0

    stub = SwarmStub()
    report = await stub.play(tasks(4), rollout, retries=1)
    assert (report.ended, report.crashed, report.given_up) == (6, 4, 2)


async def test_a_rollout_that_never_works_stops_run_tasks_instead_of_spinning_for_ever() -> None:
    async def rollout(episode: Episode, task: Task) -> float:
        raise ValueError("no such tool")

    stub = SwarmStub()
    async with stub.client() as swarm:
        with pytest.raises(RolloutsFailing, match="in a row"):
            await swarm.run_tasks(endless(), rollout, concurrency=2)
    assert stub.by_state()["running"] == 0


@pytest.mark.parametrize("answer", [None, "good", float("nan")])
async def test_a_rollout_that_answers_nonsense_has_crashed(answer: Any) -> None:
    async def rollout(episode: Episode, task: Task) -> Any:
        return answer

    stub = SwarmStub(group_size=2)
    report = await stub.play(tasks(1), rollout, retries=0)
    assert (report.ended, report.crashed) == (0, 2)
    assert stub.by_state() == {"aborted": 2}


async def test_a_crash_whose_words_no_json_can_carry_costs_one_episode_too() -> None:
    async def rollout(episode: Episode, task: Task) -> float:
        if task.id == "t-1":
            raise ValueError("no such tool: \ud83d")
        return 1.0

    stub = SwarmStub()
    report = await stub.play(tasks(3), rollout, retries=0)
    assert (report.ended, report.crashed) == (4, 2)
    assert all("no such tool: \\ud83d" in one.detail for one in stub.episodes.values() if one.detail)


@pytest.mark.parametrize(
    "metadata",
    [
        {"answer": object()},
        {"answer": "\ud83d"},
        {"losses": [{"last": float("nan")}]},
        {"best": float("-inf")},
        {7: "x"},
    ],
)
async def test_metadata_that_no_json_can_carry_costs_one_episode(metadata: dict[str, Any]) -> None:
    async def rollout(episode: Episode, task: Task) -> None:
        episode.end(reward=1.0, metadata=metadata if task.id == "t-1" else {"loss": 0.5, "seen": {7: [None]}})

    stub = SwarmStub()
    report = await stub.play(tasks(3), rollout, retries=0)
    assert (report.ended, report.crashed) == (4, 2)
    assert stub.by_state() == {"ended": 4, "aborted": 2}
    assert all("InvalidSpec: " in one.detail for one in stub.episodes.values() if one.detail)


async def test_a_result_that_the_server_refuses_costs_one_episode_whose_slot_is_given_back() -> None:
    stub = SwarmStub(before=[(":end", Refusal(ErrorCode.INVALID_SPEC, "an integer exceeds 64 bits"))])
    report = await stub.play(tasks(3), right)
    assert (report.ended, report.crashed) == (6, 1)
    assert stub.by_state() == {"ended": 6, "aborted": 1}


async def test_a_rollout_that_gives_its_episode_up_is_tried_again_and_its_reason_is_kept() -> None:
    tried = 0

    async def rollout(episode: Episode, task: Task) -> float | None:
        nonlocal tried
        tried += 1
        if tried > 1:
            return 1.0
        episode.abort("the sandbox did not start")
        return None

    stub = SwarmStub()
    report = await stub.play(tasks(1), rollout, concurrency=1)
    assert (report.ended, report.crashed) == (2, 1)
    assert [one.detail for one in stub.episodes.values() if one.detail] == ["the sandbox did not start"]


async def test_a_rollout_that_always_crashes_inside_its_team_stops_run_tasks_too() -> None:
    other = SwarmStub().client("http://other")
    stream = (Task(f"t-{number}", "") for number in range(50))

    async def rollout(episode: Episode, task: Task) -> None:
        async with team(planner=episode, solver=other):
            raise ValueError("no such tool")

    async with SwarmStub().client() as swarm, other:
        with pytest.raises(RolloutsFailing, match="no such tool"):
            await swarm.run_tasks(stream, rollout, concurrency=2)


@pytest.mark.parametrize("rewarded", [True, False])
async def test_a_rollout_that_gives_its_team_up_has_crashed(rewarded: bool) -> None:
    stub, beside = SwarmStub(), SwarmStub()
    other = beside.client("http://other")

    async def rollout(episode: Episode, task: Task) -> float | None:
        async with team(planner=episode, solver=other) as both:
            if rewarded:
                both.end(rewards={"planner": 1.0, "solver": 1.0})
            both.abort("judged invalid")
        return None if rewarded else 0.0

    async with stub.client() as swarm, other:
        report = await swarm.run_tasks(tasks(1), rollout, kind="eval", retries=1)
    assert (report.ended, report.crashed, report.lost, report.given_up) == (0, 2, 0, 1)
    assert [one.detail for one in stub.episodes.values()] == ["judged invalid"] * 2
    assert beside.by_state() == {"aborted": 2}


@pytest.mark.parametrize("bad", [{"solver": float("nan")}, {"metadata": {"a": object()}}])
async def test_results_of_a_team_are_handed_in_all_or_none(bad: dict[str, Any]) -> None:
    stub, beside = SwarmStub(), SwarmStub()
    other = beside.client("http://other")
    async with stub.client() as swarm, other, team(task_id="t", planner=swarm, solver=other) as both:
        with pytest.raises((ValueError, InvalidSpec)):
            both.end(rewards={"planner": 1.0, "solver": bad.get("solver", 1.0)}, metadata=bad.get("metadata"))
        assert [member.ended for member in both.members.values()] == [False, False]
        both.end(rewards={"planner": 0.25, "solver": 0.5})
        assert [member.reward for member in both.members.values()] == [0.25, 0.5]
        with pytest.raises(RuntimeError, match="has already ended"):
            both.end(rewards={"planner": 0.0, "solver": 0.0})
        both.abort("the stub knows no teams")


async def test_a_rollout_that_hides_that_its_team_was_lost_has_not_ended_its_episode() -> None:
    stub = SwarmStub()
    other = SwarmStub().client("http://other")

    async def rollout(episode: Episode, task: Task) -> float:
        try:
            async with team(planner=episode, solver=other):
                raise LeaseLost(ErrorCode.LEASE_LOST, "the server was started again")
        except LeaseLost:
            return 0.0

    async with stub.client() as swarm, other:
        report = await swarm.run_tasks(tasks(1), rollout, kind="eval", retries=1)
    assert (report.ended, report.crashed, report.lost, report.given_up) == (0, 2, 0, 1)


async def test_run_tasks_stops_when_the_run_of_a_member_of_its_team_is_over() -> None:
    """However long its own run and its stream go on: no further team can be had."""
    other = SwarmStub(train_limit=0).client("http://other")

    async def rollout(episode: Episode, task: Task) -> None:
        async with team(planner=episode, solver=other):
            raise AssertionError("the solver cannot be had")

    stub = SwarmStub()
    async with stub.client() as swarm, other:
        report = await swarm.run_tasks(endless(), rollout, concurrency=3)
        with pytest.raises(TeamOver, match="solver cannot play any longer"):
            async with team(task_id="t-9", planner=swarm, solver=other):
                pass
        with pytest.raises(NotFound):
            async with team(
                planner=swarm.episode(task_id="t-9"), solver=other.episode(task_id="t-9", run_id="misspelt")
            ):
                pass
    assert report.run_over
    assert (report.lost, report.crashed, report.given_up) == (0, 0, 0)
    assert stub.by_state().get("running", 0) == 0


async def test_a_rollout_that_always_cancels_itself_is_told_so() -> None:
    async def rollout(episode: Episode, task: Task) -> float:
        raise asyncio.CancelledError

    async with SwarmStub().client() as swarm:
        with pytest.raises(RolloutsFailing, match=r"the last with asyncio\.CancelledError"):
            await swarm.run_tasks(endless(), rollout, concurrency=2)


async def test_an_episode_whose_lease_was_lost_is_tried_again() -> None:
    stub = SwarmStub()
    unlucky = True

    async def rollout(episode: Episode, task: Task) -> float:
        nonlocal unlucky
        if unlucky:
            unlucky = False
            stub.episodes[episode.id].state = "dropped"
            stub.episodes[episode.id].reason = "server_restarted"
        return 1.0

    report = await stub.play(tasks(2), rollout)
    assert (report.ended, report.lost, report.crashed) == (4, 1, 0)


async def test_attempts_that_a_restart_of_the_server_lost_are_a_line_each_without_a_traceback(
    caplog: pytest.LogCaptureFixture,
) -> None:
    stub = SwarmStub()
    unlucky: set[str] = set()

    async def rollout(episode: Episode, task: Task) -> float:
        if task.id not in unlucky:
            unlucky.add(task.id)
            stub.episodes[episode.id].state, stub.episodes[episode.id].cause = "dropped", Cause.SERVER
            raise PermissionError(f"403: episode {episode.id!r} is closed:\nserver_restarted")
        return 1.0

    caplog.set_level("INFO", "swarm.client")
    report = await stub.play(tasks(24), rollout, episodes_per_task=1)
    assert (report.ended, report.lost, report.crashed) == (24, 24, 0)
    assert len(caplog.records) == 24
    assert not any(record.exc_info for record in caplog.records)
    said = "an attempt at task t-0 was lost (server): PermissionError: 403: episode 'ep-0' is closed: server_restarted"
    assert said in caplog.messages


@pytest.mark.parametrize("grades", [False, True])
async def test_a_fault_of_a_rollout_or_grader_is_logged_with_its_traceback(
    grades: bool, caplog: pytest.LogCaptureFixture
) -> None:
    failed = False

    async def rollout(episode: Episode, task: Task) -> float:
        nonlocal failed
        if not failed:
            failed = True
            with grading() if grades else contextlib.nullcontext():
                raise LookupError("a fault of ours")
        return 1.0

    caplog.set_level("INFO", "swarm.client")
    await SwarmStub().play(tasks(2), rollout, episodes_per_task=1)
    (record,) = caplog.records
    assert record.getMessage().startswith("the rollout of task t-0 crashed (episode ep-")
    assert record.exc_info is not None


async def test_a_rollout_whose_lease_is_lost_is_cancelled() -> None:
    stub, clock = SwarmStub(group_size=2), ManualClock()
    cancelled: list[str] = []

    async def rollout(episode: Episode, task: Task) -> float:
        if cancelled or episode.id != "ep-0":
            return 1.0
        stub.episodes["ep-0"].state = "dropped"
        try:
            while True:
                await asyncio.sleep(0)
                clock.advance(1)
        except asyncio.CancelledError:
            cancelled.append(episode.id)
            raise

    report = await stub.play(tasks(1), rollout, idle_limit_s=60, clock=clock)
    assert cancelled == ["ep-0"]
    assert (report.ended, report.lost) == (2, 1)


async def test_a_refusal_that_is_no_limit_ends_run_tasks_with_itself_and_gives_its_episodes_back() -> None:
    stub = SwarmStub()
    started = 0

    async def rollout(episode: Episode, task: Task) -> float:
        nonlocal started
        started += 1
        if started == 3:
            stub.before.append((":claim", Refusal(ErrorCode.ENGINE_FAILED, "the engine failed")))
            return 1.0
        await asyncio.Event().wait()
        return 0.0

    async with stub.client() as swarm:
        with pytest.raises(EngineFailed):
            await swarm.run_tasks(endless(), rollout, concurrency=4)
    assert stub.by_state()["running"] == 0


async def test_run_tasks_waits_for_as_long_as_its_server_says_that_it_will_later() -> None:
    later = Refusal(ErrorCode.DRAINING, "a step takes its time", retry_after_s=600.0)
    stub, clock = SwarmStub(before=[(":claim", later)] * 6), RushedClock()
    report = await stub.play(tasks(2), right, clock=clock)
    assert report.ended == 4
    assert clock.monotonic() > 900


async def test_a_moment_of_full_disk_costs_run_tasks_neither_its_results_nor_itself() -> None:
    full = Refusal(ErrorCode.STORAGE_FULL, "no room")
    stub, clock = SwarmStub(before=[(":end", full), (":claim", full), (":end", full)]), RushedClock()
    report = await stub.play(tasks(2), right, idle_limit_s=3_600, clock=clock)
    assert (report.ended, report.lost, report.crashed) == (4, 0, 0)
    assert stub.by_state() == {"ended": 4}


@pytest.mark.parametrize("path", [":claim", ":end"])
async def test_a_disk_that_stays_full_ends_run_tasks_within_minutes(path: str) -> None:
    full = Refusal(ErrorCode.STORAGE_FULL, "no room")
    stub, clock = SwarmStub(before=[(path, full)] * 10_000), RushedClock()
    async with stub.client(clock=clock) as swarm:
        with pytest.raises(StorageFull):
            await swarm.run_tasks(tasks(1), right, concurrency=1, idle_limit_s=3_600)
    assert ROLLOUT_PATIENCE.full_s <= clock.monotonic() <= 2 * ROLLOUT_PATIENCE.full_s


async def test_without_a_run_there_is_an_error_that_says_so() -> None:
    async with SwarmStub().client() as swarm:
        with pytest.raises(NotFound):
            await swarm.run_tasks(tasks(1), right, run_id="run-9")


# -- after a crash of the client --------------------------------------------------------------------------------------


class Killed(BaseException):
    """Stands for SIGKILL: nothing is said to the server any more."""


async def die_while_holding(
    stub: SwarmStub, after: int, concurrency: int = 4, mix: str | None = None, own_mix: str | None = None
) -> None:
    """Run tasks in a process that vanishes once `after` episodes ended, with others open."""
    ended = 0
    dying = asyncio.Event()

    async def rollout(episode: Episode, task: Task) -> float:
        nonlocal ended
        if ended >= after:
            dying.set()
            await asyncio.Event().wait()
        ended += 1
        return 1.0

    swarm = stub.client()
    stream = [replace(task, mix=mix) for task in tasks(4)]
    working = asyncio.create_task(swarm.run_tasks(stream, rollout, concurrency=concurrency, mix=own_mix))
    await dying.wait()
    for _ in range(100):
        await asyncio.sleep(0)
    stub.before = [(":abort", Refusal(ErrorCode.LEASE_LOST, "nobody hears the dead"))] * concurrency
    working.cancel()
    with pytest.raises(asyncio.CancelledError):
        await working
    stub.before = []
    await swarm.close()


@pytest.mark.parametrize("after", [0, 1, 4, 7])
async def test_a_restarted_client_goes_on_where_it_stopped_and_frees_what_it_left_open(after: int) -> None:
    stub = SwarmStub(group_size=3)
    await die_while_holding(stub, after)
    left_open = stub.by_state()["running"]
    assert left_open >= 3
    report = await stub.play(tasks(4), right, concurrency=4)
    assert report.resumed == after
    assert report.ended == 12 - after
    assert stub.by_state() == {"ended": 12, "aborted": left_open}
    assert Counter(one.claim["task_id"] for one in stub.episodes.values() if one.state == "ended") == {
        task.id: 3 for task in tasks(4)
    }


async def test_run_tasks_with_a_family_goes_on_with_tasks_of_another_where_it_stopped() -> None:
    stub = SwarmStub(group_size=3)
    stream = [Task("1", ""), Task("1", "", mix="code"), Task("2", "", mix="code")]
    await stub.play(stream[:2], right, mix="math")
    report = await stub.play(stream, right, mix="math")
    assert (report.resumed, report.ended) == (6, 3)


async def test_an_empty_family_is_none_and_goes_on_where_it_stopped() -> None:
    stub = SwarmStub(group_size=3)
    for played in (6, 0):
        async with stub.client() as swarm:
            report = await swarm.run_tasks(tasks(2), right, mix="")
            assert (report.ended, report.resumed) == (played, 6 - played)
            assert await swarm.tasks(mix="") == await swarm.tasks()


def running(stub: SwarmStub) -> set[str]:
    return {one.episode_id for one in stub.episodes.values() if one.state == "running"}


def noting(played: set[str]) -> Rollout:
    """A rollout that is always right, and notes which episodes it was given."""

    async def rollout(episode: Episode, task: Task) -> float:
        played.add(episode.id)
        return 1.0

    return rollout


async def test_run_tasks_with_a_family_frees_what_it_left_open_of_another_and_plays_none_of_it_on() -> None:
    stub = SwarmStub(group_size=3)
    await die_while_holding(stub, 4, mix="code", own_mix="math")
    left_open, played = running(stub), set[str]()
    async with stub.client() as swarm:
        await swarm.run_tasks([Task("of-its-own", "")], right, mix="math")
        assert stub.by_state()["aborted"] == len(left_open)
        report = await swarm.run_tasks([replace(task, mix="code") for task in tasks(4)], noting(played), mix="math")
    assert (report.resumed, report.ended) == (4, 8)
    assert not played & left_open
    assert stub.by_state() == {"ended": 15, "aborted": len(left_open)}


async def test_a_restarted_client_frees_what_it_left_open_of_tasks_with_a_family_of_their_own_and_plays_none_of_it_on() -> (
    None
):
    stub = SwarmStub(group_size=3)
    await die_while_holding(stub, 4, mix="math")
    left_open, played = running(stub), set[str]()
    report = await stub.play([replace(task, mix="math") for task in tasks(4)], noting(played), concurrency=4)
    assert (report.resumed, report.ended) == (4, 8)
    assert not played & left_open
    assert stub.by_state() == {"ended": 12, "aborted": len(left_open)}


async def test_a_restarted_client_does_not_take_a_task_of_one_family_for_the_same_of_another() -> None:
    stub = SwarmStub(group_size=3)
    await stub.play([Task("1", "", mix="math")], right)
    report = await stub.play([Task("1", "", mix="code"), Task("1", "", mix="math")], right)
    assert (report.resumed, report.ended) == (3, 3)
    assert Counter(one.claim["mix"] for one in stub.episodes.values()) == {"math": 3, "code": 3}


@pytest.mark.parametrize("ids", [("a", "b"), ("a", "a")], ids=["tasks of its own", "the same tasks"])
async def test_a_second_run_tasks_of_a_client_leaves_alone_what_the_first_plays(ids: tuple[str, str]) -> None:
    stub, begun, over = SwarmStub(group_size=2), asyncio.Event(), asyncio.Event()
    played: list[str] = []

    async def slow(episode: Episode, task: Task) -> float:
        played.append(episode.id)
        if len(played) == 2:
            begun.set()
        await over.wait()
        return 1.0

    async with stub.client() as swarm:
        first = asyncio.create_task(swarm.run_tasks([Task(ids[0], "")], slow, episodes_per_task=2))
        await begun.wait()
        second = asyncio.create_task(swarm.run_tasks([Task(ids[1], "")], slow, episodes_per_task=2))
        for _ in range(1_000):
            await asyncio.sleep(0)
        over.set()
        reports = [await first, await second]
    assert [(report.ended, report.lost) for report in reports] == [(2, 0), (2, 0)]
    assert len(set(played)) == 4
    assert stub.by_state() == {"ended": 4}


async def test_what_another_run_tasks_of_the_client_has_ended_since_is_no_orphan() -> None:
    stub, over = SwarmStub(group_size=2), asyncio.Event()

    async def slow(episode: Episode, task: Task) -> float:
        await over.wait()
        return 1.0

    async with stub.client() as swarm:
        first = asyncio.create_task(swarm.run_tasks([Task("a", "", mix="math")], slow))

        async def stream() -> AsyncIterator[Task]:
            over.set()
            await first
            yield Task("a", "", mix="math")

        for _ in range(200):
            await asyncio.sleep(0)
        await swarm.run_tasks(stream(), right, mix="code")
    assert stub.by_state() == {"ended": 4}


async def test_a_task_that_comes_again_later_in_the_stream_counts_again() -> None:
    stub = SwarmStub(group_size=2)
    stream = [Task("a", ""), Task("b", ""), Task("a", "")]
    await stub.play(stream[:1], right)
    report = await stub.play(stream, right)
    assert (report.resumed, report.ended) == (2, 4)


def test_a_task_has_an_id() -> None:
    with pytest.raises(ValueError, match="a task needs an id"):
        Task("", "What is 2+3?")


async def test_a_restarted_client_frees_what_another_version_of_its_code_left_open() -> None:
    stub = SwarmStub(group_size=2)
    await die_while_holding(stub, 0)
    left_open = stub.by_state()["running"]
    report = await stub.play(tasks(4), right, version="1")
    assert report.ended == 8
    assert stub.by_state() == {"ended": 8, "aborted": left_open}


async def test_what_a_client_claimed_outside_run_tasks_is_left_alone() -> None:
    stub = SwarmStub()
    async with stub.client() as first, stub.client() as second, first.episode(task_id="by hand", run_id=RUN) as episode:
        await second.run_tasks(tasks(1), right)
        await episode.end(reward=1.0)
    assert stub.by_state() == {"ended": 3}


async def test_an_older_process_of_a_client_stops_with_an_error_that_says_why() -> None:
    stub, begun, released = SwarmStub(), asyncio.Event(), asyncio.Event()

    async def slow(episode: Episode, task: Task) -> float:
        begun.set()
        await released.wait()
        return 1.0

    async with stub.client() as older, stub.client() as newer:
        stopping = asyncio.create_task(older.run_tasks(tasks(1), slow, episodes_per_task=1))
        await begun.wait()
        assert (await newer.run_tasks(tasks(1), right, episodes_per_task=1)).ended == 1
        released.set()
        with pytest.raises(LeaseLost, match="another process"):
            await stopping
    assert [(one.state, one.cause) for one in stub.episodes.values()] == [("dropped", "client"), ("ended", None)]


async def test_another_client_does_not_count_on_this_ones_episodes() -> None:
    stub = SwarmStub()
    await stub.play(tasks(2), right)
    async with stub.client(client_id="c-2") as swarm:
        assert (await swarm.run_tasks(tasks(2), right)).resumed == 0
    assert stub.episodes["ep-0"].claim["run_id"] == RUN


# -- progress ---------------------------------------------------------------------------------------------------------


async def test_the_progress_line_says_how_far_how_good_and_how_fast() -> None:
    clock, stream = ManualClock(), io.StringIO()
    line = ProgressLine("train", total=4, clock=clock, stream=stream)
    line.resumed(1)
    clock.advance(2)
    line.ended(1.0)
    line.ended(0.0)
    line.crashed()
    assert line.text() == "train  [###############.....] 3/4  reward 0.500  1.0/s  1 crashed"
    line.close()
    assert stream.getvalue().endswith("\n")
