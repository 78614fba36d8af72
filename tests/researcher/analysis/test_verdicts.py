"""Effects and verdicts follow fixed rules, in a fixed order, and never assume success."""

from __future__ import annotations

import numpy as np
import pytest
from statsmodels.stats.multitest import multipletests

from researcher.analysis.comparisons import compare, pairing_pays
from researcher.analysis.effects import effects, holm_alphas, holm_p_values
from researcher.analysis.samples import NotEnoughTrials
from researcher.analysis.verdicts import conclude
from researcher.instruments.instrument import Direction
from researcher.models import Effect, TrialEvidence, TrialRecord
from researcher.study.plan import Plan, Verdict
from tests.fakes.study import (
    THRESHOLD,
    done_trial,
    failed_trial,
    planned_trial,
    reaching_trial,
    study_plan,
    trials_with,
)

BASE, TREAT = "lr=base", "lr=4e-05"


@pytest.mark.parametrize(
    ("base", "treat", "direction", "verdict"),
    [
        ([0.1, 0.12, 0.11], [0.5, 0.52, 0.51], "increase", Verdict.SUPPORTED),
        ([0.5, 0.52, 0.51], [0.1, 0.12, 0.11], "increase", Verdict.REFUTED),
        ([0.5, 0.52, 0.51], [0.1, 0.12, 0.11], "decrease", Verdict.SUPPORTED),
        ([0.1, 0.12, 0.11], [0.5, 0.52, 0.51], "decrease", Verdict.REFUTED),
        ([0.1, 0.12, 0.11], [0.11, 0.12, 0.1], "increase", Verdict.EQUIVALENT),
        ([0.1, 0.4, 0.2], [0.5, 0.1, 0.3], "increase", Verdict.INCONCLUSIVE),
        ([0.1, 0.1, 0.1], [0.5, 0.5, 0.5], "increase", Verdict.INCONCLUSIVE),
        ([0.10, 0.11, 0.12], [0.16, 0.17, 0.18], "increase", Verdict.EQUIVALENT),
        ([0.49, 0.5, 0.51], [0.59, 0.6, 0.61], "increase", Verdict.SUPPORTED),  # at the margin, though 0.6 - 0.5 < 0.1
        ([0.59, 0.6, 0.61], [0.49, 0.5, 0.51], "decrease", Verdict.SUPPORTED),
    ],
)
def test_the_verdict_follows_from_interval_and_margin(
    base: list[float], treat: list[float], direction: Direction, verdict: Verdict
) -> None:
    plan = study_plan(direction=direction)
    assert conclude(plan, trials_with(plan, {BASE: base, TREAT: treat})).verdicts[0].verdict is verdict


def reaching(base: list[int | None], treat: list[int | None]) -> tuple[Plan, list[TrialRecord]]:
    """A study that asks whether the treatment takes fewer steps to a threshold, within ten steps of training."""
    plan = study_plan(metrics=(THRESHOLD,), margin=2.0, direction="decrease")
    rows = {BASE: base, TREAT: treat}
    return plan, [reaching_trial(plan, arm, seed, step) for arm, row in rows.items() for seed, step in enumerate(row)]


@pytest.mark.parametrize(
    ("base", "treat", "found"),
    [
        ([8, 9, 9], [2, 3, 3], Verdict.SUPPORTED),
        ([2, 3, 3], [8, 9, 9], Verdict.REFUTED),
        ([9, None, None], [2, 3, 3], Verdict.SUPPORTED),  # were the baseline's larger, the gain would be so too
        ([2, 3, 3], [9, None, None], Verdict.REFUTED),
        ([9, None, None], [2, 3, 2, 3, None], Verdict.INCONCLUSIVE),  # the last may be any number
        ([9, 10, 10], [9, 10, 10], Verdict.EQUIVALENT),
        ([9, 10, 10], [9, 10, None], Verdict.INCONCLUSIVE),
        ([10, None, None], [None, 10, None], Verdict.INCONCLUSIVE),
        ([None, None, None], [None, None, None], Verdict.INCONCLUSIVE),
    ],
)
def test_a_threshold_that_was_never_reached_may_be_any_number_of_steps_away(
    base: list[int | None], treat: list[int | None], found: Verdict
) -> None:
    record = conclude(*reaching(base, treat)).verdicts[0]
    assert record.verdict is found
    assert ("never reached" in record.reason) == (found is Verdict.INCONCLUSIVE and set(base) != {None})


