"""Orders of arms as conditions: `5 ≪ 15 ≈ 25`."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from pydantic import ValidationError

from researcher.analysis.decide import decide, holds
from researcher.analysis.samples import NotEnoughTrials
from researcher.analysis.verdicts import conclude
from researcher.study.plan import Branch, Condition, Relation
from tests.fakes.specs import planned
from tests.fakes.study import THRESHOLD, reaching_trial, study_plan, trials_with

PLAN = study_plan((2e-5, 4e-5))
ARMS = ("lr=base", "lr=2e-05", "lr=4e-05")


def order(*relations: Relation, arms: Sequence[str] = ARMS) -> Condition:
    return Condition(kind="order", arms=tuple(arms), relations=relations, metric="auc")


def around(mean: float, spread: float = 0.01) -> list[float]:
    return [mean - spread, mean, mean + spread, mean]


@pytest.mark.parametrize(
    ("means", "relations", "expected"),
    [
        ((0.1, 0.5, 0.5), ("≪", "≈"), True),
        ((0.1, 0.5, 0.5), ("≪", "≪"), False),
        ((0.1, 0.5, 0.3), ("≪", "≫"), True),
        ((0.1, 0.15, 0.5), ("≪", "≪"), False),  # the first step is real, and smaller than the margin
        ((0.1, 0.15, 0.5), ("≈", "≪"), True),
        ((0.5, 0.1, 0.1), ("≪", "≈"), False),
        ((0.5, 0.6, 0.5), ("≪", "≫"), True),  # at the margin, though 0.6 - 0.5 < 0.1
    ],
)
def test_an_order_holds_where_every_relation_does(
    means: Sequence[float], relations: tuple[Relation, ...], expected: bool
) -> None:
    trials = trials_with(PLAN, {arm: around(mean) for arm, mean in zip(ARMS, means, strict=True)})
    assert holds(order(*relations), PLAN, trials, conclude(PLAN, trials)) is expected


def test_an_order_of_many_seeds_near_a_ceiling_is_seen() -> None:
    means = {"lr=base": [0.1] * 19 + [0.15], "lr=2e-05": [1.0] * 19 + [0.95], "lr=4e-05": [1.0] * 19 + [0.98]}
    trials = trials_with(PLAN, means)
    assert holds(order("≪", "≈"), PLAN, trials, conclude(PLAN, trials))


def test_with_loud_noise_neither_much_less_nor_about_equal_is_known() -> None:
    trials = trials_with(PLAN, {arm: around(0.3, spread=0.4) for arm in ARMS})
    known = [holds(order(each, each), PLAN, trials, conclude(PLAN, trials)) for each in ("≪", "≈", "≫")]
    assert known == [False, False, False]


@pytest.mark.parametrize(
    ("left", "right", "relation", "expected"),
    [
        ([9, 10, 10], [9, 10, 10], "≈", True),
        ([9, 10, 10], [9, 10, None], "≈", False),
        ([2, 3, 3], [9, None, None], "≪", True),
        ([9, None, None], [2, 3, 3], "≫", True),
        ([9, None, None], [2, 3, 2, 3, None], "≫", False),
    ],
)
def test_no_order_rests_on_how_soon_a_threshold_would_have_been_reached_that_never_was(
    left: list[int | None], right: list[int | None], relation: Relation, expected: bool
) -> None:
    plan = study_plan(metrics=(THRESHOLD,), margin=2.0, direction="decrease")
    arms = [arm.name for arm in plan.arms]
    when = Condition(kind="order", arms=tuple(arms), relations=(relation,), metric=THRESHOLD.name)
    rows = zip(arms, (left, right), strict=True)
    trials = [reaching_trial(plan, arm, seed, step) for arm, row in rows for seed, step in enumerate(row)]
    assert holds(when, plan, trials, conclude(plan, trials)) is expected


def test_a_decision_table_of_orders_chooses_the_branch() -> None:
    table = (
        Branch(stage="compare", when=order("≪", "≪"), then="stop", reason="more is better as far as was tried"),
        Branch(stage="compare", when=order("≪", "≈"), then="stop", reason="it levels off"),
        Branch(stage="compare", when=Condition(kind="always"), then="stop", reason="nothing clear"),
    )
    plan = PLAN.model_copy(update={"branches": table})
    for means, reason in (((0.1, 0.5, 0.9), "as far"), ((0.1, 0.5, 0.5), "levels off"), ((0.5, 0.5, 0.5), "nothing")):
        trials = trials_with(plan, {arm: around(mean) for arm, mean in zip(ARMS, means, strict=True)})
        assert reason in decide(plan, "compare", trials).reason


def test_without_trials_it_is_not_known_and_half_an_order_is_no_condition() -> None:
    trials = trials_with(PLAN, {"lr=base": around(0.1)})
    with pytest.raises(NotEnoughTrials, match="lr=2e-05"):
        holds(order("≪", "≈"), PLAN, trials, conclude(PLAN, trials))
    for broken in ({"relations": ("≪",)}, {"metric": None}, {"arms": ()}, {"relations": ("<", "≈")}):
        with pytest.raises(ValidationError):
            Condition.model_validate({**order("≪", "≈").model_dump(), **broken})


def test_a_balance_is_decided_by_the_orders_that_hold() -> None:
    plan = planned(compare={"group_size": {"levels": [16, 4, 8]}}, design="balance", metric="final_reward")

    def decided(noise: float, **sizes: float) -> str:
        arms = {f"group_size={name[1:]}": [mean + e for e in (-noise, 0.0, noise)] for name, mean in sizes.items()}
        return decide(plan, "compare", trials_with(plan, arms)).reason

    assert decided(0.005, s4=0.2, s8=0.6, s16=0.61) == (
        "group_size=8 is the best balance: group_size=4 ≪ group_size=8 ≈ group_size=16 on final_reward"
    )
    assert decided(0.1, s4=0.2, s8=0.6, s16=0.66) == "every planned trial has ended"
