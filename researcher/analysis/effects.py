"""Computes the effects of a plan: treatment minus baseline for every hypothesis, with Holm-adjusted intervals.

A screen's effects are not adjusted, because a screen tests nothing and only ranks. Their noise is pooled over all its arms.

The hypotheses that one stage decides are a family. The adjustment counts all of them, even those that could not be tested. It does
not count hypotheses that a race left behind, because these are never tested on fresh seeds, nor hypotheses of a stage that the
plan's branches skipped. At a look of a sequential design, the level is what the look may spend (`power.may_spend`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Literal

from researcher.analysis.comparisons import Comparison, Fit, compare, pairing_pays, regressors
from researcher.analysis.power import may_spend
from researcher.analysis.race import left_behind
from researcher.analysis.samples import NotEnoughTrials, Sample, deciding_stage, judged_stage, sample, seeds_of, side
from researcher.models import Effect, TrialRecord, TrialStatus
from researcher.study.plan import Hypothesis, Plan, StageKind


def effects(plan: Plan, trials: Sequence[TrialRecord]) -> dict[str, Effect | NotEnoughTrials]:
    """Map each hypothesis id to its effect or, if the hypothesis cannot be tested, to the reason. Keeps the plan's order."""
    compared: dict[str, Comparison] = {}
    missing: dict[str, NotEnoughTrials] = {}
    families: dict[str, list[Hypothesis]] = {}
    for hypothesis in plan.hypotheses:
        try:
            if (why := left_behind(plan, hypothesis, trials)) is not None:
                missing[hypothesis.id] = NotEnoughTrials(why)
                continue
            families.setdefault(deciding_stage(plan, hypothesis).id, []).append(hypothesis)
        except NotEnoughTrials as reason:
            missing[hypothesis.id] = reason
    adjusted: dict[str, float] = {}
    levels: dict[str, float] = {}
    for family in families.values():
        alpha = min(_alpha(plan, hypothesis, trials) for hypothesis in family)
        for hypothesis in family:
            try:
                compared[hypothesis.id] = _comparison(plan, hypothesis, trials, alpha, len(family))
            except NotEnoughTrials as reason:
                missing[hypothesis.id] = reason
        p_values = [compared[h.id].p_value if h.id in compared else 1.0 for h in family]
        explores = deciding_stage(plan, family[0]).explores
        adjusted |= zip((h.id for h in family), p_values if explores else holm_p_values(p_values), strict=True)
        alphas = [alpha] * len(family) if explores else holm_alphas(p_values, alpha)
        levels |= zip((h.id for h in family), alphas, strict=True)
    return {
        h.id: missing[h.id]
        if h.id in missing
        else _effect(plan, h, trials, compared[h.id], adjusted[h.id], levels[h.id])
        for h in plan.hypotheses
    }


def secondary_effect(
    plan: Plan, hypothesis: Hypothesis, metric: str, trials: Sequence[TrialRecord]
) -> Effect | NotEnoughTrials:
    """Return the effect of the hypothesis's two sides on another metric of the plan, or the reason why it cannot be computed.

    It is reported but decides nothing. Its interval therefore has confidence 1 - alpha, with the hypothesis's alpha, and is not
    adjusted for other hypotheses, metrics or looks.
    """
    asked = hypothesis.model_copy(update={"metric": metric, "margin": plan.metric(metric).margin})
    try:
        if (why := left_behind(plan, hypothesis, trials)) is not None:
            return NotEnoughTrials(why)
        compared = _comparison(plan, asked, trials, asked.alpha, 1)
    except NotEnoughTrials as reason:
        return reason
    return _effect(plan, asked, trials, compared, compared.p_value, asked.alpha)


def _alpha(plan: Plan, hypothesis: Hypothesis, trials: Sequence[TrialRecord]) -> float:
    stage = judged_stage(plan, hypothesis, trials)
    return hypothesis.alpha if stage.spends is None else may_spend(plan, stage, trials)


def holm_p_values(p_values: Sequence[float]) -> list[float]:
    """Return Holm-adjusted p-values, in the order given.

    statsmodels' `multipletests` gives the same values (a test checks that) but runs a garbage collection at every call.
    """
    m = len(p_values)
    adjusted = [0.0] * m
    largest = 0.0
    for rank, i in enumerate(sorted(range(m), key=lambda i: p_values[i])):
        largest = max(largest, min(1.0, (m - rank) * p_values[i]))
        adjusted[i] = largest
    return adjusted


def holm_alphas(p_values: Sequence[float], alpha: float) -> list[float]:
    """Return the level of each test in Holm's step-down procedure, in the order given.

    The first test that fails ends the procedure, so that test and all after it get its level. An interval at 1 - level therefore
    excludes zero exactly when the adjusted p-value is at most alpha.
    """
    m = len(p_values)
    order = sorted(range(m), key=lambda i: p_values[i])
    levels = [0.0] * m
    stopped: float | None = None
    for rank, i in enumerate(order):
        own = alpha / (m - rank)
        if stopped is None and p_values[i] > own:
            stopped = own
        levels[i] = own if stopped is None else stopped
    return levels


