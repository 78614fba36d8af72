"""A strategist's proposals, how code judges them, and how they are ranked."""

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
"""Prior standard deviation of an effect that was never measured, in margins."""


class NewHypothesis(StrictModel):
    """A hypothesis to register. `kill_if` is the result that would end it."""

    claim: _Text
    prediction: _Text
    kill_if: _Text
    parent: str | None = None


class Proposal(StrictModel):
    """One possible next step.

    Attributes:
        instrument: name of one of the campaign's instruments. None means the first.
        spec: fields of a study file that say what is compared (`compare` or `arms`, `design`, `set`, `steps`, `seeds`). Code sets
            goal, instrument, metric, margin, first seed and budget.
        hypothesis: the id of an open hypothesis, or a new one. Every action that runs a study needs one.
        if_true, if_false: the next step in each case.
        rests_on: ids of studies of this campaign.
        words: the question of `ask`, the answer of `conclude`, or the brief of `new_instrument`.
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
    """For a confirmation: the effect that its seeds should detect, in the metric's unit. Minimum and default: 1.5 margins."""
    drops: dict[str, str] = {}
    """Open hypotheses to give up with this step, and why."""


class Judged(StrictModel):
    """A proposal with its plan and price, or with its problems.

    Attributes:
        cost_s: expected seconds of trials.
        bits: expected information.
        baseline: for a confirmation, `default`, `incumbent` or `other`; else empty.
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
    """Number of the journal entry in which a person requested this study; None if a strategist proposed it."""

    @property
    def rank(self) -> float:
        """Expected bits per hour of trials. Higher is better."""
        return self.bits / max(self.cost_s, 1.0) * 3600

    def row(self) -> dict[str, Any]:
        """Return the row that is stored with the decision."""
        said = self.model_dump(mode="json", exclude={"plan"})
        return {**said, "rank": round(self.rank, 6)}


def information(plan: Plan, view: View) -> float:
    """Return the expected information of a plan, in bits.

    It is the sum over the plan's hypotheses of log2(1 + (tau / SE)^2) / 2. Here tau is the standard deviation of the belief about
    the effect, and SE the standard error of its estimate with the minimum number of seeds. An effect that was never measured on
    this instrument is believed to be 0 ± two margins; otherwise the belief follows from the trials.
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
    """Return the standard deviation of the belief about the effect between two sides with these numbers of finished trials."""
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
