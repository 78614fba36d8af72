"""Interim evaluations: a few held-out tasks every few steps, while training waits.

They show a trial's progress and decide nothing. Their episodes belong to a separate client, so they are not counted among the
trial's episodes and do not affect the results, losses or retries of the evaluations before and after training.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence

from swarm.client.client import SwarmClient
from swarm.client.errors import RolloutsFailing
from swarm.client.rollouts import RolloutReport
from swarm.client.tasks import Task, TaskStream, each

_log = logging.getLogger(__name__)

_SUFFIX = ":interim"
Play = Callable[[Sequence[Task]], Awaitable[RolloutReport]]
"""Plays each of the given held-out tasks once, as the interim client. Raises: RolloutsFailing."""
Say = Callable[[int, RolloutReport], None]
"""Called after each evaluation with its step and a report on its episodes."""


def interim_id(client_id: str) -> str:
    """Return the client_id for a trial's interim episodes, derived from its normal client_id."""
    return f"{client_id}{_SUFFIX}"


def is_interim(client_id: str) -> bool:
    """True if a client plays only interim evaluations."""
    return client_id.endswith(_SUFFIX)


def spread(tasks: Sequence[Task], most: int) -> list[Task]:
    """Return at most `most` of the tasks, evenly spaced, because many task sets begin with the easy ones."""
    if len(tasks) <= most:
        return list(tasks)
    return [tasks[place * len(tasks) // most] for place in range(most)]


class InterimEvaluations:
    """Runs evaluations between training tasks.

    Args:
        tasks: the held-out tasks of each interim evaluation.
        play: plays the tasks.
        say: receives the report of each evaluation.
        every: number of steps between evaluations; the first is due at step `every`. A missed evaluation is not made up.
        last: the step at which training ends and the final evaluation takes over; None if training has no step limit.
    """

    def __init__(
        self,
        swarm: SwarmClient,
        run_id: str,
        tasks: Sequence[Task],
        play: Play,
        say: Say,
        *,
        every: int,
        last: int | None,
    ) -> None:
        self._swarm = swarm
        self._run_id = run_id
        self._tasks = tasks
        self._play = play
        self._say = say
        self._every = every
        self._last = last
        self._over = 0
        """Number of evaluations that are over, including missed ones and those that another process played."""

    async def between(self, stream: TaskStream) -> AsyncIterator[Task]:
        """Yield the training tasks, pausing the stream while an evaluation is due.

        During the pause no training step runs, unless the run already has enough episodes for one.
        """
        async for task in each(stream):
            await self._evaluate_if_due()
            yield task

    async def _evaluate_if_due(self) -> None:
        status = await self._swarm.status()
        due = status.step // self._every
        if status.run_id != self._run_id or due <= self._over:
            return
        if self._last is not None and status.step >= self._last:
            return
        self._over = due
        if await self._was_played(due):
            return
        try:
            report = await self._play(self._tasks)
        except RolloutsFailing as error:
            # Interim evaluations decide nothing; if training fails too, it will report that.
            _log.warning("skipping the evaluation at step %d: %s", status.step, error)
        else:
            self._say(status.step, report)

    async def _was_played(self, due: int) -> bool:
        """True if an earlier process completed this evaluation, with all its episodes at one step."""
        ended = Counter[int]()
        for progress in await self._swarm.tasks(run_id=self._run_id, client_id=self._swarm.client_id):
            if progress.kind == "eval" and progress.step is not None and progress.step // self._every == due:
                ended[progress.step] += min(1, progress.ended)
        return any(count >= len(self._tasks) for count in ended.values())
