"""Studies that people ask a campaign for. They explore, like all that is proposed after seeing data, and come before the strategist's."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from pydantic import ValidationError

from foundation.nearest import nearest
from foundation.strict import explain
from researcher.campaign.goal import Aim
from researcher.campaign.honesty import FIELDS
from researcher.campaign.proposals import NewHypothesis, Proposal
from researcher.models import CampaignEvent, CampaignRecord, DecisionRecord
from researcher.refusals import Refusals, SpecRefused
from researcher.study.spec import StudySpec


@dataclass(frozen=True, slots=True)
class Requested:
    """A study that somebody asked for in this line of the journal."""

    line: int
    proposal: Proposal


def check_request(record: CampaignRecord, spec: Mapping[str, Any]) -> None:
    """Raises: SpecRefused, naming every wrong field. What its instrument says to it is seen when it is planned."""
    refusals, aim = Refusals(), Aim.model_validate(record.aim)
    for name in spec:
        if name in FIELDS:
            continue
        guess = nearest(name, FIELDS)
        hint = (
            f"did you mean {guess}?"
            if guess
            else f"it is the campaign's, leave it out; a study here has {', '.join(FIELDS)}"
        )
        refusals.found.append(SpecRefused(name, hint))
    try:
        StudySpec.model_validate(
            {"question": "?", "instrument": aim.instrument, **{name: spec[name] for name in spec if name in FIELDS}}
        )
    except ValidationError as error:
        for problem in explain(error, StudySpec):
            refusals.found.append(SpecRefused(problem.field, str(problem).removeprefix(f"{problem.field}: ")))
    refusals.raise_any()


def requested(events: Sequence[CampaignEvent], decisions: Sequence[DecisionRecord]) -> list[Requested]:
    """Those that no decision has carried out or refused yet, in the order in which they were asked for."""
    answered = {
        offer["asked"]
        for decision in decisions
        for offer in decision.proposals
        if offer.get("asked") is not None and (offer["chosen"] or offer["problems"])
    }
    return [
        Requested(event.seq, _proposal(event))
        for event in events
        if event.kind == "told" and event.detail.get("spec") and event.seq not in answered
    ]


def _proposal(event: CampaignEvent) -> Proposal:
    by, words = event.detail.get("by", "") or "somebody", event.detail.get("words", "")
    return Proposal(
        action="explore",
        because=f"{by} asked for it: {words}"[:4000],
        spec=dict(event.detail["spec"]),
        hypothesis=NewHypothesis(
            claim=words[:4000],
            prediction="A difference of the margin or more, as whoever asked for it expects.",
            kill_if="No difference stands out from the noise between seeds.",
        ),
    )
