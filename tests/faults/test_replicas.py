"""A real server with two vLLM replicas beside one trainer: one of them is killed, and nobody loses an episode."""

from __future__ import annotations

import asyncio
import itertools
import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path

import httpx
import pytest

from bench.serving import ServerProcess
from swarm.client import Episode, RunSpec, SwarmClient, Task
from swarm.models.folder import ModelFolder
from swarm.protocol.status import Phase, ServerStatus

pytestmark = [pytest.mark.campaign, pytest.mark.anyio]
STEPS = 12
GROUP = 4
SPEC = RunSpec.model_validate(
    {
        "batch": {"tasks": 2, "group_size": GROUP},
        "sampling": {"max_tokens": 24},
        "max_staleness": 1,
        "limits": {"steps": STEPS},
        "checkpoint": {"every_steps": 4},
    }
)
TURNS = 2


def vllm_of(server: ServerProcess, device: str) -> int:
    """The API server of a replica, below its reaper."""
    session = server.state_dir / "logs" / f"inference-{device.replace(':', '-')}.log.session"
    reaper = session.read_text().split()[0]
    return int(Path(f"/proc/{reaper}/task/{reaper}/children").read_text().split()[0])


class Agent:
    """Asks twice, the second time after its first answer. answered_while: calls that were answered in each phase of the server."""

    def __init__(self, http: httpx.AsyncClient) -> None:
        self.begun: dict[str, int] = {}
        self.phase = Phase.BOOTING
        self.answered_while: dict[Phase, int] = {}
        self._http = http

    async def play(self, episode: Episode, task: Task) -> float:
        slot = self.begun[task.id] = self.begun.get(task.id, -1) + 1
        messages: list[dict[str, str]] = [{"role": "user", "content": task.query}]
        for _ in range(TURNS):
            key = {"Authorization": f"Bearer {episode.api_key}"}
            body = {"model": "policy", "messages": messages, **episode.sampling}
            answer = await self._http.post(f"{episode.base_url}/chat/completions", json=body, headers=key)
            answer.raise_for_status()
            said = str(answer.json()["choices"][0]["message"]["content"])
            messages += [{"role": "assistant", "content": said}, {"role": "user", "content": "Say it again."}]
            self.answered_while[self.phase] = self.answered_while.get(self.phase, 0) + 1
        return float(slot % 2)


def numbered() -> Iterator[Task]:
    return (Task(id=f"t-{number}", query=f"What is {number}+1?") for number in itertools.count())


async def test_a_killed_replica_is_replaced_and_every_episode_is_trained_or_in_the_ledger(
    tiny_llama: ModelFolder, tmp_path: Path
) -> None:
    arguments = ["--trainer-device", "cpu", "--inference-devices", "cpu:0,cpu:1", "--max-model-len", "512"]
    with ServerProcess(tmp_path / "state", *arguments, engine="local", model=str(tiny_llama.path)) as server:
        async with SwarmClient(server.url) as swarm, httpx.AsyncClient(timeout=300.0, trust_env=False) as http:
            await status_when(swarm, lambda status: status.phase is Phase.IDLE)
            run_id = (await swarm.start_run(SPEC)).run_id
            agent = Agent(http)
            following = asyncio.create_task(follow(swarm, agent))
            playing = asyncio.create_task(
                swarm.run_tasks(numbered(), agent.play, run_id=run_id, concurrency=4 * GROUP, progress=False)
            )
            try:
                await status_when(swarm, lambda status: status.step >= 2)
                os.kill(vllm_of(server, "cpu:0"), signal.SIGKILL)
                away = await status_when(swarm, lambda status: not status.engine.replicas[0].ready)
                assert away.engine.warm
                assert away.engine.replicas[1].ready
                at = away.step
                more = await status_when(swarm, lambda status: status.step > at)
                assert not more.engine.replicas[0].ready  # steps are made while it is away
                back = await status_when(swarm, lambda status: status.engine.replicas[0].ready)
                assert back.engine.failures == 1
                report = await playing
            finally:
                for task in (following, playing):
                    task.cancel()
                await asyncio.gather(following, playing, return_exceptions=True)
            entries = [entry async for entry in swarm.ledger(run_id=run_id)]
            made = (await swarm.run(run_id)).steps
    assert (report.lost, report.crashed, report.given_up) == (0, 0, 0)
    assert [step.step for step in made] == [*range(1, STEPS + 1)]
    assert all(entry.state in ("trained", "in_step") or entry.reason is not None for entry in entries)
    trained = [entry for entry in entries if entry.state in ("trained", "in_step")]
    assert len(trained) == STEPS * 2 * GROUP
    assert not any(entry.tainted for entry in trained)
    assert agent.answered_while[Phase.UPDATING] > 0  # the replicas sample while the trainer trains


async def follow(swarm: SwarmClient, agent: Agent) -> None:
    async for status in swarm.statuses():
        agent.phase = status.phase


async def status_when(swarm: SwarmClient, holds: Callable[[ServerStatus], bool]) -> ServerStatus:
    async with asyncio.timeout(300.0):
        status = await swarm.status()
        while not holds(status):
            status = await swarm.status(since=status.revision, wait_s=5.0)
    return status
