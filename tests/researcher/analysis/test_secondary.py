"""Effects on metrics that decide nothing: an interval each, adjusted for nothing."""

from __future__ import annotations

import pytest
from statsmodels.stats.weightstats import CompareMeans, DescrStatsW

from researcher.analysis.effects import effects, secondary_effect
from researcher.analysis.samples import NotEnoughTrials
from researcher.analysis.verdicts import conclude
from researcher.instruments.instrument import Metric
from researcher.models import Effect
from tests.fakes.study import METRIC, study_plan, trials_with

FINAL = Metric(name="final", kind="final_reward", margin=0.5)
VALUES = {"lr=base": [0.1, 0.14, 0.12], "lr=2e-05": [0.2, 0.26, 0.2], "lr=4e-05": [0.3, 0.36, 0.31]}


def test_an_interval_is_at_the_level_of_the_hypothesis_whatever_else_is_tested() -> None:
    plan = study_plan((2e-5, 4e-5), metrics=(METRIC, FINAL))
    trials = trials_with(plan, VALUES)
    found = secondary_effect(plan, plan.hypotheses[1], "final", trials)
    assert isinstance(found, Effect)
    by_hand = CompareMeans(DescrStatsW(VALUES["lr=4e-05"]), DescrStatsW(VALUES["lr=base"]))
    assert (found.low, found.high) == pytest.approx(by_hand.tconfint_diff(0.05, usevar="unequal"))
    assert (found.metric, found.level, found.p_adjusted) == ("final", 0.95, found.p_value)
    decided = effects(plan, trials)["H1"]
    assert isinstance(decided, Effect)
    assert decided.level >= found.level


def test_what_cannot_be_compared_yet_says_why_and_no_verdict_follows_from_any_of_it() -> None:
    plan = study_plan(metrics=(METRIC, FINAL))
    trials = trials_with(plan, {"lr=base": [0.1, 0.2], "lr=4e-05": [0.5]})
    assert isinstance(secondary_effect(plan, plan.hypotheses[0], "final", trials), NotEnoughTrials)
    alone = study_plan()
    whole = trials_with(plan, {arm: VALUES[arm] for arm in ("lr=base", "lr=4e-05")})
    assert [each.verdict for each in conclude(plan, whole).verdicts] == [
        each.verdict for each in conclude(alone, whole).verdicts
    ]
