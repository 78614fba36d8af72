"""What a plan costs, and what a budget pays for."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from researcher.describe import plan_lines
from researcher.design.pricing import Pace, calibrating, price_of
from researcher.instruments.catalogue import open_instrument, read_instrument
from researcher.models import Event, TrialRecord, TrialStatus
from researcher.refusals import BudgetTooSmall
from researcher.study.plan import Plan
from tests.fakes.specs import planned

ARITHMETIC = open_instrument("arithmetic", {}).instrument
KITCHEN = read_instrument(Path(__file__).parents[2] / "instruments" / "kitchen")
TRIAL_S = ARITHMETIC.defaults.trial_s
HINTS: dict[str, Any] = {"compare": {"hints": {"baseline": False, "levels": [True]}}, "claim": "increase"}


def took(plan: Plan, *seconds: float, **more: Any) -> list[TrialRecord]:
    """Trials of the plan's first arm that took so long."""
    usual: dict[str, Any] = {"study_id": "st-old", "stage": "noise-floor", "arm": plan.arms[0].name, "attempt": 1}
    usual |= {"status": TrialStatus.DONE, "started_at": 1000.0, **more}
    return [
        TrialRecord(key=f"t-{seed}", seed=seed, ended_at=1000.0 + each, **usual) for seed, each in enumerate(seconds)
    ]


def pace_of(plan: Plan, *seconds: float, **more: Any) -> Pace:
    pace = Pace.of("st-old", plan, took(plan, *seconds, **more), ())
    assert pace is not None
    return pace


def test_a_price_follows_length_size_and_servers() -> None:
    usual = price_of(planned(), ARITHMETIC, servers=1)
    assert (usual.trials, usual.wall_s) == ((6, 10), (6 * TRIAL_S, 10 * TRIAL_S))
    for fields in ({"steps": 12}, {"set": {"group_size": 8}}):
        assert price_of(planned(**fields), ARITHMETIC, servers=1).wall_s[0] == 2 * usual.wall_s[0]
    assert price_of(planned(), ARITHMETIC, servers=2).wall_s[0] == usual.wall_s[0] / 2


def test_interim_evaluations_are_in_the_price_and_in_the_plans_words() -> None:
    plan = planned(steps=7, heldout_every=2)
    assert [plan.interim_evaluations(arm.name) for arm in plan.arms] == [3, 3]
    trained, around, interim = 7 * 8 * 4, 2 * 24 * 2, 3 * 16
    usual = planned(steps=7)
    assert plan.trial_s == pytest.approx((usual.trial_s or 0) * (1 + interim / (trained + around)))
    price = price_of(plan, ARITHMETIC, servers=1).wall_s[0]
    assert price == pytest.approx(6 * (plan.trial_s or 0)) != price_of(usual, ARITHMETIC, servers=1).wall_s[0]
    assert [line for line in plan.assumptions if "decide nothing" in line] == [
        "While training goes on, up to 16 of the held-out tasks are played every 2 steps, once each, for the curves: these "
        "numbers decide nothing."
    ]
    assert '"heldout_every":2' in plan.canonical()
    assert "heldout_every" not in usual.canonical()
    assert planned(steps=7, heldout_every=0).digest() == usual.digest()


def test_a_pace_that_was_measured_with_interim_evaluations_prices_plans_without_them() -> None:
    plan, plain = planned(steps=7, heldout_every=2), planned(steps=7)
    pace = pace_of(plan, plan.trial_s or 0)
    assert pace.fits(plain)
    assert pace.episode_s * 7 * 8 * 4 == pytest.approx(plain.trial_s)


def test_a_budget_that_does_not_pay_for_the_least_is_refused_with_what_would() -> None:
    with pytest.raises(
        BudgetTooSmall,
        match=r"^budget.wall: 6 trials take about 12 min, but the budget is 10 min: give a budget of 12m",
    ):
        planned(steps=12, budget={"wall": "10m"})
    planned(steps=12, budget={"wall": "10m"}, servers=2)
    with pytest.raises(
        BudgetTooSmall, match=r"^budget\.trials: the study needs at least 6 trials, but the budget is 5"
    ):
        planned(budget={"trials": 5})