def test_arms_of_different_lengths_are_not_ordered_by_a_threshold_that_the_short_one_had_no_time_to_reach() -> None:
    plan, _ = reaching([], [])
    short = [reaching_trial(plan, BASE, seed, None, steps=5) for seed in range(3)]
    long = [reaching_trial(plan, TREAT, seed, step, steps=20) for seed, step in enumerate([10, 11, 10])]
    record = conclude(plan, [*short, *long]).verdicts[0]
    assert record.effect is not None
    assert record.effect.low > 0
    assert record.verdict is Verdict.INCONCLUSIVE


def test_swapping_the_arms_flips_the_sign_and_nothing_else() -> None:
    low, high = [0.1, 0.13, 0.11], [0.3, 0.35, 0.31]
    plan = study_plan()
    one = effects(plan, trials_with(plan, {BASE: low, TREAT: high}))["H1"]
    other = effects(plan, trials_with(plan, {BASE: high, TREAT: low}))["H1"]
    assert isinstance(one, Effect)
    assert isinstance(other, Effect)
    assert (one.diff, one.low, one.high) == pytest.approx((-other.diff, -other.high, -other.low))
    assert one.p_value == pytest.approx(other.p_value)


def test_an_arm_without_trials_is_inconclusive_and_says_which() -> None:
    plan = study_plan()
    record = conclude(plan, trials_with(plan, {BASE: [0.1, 0.2, 0.3]})).verdicts[0]
    assert record.verdict is Verdict.INCONCLUSIVE
    assert TREAT in record.reason
    assert record.effect is None


def test_failed_trials_are_counted_and_the_verdict_still_stands() -> None:
    plan = study_plan()
    trials = [*trials_with(plan, {BASE: [0.1, 0.11, 0.12], TREAT: [0.5, 0.51]}), failed_trial(plan, TREAT, 2)]
    record = conclude(plan, trials).verdicts[0]
    assert record.effect is not None
    assert (record.effect.n_treatment, record.effect.failed_treatment) == (2, 1)
    assert record.verdict is Verdict.SUPPORTED


def test_looking_before_all_trials_have_ended_gives_no_verdict() -> None:
    plan = study_plan()
    trials = trials_with(plan, {BASE: [0.1, 0.11, 0.12], TREAT: [0.5, 0.51]})
    assert conclude(plan, trials).verdicts[0].verdict is Verdict.INCONCLUSIVE
    open_trial = planned_trial(plan, TREAT, 2)
    assert conclude(plan, [*trials, open_trial]).verdicts[0].verdict is Verdict.INCONCLUSIVE


def test_a_trial_called_done_without_its_metric_is_an_error() -> None:
    plan = study_plan()
    trials = trials_with(plan, {BASE: [0.1, 0.11, 0.12], TREAT: [0.5, 0.51, 0.52]})
    trials[0].finals.clear()
    with pytest.raises(ValueError, match="done but has no 'auc'"):
        conclude(plan, trials)


def test_a_sentinel_that_fired_comes_before_everything_else() -> None:
    plan = study_plan(sentinels=("unplanned_change",))
    trials = trials_with(plan, {BASE: [0.1, 0.11, 0.12], TREAT: [0.5, 0.51]})
    patched = TrialEvidence(changes=[{"optimizer": {"learning_rate": 1.0}}])
    record = conclude(plan, [*trials, done_trial(plan, TREAT, 2, 0.5, evidence=patched)]).verdicts[0]
    assert record.verdict is Verdict.INVALID
    assert "unplanned_change" in record.reason
    assert record.sentinels == ("unplanned_change",)


def test_every_sentinel_that_fired_is_named_once_and_a_verdict_that_none_made_invalid_names_none() -> None:
    plan = study_plan(sentinels=("heldout_leak", "unplanned_change"))
    values = {BASE: [0.1, 0.11, 0.12], TREAT: [0.5, 0.51]}
    found = TrialEvidence(changes=[{"optimizer": {"learning_rate": 1.0}}], train_tasks=["a"], heldout_tasks=["a"])
    joined = TrialEvidence(changes=[], joined={"c-1": 2}, train_tasks=[], heldout_tasks=[])
    both = [done_trial(plan, TREAT, seed, 0.5, evidence=each) for seed, each in ((2, found), (3, joined))]
    record = conclude(plan, [*trials_with(plan, values), *both]).verdicts[0]
    assert record.sentinels == ("heldout_leak", "unplanned_change")
    sound = conclude(plan, trials_with(plan, values)).verdicts[0]
    assert sound.sentinels == ()
    assert "sentinels" not in sound.model_dump()


