"""Studies that people request. They are explorations, like every study proposed after seeing data, and come before the
strategist's proposals."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from researcher.campaign.goal import Aim
from researcher.campaign.honesty import form_problems, instrument_problem, kept_apart
from researcher.campaign.proposals import NewHypothesis, Proposal
from researcher.models import CampaignEvent, DecisionRecord
from researcher.refusals import Refusals, SpecRefused


@dataclass(frozen=True, slots=True)
class Requested:
    """A study request, with the number of its journal entry."""

    line: int
    proposal: Proposal


def check_request(aims: Sequence[Aim], spec: Mapping[str, Any]) -> None:
    """Check a request's fields. Planning checks the rest. `aims` are the campaign's, starting with the first instrument's.

    Raises: SpecRefused, naming every wrong field.
    """
    name, rest = _apart(spec)
    names = [aim.instrument for aim in aims]
    if unknown := instrument_problem(name, names):
        raise SpecRefused("instrument", unknown, names)
    aim = next(aim for aim in aims if aim.instrument == (name or names[0]))
    Refusals(form_problems(rest, aim)).raise_any()
    Refusals(kept_apart(rest, aim.instrument, names)).raise_any()


def _apart(spec: Mapping[str, Any]) -> tuple[str | None, dict[str, Any]]:
    """Split a request into its instrument and its other fields."""
    name = spec.get("instrument")
    return None if name is None else str(name), {field: value for field, value in spec.items() if field != "instrument"}


def requested(events: Sequence[CampaignEvent], decisions: Sequence[DecisionRecord]) -> list[Requested]:
    """Return the requests that no decision has carried out or refused yet, oldest first."""
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
    instrument, spec = _apart(event.detail["spec"])
    return Proposal(
        action="explore",
        because=f"{by} asked for it: {words}"[:4000],
        instrument=instrument,
        spec=spec,
        hypothesis=NewHypothesis(
            claim=words[:4000],
            prediction="A difference of the margin or more, as the person who asked for it expects.",
            kill_if="No difference stands out from the noise between seeds.",
        ),
    )
