"""The frozen lake: maps that follow their seed, moves, rewards in order, and whole crossings against the echo engine."""

from __future__ import annotations

import importlib.util

import pytest

from bench.serving import ServerProcess
from studies.frozenlake import workflow
from studies.frozenlake.lake import Lake, MissingPackage, distance
from studies.frozenlake.reward import score
from tests.studies.declarations import assert_declaration_fits_the_code, declared
from tests.studies.playing import played, take, trained

pytestmark = [
    pytest.mark.anyio,
    pytest.mark.skipif(importlib.util.find_spec("gymnasium") is None, reason="gymnasium is not installed: make setup"),
]

ROWS = ("SFF", "FHF", "FFG")


def crossed(*moves: str | None, turns: int = 6, slippery: bool = False) -> Lake:
    lake = Lake(ROWS, turns=turns, slippery=slippery, seed=1)
    for move in moves:
        lake.move(move)
    lake.close()
    return lake


def test_its_description_fits_the_code() -> None:
    assert_declaration_fits_the_code("frozenlake")


@pytest.mark.parametrize("size", [3, 4, 8])
def test_no_map_is_both_trained_and_held_out_and_all_can_be_crossed(size: int) -> None:
    train = take(workflow.tasks("train", 0, None, size=size, turns=16), 200)
    held_out = list(workflow.tasks("heldout", 0, 16, size=size, turns=16))
    assert {task.id for task in train}.isdisjoint(task.id for task in held_out)
    assert len({task.id for task in held_out}) == len(held_out) == (8 if size == 3 else 16)  # there are few small maps
    assert all((distance(task.metadata["map"], 0) or 99) <= 16 for task in [*train, *held_out])


def test_a_stream_depends_on_its_seed_alone_and_every_seed_is_evaluated_alike() -> None:
    once = take(workflow.tasks("train", 1, None), 20)
    assert once == take(workflow.tasks("train", 1, 20), 40)
    assert once != take(workflow.tasks("train", 2, None), 20)
    assert list(workflow.tasks("heldout", 1, 8)) == list(workflow.tasks("heldout", 2, 8))


@pytest.mark.parametrize(
    ("split", "size", "turns", "ice"),
    [("test", 4, 8, 0.8), ("train", 2, 8, 0.8), ("train", 4, 5, 0.8), ("train", 4, 8, 0.2), ("train", 8, 14, 1.0)],
)
def test_what_is_no_lake_is_refused(split: workflow.Split, size: int, turns: int, ice: float) -> None:
    with pytest.raises(ValueError, match="must"):
        workflow.tasks(split, 0, 1, size=size, turns=turns, ice=ice)


def test_right_wrong_and_empty_crossings_are_worth_less_and_less() -> None:
    worth = [
        score(lake)
        for lake in (
            crossed("right", "right", "down", "down"),
            crossed("left", "right", "right", "down", "down"),
            crossed("left", "up", "right", "right", "down", "down"),
            crossed("right", "right", "down", "up", "down", "up"),
            crossed("right", "down"),
            crossed(None, None, None, None, None, None),
        )
    ]
    assert worth == sorted(worth, reverse=True)
    assert len(set(worth)) == len(worth)
    assert (worth[0], worth[-1]) == (1.0, 0.0)


def test_the_goal_a_hole_and_the_last_turn_end_a_crossing() -> None:
    assert crossed("right", "right", "down", "down").reached
    fallen = crossed("right", "down")
    assert (fallen.over, fallen.reached, fallen.left) == (True, False, None)
    assert crossed(None, None, turns=2).over
    assert crossed("left").shown() == "@FF\nFHF\nFFG"


def test_slips_follow_the_seed() -> None:
    moves = ("right", "right", "up", "left", "up", "right")
    assert crossed(*moves, slippery=True).at == crossed(*moves, slippery=True).at
    ways = set()
    for seed in range(12):
        lake = Lake(ROWS, turns=3, slippery=True, seed=seed)
        lake.move("right")
        lake.close()
        ways.add(lake.at)
    assert len(ways) > 1


@pytest.mark.parametrize(
    ("answer", "move"),
    [("right", "right"), ("I go DOWN.", "down"), ("up, then left", "up"), ("upright", None), ("", None), ("7", None)],
)
def test_the_first_direction_of_an_answer_is_the_move(answer: str, move: str | None) -> None:
    assert workflow.direction(answer) == move


def test_without_gymnasium_one_line_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(MissingPackage, match=r"instruments --install frozenlake.*requirements\.txt") as missing:
        workflow.tasks("train", 0, 1)
    assert "\n" not in str(missing.value)


async def test_crossings_are_played_move_by_move(echo_server: ServerProcess) -> None:
    """The echo engine says the last word that it heard: it goes down, turn after turn."""
    _, loaded = declared("frozenlake")
    report, entries = await played(echo_server.url, loaded, loaded.tasks("heldout", 0, 12))  # type: ignore[arg-type]
    assert (report.ended, report.crashed) == (12, 0)
    assert max(entry.calls for entry in entries) > 1
    assert all(entry.reward is not None and 0.0 <= entry.reward <= 1.0 for entry in entries)
    assert any(entry.reward for entry in entries)


async def test_a_training_runs_to_its_end(echo_server: ServerProcess) -> None:
    _, loaded = declared("frozenlake")
    report = await trained(echo_server.url, loaded, loaded.tasks("train", 0, None))  # type: ignore[arg-type]
    assert (report.run_over, report.crashed) == (True, 0)
