"""Repositories with a failing test, mended by a coding agent: any program that edits files and calls a model.

The agent works in a folder of its own, confined to it. When it has ended, hidden tests that were never there decide.
"""

from __future__ import annotations

import asyncio
import itertools
import random
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Literal

from swarm.client import Episode, Outcome, Task, grading, run_agent

from .commands import BUILT_IN, command_of, variables, words_of
from .defects import KINDS
from .grading import graded
from .repositories import ANY, MODULES, Repository, repository
from .reward import RIGHT, score

Split = Literal["train", "heldout"]

MOST_HELD_OUT = 100
MOST_TURNS = 200
AGENT_LIMIT_S = 1800.0
_NUMBERS = 2**31


def tasks(
    split: Split,
    seed: int,
    count: int | None,
    *,
    agent: str = BUILT_IN,
    defect: str = ANY,
    modules: int = 2,
    turns: int = 12,
    context: int = 8192,
    answer_tokens: int = 256,
) -> Iterator[Task]:
    """Repositories of `modules` modules with one defect, to be mended by `agent` in `turns` calls of the model.

    train: an endless stream (or `count` of them) in an order that depends on `seed`. heldout: `count` different ones, at
    most 100, the same for every seed. No defect is in both.
    """
    if split not in ("train", "heldout"):
        raise ValueError(f"split must be train or heldout, got {split!r}")
    if defect not in (ANY, *KINDS):
        raise ValueError(f"defect must be one of {', '.join((ANY, *KINDS))}, got {defect!r}")
    if not 1 <= modules <= len(MODULES):
        raise ValueError(f"modules must lie between 1 and {len(MODULES)}, got {modules}")
    if not 1 <= turns <= MOST_TURNS:
        raise ValueError(f"turns must lie between 1 and {MOST_TURNS}, got {turns}")
    if not words_of(agent):
        raise ValueError(f"agent must be {BUILT_IN}, a name, or a command; it is empty")
    if split == "heldout":
        count = MOST_HELD_OUT if count is None else min(count, MOST_HELD_OUT)
    played: dict[str, str | int] = {"agent": agent, "turns": turns, "context": context, "answer_tokens": answer_tokens}
    rng = random.Random(f"{split}/{seed if split == 'train' else 0}")
    drawn = ((number, repository(defect, modules, number)) for number in _numbers(rng))
    wanted = ((number, found) for number, found in drawn if found.held_out == (split == "heldout"))
    made: dict[str, str | int] = {"defect": defect, "modules": modules}
    return itertools.islice((_task(found, {**made, "number": number}, played) for number, found in wanted), count)


async def rollout(episode: Episode, task: Task) -> Outcome:
    """Have the agent mend the repository, then let the hidden tests decide."""
    metadata = task.metadata
    found = repository(metadata["defect"], int(metadata["modules"]), int(metadata["number"]))
    with tempfile.TemporaryDirectory(prefix="repo-", ignore_cleanup_errors=True) as room:
        place = Path(room)
        folder = place / "work"
        await asyncio.to_thread(found.write, folder)
        command = command_of(metadata["agent"], place / "agent")
        limits = variables(*(int(metadata[name]) for name in ("turns", "context", "answer_tokens")))
        await run_agent(
            episode,
            command.words,
            folder,
            query=task.query,
            reads=command.reads,
            hidden=[Path(__file__).parent],
            variables=limits,
            limit_s=AGENT_LIMIT_S,
        )
        with grading():
            grade = await graded(folder, found)
    reward = score(grade.fixed, grade.kept, changed=grade.changed)
    metrics = {"fixed": grade.fixed, "kept": grade.kept, "changed": float(grade.changed)}
    return Outcome(reward=reward, success=reward == RIGHT, metrics=metrics)


def _numbers(rng: random.Random) -> Iterator[int]:
    """Different ones, without end."""
    seen: set[int] = set()
    while True:
        number = rng.randrange(_NUMBERS)
        if number not in seen:
            seen.add(number)
            yield number


def _task(found: Repository, made: dict[str, str | int], played: dict[str, str | int]) -> Task:
    module, _, _ = found.defect.partition(".")
    return Task(
        id=f"{made['defect']}:{made['modules']}:{made['number']}",
        query=(
            f"In this Python repository the test {found.failing} fails. The defect is in {found.package}/{module}.py. "
            "Find it and mend the code; leave the tests as they are. `python -m unittest` runs them."
        ),
        metadata=made | played,
    )
