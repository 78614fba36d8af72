"""What the server loses costs nobody his share: long tasks are trained like short ones, however often it is killed."""

from __future__ import annotations

import asyncio
import itertools
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from bench.serving import ServerProcess
from swarm.client import Cause, Episode, Patience, RunSpec, SwarmClient, Task
from swarm.client.rollouts import RolloutReport
from tests.fakes.proxy import CALM, FaultyProxy

pytestmark = pytest.mark.anyio

GROUP = 2
KILLS_PER_TASK = 3
LONG, SHORT = "long", "short"
CALLS = {LONG: 8, SHORT: 1}


def spec(steps: int) -> RunSpec:
    return RunSpec.model_validate(
        {
            "batch": {"tasks": 2, "group_size": GROUP, "group_patience_s": 30.0},
            "sampling": {"max_tokens": 8},
            "max_staleness": 0,
            "limits": {"steps": steps},
            "checkpoint": {"every_steps": 1},
        }
    )


def stream() -> Iterator[Task]:
    return (Task(f"{(LONG, SHORT)[number % 2]}-{number}", "Say red") for number in itertools.count())


class Killed:
    """A server behind a proxy that keeps its address, killed in the middle of long episodes. Use as an async context manager."""

    def __init__(self, folder: Path, tasks_hit: int) -> None:
        self.kills = 0
        self._folder = folder
        self._left = tasks_hit * KILLS_PER_TASK
        self._hits: Counter[str] = Counter()
        self._proxy = FaultyProxy(0, CALM)
        self._http = httpx.AsyncClient(timeout=30.0, trust_env=False)
        self._killing = asyncio.Lock()

    async def __aenter__(self) -> Killed:
        await self._proxy.__aenter__()
        await self._start()
        return self

    async def __aexit__(self, *exception: object) -> None:
        await self._http.aclose()
        await self._proxy.__aexit__(*exception)
        await asyncio.to_thread(self._server.kill)

    async def train(self, steps: int, retries: int) -> tuple[RolloutReport, Counter[str], dict[Cause, int]]:
        """What the client says, trained episodes by length, and what the ledger says was lost."""
        patience = Patience(connect_s=120.0, later_s=600.0, longest_delay_s=0.5)
        async with SwarmClient(self._proxy.url, client_id="player", patience=patience) as swarm:
            run = await swarm.start_run(spec(steps))
            report = await swarm.run_tasks(stream(), self._rollout, concurrency=4, retries=retries, progress=False)
            entries = [entry async for entry in swarm.ledger(run_id=run.run_id)]
            causes = (await swarm.summary(run_id=run.run_id)).causes
        trained = Counter(entry.task_id.partition("-")[0] for entry in entries if entry.state in ("trained", "in_step"))
        return report, trained, causes

    async def _rollout(self, episode: Episode, task: Task) -> float:
        calls = CALLS[task.id.partition("-")[0]]
        for number in range(calls):
            if number == calls // 2 and calls > 1:
                await self._perhaps_kill(task)
            answer = await self._http.post(
                f"{episode.base_url}/chat/completions",
                headers={"Authorization": f"Bearer {episode.api_key}"},
                json={"model": "policy", "messages": [{"role": "user", "content": task.query}]},
            )
            answer.raise_for_status()
        return float((episode.grant.slot or 0) % 2)

    async def _perhaps_kill(self, task: Task) -> None:
        async with self._killing:
            if self._left and self._hits[task.id] < KILLS_PER_TASK:
                self._left -= 1
                self._hits[task.id] += 1
                self.kills += 1
                self._proxy.target = None
                await asyncio.to_thread(self._server.kill)
                await self._start()

    async def _start(self) -> None:
        self._folder.mkdir(exist_ok=True)
        self._server = await asyncio.to_thread(ServerProcess, self._folder / "state", "--log-level", "warning")
        self._proxy.target = httpx.URL(self._server.url).port


@pytest.mark.parametrize(
    ("steps", "tasks_hit", "retries"), [(2, 1, 0), pytest.param(50, 6, 2, marks=pytest.mark.campaign)]
)
async def test_long_and_short_tasks_are_trained_alike_under_repeated_kills(
    tmp_path: Path, steps: int, tasks_hit: int, retries: int
) -> None:
    async with Killed(tmp_path / "calm", 0) as calm:
        _, undisturbed, _ = await calm.train(steps, retries)
    async with Killed(tmp_path / "killed", tasks_hit) as killed:
        report, trained, causes = await killed.train(steps, retries)
    assert killed.kills == tasks_hit * KILLS_PER_TASK
    assert report.run_over
    assert (report.crashed, report.set_aside, report.given_up) == (0, 0, 0)
    assert report.causes.keys() <= {Cause.SERVER}
    assert set(causes) == {Cause.SERVER}
    for length in (LONG, SHORT):
        share, before = (found[length] / found.total() for found in (trained, undisturbed))
        assert abs(share - before) <= 0.02, (trained, undisturbed)