@pytest.mark.parametrize("budget", [{"wall": 8.5 * 60}, {"trials": 8}])
def test_a_budget_between_least_and_most_takes_seeds_away_and_says_so(budget: dict[str, float]) -> None:
    plan = planned(budget=budget)
    assert (plan.stages[-1].seeds, plan.stages[-1].max_seeds) == (3, 4)
    assert plan.budget.trials == 8
    assert "The budget pays for 4 seeds per arm at the most, not 5." in plan.assumptions


def test_an_instruments_own_sigma_prices_seeds_and_warns() -> None:
    plan = planned(KITCHEN, **HINTS)
    assert any("probably end the study as underpowered" in line for line in plan.assumptions)
    needed = price_of(plan, KITCHEN.instrument, servers=1).seeds_needed
    assert needed is not None
    paid = planned(KITCHEN, **HINTS, budget={"wall": "24h"})
    assert paid.stages[-1].max_seeds == needed > plan.stages[-1].max_seeds
    assert not any("underpowered" in line for line in paid.assumptions)


def test_a_race_counts_each_trial_once() -> None:
    levels = [2e-5, 4e-5, 8e-5, 1e-4, 2e-4, 4e-4]
    race: dict[str, Any] = {"compare": {"learning_rate": {"baseline": 1e-5, "levels": levels}}, "design": "race"}
    plan = planned(**race, seeds={"min": 3, "max": 3})
    # floor 3; six arms on 2 seeds; three on 2 more; two on 4 more; baseline and winner on 3 fresh ones.
    least = 3 + 6 * 2 + 3 * 2 + 2 * 4 + 2 * 3
    assert price_of(plan, ARITHMETIC, servers=1).trials[0] == least < plan.budget.trials


def test_a_sequence_counts_one_of_its_second_comparisons_and_that_the_dearest() -> None:
    seeds: dict[str, Any] = {"seeds": {"min": 3, "max": 3}, "design": "sequence"}
    ranks = {"lora_alpha_ratio": {"levels": [1, 2, 4]}, "lora_rank": {"levels": [8, 16, 32]}}
    assert planned(compare=ranks, **seeds).budget.trials == 3 * 3 + 3 * 3
    steps = {"steps": {"baseline": 6, "levels": [30]}, "learning_rate": {"baseline": 4e-5, "levels": [1e-5]}}
    longer = planned(compare=steps, **seeds)
    assert longer.trial_s == 5 * TRIAL_S
    assert price_of(longer, ARITHMETIC, servers=1).wall_s[0] == 3 * (TRIAL_S + 5 * TRIAL_S) + 3 * 2 * 5 * TRIAL_S


def test_models_that_take_turns_on_one_machine_cost_boots() -> None:
    models = planned(model=["smollm2-135m", "Qwen/Qwen2.5-0.5B"], seeds={"min": 3, "max": 3})
    alone, side_by_side = (price_of(models, ARITHMETIC, servers=servers) for servers in (1, 2))
    assert alone.wall_s[0] > 6 * TRIAL_S
    assert side_by_side.wall_s[0] == 3 * TRIAL_S


def test_a_pace_that_was_measured_replaces_the_instruments_guess() -> None:
    pace = pace_of(planned(), 20.0, 24.0, 900.0)
    plan = planned(steps=12, paces=[pace])
    assert (plan.trial_s, plan.trial_s_source) == (48.0, "measured here, st-old")
    assert price_of(plan, ARITHMETIC, servers=1).wall_s[0] == 6 * 48.0
    planned(steps=12, paces=[pace], budget={"wall": "6m"})
    guessed = planned(steps=12)
    assert (guessed.trial_s, guessed.trial_s_source) == (2 * TRIAL_S, "estimated")


@pytest.mark.parametrize("other", [{"model": "Qwen/Qwen3-0.6B"}, {"set": {"digits": 2}}, {"set": {"max_tokens": 64}}])
def test_a_pace_of_other_work_is_none_for_this(other: dict[str, Any]) -> None:
    pace = pace_of(planned(), 20.0)
    assert planned(**other, paces=[pace]).trial_s_source == "estimated"
    assert planned(set={"group_size": 8}, paces=[pace]).trial_s == 40.0


def test_only_whole_trials_of_one_attempt_show_a_pace() -> None:
    for unlike in ({"attempt": 2}, {"status": TrialStatus.RUNNING}):
        assert Pace.of("st-old", planned(), took(planned(), 20.0, **unlike), ()) is None


