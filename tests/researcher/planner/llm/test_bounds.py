"""What a topic states is found in it, and is in the spec or named; what nobody has named is in no spec."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from researcher.instruments.catalogue import read_instrument
from researcher.planner.bounds import invented, lost, stated
from researcher.study.spec import StudySpec

DATASET = read_instrument(Path(__file__).parents[4] / "studies" / "dataset").instrument
COMPARE = {"learning_rate": {"baseline": 1e-5, "levels": [4e-5]}}
HOUR = 3600.0


def spec(**fields: Any) -> StudySpec:
    return StudySpec.model_validate({"question": "?", "instrument": "arithmetic", "compare": COMPARE, **fields})


def open_bounds(
    topic: str, held: StudySpec, uncovered: Sequence[str] = (), **given: Any
) -> tuple[list[str], list[str]]:
    return lost(topic, held, uncovered, given=given, factors=DATASET.factors)


@pytest.mark.parametrize(
    ("topic", "found"),
    [
        ("6 hours at most, 8 h, 90m, 1h30m, half an hour", [("time", s * HOUR) for s in (1.5, 6, 8, 0.5)]),
        ("Within three nights or 2 weeks", [("days", 72 * HOUR), ("days", 336 * HOUR)]),
        ("höchstens zwei Stunden, 4 Startwerte, 20 Schritte", [("time", 2 * HOUR), ("seeds", 4), ("steps", 20)]),
        ("用3个种子，最多两个小时", [("time", 2 * HOUR), ("seeds", 3)]),
        ("3 to 5 seeds; seeds 10 to 14", [("seeds", 3), ("seeds", 5), ("seeds", 10), ("seeds", 14)]),
        ("at least five seeds, 1,000 steps, 50M tokens", [("seeds", 5), ("steps", 1000), ("tokens", 5e7)]),
        ("Between 22:00 and 07:00: from 10 pm", [("window", "22:00"), ("window", "07:00")]),
        ("a temperature of 1 and 5 seeds", [("seeds", 5)]),
        ("Qwen/Qwen3-0.6B, Qwen3-1.7B and a 135m model", [("model", "Qwen/Qwen3-0.6B"), ("model", "Qwen3-1.7B")]),
        ("hf:openai/webgpt or data/train.jsonl", [("data", "data/train.jsonl"), ("data", "openai/webgpt")]),
        ("on openai/gsm8k", [("hub", "openai/gsm8k")]),
        (
            "clip 0.28 against 0.2, rates 1e-5/4e-5, alpha/rank, one-digit sums, groups of 16, at step 5, in one step",
            [],
        ),
    ],
)
def test_times_counts_and_names_are_found_and_levels_are_none(topic: str, found: list[tuple[str, Any]]) -> None:
    each = [(bound.kind, bound.value) for bound in stated(topic)]
    assert sorted(each, key=str) == sorted(found, key=str)


@pytest.mark.parametrize(
    ("topic", "fields"),
    [
        ("for 6 hours", {"budget": {"wall": "6h"}}),
        ("at most 40 trials", {"budget": {"trials": 40}}),
        ("50M tokens", {"budget": {"tokens": "50M"}}),
        ("for 3 days", {"schedule": {"days": 3}}),
        ("from 22:00 to 7:00", {"schedule": {"windows": ["22:00-07:00"]}}),
        ("8 hours a night", {"schedule": {"windows": ["22:00-06:00"]}}),
        ("with 4 seeds", {"seeds": {"min": 4, "max": 4}}),
        ("fewer than 6 seeds", {"seeds": {"max": 5}}),
        ("more than 6 steps", {"steps": 7}),
        ("seeds 10 to 14", {"seeds": {"min": 5, "max": 5, "first": 10}}),
        ("20 trials", {"budget": {"trials": 20}}),
        ("2 steps of warmup", {"set": {"warmup": 2}}),
        ("256 tokens", {"set": {"max_tokens": 256}}),
        ("SmolLM2-135M-Instruct", {"model": "HuggingFaceTB/SmolLM2-135M-Instruct"}),
    ],
)
def test_a_bound_is_in_the_spec_or_named_or_overruled_or_a_problem(topic: str, fields: dict[str, Any]) -> None:
    assert open_bounds(topic, spec(**fields)) == ([], [])
    bare = spec()
    [bound, *_] = stated(topic)
    problems, _ = open_bounds(topic, bare)
    assert all(repr(each.text) in problem for each, problem in zip(stated(topic), problems, strict=True))
    assert open_bounds(topic, bare, [f"not covered: {topic}"]) == ([], [])
    problems, overruled = open_bounds(
        topic, bare, budget={"wall": 60, "trials": 9, "tokens": 9}, schedule={"windows": ["1:00-2:00"], "days": 1},
        seeds={"min": 9, "max": 9, "first": 9}, steps=9, model="smollm2-81m",
    )  # fmt: skip
    assert not problems
    assert bound.text in overruled[0]


@pytest.mark.parametrize(
    ("topic", "fields", "held"),
    [
        ("with 4 seeds", {"seeds": {"first": 4}}, False),
        ("with 4 seeds", {"seeds": {"min": 4}}, False),
        ("with 4 seeds", {"seeds": {"min": 2, "max": 4}}, False),
        ("at least 4 seeds", {"seeds": {"min": 2, "max": 4}}, False),
        ("no fewer than 4 seeds", {"seeds": {"max": 4}}, False),
        ("4 seeds or more", {"seeds": {"min": 3, "max": 4}}, False),
        ("at most 4 seeds", {"seeds": {"min": 4, "max": 9}}, False),
        ("no more than 4 seeds", {"seeds": {"max": 5}}, False),
        ("höchstens 4 Startwerte", {"seeds": {"min": 4}}, False),
        ("up to 8 seeds", {"seeds": {"min": 8, "max": 9}}, False),
        ("3 to 5 seeds", {"seeds": {"min": 3, "max": 6}}, False),
        ("between 3 and 5 seeds", {"seeds": {"min": 2, "max": 5}}, False),
        ("seeds 10 to 14", {"seeds": {"min": 10, "max": 14}}, False),
        ("for 8 steps", {"set": {"group_size": 8}}, False),
        ("for 8 steps", {"seeds": {"min": 8, "max": 8}}, False),
        ("in at most 8 trials", {"compare": {"group_size": {"baseline": 4, "levels": [8]}}}, False),
        ("20 trials", {"fine": 20}, False),
        ("64 tokens", {"set": {"group_size": 64}}, False),
        ("within 2 hours", {"schedule": {"windows": ["22:00-07:00"]}}, False),
        ("8 hours a night", {"budget": {"wall": "8h"}}, False),
        ("of Qwen3-0.6B", {"arms": {"Qwen3-0.6B": {}, "b": {"learning_rate": 1e-5}}, "compare": {}}, False),
        ("at least 4 seeds", {"seeds": {"min": 5}}, True),
        ("at most 4 seeds, up to 2 hours", {"seeds": {"max": 3}, "budget": {"wall": "2h"}}, True),
        ("between 3 and 5 seeds", {"seeds": {"min": 3, "max": 5}}, True),
        ("4 seeds at most 2 hours", {"seeds": {"min": 4, "max": 4}, "budget": {"wall": "2h"}}, True),
        ("At least 4 seeds; with 4 seeds it is cheap.", {"seeds": {"min": 4}}, True),
        ("4 or 8 steps", {"compare": {"steps": {"baseline": 4, "levels": [8]}}}, True),
        ("over 3 nights", {"schedule": {"days": 3}}, True),
        ("on hf:openai/gsm8k", {"set": {"data": "hf:openai/gsm8k"}}, True),
    ],
)
def test_a_bound_is_held_by_the_fields_for_it_alone(topic: str, fields: dict[str, Any], held: bool) -> None:
    problems, overruled = open_bounds(topic, spec(**fields))
    assert (problems == []) is held
    assert overruled == []


@pytest.mark.parametrize(
    ("topic", "given", "overruled"),
    [
        ("with Qwen/Qwen3-0.6B", {"set": {"epochs": 2}}, False),
        ("with Qwen/Qwen3-0.6B", {"set": {"data": "hf:openai/gsm8k"}}, False),
        ("with Qwen/Qwen3-0.6B", {"model": "smollm2-81m"}, True),
        ("with Qwen/Qwen3-0.6B", {"compare": {"model_size": {"levels": ["smollm2-81m"]}}}, True),
        ("on a/train.jsonl", {"model": "smollm2-81m"}, False),
        ("on a/train.jsonl", {"set": {"data": "hf:openai/gsm8k"}}, True),
        ("on openai/gsm8k", {"model": "smollm2-81m"}, False),
        ("on openai/gsm8k", {"model": "smollm2-81m", "set": {"data": "hf:a/b"}}, True),
        ("within 2 hours", {"schedule": {"windows": ["22:00-07:00"]}}, False),
        ("within 2 hours", {"schedule": {"days": 2}}, False),
        ("within 2 hours", {"budget": {"wall": 3600}}, True),
        ("for 3 days", {"schedule": {"windows": ["22:00-07:00"]}}, False),
        ("from 10 pm", {"schedule": {"days": 2}}, False),
        ("4 seeds", {"seeds": {"first": 7}}, False),
        ("seeds 10 to 14", {"seeds": {"min": 3, "max": 3}}, False),
        ("for 8 steps", {"set": {"warmup": 2}}, False),
        ("for 8 steps", {"steps": 4}, True),
    ],
)
def test_only_an_option_for_the_field_of_a_bound_overrules_it(
    topic: str, given: dict[str, Any], overruled: bool
) -> None:
    problems, found = open_bounds(topic, spec(), **given)
    assert (not problems) == overruled
    assert overruled <= bool(found)


def test_another_number_of_the_same_size_does_not_name_a_bound() -> None:
    problems, _ = open_bounds("Use 3 seeds.", spec(), ["3 hypotheses are left out"])
    assert len(problems) == 1
    assert open_bounds("Use 3 seeds.", spec(), ["three seeds: too dear"]) == ([], [])


@pytest.mark.parametrize(
    ("fields", "said", "names"),
    [
        ({"model": "Qwen/Qwen3-0.6B"}, "Does Qwen/Qwen3-0.6B learn?", []),
        ({"model": "smollm2-81m"}, "", []),
        ({"model": "Qwen/Qwen3-4B"}, "Does Qwen learn?", ["Qwen/Qwen3-4B"]),
        ({"arms": {"a": {}, "b": {"model": "evil/x"}}, "compare": {}}, "", ["evil/x"]),
        ({"set": {"data": "a/train.jsonl"}}, "on a/train.jsonl, please", []),
        ({"set": {"data": "train.jsonl"}}, "on a/train.jsonl.bak", ["train.jsonl"]),
        ({"set": {"data": "hf:openai/gsm8k"}}, "the data set openai/gsm8k", []),
        ({"set": {"question_column": "secret"}}, "secrets are in it", ["secret"]),
        ({"set": {"question_column": "prompt", "reward": "exact"}}, "the column 'prompt'", []),
        ({"start_from": "st-1/a", "notify": ["SLACK"]}, "", ["st-1/a", "SLACK"]),
        ({"set": {"algorithm": "grpo", "loss_function": "mine.py:loss"}}, "Does it learn?", ["mine.py:loss"]),
        ({"arms": {"a": {"algorithm": "mine.py:f"}, "b": {}}, "compare": {}}, "Is mine.py:f better?", []),
    ],
)
def test_models_files_and_texts_are_their_authors_to_name(fields: dict[str, Any], said: str, names: list[str]) -> None:
    problems = invented(spec(**fields), DATASET, said)
    assert [name for name in names if any(repr(name) in problem for problem in problems)] == names
    assert len(problems) == len(names)
