"""Verdicts, by rules fixed in advance and applied in a fixed order; success is never the default.

A verdict is invalid (a sentinel fired), supported, refuted, equivalent or inconclusive. Reasons are in words, without numbers: the
report states numbers as claims.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from researcher.analysis.effects import effects
from researcher.analysis.metrics import Censored, censored
from researcher.analysis.samples import NotEnoughTrials, judged_stage, reaches, sample, seeds_of
from researcher.analysis.sentinel_findings import SentinelFinding
from researcher.analysis.sentinels import inspect
from researcher.models import Effect, TrialRecord, VerdictRecord
from researcher.study.plan import Hypothesis, Plan, Verdict


def _screened(hypothesis: Hypothesis) -> str:
    what = "this factor" if hypothesis.treatment_arms else "these arms"
    return f"a screen only explores and gives no verdict; a comparison of {what} on fresh seeds would give one"


def verdict(
    plan: Plan,
    hypothesis: Hypothesis,
    effect: Effect | NotEnoughTrials,
    findings: Sequence[SentinelFinding],
    trials: Sequence[TrialRecord],
) -> VerdictRecord:
    """Judge one hypothesis."""
    measured = effect if isinstance(effect, Effect) else None
    fired = [finding for finding in findings if finding.takes(hypothesis)]
    if fired:
        reason = "; ".join(f"{finding.name}: {finding.text}" for finding in fired)
        names = tuple(dict.fromkeys(finding.name for finding in fired))
        return _record(hypothesis, Verdict.INVALID, reason, measured, names)
    if judged_stage(plan, hypothesis, trials).explores:
        screened = _screened(hypothesis)
        reason = screened if measured is not None else f"{effect}; and {screened}"
        return _record(hypothesis, Verdict.INCONCLUSIVE, reason, measured)
    if measured is None:
        return _record(hypothesis, Verdict.INCONCLUSIVE, str(effect), None)
    if _unfinished(plan, hypothesis, trials):
        reason = "some planned trials have not ended, and the plan has no rule for looking early"
        return _record(hypothesis, Verdict.INCONCLUSIVE, reason, measured)
    found = _as_far_as_seen(*_by_interval(hypothesis, measured), measured, censored(plan, hypothesis, trials))
    return _record(hypothesis, *found, measured)


def _as_far_as_seen(found: Verdict, reason: str, effect: Effect, unseen: Censored) -> tuple[Verdict, str]:
    """Weaken a verdict that trials without a known value could overturn: those that never reached their threshold.

    Such trials rule out "equivalent". A sign only stands if larger values in them would not change it.
    """
    signed = found in (Verdict.SUPPORTED, Verdict.REFUTED) and unseen.keeps_sign(effect.diff)
    if not unseen.any or signed or found is Verdict.INCONCLUSIVE:
        return found, reason
    return Verdict.INCONCLUSIVE, (
        "some trials never reached the threshold and count as one step more than their last: their true values may be "
        "larger and overturn the result"
    )


def _by_interval(hypothesis: Hypothesis, effect: Effect) -> tuple[Verdict, str]:
    stated = "assumed" if hypothesis.direction_assumed else "stated"
    sign = 1 if hypothesis.direction == "increase" else -1
    low, high = sorted((sign * effect.low, sign * effect.high))
    if low == high:
        return Verdict.INCONCLUSIVE, "trials do not differ between seeds at all, so the measurement may be broken"
    if low > 0 and reaches(sign * effect.diff, hypothesis.margin):
        reason = f"the adjusted interval lies entirely in the {stated} direction and the estimate reaches the margin"
        return Verdict.SUPPORTED, reason
    if high < 0:
        return Verdict.REFUTED, f"the adjusted interval lies entirely against the {stated} direction"
    if effect.p_equivalence <= 1 - effect.level:
        return Verdict.EQUIVALENT, "two one-sided tests place the difference within the margin on either side"
    if low > 0:
        return Verdict.INCONCLUSIVE, f"the difference has the {stated} direction, but the estimate is below the margin"
    return Verdict.INCONCLUSIVE, "the adjusted interval contains zero and extends beyond the margin"


def _unfinished(plan: Plan, hypothesis: Hypothesis, trials: Sequence[TrialRecord]) -> bool:
    """True if an arm has fewer ended trials than planned, or trials that have not ended."""
    stage = judged_stage(plan, hypothesis, trials)
    within = seeds_of(plan, stage, trials)
    for arm in sorted(hypothesis.sides):
        found = sample(within, arm, hypothesis.metric)
        if found.open or len(found.values) + found.failed < stage.seeds:
            return True
    return False


def _record(
    hypothesis: Hypothesis, verdict: Verdict, reason: str, effect: Effect | None, sentinels: tuple[str, ...] = ()
) -> VerdictRecord:
    return VerdictRecord(hypothesis=hypothesis.id, verdict=verdict, reason=reason, effect=effect, sentinels=sentinels)


@dataclass(frozen=True, slots=True, kw_only=True)
class Conclusions:
    """What follows from plan and trials. It depends on nothing else, so it can be recomputed at any time."""

    effects: dict[str, Effect | NotEnoughTrials]
    findings: tuple[SentinelFinding, ...]
    verdicts: tuple[VerdictRecord, ...]

    def verdict(self, hypothesis: str) -> VerdictRecord:
        return next(record for record in self.verdicts if record.hypothesis == hypothesis)


def conclude(plan: Plan, trials: Sequence[TrialRecord]) -> Conclusions:
    """Compute the findings, the effects and one verdict for each hypothesis."""
    measured = effects(plan, trials)
    findings = inspect(plan, trials)
    records = tuple(verdict(plan, h, measured[h.id], findings, trials) for h in plan.hypotheses)
    return Conclusions(effects=measured, findings=tuple(findings), verdicts=records)
