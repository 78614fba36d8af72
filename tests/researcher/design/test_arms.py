"""Arms have distinct names, equal arms share no seed, and contrasts of crossed factors are balanced."""

from __future__ import annotations

import itertools
from math import prod
from pathlib import Path
from typing import Any

import pytest

from researcher.analysis.race import due
from researcher.design.arms import names_of, runs, with_own_seeds
from researcher.design.planning import checked
from researcher.design.stages import LAST_SEED, with_seeds
from researcher.instruments.catalogue import open_instrument
from researcher.instruments.instrument import Factor
from researcher.refusals import PlanningRefused
from researcher.study.plan import Arm, Plan
from swarm.protocol.errors import InvalidSpec
from swarm.protocol.runspec import RunSpec
from tests.fakes.specs import planned
from tests.fakes.study import study_plan

DATA = Factor(name="data", target="task.data", type="data", default="")
SAID = Factor(name="said", target="task.said", type="text", default="")
RATE = Factor(name="rate", target="task.rate", type="float", default=0.0)


@pytest.fixture
def files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for number, folder in enumerate("abc"):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "train.jsonl").write_text(f'{{"question": "1+{number}?", "answer": "{1 + number}"}}\n')


@pytest.mark.parametrize(
    ("factor", "levels", "names"),
    [
        (DATA, ["/x/a.jsonl#sha256=1", "/y/b.jsonl#sha256=2"], ["data=a.jsonl", "data=b.jsonl"]),
        (DATA, ["/x/a.jsonl#sha256=1", "/y/a.jsonl#sha256=2", "/z/b.jsonl#sha256=3"], ["data=x-a.jsonl", "data=y-a.jsonl", "data=b.jsonl"]),
        (DATA, ["hf:x/gsm8k", "hf:y/gsm8k", "hf:z/gsm8k"], ["data=hf:x-gsm8k", "data=hf:y-gsm8k", "data=hf:z-gsm8k"]),
        (SAID, ["be brief", "be kind"], ["said=be-brief", "said=be-kind"]),
        (RATE, [1e-5, 1e-5], ["rate=1e-5", "rate=1e-5-again"]),
        (RATE, [1e-5, 4e-5, 1e-5, 1e-5], ["rate=1e-5", "rate=4e-5", "rate=1e-5-again", "rate=1e-5-again-2"]),
        (SAID, ["a", "a again", "a"], ["said=a", "said=a-again", "said=a-again-2"]),
    ],
)  # fmt: skip
def test_levels_are_named_apart_and_equal_ones_are_run_again(
    factor: Factor, levels: list[str | float], names: list[str]
) -> None:
    assert list(names_of(factor, levels)) == names


@pytest.mark.parametrize(
    ("factor", "levels"),
    [
        (SAID, ["be brief", "be-brief", "be/brief"]),
        (DATA, ["/1/x/a.jsonl#sha256=1", "/2/x/a.jsonl#sha256=2"]),
        (DATA, ["/1/x/a.jsonl#sha256=1", "/1/y/a.jsonl#sha256=2", "/1/x-a.jsonl#sha256=3"]),
        (RATE, [0.1, 0.1000000000001]),
    ],
)
def test_what_no_folder_tells_apart_a_hash_does(factor: Factor, levels: list[str | float]) -> None:
    names = names_of(factor, levels)
    assert len(set(names)) == len(levels)
    assert names_of(factor, levels[::-1]) == names[::-1]
    assert not any("again" in name for name in names)


def test_arms_are_named_after_their_levels_and_swapped_ones_are_another_plan() -> None:
    one = planned()
    other = planned(compare={"learning_rate": {"baseline": 4e-5, "levels": [1e-5]}}, claim="increase")
    assert [arm.name for arm in one.arms] == ["learning_rate=1e-5", "learning_rate=4e-5"]
    assert one.hypotheses[0].treatment == other.hypotheses[0].baseline
    assert one.hypotheses[0].direction == other.hypotheses[0].direction
    assert one.digest() != other.digest()


def test_bundles_are_compared_with_the_first_under_their_own_names() -> None:
    plan = planned(arms={"vanilla": {"kl": 0.0}, "dapo": {"clip_high": 0.28, "kl": 0.1}, "same": {}}, claim="increase")
    assert [arm.name for arm in plan.arms] == ["vanilla", "dapo", "same"]
    assert [(each.baseline, each.treatment) for each in plan.hypotheses] == [("vanilla", "dapo"), ("vanilla", "same")]
    assert [each.factor for each in plan.hypotheses] == ["clip_high + kl", "kl"]
    assert plan.hypotheses[0].statement == "dapo has a higher auc_reward than vanilla"


@pytest.mark.usefixtures("files")
def test_files_of_one_name_are_arms_of_their_own_pinned_by_their_digest() -> None:
    plan = planned("dataset", compare={"data": {"levels": [f"{folder}/train.jsonl" for folder in "abc"]}})
    assert [arm.name for arm in plan.arms] == [f"data={folder}-train.jsonl" for folder in "abc"]
    levels = [str(arm.levels["data"]) for arm in plan.arms]
    assert len(set(levels)) == 3
    assert all(level.startswith("/") and "#sha256=" in level for level in levels)
    again = planned("dataset", compare={"data": {"levels": ["a/train.jsonl", "./a/train.jsonl"]}})
    assert [arm.name for arm in again.arms] == ["data=train.jsonl", "data=train.jsonl-again"]
    assert any("runs the same as" in line for line in again.assumptions)
    with pytest.raises(PlanningRefused, match=r"the file 'd/train.jsonl' cannot be read"):
        planned("dataset", compare={"data": {"levels": ["a/train.jsonl", "d/train.jsonl"]}})


