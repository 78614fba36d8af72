"""A strategist's proposals, their judgement by code, and their ranking."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Annotated, Any

from pydantic import Field

from foundation.strict import StrictModel
from researcher.analysis.samples import deciding_stage
from researcher.campaign.goal import changed
from researcher.campaign.seen import View, key_of
from researcher.instruments.instrument import Scalar
from researcher.models import Action
from researcher.study.plan import Plan

_Text = Annotated[str, Field(min_length=1, max_length=4000)]
PRIOR_MARGINS = 2.0
"""Standard deviation of an effect that was never measured, in margins."""


class NewHypothesis(StrictModel):
    """A hypothesis as it is registered. kill_if: the result that would end it."""

    claim: _Text
    prediction: _Text
    kill_if: _Text
    parent: str | None = None


class Proposal(StrictModel):
    """One possible next step.

    instrument: of the campaign's, by name; None: the first. spec: fields of a study file that say what is compared
    (`compare` or `arms`, `design`, `set`, `steps`, `seeds`); code sets goal, instrument, metric, margin, first seed and
    budget. hypothesis: the id of an open one, or a new one; needed by actions that carry out a study. if_true, if_false:
    the next step in each case. rests_on: ids of studies of this campaign. words: the question of `ask`, the answer of
    `conclude`, the brief of `new_instrument`.
    """

    action: Action
    because: _Text
    instrument: str | None = None
    spec: dict[str, Any] = {}
    hypothesis: NewHypothesis | str | None = None
    if_true: str = ""
    if_false: str = ""
    rests_on: tuple[str, ...] = ()
    words: str = ""
    expects: Annotated[float | None, Field(gt=0)] = None
    """For a confirmation: effect for which its seeds are counted, in the metric's unit. Least and default: 1.5 margins."""
    drops: dict[str, str] = {}
    """Open hypotheses to give up with this step, and why."""


class Judged(StrictModel):
    """A proposal with its plan and price, or with its problems.

    bits: expected information; cost_s: expected seconds of trials. Higher `rank` is better: bits per hour.
    baseline: `default`, `incumbent` or `other`, where the study has one.
    """

    proposal: Proposal
    problems: tuple[str, ...] = ()
    plan: str | None = None
    """Canonical JSON."""
    spec: dict[str, Any] = {}
    """The complete spec, with the fields that code has filled in."""
    alpha: float | None = None
    trials: tuple[int, int] = (0, 0)
    cost_s: float = 0.0
    bits: float = 0.0
    baseline: str = ""
    asked: int | None = None
    """Journal line in which a person requested it; None if a strategist proposed it."""

    @property
    def rank(self) -> float:
        """Bits per hour of trials."""
        return self.bits / max(self.cost_s, 1.0) * 3600

    def row(self) -> dict[str, Any]:
        """The row that is stored with the decision."""
        said = self.model_dump(mode="json", exclude={"plan"})
        return {**said, "rank": round(self.rank, 6)}


def information(plan: Plan, view: View) -> float:
    """Expected information of a plan in bits: the sum over its hypotheses of log2(1 + (tau / SE)^2) / 2, where tau is the
    standard deviation of the belief about the effect, and SE the standard error of its estimate at the plan's least seeds.

    The belief about an effect that was never measured on this instrument is 0 ± two margins; otherwise it follows from the
    trials.
    """
    sigma, bits = view.sigma, 0.0
    measured = view.measured()
    for hypothesis in plan.hypotheses:
        if hypothesis.metric != view.aim.metric:
            continue
        stage = deciding_stage(plan, hypothesis)
        counts = [len(arms) * stage.seeds for arms in (hypothesis.baselines, hypothesis.treatments)]
        error = sigma * math.sqrt(sum(1 / count for count in counts))
        sides = [[plan.arm(name).levels for name in arms] for arms in (hypothesis.baselines, hypothesis.treatments)]
        prior = _believed([_trials_of(side, measured, view) for side in sides], view)
        bits += 0.5 * math.log2(1 + (prior / error) ** 2)
    return bits


def _believed(counts: list[int], view: View) -> float:
    """Standard deviation of the believed effect between two sides with these numbers of finished trials."""
    prior = PRIOR_MARGINS * view.aim.margin
    if not all(counts):
        return prior
    error = view.sigma * math.sqrt(sum(1 / count for count in counts))
    return 1 / math.sqrt(1 / prior**2 + 1 / error**2)


def _trials_of(
    side: list[dict[str, Scalar]], measured: Mapping[str, tuple[dict[str, Scalar], int, float]], view: View
) -> int:
    keys = [key_of(changed(view.aim, levels)) for levels in side]
    return sum(measured[key][1] for key in keys) if all(key in measured for key in keys) else 0
