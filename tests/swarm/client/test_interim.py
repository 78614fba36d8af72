"""Interim evaluations come once in every few steps, between training tasks, and cost a trial nothing but time."""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest

from swarm.client.errors import RolloutsFailing
from swarm.client.interim import InterimEvaluations, interim_id, is_interim, spread
from swarm.client.rollouts import RolloutReport
from swarm.client.tasks import Task
from swarm.protocol.episodes import TaskProgress

pytestmark = pytest.mark.anyio

HELD_OUT = [Task("a", ""), Task("b", "")]


class Server:
    """Makes a step for every two training tasks. played: steps at which held-out tasks were played."""

    client_id = "c:interim"

    def __init__(self, *ended: TaskProgress, step: int = 0) -> None:
        self.ended = ended
        self.step = step
        self.played: list[int] = []
        self.fails = False

    async def status(self) -> Any:
        return SimpleNamespace(run_id="run", step=self.step)

    async def tasks(self, **_: str) -> Sequence[TaskProgress]:
        return self.ended

    async def play(self, tasks: Sequence[Task]) -> RolloutReport:
        self.played.append(self.step)
        if self.fails:
            raise RolloutsFailing("3 tasks in a row were set aside")
        return RolloutReport(ended=len(tasks))

    async def train(self, every: int, last: int) -> list[int]:
        """The steps at which evaluations ended, in a run of `last` steps."""
        said: list[int] = []
        swarm: Any = self
        evaluations = InterimEvaluations(
            swarm, "run", HELD_OUT, self.play, lambda step, _: said.append(step), every=every, last=last
        )
        names = [f"t-{number}" for number in range(2 * (last - self.step) + 2)]
        given = []
        async for task in evaluations.between(Task(name, "") for name in names):
            given.append(task.id)
            self.step = min(last, self.step + (len(given) % 2 == 0))
        assert given == names
        return said


def ended(task: str, step: int) -> TaskProgress:
    return TaskProgress(task_id=task, kind="eval", step=step, ended=1)


async def test_one_comes_in_every_few_steps_and_none_before_the_first_or_after_the_last() -> None:
    server = Server()
    assert await server.train(every=2, last=6) == server.played == [2, 4]


async def test_what_an_earlier_process_played_is_not_played_again_and_what_it_left_half_done_is() -> None:
    assert await Server(ended("a", 2), ended("b", 2), step=3).train(every=2, last=6) == [4]
    assert await Server(ended("a", 2), ended("b", 3), step=3).train(every=2, last=6) == [3, 4]


async def test_one_that_fails_is_left_out_and_training_goes_on() -> None:
    server = Server()
    server.fails = True
    assert await server.train(every=2, last=5) == []
    assert server.played == [2, 4]


def test_tasks_are_spread_over_their_order() -> None:
    tasks = [Task(str(number), "") for number in range(10)]
    assert [task.id for task in spread(tasks, 4)] == ["0", "2", "5", "7"]
    assert spread(tasks, 10) == spread(tasks, 99) == tasks


def test_its_client_is_another_than_the_trials() -> None:
    assert is_interim(interim_id("trial:hash/a/0"))
    assert not is_interim("trial:hash/a/0")
