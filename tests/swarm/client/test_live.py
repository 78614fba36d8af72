"""Families of tasks, edited clients and restored runs, over real HTTP and with the commands that people use."""

from __future__ import annotations

import asyncio
import json
import time
from collections import Counter
from typing import Any

import pytest

from bench.serving import ServerProcess
from swarm.client import Episode, Outcome, RunSpec, SwarmClient, Task
from swarm.client.errors import Forbidden, InvalidSpec, NotFound, RolloutsFailing
from swarm.main import main

pytestmark = pytest.mark.anyio

MIX = {"math": {"ratio": 40}, "web": {"ratio": 30}, "code": {"ratio": 30}}
FIRST_EPISODE_S = 2.0
"""What replacing a client by an edited one may cost until the new one has its first episode."""


def spec(**changes: Any) -> RunSpec:
    batch = {"tasks": 5, "group_size": 2, **changes.pop("batch", {})}
    fields = {"seed": 3, "batch": batch, "sampling": {"max_tokens": 8}, "limits": {"steps": 10}}
    return RunSpec.model_validate(fields | changes)


def endless(family: str) -> Any:
    return (Task(id=f"{family}-{index}", query="say this") for index in range(10_000))


async def rollout(episode: Episode, task: Task) -> Outcome:
    import httpx

    async with httpx.AsyncClient(
        base_url=episode.base_url, headers={"Authorization": f"Bearer {episode.api_key}"}
    ) as it:
        body = {"model": "policy", "messages": [{"role": "user", "content": task.query}]}
        (await it.post("/chat/completions", json=body, timeout=60)).raise_for_status()
    slowness_s = {"math": 0.0, "web": 0.002, "code": 0.01}.get(task.id.split("-")[0], 0.0)
    await asyncio.sleep(slowness_s)
    return Outcome(reward=float(episode.grant.slot or 0))


async def test_three_clients_of_different_speed_are_trained_in_the_shares_of_the_mix(
    echo_server: ServerProcess,
) -> None:
    async with SwarmClient(echo_server.url, client_id="one-client") as swarm:
        run = await swarm.start_run(spec(batch={"mix": MIX}))
        working = [
            swarm.run_tasks(endless(name), rollout, run_id=run.run_id, mix=name, concurrency=4, progress=False)
            for name in MIX
        ]
        assert all(report.run_over for report in await asyncio.gather(*working))
        done, status = await swarm.run(run.run_id), await swarm.status()
    totals: Counter[str] = Counter()
    for step in done.steps:
        totals.update({name: int(step.values[f"mix_groups/{name}"]) for name in MIX})
    assert totals == {"math": 20, "web": 15, "code": 15}
    assert {name: family.trained_groups for name, family in status.pool.by_mix.items()} == dict(totals)


async def test_a_claim_of_no_family_is_told_which_there_are(echo_server: ServerProcess) -> None:
    async with SwarmClient(echo_server.url) as swarm:
        await swarm.start_run(spec(batch={"mix": MIX}))
        with pytest.raises(InvalidSpec, match="math, web, code"):
            async with swarm.episode(task_id="t", mix="maths"):
                raise AssertionError("granted")


async def test_an_edited_client_has_its_first_episode_at_once(echo_server: ServerProcess) -> None:
    async with SwarmClient(echo_server.url, client_id="it", client_version="1") as old:
        run = await old.start_run(spec(limits={"steps": None}))

        async def hang(episode: Episode, task: Task) -> Outcome:
            await asyncio.Event().wait()
            return Outcome(reward=0.0)

        working = asyncio.create_task(old.run_tasks(endless("slow"), hang, concurrency=40, progress=False))
        async for status in old.statuses():
            if status.pool.running == 20:  # as many as the server lets in
                break
        async with SwarmClient(echo_server.url, client_id="it", client_version="2") as new:
            began = time.monotonic()
            async with new.episode(task_id="fresh") as episode:
                waited_s = time.monotonic() - began
                await episode.end(reward=1.0)
            assert waited_s < FIRST_EPISODE_S
        working.cancel()
        await asyncio.gather(working, return_exceptions=True)
        assert [one.client_version for one in (await old.run(run.run_id)).versions] == ["1", "2"]


async def test_a_quarantined_version_hears_why(echo_server: ServerProcess) -> None:
    async with SwarmClient(echo_server.url, client_version="bad") as swarm:
        run = await swarm.start_run(spec())
        report = await swarm.quarantine(run.run_id, "bad", reason="rewards itself")
        assert report.versions == []
        with pytest.raises(Forbidden, match="rewards itself"):
            await swarm.run_tasks(endless("x"), rollout, progress=False)
        await swarm.quarantine(run.run_id, "bad", quarantined=False)
        assert (await swarm.run_tasks(endless("x"), rollout, progress=False)).run_over


async def test_a_crash_of_the_rollout_is_in_the_ledger_with_its_traceback(echo_server: ServerProcess) -> None:
    async def crash(episode: Episode, task: Task) -> Outcome:
        raise ValueError(f"no tool for {task.id}")

    async with SwarmClient(echo_server.url) as swarm:
        run = await swarm.start_run(spec())
        with pytest.raises(RolloutsFailing):
            await swarm.run_tasks(endless("x"), crash, progress=False)
        entries = [entry async for entry in swarm.ledger(run_id=run.run_id)]
    assert any("ValueError: no tool for x-0" in (entry.detail or "") for entry in entries)


def test_people_restore_and_quarantine_with_commands(
    echo_server: ServerProcess, capsys: pytest.CaptureFixture[str]
) -> None:
    def said(*arguments: str) -> str:
        assert main([*arguments, "--url", echo_server.url]) == 0, capsys.readouterr().err
        return capsys.readouterr().out

    async def train() -> str:
        async with SwarmClient(echo_server.url, client_version="v1") as swarm:
            run = await swarm.start_run(spec(limits={"steps": 2}))
            await swarm.run_tasks(endless("x"), rollout, progress=False)
            async for _ in swarm.statuses():
                if (await swarm.run(run.run_id)).status == "complete":
                    break
            with pytest.raises(NotFound, match="has no checkpoint of step 7"):
                await swarm.restore(run.run_id, 7)
            return run.run_id

    run_id = asyncio.run(train())
    assert said("run", "restore", "0") == f"run {run_id} continues from step 0 on branch 1\n"
    assert said("run", "quarantine", "v1", "--reason", "odd") == "client version v1 is quarantined\n"
    assert "v11 is quarantined in advance: no training episode has had this version yet; seen so far: v1\n" in said(
        "run", "quarantine", "v11"
    )
    assert "quarantined: odd" in said("run", "status")
    assert "admitted again" in said("run", "quarantine", "v1", "--lift")
    report = json.loads(said("run", "status", "--json"))["run"]
    assert (report["branch"], report["step"], report["status"]) == (1, 0, "running")
