"""What a plan's trials say at this moment: findings, effects, verdicts together. The one call for executor and report."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from researcher.analysis.effects import effects
from researcher.analysis.samples import NotEnoughTrials
from researcher.analysis.sentinels import inspect
from researcher.analysis.sightings import SentinelFinding
from researcher.analysis.verdicts import verdict
from researcher.models import Effect, TrialRecord, VerdictRecord
from researcher.study.plan import Plan


@dataclass(frozen=True, slots=True, kw_only=True)
class Conclusions:
    """Everything here follows from plan and trials alone, so it can be computed again at any time."""

    effects: dict[str, Effect | NotEnoughTrials]
    findings: tuple[SentinelFinding, ...]
    verdicts: tuple[VerdictRecord, ...]

    def verdict(self, hypothesis: str) -> VerdictRecord:
        return next(record for record in self.verdicts if record.hypothesis == hypothesis)


def conclude(plan: Plan, trials: Sequence[TrialRecord]) -> Conclusions:
    """Findings, effects and one verdict for each hypothesis."""
    measured = effects(plan, trials)
    findings = inspect(plan, trials)
    records = tuple(verdict(plan, h, measured[h.id], findings, trials) for h in plan.hypotheses)
    return Conclusions(effects=measured, findings=tuple(findings), verdicts=records)
