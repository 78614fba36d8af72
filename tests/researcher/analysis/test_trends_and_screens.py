"""Trends and screens, as they are judged: slopes by the rules of every verdict, screens never."""

from __future__ import annotations

import math
from typing import Any

import pytest

from bench.made_up_studies import World, instrument, simulate
from researcher.analysis.knowledge import findings_of, known_to, scope
from researcher.analysis.power import hypothesis_seeds, measured_noise, seeds_needed, side_sigma
from researcher.analysis.sentinel_findings import SentinelFinding
from researcher.analysis.verdicts import conclude, verdict
from researcher.design.planning import plan_of
from researcher.models import TrialRecord, TrialStatus
from researcher.study.plan import Plan, Verdict
from researcher.study.spec import StudySpec
from tests.fakes.example_plan import example_plan
from tests.researcher.design.test_screens_and_trends import BUNDLES, LEVELS, screen, trend


def world(plan: Plan, *means: float, sigma: float = 0.03) -> World:
    return World(means=dict(zip((arm.name for arm in plan.arms), means, strict=True)), sigma=sigma, seed=4)


def two_rates(plan: Plan) -> World:
    means = {arm.name: 0.2 * (arm.levels["learning_rate"] == 4e-5) for arm in plan.arms}
    return World(means=means, sigma=0.05, seed=1)


@pytest.mark.parametrize(
    ("means", "claim", "said"),
    [
        ((0.1, 0.2, 0.3, 0.4), "increase", Verdict.SUPPORTED),
        ((0.4, 0.3, 0.2, 0.1), "increase", Verdict.REFUTED),
        ((0.4, 0.3, 0.2, 0.1), "decrease", Verdict.SUPPORTED),
        ((0.2, 0.2, 0.2, 0.2), "increase", Verdict.EQUIVALENT),
        ((0.2, 0.225, 0.25, 0.275), "increase", Verdict.INCONCLUSIVE),
    ],
)
def test_the_slope_is_judged_by_the_rules_of_every_verdict(means: tuple[float, ...], claim: str, said: Verdict) -> None:
    plan = trend(claim=claim)
    ending = simulate(plan, world(plan, *means))
    assert [record.verdict for record in ending.verdicts] == [said]


def test_levels_without_any_spread_between_seeds_are_not_decided() -> None:
    plan = trend(claim="increase")
    [record] = simulate(plan, world(plan, 0.1, 0.2, 0.3, 0.5, sigma=0.0)).verdicts
    assert record.verdict is Verdict.INCONCLUSIVE
    assert "do not differ between seeds" in record.reason


def test_a_trend_goes_on_only_where_the_noise_allows_it() -> None:
    plan = trend(seeds={"min": 3, "max": 4})
    ending = simulate(plan, world(plan, 0.1, 0.2, 0.3, 0.4, sigma=0.4))
    assert (ending.action, ending.trials) == ("underpowered", 3)


def test_a_trend_may_be_looked_at_more_than_once_within_one_alpha() -> None:
    plan = trend(claim="increase", looks=2, seeds={"min": 8, "max": 8})
    ending = simulate(plan, world(plan, 0.1, 0.3, 0.5, 0.7))
    [record] = ending.verdicts
    assert (record.verdict, ending.trials) == (Verdict.SUPPORTED, 8 + 3 * 4)
    assert record.effect is not None
    assert record.effect.level == pytest.approx(1 - plan.stages[1].spends)  # type: ignore[operator]


@pytest.mark.parametrize(("levels", "share"), [((1, 2, 4), 1.0), ((1, 2, 4, 8), math.sqrt(10 / 9))])
def test_the_seeds_follow_from_the_noise_and_from_how_the_levels_lie(levels: tuple[int, ...], share: float) -> None:
    plan = trend(levels=[1e-5 * level for level in levels])
    [claim] = plan.hypotheses
    assert side_sigma(plan, claim, 1.0) == pytest.approx(1 / share)
    ending = simulate(plan, world(plan, *[0.1] * len(levels), sigma=0.1))
    floor = [trial for trial in ending.records if trial.stage == "noise-floor"]
    upper = measured_noise(plan, floor, "final_reward").upper
    wanted = seeds_needed(sigma=upper / share, effect=0.15, alpha=0.05, power=0.8)
    assert hypothesis_seeds(plan, claim, floor) == wanted
    assert ending.trials == len(levels) * min(40, max(5, wanted))


def test_a_trial_of_a_level_between_that_has_not_ended_leaves_the_trend_open() -> None:
    plan = trend(claim="increase", seeds={"min": 5, "max": 5})
    ending = simulate(plan, world(plan, 0.1, 0.2, 0.3, 0.4))
    late = [each.model_copy(update=_late(each)) for each in ending.records]
    [record] = conclude(plan, late).verdicts
    assert record.verdict is Verdict.INCONCLUSIVE
    assert "have not ended" in record.reason
    assert record.effect is not None
    assert record.effect.n_between == 9


