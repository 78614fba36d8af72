"""Looks that add no seed: what they may spend is not lost, and the power that was promised is there."""

from __future__ import annotations

import math

import pytest

from bench.made_up_studies import INSTRUMENT, World, simulate
from researcher.analysis.verdicts import conclude
from researcher.models import TrialRecord
from researcher.study.plan import ALPHA, Plan, Verdict
from tests.fakes.specs import planned
from tests.fakes.study import done_trial


def looked_at(looks: int, seeds: int) -> Plan:
    compared = {"learning_rate": {"baseline": 1e-5, "levels": [2e-5]}}
    number = {"min": seeds, "max": seeds}
    return planned(INSTRUMENT, compare=compared, claim="increase", looks=looks, seeds=number)


def drawn(plan: Plan, seeds: int) -> list[TrialRecord]:
    """Trials of every arm; each made by the first stage that asks for its seed."""
    asked = [stage for stage in plan.stages if stage.spends is not None]
    return [
        done_trial(plan, arm.name, seed, 0.3 * place + 0.01 * seed).model_copy(
            update={"stage": next(stage.id for stage in asked if stage.max_seeds > seed)}
        )
        for place, arm in enumerate(plan.arms)
        for seed in range(seeds)
    ]


def level(plan: Plan, trials: list[TrialRecord]) -> float:
    (record,) = conclude(plan, trials).verdicts
    assert record.effect is not None
    return record.effect.level


@pytest.mark.parametrize(("looks", "seeds"), [(2, 2), (3, 2), (5, 2), (5, 3), (5, 4)])
def test_after_the_last_look_all_of_alpha_is_spent(looks: int, seeds: int) -> None:
    plan = looked_at(looks, seeds)
    levels = {level(plan, drawn(plan, each.max_seeds)) for each in plan.stages if each.spends is not None}
    assert sum(1 - each for each in levels) == pytest.approx(ALPHA)
    last = [each.spends for each in plan.stages if each.spends is not None and each.max_seeds == seeds]
    assert 1 - level(plan, drawn(plan, seeds)) == pytest.approx(math.fsum(last))


def test_looks_that_each_add_seeds_spend_what_the_plan_says() -> None:
    plan = looked_at(3, 9)
    for look in plan.stages[1:]:
        assert 1 - level(plan, drawn(plan, look.max_seeds)) == pytest.approx(look.spends)


def test_a_plan_from_before_looks_were_merged_is_judged_as_it_was() -> None:
    plan = looked_at(3, 2).model_copy(update={"merged_looks": False})
    assert 1 - level(plan, drawn(plan, 2)) == pytest.approx(plan.stages[1].spends)


def test_a_plan_without_looks_says_nothing_of_merged_ones() -> None:
    assert "merged_looks" not in looked_at(1, 2).canonical()


def test_two_seeds_looked_at_three_times_have_the_promised_power() -> None:
    plan = looked_at(3, 2)
    means = {plan.arms[-1].name: plan.planned_effect}
    sigma = plan.planned_effect / 10
    endings = [simulate(plan, World(means=means, sigma=sigma, seed=seed)) for seed in range(120)]
    begun = [ending.verdicts[0].verdict for ending in endings if ending.action != "underpowered"]
    assert len(begun) >= 20
    assert begun.count(Verdict.SUPPORTED) / len(begun) >= plan.power
