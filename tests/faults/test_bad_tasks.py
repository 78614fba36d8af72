"""One task whose rollouts all fail costs itself alone, also where every step waits for every task."""

from __future__ import annotations

import itertools

import httpx
import pytest

from bench.serving import ServerProcess
from swarm.client import Cause, Episode, RunSpec, SwarmClient, Task

pytestmark = pytest.mark.anyio


async def test_a_bad_task_is_set_aside_and_the_run_goes_on_to_its_limit_at_max_staleness_0(
    echo_server: ServerProcess,
) -> None:
    spec = RunSpec.model_validate(
        {
            "batch": {"tasks": 1, "group_size": 4, "group_patience_s": 0.5},
            "sampling": {"max_tokens": 8},
            "max_staleness": 0,
            "limits": {"steps": 3},
        }
    )
    async with httpx.AsyncClient(trust_env=False) as http, SwarmClient(echo_server.url, client_id="c") as swarm:

        async def rollout(episode: Episode, task: Task) -> float:
            if task.id == "bad":
                raise KeyError("answer")
            answer = await http.post(
                f"{episode.base_url}/chat/completions",
                headers={"Authorization": f"Bearer {episode.api_key}"},
                json={"model": "policy", "messages": [{"role": "user", "content": "Say red"}]},
            )
            return float(answer.raise_for_status().is_success)

        run = await swarm.start_run(spec)
        stream = (Task("bad" if number % 2 == 0 else f"good-{number}", "") for number in itertools.count())
        report = await swarm.run_tasks(stream, rollout, progress=False)
        done = await swarm.run(run.run_id)
        summary = await swarm.summary(run_id=run.run_id)
    assert (report.run_over, done.status, done.step) == (True, "complete", 3)
    assert report.set_aside == 1
    assert report.causes[Cause.ROLLOUT] == summary.causes[Cause.ROLLOUT] <= 12
    assert {lost.task_id for lost in summary.lost if lost.cause is Cause.ROLLOUT} == {"bad"}
