"""The parts of a report's page: one hypothesis, arm, trial, decision, sentinel, earlier finding, with its claims. No wording."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from researcher.instruments.instrument import Metric
from researcher.models import Claim, TrialRecord
from researcher.study.plan import Arm, Hypothesis, Known, Stage

Claims = dict[str, Claim]
"""By the short name that templates use."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HypothesisPart:
    hypothesis: Hypothesis
    stage: Stage
    """The one that decides."""
    verdict: str
    reason: str
    measured: bool
    censored: bool
    """Whether trials that it is judged by never reached the threshold of its metric."""
    left_behind: str | None
    """Why the plan's own rules left it untested; None where they did not."""
    crossed: bool
    """It is an interaction: its sides are no levels of a factor."""
    log_scale: bool
    """A trend over the logarithm of its levels."""
    claims: Claims

    @property
    def trend(self) -> bool:
        """Whether it is about the change along a fitted line."""
        return bool(self.hypothesis.between_arms)

    @property
    def explored(self) -> bool:
        """Whether it is the main effect of a screen's factor, which is not tested."""
        return self.stage.explores

    @property
    def bends(self) -> bool:
        """Whether the levels of a trend do not lie on its line."""
        lacks = self.claims["p_lack_of_fit"].value if self.trend else None
        return isinstance(lacks, float) and lacks < self.hypothesis.alpha

    @property
    def size(self) -> float:
        """Of its effect, either way; below 0 where there is none."""
        diff = self.claims["diff"].value
        return abs(diff) if isinstance(diff, int | float) else -1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class ArmPart:
    arm: Arm
    claims: Claims
    levels: Claims
    summaries: dict[str, Claims]
    """By metric: mean, sd, iqm."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TrialPart:
    trial: TrialRecord
    claims: Claims
    finals: Claims
    """By metric."""
    spark: str


@dataclass(frozen=True, slots=True, kw_only=True)
class CensoredPart:
    """Trials that never reached the threshold of a metric: all of them, and by arm."""

    metric: Metric
    trials: Claim
    arms: Claims
    decides: bool
    """Whether a hypothesis is about this metric."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepPart:
    """One decision of the path."""

    after: str
    action: str
    to: str | None
    reason: str
    claims: Claims


@dataclass(frozen=True, slots=True, kw_only=True)
class SentinelPart:
    name: str
    state: Claim
    findings: Sequence[tuple[str, str, Claim, tuple[str, ...]]]
    """Severity, text, value, arms."""


@dataclass(frozen=True, slots=True, kw_only=True)
class KnownPart:
    """An earlier finding that the plan quotes."""

    known: Known
    claims: Claims
    agreements: list[tuple[str, Claim]]
    """For each hypothesis that asks the same: what its verdict says to it."""

    @property
    def contradicted(self) -> bool:
        return any(str(claim.value).startswith("contradicts") for _, claim in self.agreements)