def _late(trial: TrialRecord) -> dict[str, Any]:
    return {"status": TrialStatus.RUNNING} if (trial.arm, trial.seed) == ("learning_rate=2e-5", 4) else {}


def test_a_trend_is_another_question_than_the_comparison_of_its_ends() -> None:
    plan = trend(claim="increase")
    ends = plan_of(
        StudySpec.model_validate(
            {
                "question": "q",
                "instrument": "simulation",
                "claim": "increase",
                "compare": {"learning_rate": {"levels": [1e-5, 8e-5]}},
            }
        ),
        instrument(),
    )
    found = simulate(plan, world(plan, 0.1, 0.2, 0.3, 0.4))
    [one] = findings_of("st-1", plan, found.verdicts, 0.0, found.records)
    [other] = findings_of("st-2", ends, simulate(ends, world(ends, 0.1, 0.4)).verdicts, 0.0)
    assert one.scope["fitted_over"] == [{"learning_rate": 2e-5}, {"learning_rate": 4e-5}]
    assert scope(one) != scope(other)


def test_plans_and_effects_of_other_designs_are_stored_as_before() -> None:
    assert "between_arms" not in example_plan().canonical()
    plan = trend(design="compare", levels=(1e-5, 4e-5))
    [record] = simulate(plan, world(plan, 0.1, 0.4)).verdicts
    assert record.effect is not None
    assert not {"n_between", "failed_between", "p_lack_of_fit"} & set(record.effect.model_dump())


def test_whatever_its_effects_a_screen_gives_no_verdict_and_leaves_no_finding() -> None:
    plan = screen()
    ending = simulate(plan, two_rates(plan))
    assert (ending.action, ending.trials) == ("stop", 8)
    for record in ending.verdicts:
        assert record.verdict is Verdict.INCONCLUSIVE
        assert "a screen only explores and gives no verdict" in record.reason
    assert ending.verdicts[0].effect is not None
    assert ending.verdicts[0].effect.low > 0
    assert findings_of("st-1", plan, ending.verdicts, 0.0) == []
    assert known_to(plan, []) == ()


def test_a_sentinel_that_fired_makes_an_effect_invalid() -> None:
    plan = screen()
    ending = simulate(plan, two_rates(plan))
    [first, second] = plan.hypotheses
    fired = SentinelFinding(
        name="leak", severity="invalid", text="a leak", arms=plan.stages[0].arms, hypotheses=("H1",)
    )
    found = [
        verdict(plan, each, record.effect, [fired], ending.records)  # type: ignore[arg-type]
        for each, record in zip((first, second), ending.verdicts, strict=True)
    ]
    assert [record.verdict for record in found] == [Verdict.INVALID, Verdict.INCONCLUSIVE]


@pytest.mark.parametrize(
    "asked", [{"compare": LEVELS}, {"compare": {}, "arms": BUNDLES}], ids=["levels of one factor", "bundles"]
)
def test_arms_are_screened_against_the_first_and_get_no_verdict(asked: dict[str, Any]) -> None:
    plan = screen(**asked)
    means = [0.1, 0.5, *[0.1] * (len(plan.arms) - 2)]
    ending = simulate(plan, world(plan, *means))
    assert (ending.action, ending.trials) == ("stop", 2 * len(plan.arms))
    first, *others = ending.verdicts
    assert first.effect is not None
    assert first.effect.method == "arm_means"
    assert first.effect.low > 0
    assert (first.effect.n_baseline, first.effect.n_treatment) == (2, 2)
    assert {record.verdict for record in ending.verdicts} == {Verdict.INCONCLUSIVE}
    assert all("a comparison of these arms on fresh seeds would" in record.reason for record in ending.verdicts)
    assert all(record.effect is not None and record.effect.low < 0 < record.effect.high for record in others)
    assert findings_of("st-1", plan, ending.verdicts, 0.0) == []


def test_an_arm_without_a_finished_trial_costs_a_screen_that_arm_alone() -> None:
    plan = screen(compare=LEVELS)
    ending = simulate(plan, world(plan, 0.1, 0.5, 0.1, 0.1))
    lost = [
        trial.model_copy(update={"status": TrialStatus.FAILED}) if trial.arm == plan.arms[2].name else trial
        for trial in ending.records
    ]
    one, gone, other = conclude(plan, lost).verdicts
    assert gone.effect is None
    assert "arm 'learning_rate=4e-5' has no finished trial; and a screen only explores" in gone.reason
    assert one.effect is not None
    assert other.effect is not None
