"""The synchronous client: closed once or more often, interrupted, and asked by its own stream of tasks."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from queue import Queue
from typing import TypeVar

import httpx
import pytest

from swarm.client import Task
from swarm.client.sync import DaemonThread, Episode, SwarmClient, team
from tests.fakes.swarm_stub import RUN, SwarmStub

APART_S = 0.5
LONG_S = 20.0

T = TypeVar("T")


def in_time(work: Callable[[], T], within_s: float = LONG_S) -> T:
    """What `work` answers, in a thread that nobody waits for beyond the time. Raises: TimeoutError."""
    return DaemonThread("the test").begin(work).result(within_s)


class Belated(httpx.AsyncBaseTransport):
    """A server whose answer to a claim arrives after its client was interrupted."""

    def __init__(self, stub: SwarmStub) -> None:
        self.stub = stub
        self.claimed = threading.Event()
        self.interrupted = threading.Event()

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        answer = await self.stub._serve(request)
        if request.url.path.endswith(":claim"):
            self.claimed.set()
            await asyncio.to_thread(self.interrupted.wait, 10.0)
            await asyncio.sleep(APART_S)
        return answer


def over(transport: httpx.AsyncBaseTransport, url: str = "http://stub") -> SwarmClient:
    return SwarmClient(url, transport=transport)


@pytest.fixture
def interruptible() -> Iterator[None]:
    """Also where the tests run in the background of a shell, which ignores interrupts."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


def interrupt_during(transport: Belated) -> None:
    transport.claimed.wait(10.0)
    time.sleep(APART_S)
    os.kill(os.getpid(), signal.SIGINT)
    transport.interrupted.set()


def test_a_client_may_be_closed_again_and_others_go_on() -> None:
    one, other = SwarmClient("http://stub"), over(SwarmStub().transport())
    one.close()
    one.close()
    with other:
        assert other.status().run_id == RUN


@pytest.mark.usefixtures("interruptible")
def test_a_claim_that_is_interrupted_on_its_way_is_given_back() -> None:
    stub = SwarmStub()
    transport = Belated(stub)
    threading.Thread(target=interrupt_during, args=(transport,), daemon=True).start()
    swarm = over(transport)
    with pytest.raises(KeyboardInterrupt), swarm, swarm.episode(task_id="t", run_id=RUN):
        pytest.fail("it was never had")
    assert stub.by_state() == {"aborted": 1}


def test_a_stream_of_tasks_may_ask_its_own_client() -> None:
    def tasks(swarm: SwarmClient) -> Iterator[Task]:
        for number in range(2):
            yield Task(f"{swarm.status().run_id}-{number}", "")

    def rollout(episode: Episode, task: Task) -> float:
        return 1.0

    with over(SwarmStub(group_size=2).transport()) as swarm:
        assert swarm.run_tasks(tasks(swarm), rollout, run_id=RUN).ended == 4


def test_a_rollout_that_exits_has_crashed_and_the_client_goes_on() -> None:
    def rollout(episode: Episode, task: Task) -> float:
        if task.id == "bad":
            sys.exit("agent: bad flag")
        return 1.0

    stub = SwarmStub()
    with over(stub.transport()) as swarm:
        stream = [Task("bad", ""), Task("good", "")]
        report = in_time(partial(swarm.run_tasks, stream, rollout, run_id=RUN, kind="eval", retries=0))
        assert swarm.status().run_id == RUN
    assert (report.ended, report.crashed) == (1, 1)
    (detail,) = (one.detail for one in stub.episodes.values() if one.detail)
    assert detail.count("Traceback") == 1
    assert 'sys.exit("agent: bad flag")' in detail


def test_a_rollout_that_finds_nothing_next_has_crashed() -> None:
    def rollout(episode: Episode, task: Task) -> float:
        return next(float(word) for word in task.query.split() if word.isdigit())

    stub = SwarmStub()
    with over(stub.transport()) as swarm:
        stream = [Task("bad", "none"), Task("good", "1")]
        report = in_time(partial(swarm.run_tasks, stream, rollout, run_id=RUN, kind="eval", retries=0))
    assert (report.ended, report.crashed) == (1, 1)
    (detail,) = (one.detail for one in stub.episodes.values() if one.detail)
    assert "return next(float(word)" in detail
    assert "StopIteration" in detail


def test_a_rollout_that_is_stuck_costs_its_episode_alone() -> None:
    stub, played, freed = SwarmStub(), list[str](), threading.Event()

    def rollout(episode: Episode, task: Task) -> float:
        played.append(task.id)
        if task.id == "stuck":
            stub.episodes[episode.id].state = "dropped"
            freed.wait(LONG_S)
        return 1.0

    stream = [Task("stuck", ""), *(Task(f"t-{number}", "") for number in range(6))]
    with over(stub.transport()) as swarm:
        work = partial(swarm.run_tasks, stream, rollout, run_id=RUN, kind="eval", concurrency=1, retries=0)
        report = in_time(partial(work, idle_limit_s=0.3), LONG_S / 2)
        freed.set()
    assert (report.ended, report.lost) == (6, 1)
    assert played == [task.id for task in stream]


def test_tasks_that_are_no_stream_end_their_caller() -> None:
    class Broken:
        def __iter__(self) -> Iterator[Task]:
            return next(iter(()))

    with (
        over(SwarmStub().transport()) as swarm,
        pytest.raises(RuntimeError, match="tasks raised StopIteration"),
    ):
        in_time(partial(swarm.run_tasks, Broken(), lambda *_: 1.0, run_id=RUN, kind="eval"))


