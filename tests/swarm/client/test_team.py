"""Teams over two real servers with the echo engine: on both or on none, whoever is killed and when."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import httpx
import pytest

from bench.serving import ServerProcess
from swarm.client import (
    EpisodeUnfinished,
    Patience,
    RunSpec,
    SwarmClient,
    team,
)
from swarm.client.episode import Episode
from swarm.protocol.episodes import LedgerEntry

pytestmark = pytest.mark.anyio

QUICK = Patience(connect_s=20.0, later_s=20.0)
SPEC = RunSpec.model_validate(
    {
        "batch": {"tasks": 2, "group_size": 2},
        "sampling": {"max_tokens": 16},
        "max_staleness": 0,
        "limits": {"steps": 50},
    }
)
SETTLE_S = 60.0


class Pair:
    """Two servers that can be killed and started again at their addresses."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.servers = {name: ServerProcess(folder / name, "--log-level", "warning") for name in ("a", "b")}
        self.urls = {name: server.url for name, server in self.servers.items()}

    def kill(self, name: str) -> None:
        self.servers[name].kill()

    def start(self, name: str) -> None:
        port = str(httpx.URL(self.urls[name]).port)
        self.servers[name] = ServerProcess(self.folder / name, "--log-level", "warning", "--port", port)

    def restart(self, name: str) -> None:
        self.kill(name)
        self.start(name)

    def stop(self) -> None:
        for server in self.servers.values():
            if server.process.poll() is None:
                server.stop()


@pytest.fixture
def pair(tmp_path: Path) -> Iterator[Pair]:
    both = Pair(tmp_path)
    try:
        yield both
    finally:
        both.stop()


@dataclass
class Swarms:
    a: SwarmClient
    b: SwarmClient

    async def fates(self, team_ids: list[tuple[str, str]]) -> list[tuple[LedgerEntry, LedgerEntry]]:
        """Of both members of each team, once nothing is prepared or running any more."""
        async with asyncio.timeout(SETTLE_S):
            for swarm in (self.a, self.b):
                async for status in swarm.statuses(wait_s=0.5):
                    if not status.pool.prepared and not status.pool.running:
                        break
        return [(await self.a.entry(one), await self.b.entry(other)) for one, other in team_ids]


@asynccontextmanager
async def swarms(pair: Pair) -> AsyncIterator[Swarms]:
    async with (
        SwarmClient(pair.urls["a"], client_id="c", patience=QUICK) as a,
        SwarmClient(pair.urls["b"], client_id="c", patience=QUICK) as b,
    ):
        for swarm in (a, b):
            await swarm.start_run(SPEC, idempotency_key="the run")
        yield Swarms(a, b)


async def call(episode: Episode) -> None:
    async with httpx.AsyncClient(trust_env=False) as http:
        answer = await http.post(
            f"{episode.base_url}/chat/completions",
            headers={"Authorization": f"Bearer {episode.api_key}"},
            json={"model": "policy", "messages": [{"role": "user", "content": "Say red"}]},
        )
        assert answer.status_code == 200, answer.text


def counted(entry: LedgerEntry) -> bool:
    """Whether it got into the pool, whatever training made of it."""
    return entry.reward is not None


async def test_a_team_counts_on_both_servers_with_a_reward_of_its_own_on_each(pair: Pair) -> None:
    async with swarms(pair) as both:
        async with team(task_id="t-1", planner=both.a, solver=both.b) as ep:
            await call(ep["planner"])
            await call(ep["solver"])
            ids = [(ep["planner"].id, ep["solver"].id)]
            ep.end(rewards={"planner": 1.0, "solver": 0.25}, success=True, metrics={"turns": 2})
        assert ep.committed
        [(planner, solver)] = await both.fates(ids)
    assert (planner.reward, solver.reward) == (1.0, 0.25)
    assert planner.state == solver.state == "ended"
    assert planner.success
    assert solver.metrics == {"turns": 2.0}


async def test_an_exception_or_a_missing_reward_aborts_on_both(pair: Pair) -> None:
    async with swarms(pair) as both:
        with pytest.raises(ZeroDivisionError):
            async with team(task_id="t-1", planner=both.a, solver=both.b) as ep:
                raise ZeroDivisionError("boom")
        with pytest.raises(EpisodeUnfinished):
            async with team(task_id="t-1", planner=both.a, solver=both.b) as bare:
                bare["planner"].end(reward=1.0)
        fates = await both.fates([(one["planner"].id, one["solver"].id) for one in (ep, bare)])
    assert all(entry.reason == "aborted" for fate in fates for entry in fate)
    assert fates[0][0].detail == "ZeroDivisionError: boom"
