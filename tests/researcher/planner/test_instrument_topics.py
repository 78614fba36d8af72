"""Topics about each instrument, in the words of people: the right instrument, arms, settings and data; or a refusal that says what to write."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

import pytest

from researcher.instruments.catalogue import available
from researcher.planner.graph import PlanOptions, plan_study
from researcher.planner.written import taken_out
from researcher.refusals import PlanningRefused
from researcher.study.plan import Plan

pytestmark = pytest.mark.anyio

ALL = available({})


async def plan(topic: str, instrument: str | None = None) -> Plan:
    return await plan_study(topic, PlanOptions(planner="builtin", instrument=instrument), instruments=ALL)


def arms(made: Plan) -> list[Any]:
    (factor,) = made.factors
    return [factor.name, *(arm.levels[factor.name] for arm in made.arms)]


COUNTDOWN = [
    ("Is a group size of 8 better than 4 on countdown?", ["group_size", 4, 8], {}),
    ("Does countdown learn faster with lr 1e-4 than with 1e-5?", ["learning_rate", 1e-5, 1e-4], {}),
    ("On the countdown game, do groups of 16 beat groups of 8?", ["group_size", 8, 16], {}),
    ("Compare temperature 0.7 and 1.0 for Countdown", ["temperature", 1.0, 0.7], {}),
    ("Is RLOO faster than GRPO on countdown with 4 numbers?", ["algorithm", "grpo", "rloo"], {"numbers": 4}),
    ("Does countdown get easier to learn with 2 numbers than with 4?", ["numbers", 4, 2], {}),
]  # fmt: skip
LAKE = [
    ("Is a group size of 8 better than 4 on frozenlake?", ["group_size", 4, 8], {}),
    ("Does a learning rate of 1e-4 cross the frozen lake better than 1e-5?", ["learning_rate", 1e-5, 1e-4], {}),
    ("On FrozenLake with a map size of 5, do 12 turns beat 8 turns?", ["turns", 8, 12], {"size": 5}),
    ("Is held-out accuracy on gymnasium's frozen-lake lower with slippery ice than without?", ["slippery", False, True], {}),
    ("For slippery frozen lake, is group size 16 better than 4?", ["group_size", 4, 16], {"slippery": True}),
    ("On a non-slippery frozen lake, is a learning rate of 1e-4 better than 4e-5?", ["learning_rate", 4e-5, 1e-4], {"slippery": False}),
    ("Can a 5x5 frozen lake be learnt faster with groups of 16 than of 8?", ["group_size", 8, 16], {"size": 5}),
    ("FrozenLake: temperature 0.7 vs 1.0", ["temperature", 1.0, 0.7], {}),
]  # fmt: skip
GYM = [
    ("Does GRPO learn reasoning-gym sudoku?", ["learning_rate", 0.0, 4e-5], {"family": "sudoku"}),
    ("Does GRPO learn reasoning-gym chain_sum faster with a learning rate of 4e-5 than with 1e-5?", ["learning_rate", 1e-5, 4e-5], {"family": "chain_sum"}),
    ("Does GRPO learn reasoning gym's leg_counting faster with groups of 16 than groups of 8?", ["group_size", 8, 16], {"family": "leg_counting"}),
    ("Is a group size of 8 better than 4 on spell backward?", ["group_size", 4, 8], {"family": "spell_backward"}),
    ("On the reasoning_gym family mini_sudoku, does temperature 0.7 beat 1.0?", ["temperature", 1.0, 0.7], {"family": "mini_sudoku"}),
    ("Is reasoning-gym countdown learned faster with lr 1e-4 than 1e-5?", ["learning_rate", 1e-5, 1e-4], {"family": "countdown"}),
    ("Does reasoning-gym learn faster on leg_counting than on chain_sum?", ["family", "chain_sum", "leg_counting"], {}),
    (
        "On reasoning-gym chain_sum with options 'max_terms=2 max_digits=1', does lr 4e-5 beat 1e-5?",
        ["learning_rate", 1e-5, 4e-5],
        {"family": "chain_sum", "options": "max_terms=2 max_digits=1"},
    ),
]  # fmt: skip
TOPICS = [
    *((*each, "countdown") for each in COUNTDOWN),
    *((*each, "frozenlake") for each in LAKE),
    *((*each, "reasoning_gym") for each in GYM),
]


@pytest.mark.parametrize(("topic", "wanted", "settings", "instrument"), TOPICS)
async def test_a_topic_finds_its_instrument_and_its_arms(
    topic: str, wanted: list[Any], settings: dict[str, Any], instrument: str
) -> None:
    made = await plan(topic)
    assert made.instrument == instrument
    assert arms(made) == wanted
    assert {name: made.task[name] for name in settings} == settings


async def test_a_guess_of_ones_own_is_no_game() -> None:
    assert (await plan("group size 4 or 8 on sums? My guess is 8.")).instrument == "arithmetic"


@pytest.fixture
def data(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """What plans call data/train.jsonl, in the folder that the planner is started in."""
    monkeypatch.chdir(tmp_path)
    file = tmp_path / "data" / "train.jsonl"
    file.parent.mkdir()
    file.write_text('{"question": "1+1?", "answer": "2"}\n')
    file.with_name("other.jsonl").write_text('{"question": "2+2?", "answer": "4"}\n')
    return f"{file}#sha256={hashlib.sha256(file.read_bytes()).hexdigest()[:16]}"


DATA = [
    ("Is a group size of 8 better than 4 on my data set data/train.jsonl with reward exact?", ["group_size", 4, 8], {"reward": "exact"}),
    ("Does training on data/train.jsonl help?", ["learning_rate", 0.0, 4e-5], {"reward": "exact"}),
    ("Is a group size of 8 better than 4 on data/train.jsonl?", ["group_size", 4, 8], {"reward": "exact"}),
    ("With the reward number, does lr 4e-5 learn './data/train.jsonl' faster than 1e-5?", ["learning_rate", 1e-5, 4e-5], {"reward": "number"}),
    ("Do groups of 16 beat groups of 8 on the dataset data/train.jsonl, scored by math?", ["group_size", 8, 16], {"reward": "math"}),
    ("Compare the rewards exact and contains on data/train.jsonl", ["reward", "contains", "exact"], {}),
    (
        "On data/train.jsonl with question column 'prompt', answer_column=target and reward regex, is temperature 0.7 better than 1.0?",
        ["temperature", 1.0, 0.7],
        {"question_column": "prompt", "answer_column": "target", "reward": "regex"},
    ),
    (
        "On data/train.jsonl with the instruction \"Answer with 1 word, 2 at most.\", do groups of 4 beat groups of 8?",
        ["group_size", 8, 4],
        {"instruction": "Answer with 1 word, 2 at most."},
    ),
]  # fmt: skip


@pytest.mark.parametrize(("topic", "wanted", "settings"), DATA)
async def test_data_are_named_in_the_topic_and_pinned_in_the_plan(
    topic: str, wanted: list[Any], settings: dict[str, Any], data: str
) -> None:
    made = await plan(topic)
    assert made.instrument == "dataset"
    assert arms(made) == wanted
    assert {name: made.task[name] for name in ("data", *settings)} == {"data": data, **settings}


async def test_two_files_are_two_arms_each_with_its_digest(data: str) -> None:
    made = await plan("Does training on data/other.jsonl learn faster than on data/train.jsonl?")
    assert [arm.name for arm in made.arms] == ["data=train.jsonl", "data=other.jsonl"]
    levels = [str(arm.levels["data"]) for arm in made.arms]
    assert levels[0] == data
    assert "other.jsonl#sha256=" in levels[1]


@pytest.mark.parametrize(
    ("topic", "source"),
    [
        ("Is a group size of 8 better than 4 on hf:openai/gsm8k with reward number?", "hf:openai/gsm8k"),
        ("Is a group size of 8 better than 4 on the data set openai/gsm8k with reward number?", "hf:openai/gsm8k"),
        ("On https://huggingface.co/datasets/openai/gsm8k with reward number, do groups of 8 beat groups of 4?", "hf:openai/gsm8k"),
        ("Do groups of 8 beat groups of 4 on hf:HuggingFaceH4/MATH-500@v1 with reward math?", "hf:HuggingFaceH4/MATH-500@v1"),
    ],
)  # fmt: skip
async def test_a_data_set_of_the_hub_is_named_in_many_ways(topic: str, source: str) -> None:
    made = await plan(topic)
    assert (made.instrument, made.task["data"]) == ("dataset", source)
    assert arms(made) == ["group_size", 4, 8]


@pytest.mark.parametrize(
    ("topic", "says"),
    [
        ("Is a group size of 8 better than 4 on my data set?", "name a JSON lines file"),
        ("Is a group size of 8 better than 4 on nowhere/train.jsonl?", "'nowhere/train.jsonl' cannot be read"),
        ("Does GRPO learn reasoning-gym chan_sum faster with lr 4e-5 than 1e-5?", "did you mean chain_sum"),
        ("Does GRPO learn reasoning-gym chainsum faster with lr 4e-5 than 1e-5?", "did you mean chain_sum"),
        ("Does GRPO learn reasoning-gym leg_count faster with lr 4e-5 than 1e-5?", "did you mean leg_counting"),
        ("Does GRPO learn the reasoning-gym family blorpity faster with lr 4e-5 than 1e-5?", "'blorpity' is no family of reasoning_gym"),
        ("Would an agent that sees hints learn guess_number faster?", "names nothing that guess_number can vary"),
        ("Is a map size of 9 harder than 4 on frozenlake?", "from 3 to 8"),
        ("Does countdown learn faster with 9 numbers than with 3?", "from 2 to 5"),
    ],
)  # fmt: skip
async def test_what_cannot_be_asked_says_what_to_write(topic: str, says: str, data: str) -> None:
    with pytest.raises(PlanningRefused) as refused:
        await plan(topic)
    assert says in str(refused.value)
    assert "\n" not in str(refused.value)
    assert refused.value.nearest


@pytest.mark.parametrize(
    ("topic", "instrument"),
    [
        ("Does GRPO learn one-digit sums faster with a learning rate of 4e-5 than with 1e-5?", "arithmetic"),
        ("Does a learning rate of 1e-4 beat 1e-5?", "arithmetic"),
        ("Is a group size of 8 better than 4 when guessing numbers with a tool?", "guess_number"),
        ("Do two models cooperate better with lr 1e-4 than 1e-5?", "team"),
        ("Does a mixture of families learn faster with lr 1e-4 than 1e-5?", "cocktail"),
    ],
)
async def test_topics_about_the_other_instruments_stay_theirs(topic: str, instrument: str) -> None:
    assert (await plan(topic)).instrument == instrument


@pytest.mark.parametrize(
    "beside", ["without training longer", "without training on harder sums", "not training from scratch"]
)
async def test_what_is_trained_otherwise_is_not_frozen(beside: str) -> None:
    assert arms(await plan(f"For the team, is a group size of 8 better than 4 {beside}?")) == ["group_size", 4, 8]


@pytest.mark.parametrize("said", ["freezing the planner", "a frozen planner", "not training the planner"])
async def test_what_is_frozen_does_not_learn(said: str) -> None:
    made = await plan(f"Does {said} hurt the team's accuracy?")
    assert made.instrument == "team"
    assert arms(made) == ["planner_learning_rate", 4e-5, 0.0]


async def test_without_training_one_model_it_is_frozen_and_what_cannot_be_is_refused() -> None:
    assert arms(await plan("Does the solver learn without training the planner?")) == [
        "planner_learning_rate",
        4e-5,
        0.0,
    ]
    with pytest.raises(PlanningRefused, match="'solver' cannot be frozen by itself in team"):
        await plan("Is a frozen planner worse than a frozen solver?")


async def test_an_instrument_that_is_named_on_the_command_line_takes_data_too(data: str) -> None:
    made = await plan("Is a group size of 8 better than 4 on data/train.jsonl?", "dataset")
    assert made.task["data"] == data


def test_texts_are_taken_out_before_words_are_read() -> None:
    (dataset,) = (each.instrument for each in ALL if each.instrument.name == "dataset")
    out = taken_out("On a.jsonl with answer column is `b c`, split=test, is lr 1e-5 better?", dataset)
    assert {factor.name: level for factor, level in out.levels.values()} == {
        "data": "a.jsonl",
        "answer_column": "b c",
        "source_split": "test",
    }
    assert "jsonl" not in out.topic
