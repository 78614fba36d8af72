"""Interim evaluations: a few held-out tasks every few steps, while training waits.

They show a trial's progress and decide nothing. Their episodes belong to a separate client, so that nothing that counts the
trial's episodes sees them: they do not affect results, losses or retries of the evaluations before and after training.
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
"""Play held-out tasks once each, as the interim client. Raises: RolloutsFailing."""
Say = Callable[[int, RolloutReport], None]
"""Called with the step of an ended evaluation and the report of its episodes."""


def interim_id(client_id: str) -> str:
    """The client_id of a trial's interim episodes, derived from its normal client_id."""
    return f"{client_id}{_SUFFIX}"


def is_interim(client_id: str) -> bool:
    """Whether a client plays only interim evaluations."""
    return client_id.endswith(_SUFFIX)


def spread(tasks: Sequence[Task], most: int) -> list[Task]:
    """At most `most` of the tasks, evenly spaced, because many task sets begin with the easy ones."""
    if len(tasks) <= most:
        return list(tasks)
    return [tasks[place * len(tasks) // most] for place in range(most)]


class InterimEvaluations:
    """Runs evaluations between training tasks. tasks: the tasks of each interim evaluation.

    every: an evaluation is due every `every` steps, first at step `every`; one that was missed is not made up.
    last: the step at which training ends, and after which the final evaluation follows; None if no number of steps ends it.
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
        """Number of evaluations that are over, including those that another process played or that were missed."""

    async def between(self, stream: TaskStream) -> AsyncIterator[Task]:
        """The stream of training tasks, paused for evaluations that are due. Meanwhile no further step runs, unless the run already has
        enough episodes for one."""
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
            _log.warning("the evaluation at step %d is left out: %s", status.step, error)
        else:
            self._say(status.step, report)

    async def _was_played(self, due: int) -> bool:
        """Whether an earlier process completed this evaluation, all at one step."""
        ended = Counter[int]()
        for progress in await self._swarm.tasks(run_id=self._run_id, client_id=self._swarm.client_id):
            if progress.kind == "eval" and progress.step is not None and progress.step // self._every == due:
                ended[progress.step] += min(1, progress.ended)
        return any(count >= len(self._tasks) for count in ended.values())
