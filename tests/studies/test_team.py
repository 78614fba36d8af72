"""The team instrument: splits, two rewards in order, and whole teams against two echo servers."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import pytest

from bench.serving import ServerProcess
from studies.team import workflow
from studies.team.reward import score_planner, score_solver
from swarm.client import Partner, RunSpec, SwarmClient, Task
from tests.studies.declarations import assert_declaration_fits_the_code, declared

pytestmark = pytest.mark.anyio


def take(stream: Any, count: int) -> list[Task]:
    return list(itertools.islice(stream, count))


def test_its_description_fits_the_code() -> None:
    assert_declaration_fits_the_code("team")


@pytest.mark.parametrize("operands", [2, 3])
def test_no_sum_is_both_trained_and_held_out_in_whatever_story_or_order(operands: int) -> None:
    train, held_out = (
        {
            tuple(sorted(task.metadata["operands"]))
            for task in take(workflow.tasks(split, 0, None, operands=operands), 60)
        }
        for split in ("train", "heldout")
    )
    assert train.isdisjoint(held_out)
    assert len(held_out) > 40
    assert len(take(workflow.tasks("heldout", 0, None), 10_000)) < 100, "they come to an end"


def test_a_stream_depends_on_its_seed_alone_and_every_seed_is_evaluated_alike() -> None:
    once = take(workflow.tasks("train", 1, None), 50)
    assert once == take(workflow.tasks("train", 1, 50), 99)
    assert once != take(workflow.tasks("train", 2, None), 50)
    assert list(workflow.tasks("heldout", 1, 20)) == list(workflow.tasks("heldout", 2, 20))


@pytest.mark.parametrize(("split", "operands"), [("test", 2), ("train", 1), ("train", 5)])
def test_what_is_no_task_is_refused(split: workflow.Split, operands: int) -> None:
    with pytest.raises(ValueError, match="must"):
        workflow.tasks(split, 0, 1, operands=operands)


def test_right_wrong_and_empty_answers_are_worth_less_and_less_to_both() -> None:
    answers = [score_solver(answer, 12) for answer in ("3 + 9 = 12", "13", "")]
    assert answers == [1.0, 0.1, 0.0]
    plans = [
        score_planner("3 + 9", (3, 9), 1.0),
        score_planner("3 + 8", (3, 9), 1.0),
        score_planner("3 + 9 = 12", (3, 9), 1.0),
        score_planner("apples", (3, 9), 0.1),
        score_planner(" ", (3, 9), 0.0),
    ]
    assert plans == sorted(plans, reverse=True)
    assert (plans[0], plans[-1]) == (1.0, 0.0)


async def test_both_models_are_trained_by_the_same_teams(tmp_path: Path) -> None:
    _, loaded = declared("team")
    spec = RunSpec.model_validate(
        {
            "batch": {"tasks": 2, "group_size": 2},
            "sampling": {"max_tokens": 16},
            "limits": {"steps": 2},
            "max_staleness": 0,
        }
    )
    with ServerProcess(tmp_path / "a") as ours, ServerProcess(tmp_path / "b") as theirs:
        async with SwarmClient(ours.url, client_id="c") as solver, SwarmClient(theirs.url) as planner:
            await solver.start_run(spec)
            beside = (await planner.start_run(spec)).run_id
            assert loaded.meet is not None
            loaded.meet({"planner": Partner(planner, beside)})
            held_out = list(loaded.tasks("heldout", 0, 2))  # type: ignore[arg-type]
            evaluated = await solver.run_tasks(held_out, loaded.rollout, kind="eval", progress=False)
            stream = loaded.tasks("train", 1, None)
            report = await solver.run_tasks(stream, loaded.rollout, concurrency=4, progress=False)
            assert loaded.close is not None
            await loaded.close()
            solved = [entry async for entry in solver.ledger() if entry.reward is not None]
            planned = [entry async for entry in planner.ledger() if entry.reward is not None]
    assert (evaluated.ended, report.run_over) == (2, True)
    assert report.ended >= 8
    assert sorted(entry.task_id for entry in solved) == sorted(entry.task_id for entry in planned)
    assert {entry.metrics["planner_reward"] for entry in solved} == {entry.reward for entry in planned}


async def test_without_a_second_server_it_says_what_to_do(echo_server: ServerProcess) -> None:
    _, loaded = declared("team")
    async with SwarmClient(echo_server.url) as swarm:
        await swarm.start_run(RunSpec())
        [task] = loaded.tasks("heldout", 0, 1)  # type: ignore[misc]
        async with swarm.episode(task_id=task.id, kind="eval") as episode:
            with pytest.raises(Exception, match="a second server"):
                await loaded.rollout(episode, task)
            episode.abort("no partner")