def test_the_time_in_which_a_trial_rested_is_no_part_of_a_pace() -> None:
    [trial] = took(planned(), 20.0 + 30_000.0)
    kinds = ("trial_paused", "trial_continued")
    rest = [
        Event(seq=seq, study_id="st-old", at=1010.0 + 30_000.0 * seq, kind=kind, detail={"trial": trial.key})
        for seq, kind in enumerate(kinds)
    ]
    assert Pace.of("st-old", planned(), [trial], rest) == pace_of(planned(), 20.0)


def calibrated(plan: Plan, seconds: float, *step_s: float, **more: Any) -> Pace | None:
    """The pace of a calibration whose trial took so long, and its steps."""
    series = {"step_s": list(enumerate(step_s, start=1))}
    return Pace.calibrated("st-short", calibrating(plan), took(plan, seconds, series=series, **more), ())


def test_a_calibration_prices_the_steps_apart_from_what_a_trial_does_once() -> None:
    pace = calibrated(planned(), 100.0, 30.0, 11.0, 9.0)
    assert pace is not None
    assert pace.around_s == pytest.approx(70.0)  # evaluations, and 20 s that the first step took longer
    plan = planned(steps=12, paces=[pace])
    assert (plan.trial_s, plan.trial_s_source) == (190.0, "measured here, 3 steps of st-short")
    assert planned(steps=100, paces=[pace]).trial_s == pytest.approx(1100.0, rel=0.05)
    assert planned(steps=12, set={"group_size": 8}, paces=[pace]).trial_s == 310.0
    assert planned(steps=12, heldout_every=6, paces=[pace]).trial_s == pytest.approx(190.0 + 16 * 10 / 32, rel=0.05)
    assert planned(set={"digits": 2}, paces=[pace]).trial_s_source == "estimated"


def test_a_calibration_that_shows_no_second_step_is_no_pace() -> None:
    assert calibrated(planned(), 100.0, 30.0) is None
    assert calibrated(planned(), 100.0, 30.0, 10.0, 10.0, attempt=2) is None


def test_a_calibration_of_several_models_of_which_one_failed_is_no_pace() -> None:
    short = calibrating(planned())
    [small] = took(short, 100.0, series={"step_s": [(1, 30.0), (2, 10.0), (3, 10.0)]})
    [large] = took(short, 900.0, status=TrialStatus.FAILED, reason="no memory", arm=short.arms[1].name)
    assert Pace.calibrated("st-short", short, [small], ()) is not None
    assert Pace.calibrated("st-short", short, [small, large], ()) is None


def test_a_calibrations_trials_are_short_in_every_arm() -> None:
    steps = {"steps": {"baseline": 6, "levels": [30]}}
    plan = planned(compare=steps)
    short = calibrating(plan)
    assert {short.steps_of(arm.name) for arm in short.arms} == {3}
    assert pace_of(short, 9.0).fits(plan)


def test_tokens_are_priced_by_lengths_until_an_earlier_study_has_counted_them() -> None:
    assert price_of(planned(), ARITHMETIC, servers=1).tokens is None
    plan = planned(budget={"tokens": "50M"}, set={"max_tokens": 16})
    episodes = 6 * 8 * 4 + 2 * 24 * 2
    assert plan.trial_tokens is not None
    assert plan.trial_tokens == pytest.approx(episodes * (16 + 100), rel=0.01)
    assert price_of(plan, ARITHMETIC, servers=1).tokens == (6 * plan.trial_tokens, 10 * plan.trial_tokens)
    assert not [note for note in plan.assumptions if "tokens" in note]
    [note] = [note for note in planned(budget={"tokens": 1000}, set={"max_tokens": 16}).assumptions if "tokens" in note]
    assert "1,000 are given: the study may stop before its end" in note
    counted = {"tokens_called": [(1, 640.0), (2, 960.0)], "episodes": [(1, 16.0), (2, 16.0)]}
    pace = pace_of(plan, 60.0, series=counted)
    assert pace.episode_tokens == 50
    measured = planned(budget={"tokens": "50M"}, set={"max_tokens": 16}, paces=[pace])
    assert measured.trial_tokens == pytest.approx(episodes * 50, rel=0.01)


def test_a_dry_run_says_what_tokens_it_may_take() -> None:
    said = "\n".join(plan_lines(planned(budget={"tokens": "50M"})))
    assert "50,000,000 tokens of the agents' calls" in said
    assert "tokens of the agents' calls, roughly" in said
    assert "tokens of" not in "\n".join(plan_lines(planned()))
