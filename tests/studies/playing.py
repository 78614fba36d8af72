"""An instrument's episodes on a real server: held-out ones, and a short training."""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from typing import Any

from swarm.client import RolloutReport, RunSpec, SwarmClient, Task
from swarm.client.workflow import Workflow
from swarm.protocol.episodes import LedgerEntry

SPEC: dict[str, Any] = {
    "sampling": {"max_tokens": 16},
    "batch": {"tasks": 2, "group_size": 2},
    "limits": {"steps": 2},
}


def take(stream: Any, count: int) -> list[Task]:
    return list(itertools.islice(stream, count))


async def played(url: str, workflow: Workflow, heldout: Iterable[Task]) -> tuple[RolloutReport, list[LedgerEntry]]:
    """Every held-out task once: what `run_tasks` did, and what the server kept of it."""
    async with SwarmClient(url) as swarm:
        run = await swarm.start_run(RunSpec.model_validate(SPEC))
        hot = {"temperature": 1.0}  # at 0 the echo engine, untrained, never says what it was told
        report = await swarm.run_tasks(list(heldout), workflow.rollout, kind="eval", sampling=hot, progress=False)
        entries = [entry async for entry in swarm.ledger(run_id=run.run_id, kind="eval")]
    if workflow.close is not None:
        await workflow.close()
    return report, entries


async def trained(url: str, workflow: Workflow, stream: Iterable[Task]) -> RolloutReport:
    """A training of two steps, to its end."""
    async with SwarmClient(url) as swarm:
        await swarm.start_run(RunSpec.model_validate(SPEC))
        report = await swarm.run_tasks(stream, workflow.rollout, progress=False)
    if workflow.close is not None:
        await workflow.close()
    return report
