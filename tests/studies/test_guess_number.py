"""The number-guessing instrument: splits, rules, rewards in order, and whole games against the echo engine."""

from __future__ import annotations

import itertools
from types import SimpleNamespace
from typing import Any

import pytest

from bench.serving import ServerProcess
from studies.guess_number import workflow
from studies.guess_number.game import Game
from studies.guess_number.reward import score
from swarm.client import RunSpec, SwarmClient, Task
from tests.studies.declarations import assert_declaration_fits_the_code, declared

pytestmark = pytest.mark.anyio


def take(stream: Any, count: int) -> list[Task]:
    return list(itertools.islice(stream, count))


def played(*guesses: int | None, turns: int = 4) -> Game:
    game = Game(low=10, high=17, secret=12, turns=turns)
    for number in guesses:
        game.guess(number)
    return game


def test_its_description_fits_the_code() -> None:
    assert_declaration_fits_the_code("guess_number")


@pytest.mark.parametrize("width", [4, 8, 40])
def test_no_secret_of_a_range_is_both_trained_and_held_out(width: int) -> None:
    train = {task.id for task in take(workflow.tasks("train", 0, None, width=width), 5000)}
    held_out = {task.id for task in workflow.tasks("heldout", 0, None, width=width)}
    assert train.isdisjoint(held_out)
    assert len(held_out) > 50


def test_a_stream_depends_on_its_seed_alone_and_every_seed_is_evaluated_alike() -> None:
    once = take(workflow.tasks("train", 1, None), 100)
    assert once == take(workflow.tasks("train", 1, 100), 200)
    assert once != take(workflow.tasks("train", 2, None), 100)
    assert list(workflow.tasks("heldout", 1, 20)) == list(workflow.tasks("heldout", 2, 20))


@pytest.mark.parametrize(("split", "width", "turns"), [("test", 8, 4), ("train", 3, 4), ("train", 8, 0)])
def test_what_is_no_task_is_refused(split: workflow.Split, width: int, turns: int) -> None:
    with pytest.raises(ValueError, match="must"):
        workflow.tasks(split, 0, 1, width=width, turns=turns)


def test_right_wrong_and_empty_games_are_worth_less_and_less() -> None:
    worth = [
        score(game)
        for game in (
            played(12),
            played(14, 12),
            played(17, 10, 14, 12),
            played(17, 10, 14, 13),
            played(17, 10, 14, 17),
            played(None, None, None, -(10**400)),
            played(None, None, None, None),
        )
    ]
    assert worth == sorted(worth, reverse=True)
    assert len(set(worth)) == len(worth)
    assert (worth[0], worth[-1]) == (1.0, 0.0)


def test_a_hint_points_to_the_secret() -> None:
    game = played()
    assert game.guess(10).startswith("Higher")
    assert game.guess(14).startswith("Lower")
    assert game.guess(12) == "Correct!"
    assert game.over
    assert played(None, turns=1).over


@pytest.mark.parametrize(
    ("arguments", "guessed"),
    [
        ('{"number": 12}', [12]),
        ('{"number": "13"}', [13]),
        ('{"number": true}', []),
        ("[12]", []),
        ("{12", []),
        ("{}", []),
    ],
)
def test_a_tool_call_is_a_guess_when_it_holds_a_number(arguments: str, guessed: list[int]) -> None:
    game = played()
    call = SimpleNamespace(id="c-1", function=SimpleNamespace(name="guess", arguments=arguments))
    said = workflow.answers(SimpleNamespace(tool_calls=[call, call], content=None), game)
    assert (game.guesses, game.used) == (guessed, 1)
    assert [one["role"] for one in said] == ["tool", "tool"]
    assert said[1]["content"] == "One guess at a time."


def test_a_number_in_the_text_is_a_guess_too() -> None:
    game = played()
    assert (
        workflow.answers(SimpleNamespace(tool_calls=None, content="between 10 and 17: 12"), game)[0]["content"]
        == "Correct!"
    )
    workflow.answers(SimpleNamespace(tool_calls=None, content=None), game)
    assert game.guesses == [12]


def test_a_number_of_more_digits_than_python_reads_is_a_wrong_guess_and_no_crash() -> None:
    digits = "9" * 5000
    for arguments in (f'{{"number": {digits}}}', f'{{"number": "{digits}"}}'):
        game = played()
        call = SimpleNamespace(id="c-1", function=SimpleNamespace(name="guess", arguments=arguments))
        workflow.answers(SimpleNamespace(tool_calls=[call], content=None), game)
        assert (game.used, game.over) == (1, False)
    game = played()
    workflow.answers(SimpleNamespace(tool_calls=None, content=f"It is {digits}"), game)
    assert (game.used, game.over) == (1, False)


async def test_whole_games_are_played_and_trained_over_http(echo_server: ServerProcess) -> None:
    folder, loaded = declared("guess_number")
    spec = folder.instrument.defaults.run | {"batch": {"tasks": 2, "group_size": 2}, "limits": {"steps": 2}}
    async with SwarmClient(echo_server.url) as swarm:
        run = await swarm.start_run(RunSpec.model_validate(spec))
        held_out = list(loaded.tasks("heldout", 0, 3))  # type: ignore[arg-type]
        evaluated = await swarm.run_tasks(held_out, loaded.rollout, kind="eval", progress=False)
        report = await swarm.run_tasks(loaded.tasks("train", 1, None), loaded.rollout, concurrency=4, progress=False)
        entries = [entry async for entry in swarm.ledger(run_id=run.run_id)]
        trace = await swarm.trace(next(entry.episode_id for entry in entries if entry.calls > 1))
    assert loaded.close is not None
    await loaded.close()
    assert (evaluated.ended, report.crashed, report.run_over) == (3, 0, True)
    assert all(entry.metrics["turns"] == entry.calls for entry in entries if entry.reward is not None)
    second = trace.calls[1]
    assert second.parent_call_id == trace.calls[0].call_id, "what was sampled is continued, not tokenised again"
