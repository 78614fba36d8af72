"""The plan's branches decide, on data alone."""

from __future__ import annotations

import pytest

from researcher.analysis.decide import decide
from researcher.study.plan import Branch, Condition
from tests.fakes.study import failed_trial, planned_trial, study_plan, trials_with

BASE, TREAT = "lr=base", "lr=4e-05"


def test_a_quiet_noise_floor_leads_to_the_comparison_with_the_least_seeds() -> None:
    plan = study_plan()
    decision = decide(plan, "floor", trials_with(plan, {BASE: [0.1, 0.101, 0.102]}))
    assert (decision.action, decision.to, decision.seeds) == ("stage", "compare", 3)


def test_a_louder_noise_floor_asks_for_more_seeds_up_to_the_plans_most() -> None:
    plan = study_plan(max_seeds=12)
    decision = decide(plan, "floor", trials_with(plan, {BASE: [0.1, 0.13, 0.16]}))
    assert decision.action == "stage"
    assert decision.seeds is not None
    assert 3 < decision.seeds <= 12
    assert decision.seeds == decision.seeds_needed


def test_too_loud_a_noise_floor_ends_the_study_as_underpowered_with_what_it_would_take() -> None:
    plan = study_plan()
    decision = decide(plan, "floor", trials_with(plan, {BASE: [0.0, 0.2, 0.4]}))
    assert decision.action == "underpowered"
    assert decision.power is not None
    assert decision.power < 0.8
    assert decision.seeds_needed is not None
    assert decision.seeds_needed > plan.stages[1].max_seeds


def test_a_noise_floor_that_was_not_measured_lets_nothing_pass() -> None:
    plan = study_plan()
    trials = [*trials_with(plan, {BASE: [0.1]}), failed_trial(plan, BASE, 1), failed_trial(plan, BASE, 2)]
    decision = decide(plan, "floor", trials)
    assert decision.action == "stop"
    assert "no arm of the noise floor has two finished trials" in decision.reason
    assert not decision.by_plan


@pytest.mark.parametrize(
    ("when", "reason"),
    [
        (Condition(kind="verdict_in", hypothesis="H1", verdicts=("supported",)), "first"),
        (Condition(kind="verdict_in", hypothesis="H1", verdicts=("refuted", "equivalent")), "rest"),
        (Condition(kind="diff_at_least", hypothesis="H1", value=0.3), "first"),
        (Condition(kind="diff_at_least", hypothesis="H1", value=0.5), "rest"),
        (Condition(kind="diff_at_most", hypothesis="H1", value=0.5), "first"),
    ],
)
def test_the_first_branch_that_holds_decides(when: Condition, reason: str) -> None:
    rest = Branch(stage="compare", when=Condition(kind="always"), then="stop", reason="rest")
    plan = study_plan(branches=(Branch(stage="compare", when=when, then="stop", reason="first"), rest))
    decision = decide(plan, "compare", trials_with(plan, {BASE: [0.1, 0.11, 0.12], TREAT: [0.5, 0.51, 0.52]}))
    assert decision.reason == reason


def test_a_condition_on_an_effect_that_is_not_known_stops_the_study() -> None:
    when = Condition(kind="diff_at_least", hypothesis="H1", value=0.3)
    branch = Branch(stage="compare", when=when, then="stage", to="compare", reason="more")
    plan = study_plan(branches=(branch,))
    decision = decide(plan, "compare", [*trials_with(plan, {BASE: [0.1, 0.2]}), planned_trial(plan, TREAT, 0)])
    assert (decision.action, decision.to) == ("stop", None)


def test_a_plan_without_a_branch_for_what_happened_is_an_error() -> None:
    plan = study_plan(branches=())
    with pytest.raises(ValueError, match="no branch"):
        decide(plan, "compare", trials_with(plan, {BASE: [0.1, 0.11, 0.12], TREAT: [0.5, 0.51, 0.52]}))