def method_for(plan: Plan, hypothesis: Hypothesis, trials: Sequence[TrialRecord]) -> Literal["welch", "paired"]:
    """Choose the paired test only if the noise floor ran both arms and its trials show that pairing pays; else Welch's, as for
    arms without shared seeds."""
    if len({plan.arm(name).seed_offset for name in hypothesis.sides}) > 1:
        return "welch"
    stage = deciding_stage(plan, hypothesis)
    for floor in plan.stages:
        if floor.kind is StageKind.NOISE_FLOOR and hypothesis.sides <= set(floor.arms):
            baseline, treatment = _samples(plan, hypothesis, seeds_of(plan, floor, trials))
            if pairing_pays(baseline.values, treatment.values, stage.seeds, hypothesis.alpha):
                return "paired"
    return "welch"


def _samples(plan: Plan, hypothesis: Hypothesis, trials: Sequence[TrialRecord]) -> tuple[Sample, Sample]:
    return (
        side(plan, trials, hypothesis.baselines, hypothesis.metric),
        side(plan, trials, hypothesis.treatments, hypothesis.metric),
    )


def _comparison(
    plan: Plan, hypothesis: Hypothesis, trials: Sequence[TrialRecord], alpha: float, tests: int
) -> Comparison:
    stage = judged_stage(plan, hypothesis, trials)
    within = seeds_of(plan, stage, trials)
    baseline, treatment = _samples(plan, hypothesis, within)
    if stage.explores:
        return _fit(plan, hypothesis, within)
    for arm, values in ((hypothesis.baseline, baseline.values), (hypothesis.treatment, treatment.values)):
        if len(values) < 2:
            some = "only one finished trial" if values else "no finished trial"
            raise NotEnoughTrials(f"{'side' if hypothesis.baseline_arms else 'arm'} {arm!r} has {some}")
    if hypothesis.between_arms:
        return _fit(plan, hypothesis, within)
    method = method_for(plan, hypothesis, trials)
    if method == "paired" and len(_shared(baseline.values, treatment.values)) < 2:
        raise NotEnoughTrials("the comparison is paired, and fewer than two seeds finished in both arms")
    return compare(baseline.values, treatment.values, method, alpha=alpha, tests=tests)


def _fit(plan: Plan, hypothesis: Hypothesis, within: Sequence[TrialRecord]) -> Fit:
    finished = {trial.arm for trial in within if trial.status is TrialStatus.DONE}
    method, columns = regressors(plan, hypothesis, finished)
    values = {arm: list(sample(within, arm, hypothesis.metric).values.values()) for arm in columns}
    if method == "arm_means" and (idle := [arm for arm in sorted(hypothesis.sides) if not values[arm]]):
        raise NotEnoughTrials(f"arm {idle[0]!r} has no finished trial")
    try:
        return Fit.of(method, values, columns)
    except ValueError as error:
        raise NotEnoughTrials(str(error)) from error


def _effect(
    plan: Plan, hypothesis: Hypothesis, trials: Sequence[TrialRecord], compared: Comparison, p: float, alpha: float
) -> Effect:
    within = seeds_of(plan, judged_stage(plan, hypothesis, trials), trials)
    baseline, treatment = _samples(plan, hypothesis, within)
    counts = [len(baseline.values), len(treatment.values)]
    if compared.method == "paired":
        counts = 2 * [len(_shared(baseline.values, treatment.values))]
    elif compared.method == "main_effects":
        counts = [_finished(within, arms, hypothesis.metric) for arms in (hypothesis.baselines, hypothesis.treatments)]
    between = [sample(within, arm, hypothesis.metric) for arm in hypothesis.between_arms]
    low, high = compared.interval(alpha)
    return Effect(
        hypothesis=hypothesis.id,
        metric=hypothesis.metric,
        n_baseline=counts[0],
        n_treatment=counts[1],
        n_between=sum(len(each.values) for each in between),
        failed_between=sum(each.failed for each in between),
        failed_baseline=baseline.failed,
        failed_treatment=treatment.failed,
        mean_baseline=compared.centres[0],
        mean_treatment=compared.centres[1],
        diff=compared.centres[1] - compared.centres[0],
        low=low,
        high=high,
        level=1 - alpha,
        method=compared.method,
        p_value=compared.p_value,
        p_adjusted=p,
        p_equivalence=compared.p_equivalence(hypothesis.margin),
        p_lack_of_fit=compared.p_lack_of_fit if isinstance(compared, Fit) else None,
    )


def _finished(within: Sequence[TrialRecord], arms: Sequence[str], metric: str) -> int:
    return sum(len(sample(within, arm, metric).values) for arm in arms)


def _shared(baseline: Mapping[int, float], treatment: Mapping[int, float]) -> set[int]:
    return set(baseline) & set(treatment)
