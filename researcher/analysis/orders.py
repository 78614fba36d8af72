"""Orders of arms: whether `5 ≪ 15 ≈ 25` holds, with ≪ and ≈ defined by the metric's margin."""

from __future__ import annotations

from collections.abc import Sequence

from researcher.analysis.censoring import Censored, count_censored
from researcher.analysis.comparisons import compare
from researcher.analysis.rounding import reaches
from researcher.analysis.samples import NotEnoughTrials, sample
from researcher.models import TrialRecord
from researcher.study.plan import Condition, Plan, Relation

ALPHA = 0.05


def order_holds(when: Condition, plan: Plan, trials: Sequence[TrialRecord]) -> bool:
    """Whether all relations hold, each at its share of alpha (Bonferroni), on the trials of the stage that is judged.

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
        raise NotEnoughTrials(f"{left} {relation} {right} on {metric} needs two finished trials of each")
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
        return False  # no spread at all: noise cannot be told from a broken measurement; or what was not seen could turn it
    return (low > 0 and reaches(difference, margin)) if relation == "≪" else (high < 0 and reaches(-difference, margin))
