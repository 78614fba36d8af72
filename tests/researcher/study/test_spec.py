"""What a study spec takes, how it is written back, and what it refuses by the path of the field."""

from __future__ import annotations

from typing import Any

import pytest
from pydantic import ValidationError

from foundation.strict import explain
from researcher.study.spec import StudySpec, count_text, duration_text

LR = {"learning_rate": {"levels": [1e-5, 4e-5]}}
KL = {"kl": {"levels": [0.0, 0.1]}}
BOTH = LR | KL
ARMS: dict[str, Any] = {"a": {}, "b": {"kl": 0.1}}


def levels(count: int) -> dict[str, Any]:
    return {"lr": {"levels": list(range(1, count + 1))}}


def spec(**fields: Any) -> StudySpec:
    return StudySpec.model_validate({"question": "Is it better?", "instrument": "arithmetic", **fields})


def test_a_spec_is_written_back_as_what_was_set() -> None:
    given = {
        "question": "Is it better?", "instrument": "arithmetic", "model": ["a", "b"], "compare": KL, "design": "factorial",
        "set": {"epochs": 2}, "claim": "increase", "margin": 0.05, "seeds": {"min": 3, "first": 7},
        "budget": {"wall": "8h", "trials": 60, "tokens": "50M"}, "schedule": {"windows": ["22:00-07:00"], "days": 3},
    }  # fmt: skip
    found = StudySpec.model_validate(given)
    assert found.document() == given
    assert StudySpec.model_validate(found.document()) == found
    assert list(found.document()) == [name for name in StudySpec.model_fields if name in given]


@pytest.mark.parametrize(
    ("given", "seconds", "written"),
    [("8h", 28800, "8h"), ("90m", 5400, "90m"), ("1h30m", 5400, "90m"), ("1 h", 3600, "1h"), (45, 45, "45s"), (0.5, 0.5, "0.5s")],
)  # fmt: skip
def test_times_are_read_as_people_write_them(given: object, seconds: float, written: str) -> None:
    assert spec(compare=LR, budget={"wall": given}).budget.wall == seconds
    assert duration_text(seconds) == written


@pytest.mark.parametrize(
    ("given", "count", "written"), [("50M", 50_000_000, "50M"), ("1.5k", 1500, "1500"), (7, 7, "7")]
)
def test_counts_are_read_as_people_write_them(given: object, count: int, written: str) -> None:
    assert spec(compare=LR, budget={"tokens": given}).budget.tokens == count
    assert count_text(count) == written


def test_the_models_of_a_spec_are_one_or_several() -> None:
    assert spec(compare=LR).models == ()
    assert spec(compare=LR, model="a").models == ("a",)
    assert spec(model=["a", "b"]).models == ("a", "b")


