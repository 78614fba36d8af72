"""Evaluates the plan's branches: which stage comes next and with how many seeds, or why the study ends.

Only the plan decides. If one of its conditions cannot be evaluated, the study stops and gives that as its reason.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from researcher.analysis.comparisons import compare
from researcher.analysis.metrics import Censored, count_censored
from researcher.analysis.power import hypothesis_power, hypothesis_seeds, seeds_for
from researcher.analysis.race import contenders, in_the_running
from researcher.analysis.samples import NotEnoughTrials, deciding_stage, reaches, sample
from researcher.analysis.verdicts import Conclusions, conclude
from researcher.models import Effect, TrialRecord
from researcher.study.plan import ALPHA, Branch, Condition, Hypothesis, Plan, Relation


@dataclass(frozen=True, slots=True, kw_only=True)
class Decision:
    """The decision after a stage.

    `to` is the next stage, `seeds` its number of seeds per arm, starting at `first_seed`. `seeds_needed` is the number of seeds per arm
    for full power.
    """

    after: str
    action: Literal["stage", "stop", "underpowered"]
    to: str | None = None
    seeds: int | None = None
    seeds_needed: int | None = None
    power: float | None = None
    """Power with the seeds that the plan allows, for the upper bound of σ."""
    reason: str
    by_plan: bool = True
    """False if the study stops because a rule of the plan could not be evaluated."""


def decide(plan: Plan, after: str, trials: Sequence[TrialRecord]) -> Decision:
    """Return the decision of the first branch after stage `after` whose condition holds.

    Raises: ValueError when none holds: such a plan decides nothing and should not have been frozen.
    """
    conclusions = conclude(plan, trials)
    for branch in plan.branches:
        if branch.stage != after:
            continue
        try:
            if holds(branch.when, plan, trials, conclusions):
                return _decision(plan, branch, trials)
        except NotEnoughTrials as missing:
            reason = f"the plan has a rule that cannot be evaluated: {missing}"
            return Decision(after=after, action="stop", reason=reason, by_plan=False)
    raise ValueError(f"no branch of the plan holds after stage {after!r}")


def holds(when: Condition, plan: Plan, trials: Sequence[TrialRecord], conclusions: Conclusions) -> bool:
    """True if the condition holds.

    Raises: NotEnoughTrials when the trials are too few to tell.
    """
    match when.kind:
        case "always":
            return True
        case "verdict_in":
            asked = [h.id for h in _asked(when, plan) if when.hypothesis or in_the_running(plan, h, trials)]
            return all(conclusions.verdict(id).verdict.value in when.verdicts for id in asked)
        case "leads":
            return _leads(when, plan, conclusions)
        case "diff_at_least":
            return _effect(when, conclusions).diff >= _value(when)
        case "diff_at_most":
            return _effect(when, conclusions).diff <= _value(when)
        case "order":
            return order_holds(when, plan, trials)
        case "power_below":
            return min(hypothesis_power(plan, h, trials) for h in _asked(when, plan)) < _value(when)


def _decision(plan: Plan, branch: Branch, trials: Sequence[TrialRecord]) -> Decision:
    power, needed = _power(plan, trials)
    seeds = None
    if branch.then == "stage":
        target = next(stage for stage in plan.stages if stage.id == branch.to)
        contenders(plan, target, trials)
        seeds = seeds_for(plan, target, trials)
    return Decision(
        after=branch.stage,
        action=branch.then,
        to=branch.to,
        seeds=seeds,
        seeds_needed=needed,
        power=power,
        reason=branch.reason,
    )


def _power(plan: Plan, trials: Sequence[TrialRecord]) -> tuple[float | None, int | None]:
    """Return the lowest power and the most seeds needed over all hypotheses; None for both without a usable noise floor."""
    try:
        power = min(hypothesis_power(plan, h, trials) for h in plan.hypotheses)
        return power, max(hypothesis_seeds(plan, h, trials) for h in plan.hypotheses)
    except NotEnoughTrials:
        return None, None


def _asked(when: Condition, plan: Plan) -> list[Hypothesis]:
    return [h for h in plan.hypotheses if when.hypothesis in (None, h.id)]


def _leads(when: Condition, plan: Plan, conclusions: Conclusions) -> bool:
    own = next(hypothesis for hypothesis in plan.hypotheses if hypothesis.id == _named(when))
    stage = deciding_stage(plan, own)
    sizes: dict[str, float] = {}
    for hypothesis in plan.hypotheses:
        effect = conclusions.effects[hypothesis.id]
        said = conclusions.verdict(hypothesis.id).verdict.value in when.verdicts
        if said and isinstance(effect, Effect) and deciding_stage(plan, hypothesis) == stage:
            sizes[hypothesis.id] = effect.diff if hypothesis.direction == "increase" else -effect.diff
    return own.id in sizes and sizes[own.id] >= max(sizes.values())


def _named(when: Condition) -> str:
    if when.hypothesis is None:
        raise ValueError(f"condition {when.kind} names no hypothesis")
    return when.hypothesis


def _effect(when: Condition, conclusions: Conclusions) -> Effect:
    effect = conclusions.effects[_named(when)]
    if isinstance(effect, NotEnoughTrials):
        raise effect
    return effect


def _value(when: Condition) -> float:
    if when.value is None:
        raise ValueError(f"condition {when.kind} has no value")
    return when.value


def order_holds(when: Condition, plan: Plan, trials: Sequence[TrialRecord]) -> bool:
    """True if all relations hold, each tested at its share of alpha (Bonferroni), on the trials of the stage being judged.

    Raises: NotEnoughTrials when an arm has too few finished trials.
    """
    metric = plan.metric(when.metric or "")
    alpha = (when.alpha or ALPHA) / len(when.relations)
    pairs = zip(when.arms, when.arms[1:], when.relations, strict=False)
    held = [_holds(plan, trials, pair, metric.name, metric.margin, alpha) for pair in pairs]
    return all(held)


def _holds(
    plan: Plan, trials: Sequence[TrialRecord], pair: tuple[str, str, Relation], metric: str, margin: float, alpha: float
) -> bool:
    left, right, relation = pair
    explored = {stage.id for stage in plan.stages if stage.explores}
    judged = [trial for trial in trials if trial.stage not in explored]
    values = [sample(judged, plan.arm(arm).name, metric).values for arm in (left, right)]
    if min(map(len, values)) < 2:
        raise NotEnoughTrials(f"{left} {relation} {right} on {metric} needs two finished trials of each arm")
    compared = compare(values[0], values[1], "welch", alpha=alpha)
    before, after = (
        count_censored(plan.metric(metric), [trial for trial in judged if trial.arm == arm]) for arm in (left, right)
    )
    unseen = Censored(baseline=before, treatment=after)
    if relation == "≈":
        return not unseen.any and compared.p_equivalence(margin) <= alpha
    low, high = compared.interval(alpha)
    difference = compared.centres[1] - compared.centres[0]
    if low == high or not unseen.keeps_sign(difference):
        return False  # without any spread the measurement may be broken; censored values could change the sign
    return (low > 0 and reaches(difference, margin)) if relation == "≪" else (high < 0 and reaches(-difference, margin))
