"""Intervals and verdicts at a hypothesis's own level."""

from __future__ import annotations

import pytest
from statsmodels.stats.weightstats import CompareMeans, DescrStatsW

from researcher.analysis.effects import effects
from researcher.analysis.verdicts import conclude
from researcher.models import Effect
from researcher.study.plan import ALPHA, Plan, Verdict
from tests.fakes.study import study_plan, trials_with

STRICT = 0.0076
BASE, TREAT = "lr=base", "lr=4e-05"


def plan_at(alpha: float, plan: Plan | None = None) -> Plan:
    plan = plan or study_plan()
    tested = tuple(each.model_copy(update={"alpha": alpha}) for each in plan.hypotheses)
    return plan.model_copy(update={"hypotheses": tested})


def test_an_interval_has_the_confidence_that_its_level_leaves() -> None:
    values = {BASE: [0.1, 0.14, 0.12], TREAT: [0.3, 0.36, 0.31]}
    plan = plan_at(STRICT)
    found = effects(plan, trials_with(plan, values))["H1"]
    assert isinstance(found, Effect)
    by_hand = CompareMeans(DescrStatsW(values[TREAT]), DescrStatsW(values[BASE])).tconfint_diff(
        STRICT, usevar="unequal"
    )
    assert (found.low, found.high) == pytest.approx(by_hand)
    assert found.level == pytest.approx(1 - STRICT)


def test_a_family_shares_the_level_after_holm() -> None:
    plan = plan_at(STRICT, study_plan((2e-5, 4e-5)))
    noise = [0.1, 0.4, 0.2]
    found = effects(plan, trials_with(plan, {arm.name: noise for arm in plan.arms}))
    assert [each.level for each in found.values() if isinstance(each, Effect)] == pytest.approx([1 - STRICT / 2] * 2)


@pytest.mark.parametrize(("alpha", "verdict"), [(ALPHA, Verdict.SUPPORTED), (STRICT, Verdict.INCONCLUSIVE)])
def test_a_difference_that_is_seen_at_one_level_may_not_be_at_a_stricter_one(alpha: float, verdict: Verdict) -> None:
    plan = plan_at(alpha)
    trials = trials_with(plan, {BASE: [0.1, 0.2, 0.15], TREAT: [0.3, 0.4, 0.35]})
    assert conclude(plan, trials).verdict("H1").verdict is verdict


@pytest.mark.parametrize(("alpha", "verdict"), [(ALPHA, Verdict.EQUIVALENT), (STRICT, Verdict.INCONCLUSIVE)])
def test_equal_arms_are_called_equal_by_two_one_sided_tests_at_the_same_level(alpha: float, verdict: Verdict) -> None:
    plan = plan_at(alpha)
    trials = trials_with(plan, {BASE: [0.1, 0.18, 0.14], TREAT: [0.11, 0.19, 0.15]})
    found = effects(plan, trials)["H1"]
    assert isinstance(found, Effect)
    assert STRICT < found.p_equivalence < ALPHA
    assert conclude(plan, trials).verdict("H1").verdict is verdict