def test_several_hypotheses_are_adjusted_together_and_untested_ones_count() -> None:
    plan = study_plan((2e-5, 4e-5))
    values = {BASE: [0.1, 0.13, 0.11], "lr=2e-05": [0.2, 0.23, 0.21], "lr=4e-05": [0.5, 0.53, 0.51]}
    both = effects(plan, trials_with(plan, values))
    assert [e.level for e in both.values() if isinstance(e, Effect)] == pytest.approx([0.95, 0.975])
    del values["lr=2e-05"]
    left = effects(plan, trials_with(plan, values))
    assert isinstance(left["H1"], NotEnoughTrials)
    assert isinstance(left["H2"], Effect)
    assert left["H2"].p_adjusted == pytest.approx(2 * left["H2"].p_value)


@pytest.mark.parametrize("p_values", [[0.03], [0.001, 0.02, 0.04], [0.04, 0.001, 0.03, 1.0], [0.02, 0.02]])
def test_holm_is_the_one_that_statsmodels_has(p_values: list[float]) -> None:
    assert holm_p_values(p_values) == pytest.approx(list(multipletests(p_values, method="holm")[1]))
    rejected = [p <= own for p, own in zip(p_values, holm_alphas(p_values, 0.05), strict=True)]
    assert rejected == list(multipletests(p_values, alpha=0.05, method="holm")[0])


def test_holm_levels_follow_the_step_down() -> None:
    assert holm_alphas([0.001, 0.02, 0.04], 0.05) == pytest.approx([0.05 / 3, 0.05 / 2, 0.05])
    assert holm_alphas([0.001, 0.03, 0.04], 0.05) == pytest.approx([0.05 / 3, 0.05 / 2, 0.05 / 2])


def test_pairing_pays_only_where_the_shared_seed_explains_the_spread() -> None:
    base = {seed: float(value) for seed, value in enumerate([1, 2, 3, 4, 5, 6])}
    close = {seed: value + 0.01 * (-1) ** seed for seed, value in base.items()}
    unrelated = {seed: float(value) for seed, value in enumerate([3, 1, 4, 1, 5, 2])}
    assert pairing_pays(base, close, 6)
    assert not pairing_pays(base, unrelated, 6)
    assert not pairing_pays({0: 1.0, 1: 2.0}, {0: 1.0, 1: 2.0}, 6)


def test_pairing_pays_less_at_a_stricter_level_where_few_seeds_are_left() -> None:
    base = {seed: float(value) for seed, value in enumerate([1, 2, 3, 4, 5, 6, 7, 8])}
    near = {seed: value + 0.9 * (-1) ** seed for seed, value in base.items()}
    assert pairing_pays(base, near, 3)
    assert not pairing_pays(base, near, 3, alpha=0.0005)


def test_from_twenty_seeds_per_arm_the_interquartile_mean_is_bootstrapped_and_repeats() -> None:
    rng = np.random.default_rng(3)
    base = dict(enumerate(rng.normal(0, 1, 20).tolist()))
    treat = dict(enumerate(rng.normal(2, 1, 20).tolist()))
    one, two = compare(base, treat, "welch", alpha=0.05), compare(base, treat, "welch", alpha=0.05)
    assert one.method == "bootstrap_iqm"
    assert one.interval(0.05) == two.interval(0.05)
    assert one.interval(0.05)[0] > 0
    assert one.p_value < 0.01
    assert one.p_equivalence(10) < 0.01 < one.p_equivalence(0.5)


CEILING = [1.0] * 19


@pytest.mark.parametrize(
    ("base", "treat", "found"),
    [
        ([0.5] * 19 + [0.6], [*CEILING, 0.9], Verdict.SUPPORTED),
        ([*CEILING, 0.9], [0.5] * 19 + [0.6], Verdict.REFUTED),
        ([*CEILING, 0.97], [*CEILING, 0.98], Verdict.EQUIVALENT),
    ],
)
def test_spread_that_interquartile_means_leave_out_is_compared_by_means(
    base: list[float], treat: list[float], found: Verdict
) -> None:
    plan = study_plan(seeds=20, max_seeds=20)
    record = conclude(plan, trials_with(plan, {BASE: base, TREAT: treat})).verdicts[0]
    assert record.effect is not None
    assert record.effect.method == "welch"
    assert record.effect.low < record.effect.high
    assert record.verdict is found


def test_many_seeds_without_any_spread_stay_inconclusive() -> None:
    plan = study_plan(seeds=20, max_seeds=20)
    record = conclude(plan, trials_with(plan, {BASE: [0.5] * 20, TREAT: [1.0] * 20})).verdicts[0]
    assert record.effect is not None
    assert (record.effect.method, record.verdict) == ("bootstrap_iqm", Verdict.INCONCLUSIVE)
    assert "trials do not differ between seeds at all" in record.reason