@pytest.mark.usefixtures("files")
@pytest.mark.parametrize("design", ["factorial", "sequence"])
def test_files_of_one_name_are_told_apart_beside_another_factor(design: str) -> None:
    files = {"data": {"levels": ["a/train.jsonl", "b/train.jsonl"]}, "learning_rate": {"levels": [1e-5, 4e-5]}}
    plan = planned("dataset", compare=files, design=design)
    assert len({arm.name for arm in plan.arms}) == len(plan.arms) == 4
    assert len({tuple(arm.levels.items()) for arm in plan.arms}) == 4
    assert all(not set(each.baselines) & set(each.treatments) for each in plan.hypotheses)
    by_data = next(each for each in plan.hypotheses if each.factor == "data")
    assert by_data.statement.startswith("data=b-train.jsonl")


def test_a_plan_whose_arms_share_a_name_is_refused_and_one_that_is_stored_is_read() -> None:
    plan = planned()
    one, other = plan.arms
    twice = plan.model_copy(update={"arms": (one, other.model_copy(update={"name": one.name}))})
    assert Plan.model_validate_json(twice.model_dump_json()) == twice
    with pytest.raises(PlanningRefused, match=f"several arms would be called {one.name}"):
        checked(twice)


@pytest.mark.parametrize("factors", [2, 3, 4, 5])
def test_designs_are_balanced_and_their_contrasts_independent(factors: int) -> None:
    design = runs(factors)
    assert len(design) == (2**factors if factors <= 3 else 2 ** (factors - 1))
    effects = [[run[place] for run in design] for place in range(factors)]
    assert all(sum(signs) == 0 for signs in effects)
    for one, other in itertools.combinations(effects, 2):
        assert sum(a * b for a, b in zip(one, other, strict=True)) == 0
    if factors > 3:
        assert all(prod(run) == 1 for run in design)


EQUAL: dict[str, Any] = {"compare": {"learning_rate": {"baseline": 4e-5, "levels": [4e-5]}}}
FACTORS = {factor.name: factor for factor in open_instrument("arithmetic", {}).instrument.factors}


def seeds(plan: Plan) -> dict[str, set[int]]:
    """All seeds that a plan may need, by arm."""
    found: dict[str, set[int]] = {arm.name: set() for arm in plan.arms}
    for stage in plan.stages:
        for arm in stage.arms:
            found[arm] |= {plan.seed_of(arm, stage, place) for place in range(stage.max_seeds)}
    return found


def disjoint(plan: Plan) -> bool:
    return all(not one & other for one, other in itertools.combinations(seeds(plan).values(), 2))


@pytest.mark.parametrize(
    "fields",
    [
        EQUAL,
        {"compare": {"learning_rate": {"levels": ["0.00004", 4e-5]}}},
        {"arms": {"usual": {}, "said": {"learning_rate": 4e-5}}},
    ],
)
@pytest.mark.parametrize("more", [{}, {"looks": 3}, {"seeds": {"min": 4, "max": 4}}, {"seeds": {"first": 1000}}])
def test_equal_arms_run_on_disjoint_seeds_that_the_plan_says(fields: dict[str, Any], more: dict[str, Any]) -> None:
    plan = planned(**fields, **more)
    assert disjoint(plan)
    assert plan == Plan.model_validate_json(plan.canonical())
    assert any("runs the same as" in line for line in plan.assumptions)
    stage = plan.stages[-1]
    pairs = due(plan, stage, stage.seeds, [])
    assert len({seed for _, seed in pairs}) == len(pairs) == 2 * stage.seeds


def test_arms_that_differ_share_their_seeds_and_their_plan_says_nothing_new() -> None:
    plan = planned()
    assert "seed_offset" not in plan.canonical()
    first, second = seeds(plan).values()
    assert first == second
    assert with_own_seeds(plan) == plan


@pytest.mark.parametrize(
    ("factor", "levels", "equal"),
    [
        ("schedule", ({}, {"schedule": "constant"}), True),  # the RunSpec's own default
        ("schedule", ({}, {"schedule": "cosine"}), False),
        ("digits", ({}, {"digits": 1}), True),  # the factor's default
        ("digits", ({}, {"digits": 2}), False),
    ],
)
def test_what_is_the_same_is_judged_on_what_runs(
    factor: str, levels: tuple[dict[str, int | str], dict[str, int | str]], equal: bool
) -> None:
    plan = study_plan(factors=(FACTORS[factor],))
    arms = tuple(Arm(name=arm.name, levels=own) for arm, own in zip(plan.arms, levels, strict=True))
    found = with_own_seeds(plan.model_copy(update={"arms": arms}))
    assert disjoint(found) is equal


def test_a_plan_that_is_amended_to_more_seeds_keeps_its_arms_apart() -> None:
    plan = planned(**EQUAL, seeds={"min": 3, "max": 3})
    more = with_own_seeds(plan.model_copy(update={"stages": with_seeds(plan.stages, 30)}))
    assert disjoint(more)
    assert more.assumptions == plan.assumptions


def test_seeds_that_no_run_takes_are_refused_for_the_last_arm_too() -> None:
    with pytest.raises(PlanningRefused, match="give --first-seed"):
        planned(**EQUAL, seeds={"min": 5, "max": 5, "first": LAST_SEED - 5})
    with pytest.raises(InvalidSpec):
        RunSpec(seed=RunSpec(seed=LAST_SEED).seed + 1)
