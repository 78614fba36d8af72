"""What a topic states is found in it, and is in the spec or named; what nobody has named is in no spec."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from researcher.instruments.catalogue import read_instrument
from researcher.planner.bounds import invented, lost, stated
from researcher.study.spec import StudySpec

STUDIES = Path(__file__).parents[4] / "studies"
COMPARE = {"learning_rate": {"baseline": 1e-5, "levels": [4e-5]}}
HOUR = 3600.0


def spec(**fields: Any) -> StudySpec:
    return StudySpec.model_validate({"question": "?", "instrument": "arithmetic", "compare": COMPARE, **fields})


@pytest.mark.parametrize(
    ("topic", "found"),
    [
        ("6 hours at most, 8 h, 90m, 1h30m, half an hour", [("time", s * HOUR) for s in (1.5, 6, 8, 0.5)]),
        ("Within three nights or 2 weeks", [("time", 72 * HOUR), ("time", 336 * HOUR)]),
        ("höchstens zwei Stunden, 4 Startwerte, 20 Schritte", [("time", 2 * HOUR), ("seeds", 4), ("steps", 20)]),
        ("用3个种子，最多两个小时", [("time", 2 * HOUR), ("seeds", 3)]),
        ("3 to 5 seeds; seeds 10 to 14", [("seeds", 3), ("seeds", 5), ("seeds", 10), ("seeds", 14)]),
        ("at least five seeds, 1,000 steps, 50M tokens", [("seeds", 5), ("steps", 1000), ("tokens", 5e7)]),
        ("Between 22:00 and 07:00: from 10 pm", [("window", "22:00"), ("window", "07:00")]),
        ("a temperature of 1 and 5 seeds", [("seeds", 5)]),
        ("Qwen/Qwen3-0.6B, Qwen3-1.7B and a 135m model", [("name", "Qwen/Qwen3-0.6B"), ("name", "Qwen3-1.7B")]),
        ("hf:openai/webgpt or data/train.jsonl", [("name", "data/train.jsonl"), ("name", "openai/webgpt")]),
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
        ("for 3 days", {"schedule": {"days": 3}}),
        ("from 22:00 to 7:00", {"schedule": {"windows": ["22:00-07:00"]}}),
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
    assert lost(topic, spec(**fields), [], {}) == ([], [])
    bare = spec()
    [bound, *_] = stated(topic)
    assert all(
        repr(each.text) in problem for each, problem in zip(stated(topic), lost(topic, bare, [], {})[0], strict=True)
    )
    assert lost(topic, bare, [f"not covered: {topic}"], {}) == ([], [])
    problems, overruled = lost(topic, bare, [], ["budget", "schedule", "seeds", "steps", "model"])
    assert not problems
    assert bound.text in overruled[0]


def test_another_number_of_the_same_size_does_not_name_a_bound() -> None:
    problems, _ = lost("Use 3 seeds.", spec(), ["3 hypotheses are left out"], {})
    assert len(problems) == 1
    assert lost("Use 3 seeds.", spec(), ["three seeds: too dear"], {}) == ([], [])


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
    ],
)
def test_models_files_and_texts_are_their_authors_to_name(fields: dict[str, Any], said: str, names: list[str]) -> None:
    problems = invented(spec(**fields), read_instrument(STUDIES / "dataset").instrument, said)
    assert [name for name in names if any(repr(name) in problem for problem in problems)] == names
    assert len(problems) == len(names)