def test_a_stream_of_tasks_that_exits_ends_its_caller_and_no_other() -> None:
    def tasks() -> Iterator[Task]:
        yield Task("a", "")
        sys.exit("no data")

    def rollout(episode: Episode, task: Task) -> float:
        return 1.0

    with over(SwarmStub().transport()) as swarm:
        with pytest.raises(SystemExit, match="no data"):
            in_time(partial(swarm.run_tasks, tasks(), rollout, run_id=RUN, kind="eval"))
        assert swarm.status().run_id == RUN


def test_a_stream_of_tasks_that_is_stuck_keeps_nobody_waiting_when_the_client_is_closed() -> None:
    stuck, freed = threading.Event(), threading.Event()

    def tasks() -> Iterator[Task]:
        yield Task("t", "")
        stuck.set()
        freed.wait(LONG_S)

    swarm = over(SwarmStub().transport())
    work = partial(swarm.run_tasks, tasks(), lambda *_: 1.0, run_id=RUN, kind="eval")
    working = ThreadPoolExecutor(1).submit(work)
    stuck.wait(LONG_S)
    in_time(swarm.close)
    with pytest.raises(RuntimeError, match="this client is closed"):
        working.result(LONG_S / 4)
    freed.set()


def test_a_member_of_a_team_is_ended_by_itself() -> None:
    stub = SwarmStub()
    with (
        over(stub.transport()) as swarm,
        over(SwarmStub().transport(), "http://other") as other,
        team(task_id="t", planner=swarm.episode(task_id="t", run_id=RUN), solver=other) as both,
    ):
        both["planner"].end(reward=1.0, agent_rewards={"critic": 0.5})
        handed_in = both["planner"].inner.result
        both.abort("the stub knows no teams")
    assert handed_in is not None
    assert handed_in.agent_rewards == {"critic": 0.5}


class Silent(httpx.AsyncBaseTransport):
    """A server that never answers."""

    def __init__(self) -> None:
        self.asked = threading.Event()

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        self.asked.set()
        await asyncio.Event().wait()
        raise AssertionError("for ever")


def test_a_thread_that_waits_for_a_client_which_is_closed_hears_of_it() -> None:
    transport = Silent()
    swarm = over(transport)
    answers: Queue[BaseException] = Queue()

    def ask() -> None:
        try:
            swarm.status()
        except Exception as error:  # noqa: BLE001 - it is looked at below
            answers.put(error)

    threading.Thread(target=ask, daemon=True).start()
    transport.asked.wait(LONG_S)
    in_time(swarm.close)
    with pytest.raises(RuntimeError, match="this client is closed"):
        raise answers.get(timeout=LONG_S)
    with pytest.raises(RuntimeError, match="this client is closed"):
        swarm.status()


def test_an_episode_that_is_open_when_its_client_is_closed_is_given_back() -> None:
    stub, playing, over_now = SwarmStub(), threading.Event(), threading.Event()

    def rollout(episode: Episode, task: Task) -> float:
        playing.set()
        over_now.wait(LONG_S)
        return 1.0

    swarm = over(stub.transport())
    work = partial(swarm.run_tasks, [Task("t", "")], rollout, run_id=RUN, kind="eval")
    working = ThreadPoolExecutor(1).submit(work)
    playing.wait(LONG_S)
    in_time(swarm.close)
    with pytest.raises(RuntimeError, match="this client is closed"):
        working.result(LONG_S)
    over_now.set()
    assert stub.by_state() == {"aborted": 1}


def test_a_claim_on_its_way_when_its_client_is_closed_is_given_back() -> None:
    stub = SwarmStub()
    transport = Belated(stub)
    swarm = over(transport)
    entering = ThreadPoolExecutor(1).submit(swarm.episode(task_id="t", run_id=RUN).__enter__)
    transport.claimed.wait(LONG_S)
    transport.interrupted.set()
    in_time(swarm.close)
    with pytest.raises(RuntimeError, match="this client is closed"):
        entering.result(LONG_S)
    assert stub.by_state() == {"aborted": 1}


def test_what_goes_wrong_while_the_last_client_is_closed_is_raised() -> None:
    class Broken(httpx.AsyncBaseTransport):
        async def aclose(self) -> None:
            raise OSError("no such socket")

    swarm = over(Broken())
    with pytest.raises(OSError, match="no such socket"):
        in_time(swarm.close)


FORKED = """
import os, signal
from swarm.client.sync import SwarmClient
from tests.fakes.swarm_stub import RUN, SwarmStub
from tests.swarm.client.test_sync_client import over

def mine():
    return over(SwarmStub().transport())

with mine() as parents:
    assert parents.status().run_id == RUN
    child = os.fork()
    if child == 0:
        signal.alarm(20)
        with mine() as swarm:
            assert swarm.status().run_id == RUN
        try:
            parents.status()
        except RuntimeError as error:
            assert "create a new client after the fork" in str(error), error
            parents.close()
            os._exit(0)
        os._exit(3)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert parents.status().run_id == RUN
"""


def test_a_forked_process_has_clients_of_its_own() -> None:
    ended = subprocess.run([sys.executable, "-c", FORKED], capture_output=True, text=True, timeout=60, check=False)
    assert (ended.returncode, ended.stderr) == (0, "")


def test_waiting_inside_the_loop_that_does_the_work_is_refused_instead_of_lasting_for_ever() -> None:
    with over(SwarmStub().transport()) as swarm:

        async def inside() -> None:
            swarm.status()

        with pytest.raises(RuntimeError, match="cannot be called from the event loop"):
            swarm.thread.call(inside)
