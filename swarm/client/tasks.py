"""What goes into a rollout and what comes out: tasks and outcomes."""

from __future__ import annotations

import traceback
from collections.abc import AsyncIterable, AsyncIterator, Awaitable, Callable, Iterable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from swarm.protocol.episodes import LONGEST_NAME

if TYPE_CHECKING:
    from swarm.client.episode import Episode


@dataclass(frozen=True, slots=True)
class Task:
    """One problem instance. Tasks with equal ids must be equal, in every process."""

    id: str
    query: str
    metadata: dict[str, Any] = field(default_factory=dict)
    mix: str | None = None
    """The task's family, if one `run_tasks` call works on several; None means the `mix` of `run_tasks`."""

    def __post_init__(self) -> None:
        if not self.id:
            raise ValueError("a task needs an id: episodes of tasks with equal ids are compared with each other")
        if len(self.id) > LONGEST_NAME:
            raise ValueError(
                f"a task's id may have at most {LONGEST_NAME} characters, got {len(self.id)}: {self.id[:40]!r}..."
            )


@dataclass(frozen=True, slots=True)
class Outcome:
    """How an episode ended.

    Training uses only `reward`. `success` says whether the task was solved, for success rates. If a call failed on the server,
    `despite` says how the agent recovered; without it, the episode is not trained on.
    """

    reward: float
    success: bool | None = None
    metrics: dict[str, float] = field(default_factory=dict)
    despite: str | None = None


Rollout = Callable[["Episode", Task], Awaitable[Outcome | float | None]]
"""Makes one attempt at a task. Returns its outcome, or a reward, or None if it has called `episode.end` itself."""


def as_runtime_error(error: BaseException, whose: str) -> RuntimeError:
    """Convert `error` to a RuntimeError with the same traceback. `whose` names who raised it. Raise the result `from None`.

    This is needed because SystemExit stops an asyncio loop, and asyncio futures cannot hold StopIteration.
    """
    words = traceback.format_exception_only(error)[-1].strip()
    return RuntimeError(f"{whose} raised {words}").with_traceback(error.__traceback__)


def own_traceback(error: BaseException) -> str:
    """Format the traceback of a rollout's error, without our own frames that called the rollout."""
    frame = error.__traceback__
    while frame is not None and str(frame.tb_frame.f_globals.get("__name__")).startswith("swarm."):
        frame = frame.tb_next
    return "".join(traceback.format_exception(type(error), error, frame or error.__traceback__))


async def rolled_out(rollout: Rollout, episode: Episode, task: Task) -> Outcome | float | None:
    """Run a rollout and return its result. Convert a SystemExit that it raises to an ordinary error, so that the process continues."""
    try:
        return await rollout(episode, task)
    except SystemExit as error:
        raise as_runtime_error(error, "the rollout") from None


TaskStream = Iterable[Task] | AsyncIterable[Task]
"""A stream of tasks, which may be infinite."""


async def each(tasks: TaskStream) -> AsyncIterator[Task]:
    """Yield the tasks one by one, from either kind of stream."""
    if isinstance(tasks, AsyncIterable):
        async for task in tasks:
            yield task
    else:
        for task in tasks:
            yield task
