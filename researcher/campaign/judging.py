"""Judges proposals by rules, plan, price and expected information, and chooses the one to carry out."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from pydantic import ValidationError

from foundation.strict import explain
from researcher.campaign.honesty import alpha_of, baseline_of, completed, problems_of, too_little
from researcher.campaign.proposals import Judged, Proposal, information
from researcher.campaign.seen import Seen
from researcher.design.pricing import Price
from researcher.models import CONFIRMING, STUDIES, Role
from researcher.refusals import PlanningRefused
from researcher.study.plan import Plan
from researcher.study.spec import StudySpec


class StudyPlanner(Protocol):
    """Makes plans on a campaign's instruments, using measurements from this machine."""

    def plan(
        self, spec: StudySpec, *, role: Role, alpha: float | None, expects: float | None = None
    ) -> tuple[Plan, Price]:
        """Plan a study, and price it.

        Args:
            spec: the study. Its `instrument` is the name of one of the campaign's instruments.
            alpha: the alpha that a confirmation spends; None for explorations.
            expects: the effect that the number of seeds should be able to detect. None means the study's usual one.
        Raises: PlanningRefused.
        """


def judged(proposal: Proposal, seen: Seen, planner: StudyPlanner, *, writes: bool = False) -> Judged:
    """Return the proposal with its plan, price and information, or with all its problems.

    `writes` says whether an LLM can write instruments.
    """
    problems = problems_of(proposal, seen)
    if proposal.action == "new_instrument" and not writes:
        problems.append("new_instrument: no LLM is configured here that could write one; `ask` a person for it")
    if problems or proposal.action not in STUDIES:
        return Judged(proposal=proposal, problems=tuple(problems))
    view, fields = seen.on(proposal.instrument or ""), completed(proposal, seen)
    if (spent := too_little(fields["budget"])) != "":
        return Judged(proposal=proposal, problems=(spent,))
    try:
        spec = StudySpec.model_validate(fields)
    except ValidationError as error:
        return Judged(proposal=proposal, problems=tuple(str(problem) for problem in explain(error, StudySpec)))
    confirms = proposal.action in CONFIRMING
    alpha = alpha_of(seen.confirmations + 1) if confirms else None
    try:
        plan, price = planner.plan(
            spec, role="confirm" if confirms else "explore", alpha=alpha, expects=proposal.expects
        )
    except PlanningRefused as error:
        return Judged(proposal=proposal, problems=(str(error),))
    if plan.hypotheses[0].metric != view.aim.metric or plan.hypotheses[0].margin != view.aim.margin:
        return Judged(proposal=proposal, problems=("the plan's metric or margin is not the goal's",))
    return Judged(
        proposal=proposal,
        plan=plan.canonical(),
        spec=spec.document(),
        alpha=alpha,
        trials=price.trials,
        cost_s=sum(price.wall_s) / 2,
        bits=information(plan, view),
        baseline=baseline_of(plan, view) if confirms else "",
    )


def chosen(judgements: Sequence[Judged]) -> Judged | None:
    """Choose one of the sound proposals; None if there is none.

    If the first of them starts no study (it asks, concludes or wants an instrument), choose that one. Else choose the study with
    the most expected information per hour.
    """
    sound = [each for each in judgements if not each.problems]
    if not sound or sound[0].plan is None:
        return sound[0] if sound else None
    return max((each for each in sound if each.plan is not None), key=lambda each: each.rank)


def all_problems(judgements: Sequence[Judged]) -> tuple[str, ...]:
    """Return the problems of all proposals, each prefixed with its proposal's number, as input for the next attempt."""
    return tuple(
        f"proposal {number} ({each.proposal.action}): {problem}"
        for number, each in enumerate(judgements, start=1)
        for problem in each.problems
    )
