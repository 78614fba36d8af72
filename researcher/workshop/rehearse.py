"""The process of a rehearsal: `python -m researcher.workshop.rehearse REQUEST.json SANDBOX.json`.

Binds its endpoint, confines itself, and only then loads the instrument's code. The result goes to what was standard output;
whatever the code prints goes to standard error.
"""

from __future__ import annotations

import asyncio
import itertools
import math
import os
import random
import sys
import traceback
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

from foundation.clock import SystemClock
from researcher.sandbox.entry import confine_by
from researcher.sandbox.launch import SandboxSpec
from researcher.workshop.endpoint import FixedEndpoint
from researcher.workshop.rehearsal import TASKS, Played, Rehearsal, RehearsalRequest
from swarm.client.crew import hand_in
from swarm.client.episode import Episode
from swarm.client.tasks import Task, each
from swarm.client.wire import Patience
from swarm.client.workflow import Workflow, load_module, workflow_of
from swarm.protocol.episodes import (
    Cause,
    EpisodeClaim,
    EpisodeGrant,
    EpisodeReceipt,
    EpisodeResult,
    EpisodeState,
    LedgerEntry,
    WeightsVersion,
)
from swarm.protocol.teams import EpisodePreparation, TeamReceipt

EPISODE_S = 20.0
_LOOKED_THROUGH = 5000
"""Tasks of a stream among which those that failed are looked for."""
_TRACE = 1500


class _Desk:
    """What an episode asks of its server, with nobody there."""

    def __init__(self, base_url: str) -> None:
        self.url = base_url
        self.result: EpisodeResult | None = None

    async def meet(self, connect_s: float) -> None:
        raise TypeError("a rehearsal has no teams")

    async def current_run_id(self) -> str:
        return "rehearsal"

    async def run(self, run_id: str) -> object:
        raise TypeError("a rehearsal has no teams")

    async def claim(self, claim: EpisodeClaim) -> EpisodeGrant:
        return EpisodeGrant(
            episode_id="rehearsal",
            lease="none",
            group_id=None,
            slot=None,
            base_url=self.url,
            api_key="none",
            weights_version=WeightsVersion(run_id="rehearsal"),
            expires_at=math.inf,
        )

    async def end(self, episode_id: str, result: EpisodeResult) -> EpisodeReceipt:
        self.result = result
        return EpisodeReceipt(episode_id=episode_id, status="pooled")

    async def abort(self, episode_id: str, lease: str, reason: str, cause: Cause | None = None) -> LedgerEntry:
        return LedgerEntry(
            episode_id=episode_id,
            run_id="rehearsal",
            kind="train",
            task_id="rehearsal",
            mix=None,
            client_id="rehearsal",
            client_version="0",
            config_version=1,
            group_id=None,
            slot=None,
            state=EpisodeState.DROPPED,
            cause=cause,
            claimed_step=0,
            claimed_at=0.0,
        )

    async def entry(self, episode_id: str, patience: Patience | None = None) -> LedgerEntry:
        raise TypeError("a rehearsal keeps no ledger")

    async def renew(self, episode_id: str, lease: str) -> float:
        return math.inf

    async def prepare(self, episode_id: str, preparation: EpisodePreparation) -> object:
        raise TypeError("a rehearsal has no teams")

    async def commit(self, episode_id: str, lease: str, patience: Patience | None = None) -> TeamReceipt:
        raise TypeError("a rehearsal has no teams")


async def _rehearsed(request: RehearsalRequest, endpoint: FixedEndpoint) -> Rehearsal:
    found = Rehearsal()
    tasks: dict[str, list[Task]] = {}
    try:
        module = load_module(Path(request.folder), request.workflow)
        workflow = workflow_of(module, str(Path(request.folder) / request.workflow))
        for split in ("train", "heldout"):
            found.tasks[split], tasks[split] = await _tasks(request, workflow, split)
    except Exception:  # noqa: BLE001 - whatever the code raises is what is wanted to be known
        return Rehearsal(error=_trace(request))
    examples: Callable[[Task], Mapping[str, str]] | None = (
        getattr(module, "examples", None) if request.examples else None
    )
    if request.plays:
        for split, line in tasks.items():
            for task in line:
                found.played += [
                    await _played(request, workflow, endpoint, split, task, name, answer)
                    for name, answer in _answers(request, examples, task)
                ]
    if workflow.close is not None:
        await workflow.close()
    return found


