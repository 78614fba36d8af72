"""The input and the result of a rollout."""

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
    """One problem instance. Equal ids always mean equal tasks, in every process."""

    id: str
    query: str
    metadata: dict[str, Any] = field(default_factory=dict)
    mix: str | None = None
    """Its family, if one `run_tasks` works on several; None: the `mix` of `run_tasks`."""

    def __post_init__(self) -> None:
        if not self.id:
            raise ValueError("a task needs an id: episodes with equal ids are compared with each other")
        if len(self.id) > LONGEST_NAME:
            raise ValueError(
                f"a task's id has {LONGEST_NAME} characters at most, got {len(self.id)}: {self.id[:40]!r}..."
            )


@dataclass(frozen=True, slots=True)
class Outcome:
    """How an episode ended. success: whether the task was solved, for rates; reward is what training sees.

    despite: how the agent recovered from a call that failed on the server's side; without it the episode is not trained.
    """

    reward: float
    success: bool | None = None
    metrics: dict[str, float] = field(default_factory=dict)
    despite: str | None = None


Rollout = Callable[["Episode", Task], Awaitable[Outcome | float | None]]
"""One attempt at a task. Returns its outcome, or a reward, or None after it called `episode.end` itself."""


def as_runtime_error(error: BaseException, whose: str) -> RuntimeError:
    """`error` as a RuntimeError with the same traceback. Raise it `from None`.

    asyncio stops its loop for SystemExit, and its futures cannot hold StopIteration.
    """
    words = traceback.format_exception_only(error)[-1].strip()
    return RuntimeError(f"{whose} raised {words}").with_traceback(error.__traceback__)


def own_traceback(error: BaseException) -> str:
    """The traceback of a rollout's error, without our own frames that called the rollout."""
    frame = error.__traceback__
    while frame is not None and str(frame.tb_frame.f_globals.get("__name__")).startswith("swarm."):
        frame = frame.tb_next
    return "".join(traceback.format_exception(type(error), error, frame or error.__traceback__))


async def rolled_out(rollout: Rollout, episode: Episode, task: Task) -> Outcome | float | None:
    """Run a rollout and return its result. Its SystemExit counts as an error of the rollout, and the process continues."""
    try:
        return await rollout(episode, task)
    except SystemExit as error:
        raise as_runtime_error(error, "the rollout") from None


TaskStream = Iterable[Task] | AsyncIterable[Task]
"""May be infinite."""


async def each(tasks: TaskStream) -> AsyncIterator[Task]:
    """The tasks one by one, from either kind of stream."""
    if isinstance(tasks, AsyncIterable):
        async for task in tasks:
            yield task
    else:
        for task in tasks:
            yield task
