"""The cocktail instrument: splits and shares, rewards in order, each family's runtime, and a client process for each family."""

from __future__ import annotations

import asyncio
import itertools
import json
import os
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from bench.serving import ServerProcess
from studies.cocktail import workflow
from studies.cocktail.families import FAMILIES
from studies.cocktail.reward import score
from swarm.client import RunSpec, SwarmClient, Task
from tests.studies.declarations import assert_declaration_fits_the_code, declared

pytestmark = pytest.mark.anyio

ROOT = Path(__file__).parents[2]
SPEC: dict[str, Any] = {"sampling": {"max_tokens": 16}, "limits": {"steps": 2}}


def take(stream: Any, count: int) -> list[Task]:
    return list(itertools.islice(stream, count))


def test_its_description_fits_the_code() -> None:
    assert_declaration_fits_the_code("cocktail")
    folder, _ = declared("cocktail")
    mix = folder.instrument.defaults.run["batch"]["mix"]
    assert {name: entry["ratio"] for name, entry in mix.items()} == {
        name: each.share for name, each in FAMILIES.items()
    }


def test_no_task_is_both_trained_and_held_out() -> None:
    train = {task.id for task in take(workflow.tasks("train", 0, None), 5000)}
    held_out = [task.id for task in workflow.tasks("heldout", 0, None)]
    assert train.isdisjoint(held_out)
    assert len(set(held_out)) == len(held_out) == 90


def test_a_stream_depends_on_its_seed_alone_and_every_seed_is_evaluated_alike() -> None:
    once = take(workflow.tasks("train", 1, None), 50)
    assert once == take(workflow.tasks("train", 1, 50), 99)
    assert once != take(workflow.tasks("train", 2, None), 50)
    assert list(workflow.tasks("heldout", 1, 20)) == list(workflow.tasks("heldout", 2, 20))
    with pytest.raises(ValueError, match="must"):
        workflow.tasks("test", 0, 1)  # type: ignore[arg-type]


def test_families_come_in_their_shares() -> None:
    names = [task.mix for task in take(workflow.tasks("train", 0, None), 1000)]
    for start in range(0, 950, 7):
        counted = Counter(names[start : start + 50])
        assert all(abs(counted[name] - 50 * family.share) <= 2 for name, family in FAMILIES.items())


@pytest.mark.parametrize("name", sorted(FAMILIES))
def test_right_wrong_and_empty_answers_are_worth_less_and_less(name: str) -> None:
    for task in take(FAMILIES[name].tasks("train", 0), 20):
        expected = str(task.metadata["expected"])
        worth = [score(answer, expected) for answer in (f"It is {expected.upper()}.", f"{expected} or not", " \n")]
        assert worth == [1.0, 0.1, 0.0]


async def test_each_runtime_plays_held_out_tasks(echo_server: ServerProcess) -> None:
    _, loaded = declared("cocktail")
    async with SwarmClient(echo_server.url) as swarm:
        run = await swarm.start_run(RunSpec.model_validate(SPEC))
        tasks = list(loaded.tasks("heldout", 0, 10))  # type: ignore[arg-type]
        report = await swarm.run_tasks(tasks, loaded.rollout, kind="eval", progress=False)
        entries = [entry async for entry in swarm.ledger(run_id=run.run_id, kind="eval")]
    assert loaded.close is not None
    await loaded.close()
    assert (report.ended, report.crashed) == (10, 0)
    assert Counter(entry.mix for entry in entries) == {"sums": 4, "words": 3, "larger": 3}
    assert {entry.calls for entry in entries} == {1}


async def test_a_client_process_for_each_family_trains_one_model(echo_server: ServerProcess) -> None:
    spec = RunSpec.model_validate(SPEC | {"batch": {"tasks": 6, "group_size": 2}, "limits": {"steps": 3}})
    async with SwarmClient(echo_server.url) as swarm:
        run = await swarm.start_run(spec)
        processes = [await client(name, echo_server.url) for name in FAMILIES]
        reports = [json.loads((await process.communicate())[0]) for process in processes]
        done = await swarm.run(run.run_id)
        entries = [entry async for entry in swarm.ledger(run_id=run.run_id)]
    assert [process.returncode for process in processes] == [0, 0, 0]
    assert all(report["run_over"] and not report["crashed"] for report in reports)
    assert done.status == "complete"
    assert {(entry.mix, entry.client_id) for entry in entries} == {(name, f"cocktail:{name}") for name in FAMILIES}
    assert all(entry.task_id.startswith(f"{entry.mix}:") for entry in entries)


async def client(family: str, url: str) -> asyncio.subprocess.Process:
    return await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "studies.cocktail.client", family, "--url", url, "--concurrency", "2"),
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        stdout=asyncio.subprocess.PIPE,
    )