def _answers(
    request: RehearsalRequest, examples: Callable[[Task], Mapping[str, str]] | None, task: Task
) -> Iterable[tuple[int | str, str]]:
    named = examples(task) if examples is not None else {}
    return [*enumerate(request.answers), *((str(name), str(text)) for name, text in named.items())]


async def _tasks(request: RehearsalRequest, workflow: Workflow, split: str) -> tuple[list[str], list[Task]]:
    """Of a split: the ids of the first ones; the first few, and those that were named, to be played."""
    count = None if split == "train" else request.heldout
    names: list[str] = []
    line: list[Task] = []
    wanted = set(request.tasks)
    number = itertools.count()
    async for task in each(workflow.tasks(split, request.seed, count, **request.parameters)):
        at = next(number)
        if at < request.listed:
            names.append(task.id)
        if at < TASKS or task.id in wanted:
            line.append(task)
            wanted.discard(task.id)
        if at >= max(TASKS, request.listed) - 1 and (not wanted or at >= _LOOKED_THROUGH):
            break
    return names, line


async def _played(
    request: RehearsalRequest,
    workflow: Workflow,
    endpoint: FixedEndpoint,
    split: str,
    task: Task,
    name: int | str,
    answer: str,
) -> Played:
    desk = _Desk(endpoint.base_url)
    claim = EpisodeClaim(run_id="rehearsal", client_id="rehearsal", task_id=task.id)
    endpoint.begin(answer)
    random.seed(0)
    failure: dict[str, Any] = {}
    try:
        async with asyncio.timeout(EPISODE_S), Episode(desk, claim, clock=SystemClock()) as episode:
            hand_in(episode, await workflow.rollout(episode, task))
    except Exception as error:  # noqa: BLE001 - as above
        failure = {
            "error": _trace(request),
            "kind": type(error).__name__,
            "place": _place(request, error),
            "by_system": isinstance(error, OSError),
        }
    result = desk.result
    reward = None if result is None else float(result.reward)
    success = None if result is None else result.success
    return Played(
        split=split,
        task=task.id,
        answer=name,
        reward=reward,
        success=success,
        metrics=[] if result is None else sorted(result.metrics),
        asked=list(endpoint.asked),
        **failure,
    )


def _trace(request: RehearsalRequest) -> str:
    """The end of the traceback, with the instrument's files by their own names."""
    return traceback.format_exc()[-_TRACE:].replace(f"{request.folder}/", "").strip()


def _place(request: RehearsalRequest, error: Exception) -> str:
    """The last line of the instrument's own that was running; empty where none was."""
    frames = traceback.extract_tb(error.__traceback__)
    own = [frame for frame in frames if Path(frame.filename).is_relative_to(request.folder)]
    return f"{Path(own[-1].filename).relative_to(request.folder)}:{own[-1].lineno}" if own else ""


def main(arguments: list[str]) -> int:
    request = RehearsalRequest.model_validate_json(Path(arguments[0]).read_bytes())
    spec = SandboxSpec.model_validate_json(Path(arguments[1]).read_bytes())
    result = os.dup(1)
    os.dup2(2, 1)
    endpoint = FixedEndpoint()
    confine_by(spec, [endpoint.port])
    endpoint.serve()
    found = asyncio.run(_rehearsed(request, endpoint))
    with os.fdopen(result, "w") as out:
        out.write(found.model_dump_json())
    return 0


if __name__ == "__main__":
    # Not sys.exit: code that was tried may have left threads that never end.
    code = main(sys.argv[1:])
    sys.stderr.flush()
    os._exit(code)