@pytest.mark.parametrize(
    ("fields", "path", "says"),
    [
        ({}, "compare", "does not say how the arms differ"),
        ({"compare": LR, "arms": {"a": {}, "b": {}}}, "arms", "cannot be combined with compare"),
        ({"arms": {"a": {}}}, "arms", "needs at least two arms"),
        ({"arms": {"a b": {}, "c": {}}}, "arms.a b.[key]", ""),
        ({"compare": BOTH}, "design", "takes 1 factor, but the spec compares 2; use factorial, sequence, screen, arms"),
        ({"compare": LR, "design": "factorial"}, "design", "takes 2 to 5 factors"),
        ({"compare": LR, "design": "sequence"}, "design", "takes 2 factors"),
        (
            {"compare": dict.fromkeys("abcdef", KL["kl"]), "design": "factorial"},
            "design",
            "takes 2 to 5 factors, but the spec compares 6; use screen, arms",
        ),
        (
            {"arms": ARMS, "design": "balance"},
            "design",
            "balance needs compare and does not take arms; use compare, screen",
        ),
        ({"arms": ARMS, "design": "race"}, "design", "takes 3 or more arms, but the spec has 2"),
        ({"compare": LR, "design": "race"}, "compare.learning_rate.levels", "takes 3 or more levels"),
        ({"compare": LR, "design": "trend"}, "compare.learning_rate.levels", "takes 3 or more levels"),
        ({"compare": levels(3) | KL, "design": "screen"}, "compare.lr.levels", "takes 2 levels"),
        ({"model": ["a", "b", "c"], "compare": KL, "design": "screen"}, "model", "takes 2 levels"),
        ({"compare": levels(5) | KL, "design": "sequence"}, "compare.lr.levels", "takes 2 to 4 levels"),
        ({"compare": levels(5), "design": "balance"}, "compare.lr.levels", "takes 2 to 4 levels"),
        ({"compare": LR, "design": "balance", "claim": "increase"}, "claim", "a balance makes no claim"),
        ({"compare": levels(3), "design": "race", "looks": 3}, "looks", "a race has no looks; leave them out"),
        ({"compare": LR, "looks": 5, "fine": 3}, "looks", "a study with a fine stage has no looks"),
        ({"compare": BOTH, "design": "sequence", "looks": 2}, "looks", "a sequence has no looks"),
        ({"compare": BOTH, "design": "screen", "looks": 2}, "looks", "a screen has no looks"),
        ({"arms": ARMS, "design": "screen", "looks": 2}, "looks", "a screen has no looks"),
        ({"arms": ARMS, "fine": 3}, "fine", "arms that set several factors have no fine stage"),
        ({"compare": BOTH, "design": "screen", "fine": 2}, "fine", "a screen study has no fine stage"),
        ({"compare": BOTH, "design": "factorial", "fine": 3}, "fine", "a factorial study has no fine stage"),
        ({"compare": LR, "design": "balance", "fine": 3}, "fine", "a balance study has no fine stage"),
        ({"compare": BOTH, "design": "sequence", "fine": 3}, "fine", "a sequence study has no fine stage"),
        ({"compare": levels(3), "design": "trend", "fine": 3}, "fine", "a trend study has no fine stage"),
        ({"compare": {"kl": {"levels": []}}}, "compare.kl.levels", "needs at least one level"),
        ({"compare": {"kl": {"levels": [0.1, 0.1]}}}, "compare.kl.levels", "names a level twice"),
        ({"compare": LR, "set": {"learning_rate": 1e-5}}, "set.learning_rate", "is already under compare"),
        ({"model": ["a", "a"]}, "model", "names a model twice"),
        ({"compare": LR, "seeds": {"min": 5, "max": 3}}, "seeds.max", "must not be below min (5), got 3"),
        ({"compare": LR, "seeds": {"min": 1}}, "seeds.min", "greater than or equal to 2"),
        ({"compare": LR, "claim": "up"}, "claim", "'increase'"),
        ({"compare": LR, "margin": 0}, "margin", "greater than 0"),
        ({"compare": LR, "looks": 9}, "looks", "less than or equal to 5"),
        ({"compare": LR, "budget": {"wall": "soon"}}, "budget.wall", "write a time such as 8h"),
        ({"compare": LR, "budget": {"tokens": "many"}}, "budget.tokens", "write a number such as 50M"),
        (
            {"compare": LR, "budget": {"tokens": f"{'9' * 400}M"}},
            "budget.tokens",
            "is too large: at most 1,000,000,000,000,000",
        ),
        ({"compare": LR, "budget": {"tokens": 10**400}}, "budget.tokens", "is too large"),
        ({"compare": LR, "budget": {"trials": 10**400}}, "budget.trials", "is too large"),
        ({"compare": LR, "budget": {"wall": f"{'9' * 12}h"}}, "budget.wall", "is too large"),
        ({"compare": LR, "heldout_every": 10**30}, "heldout_every", "is too large: at most 1,000,000"),
        ({"compare": LR, "budget": {"hours": 8}}, "budget.hours", "unknown field"),
        ({"compare": LR, "question": " "}, "question", "write the study's question in words"),
    ],
)
def test_what_is_no_spec_is_refused_by_its_path(fields: dict[str, Any], path: str, says: str) -> None:
    with pytest.raises(ValidationError) as refused:
        spec(**fields)
    found = {problem.field: str(problem) for problem in explain(refused.value, StudySpec)}
    assert path in found
    assert says in found[path]
