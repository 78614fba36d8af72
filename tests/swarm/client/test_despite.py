"""Clients of a server whose engine fails in the middle of an episode: what they hear, and how they let it count."""

from __future__ import annotations

import asyncio
import io
import json
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import httpx
import pytest

from swarm.client import Outcome, SwarmClient, Task, TeamAborted, team
from swarm.client.episode import Episode
from swarm.client.sync import SwarmClient as SyncSwarmClient
from swarm.main import main
from swarm.protocol.episodes import Cause, DropReason
from tests.fakes.ailing_engine import AilingEngine
from tests.swarm.server.gateway.conftest import Served, served_by
from tests.vllm_fixture import LoopThread

pytestmark = pytest.mark.anyio
BODY = {"model": "policy", "messages": [{"role": "user", "content": "Repeat hello"}]}


@pytest.fixture
def two(tmp_path: Path) -> Iterator[list[tuple[Served, AilingEngine]]]:
    """Two servers, each with an engine of its own."""
    thread = LoopThread()
    with ExitStack() as stack:
        made = []
        for name in ("a", "b"):
            engine = AilingEngine()
            made.append((stack.enter_context(served_by(thread, engine, tmp_path / name)), engine))
        yield made
    thread.close()


def url(served: Served) -> str:
    return str(served.http.base_url).rstrip("/")


def post(base_url: str, api_key: str) -> int:
    headers = {"authorization": f"Bearer {api_key}"}
    return httpx.post(f"{base_url}/chat/completions", json=BODY, headers=headers, timeout=30).status_code


async def one_good_call_and_one_that_fails(episode: Episode, engine: AilingEngine) -> None:
    good = await asyncio.to_thread(post, episode.base_url, episode.api_key)
    engine.falls("faulty")
    failed = await asyncio.to_thread(post, episode.base_url, episode.api_key)
    engine.ailment = None
    assert (good, failed) == (200, 500)


async def test_an_outcome_may_say_despite_what_it_counts(two: list[tuple[Served, AilingEngine]]) -> None:
    (served, engine), _ = two
    receipts: list[Any] = []
    words: list[str | None] = [None, "it asked again"]

    async def rollout(episode: Episode, task: Task) -> Outcome:
        receipts.append(episode)
        await one_good_call_and_one_that_fails(episode, engine)
        return Outcome(reward=1.0, despite=words[min(len(receipts), len(words)) - 1])

    async with SwarmClient(url(served), client_id="c") as swarm:
        await swarm.run_tasks(
            [Task(id="t", query="hello")], rollout, episodes_per_task=1, concurrency=1, progress=False
        )
        entries = [await swarm.entry(episode.id) for episode in receipts]
    assert entries[0].reason is DropReason.TAINTED
    assert receipts[0].receipt.dropped is DropReason.TAINTED


@pytest.mark.parametrize("decider", ["planner", "solver"])
async def test_a_team_with_a_tainted_member_is_given_up_as_a_whole(
    two: list[tuple[Served, AilingEngine]], decider: str
) -> None:
    (first, engine), (second, _) = two
    clients = [SwarmClient(url(served), client_id="c") for served in (first, second)]
    async with clients[0] as one, clients[1] as other:
        held: dict[str, str] = {}

        async def plays(despite: str | None) -> bool:
            async with team(task_id="t", decider=decider, solver=other, planner=one) as members:
                held.update({name: members[name].id for name in ("solver", "planner")})
                await asyncio.to_thread(post, members["solver"].base_url, members["solver"].api_key)
                await one_good_call_and_one_that_fails(members["planner"], engine)
                members.end(rewards={"planner": 0.0, "solver": 0.0}, despite=despite)
            return members.committed

        with pytest.raises(TeamAborted, match="tainted"):
            await plays(None)
        entries = [await one.entry(held["planner"]), await other.entry(held["solver"])]
        assert [entry.cause for entry in entries] == [Cause.SERVER, Cause.SERVER]
        assert entries[0].reason is DropReason.TAINTED
        assert await plays("the planner asked again")
        assert (await one.entry(held["planner"])).despite == "the planner asked again"


def test_plain_scripts_and_the_command_line_say_it_too(
    two: list[tuple[Served, AilingEngine]],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    (served, engine), _ = two

    def calls(grant: Any) -> None:
        assert post(grant.base_url, grant.api_key) == 200
        engine.falls("faulty")
        assert post(grant.base_url, grant.api_key) == 500
        engine.ailment = None

    with SyncSwarmClient(url(served), client_id="c") as swarm:
        with swarm.episode(task_id="t") as episode:
            calls(episode)
            receipt = episode.end(reward=1.0, despite="it asked again")
        assert receipt is not None
        assert receipt.dropped is None
        with swarm.episode(task_id="t") as episode:
            calls(episode)
            receipt = episode.end(reward=1.0)
        assert receipt is not None
        assert receipt.dropped is DropReason.TAINTED

    def ended(*options: str) -> dict[str, Any]:
        episode = served.claim()
        assert episode.raw(BODY).status_code == 200
        engine.falls("faulty")
        assert episode.raw(BODY).status_code == 500
        engine.ailment = None
        monkeypatch.setattr("sys.stdin", io.StringIO(json.dumps(episode.grant)))
        assert main(["episode", "end", "-", "--reward", "1", "--url", url(served), *options]) == 0
        return dict(json.loads(capsys.readouterr().out))

    assert ended()["dropped"] == "tainted"
    assert ended("--despite", "it asked again")["dropped"] is None
