"""Families of reasoning-gym: found by name, split, scored apart, and asked against the echo engine."""

from __future__ import annotations

import importlib.util
from collections.abc import AsyncIterator

import pytest

from bench.serving import ServerProcess
from studies.reasoning_gym import families, judge, workflow
from studies.reasoning_gym.families import MissingPackage, names, options_of
from studies.reasoning_gym.judge import Judge
from tests.studies.declarations import assert_declaration_fits_the_code, declared
from tests.studies.playing import played, take, trained

pytestmark = [
    pytest.mark.anyio,
    pytest.mark.skipif(
        importlib.util.find_spec("reasoning_gym") is None, reason="reasoning-gym is not installed: make setup"
    ),
]

EASY = "max_terms=2 max_digits=1"


@pytest.fixture
async def scorer() -> AsyncIterator[Judge]:
    one = Judge()
    yield one
    await one.close()


def test_its_description_fits_the_code() -> None:
    assert_declaration_fits_the_code("reasoning_gym")


def test_every_family_of_the_package_can_be_asked_for_by_name() -> None:
    folder, _ = declared("reasoning_gym")
    (family,) = (factor for factor in folder.instrument.factors if factor.name == "family")
    assert sorted(map(str, family.choices)) == names()


@pytest.mark.parametrize(("family", "options"), [("chain_sum", EASY), ("leg_counting", ""), ("spell_backward", "")])
def test_no_question_is_both_trained_and_held_out(family: str, options: str) -> None:
    train = take(workflow.tasks("train", 0, None, family=family, options=options), 200)
    held_out = list(workflow.tasks("heldout", 0, 16, family=family, options=options))
    assert {task.id for task in train}.isdisjoint(task.id for task in held_out)
    assert len({task.query for task in held_out}) == len(held_out) == 16


def test_a_stream_depends_on_its_seed_alone_and_every_seed_is_evaluated_alike() -> None:
    once = take(workflow.tasks("train", 1, None), 20)
    assert once == take(workflow.tasks("train", 1, 20), 40)
    assert once != take(workflow.tasks("train", 2, None), 20)
    assert list(workflow.tasks("heldout", 1, 8)) == list(workflow.tasks("heldout", 2, 8))


def test_a_family_that_draws_from_pythons_own_generator_follows_the_seed_too() -> None:
    once = take(workflow.tasks("train", 1, None, family="list_functions"), 5)
    assert once == take(workflow.tasks("train", 1, None, family="list_functions"), 5)


@pytest.mark.parametrize(
    ("family", "options", "says"),
    [
        ("chain_sun", "", "no family 'chain_sun'; did you mean chain_sum"),
        ("chain_sum", "max_term=2", "no option 'max_term'; did you mean max_terms"),
        ("chain_sum", "min_terms=4 max_terms=2", "refuses the options"),
        ("chain_sum", "max_terms", "name=value"),
        ("chain_sum", "seed=3", "left to the instrument"),
        ("game_of_life_halting", "", "counts any answer as right"),
    ],
)
def test_what_no_family_has_is_refused_with_what_is_nearest(family: str, options: str, says: str) -> None:
    with pytest.raises(ValueError, match=says):
        workflow.tasks("train", 0, 1, family=family, options=options)


def test_options_are_read_as_what_they_are() -> None:
    assert options_of("a=2, b=0.5 c=true d=word") == {"a": 2, "b": 0.5, "c": True, "d": "word"}


async def test_right_wrong_and_empty_answers_are_worth_less_and_less(echo_server: ServerProcess, scorer: Judge) -> None:
    for family, options in (("chain_sum", EASY), ("leg_counting", ""), ("countdown", "")):
        given = options_of(options)
        entry = next(families.entries(family, given, "here"))
        worth = [await scorer.score(family, given, answer, entry) for answer in (entry["answer"], "-77")]
        assert worth[0] == 1.0
        assert worth[1] is not None
        assert worth[1] < 0.2


@pytest.mark.parametrize("answer", ["9**9**9", "__import__('os')._exit(0)"])
async def test_an_answer_that_is_too_much_for_the_scorer_is_wrong_and_the_next_one_is_scored(
    answer: str, scorer: Judge, monkeypatch: pytest.MonkeyPatch
) -> None:
    entry = next(families.entries("countdown", {}, "here"))
    assert await scorer.score("countdown", {}, entry["answer"], entry) == 1.0
    monkeypatch.setattr(judge, "SCORE_LIMIT_S", 2.0)
    assert (await scorer.score("countdown", {}, answer, entry) or 0.0) < 0.2
    monkeypatch.undo()
    assert await scorer.score("countdown", {}, entry["answer"], entry) == 1.0


@pytest.mark.parametrize(("answer", "counts"), [("<answer> 12 </answer>", "12"), ("12\n", "12"), ("", "")])
def test_what_stands_between_answer_tags_counts(answer: str, counts: str) -> None:
    assert workflow.final(answer) == counts


def test_without_the_package_one_line_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(MissingPackage, match=r"instruments --install reasoning_gym.*requirements\.txt") as missing:
        workflow.tasks("train", 0, 1)
    assert "\n" not in str(missing.value)


async def test_episodes_are_played_to_their_rewards(echo_server: ServerProcess) -> None:
    _, loaded = declared("reasoning_gym")
    heldout = loaded.tasks("heldout", 0, 6, family="leg_counting")
    report, entries = await played(echo_server.url, loaded, heldout)  # type: ignore[arg-type]
    assert (report.ended, report.crashed) == (6, 0)
    assert {entry.reward for entry in entries} == {workflow.WRITTEN}


async def test_a_training_runs_to_its_end(echo_server: ServerProcess) -> None:
    _, loaded = declared("reasoning_gym")
    report = await trained(echo_server.url, loaded, loaded.tasks("train", 0, None, options=EASY))  # type: ignore[arg-type]
    assert (report.run_over, report.crashed) == (True, 0)
