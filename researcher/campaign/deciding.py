"""Builds the record of a decision: the step taken, the hypotheses it registers or changes, and the study it starts. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from researcher.campaign.graph import Decided
from researcher.campaign.proposals import Judged, NewHypothesis
from researcher.campaign.records import fates_of
from researcher.campaign.seen import Seen, View
from researcher.models import (
    CONFIRMING,
    CampaignRecord,
    DecisionRecord,
    HypothesisRecord,
    LlmCall,
    Role,
    StudyOptions,
    StudyRecord,
    StudyRequest,
    StudyStatus,
)
from researcher.study.plan import Plan


@dataclass(frozen=True, slots=True)
class Written:
    """What one decision adds to the records."""

    decision: DecisionRecord
    hypotheses: tuple[HypothesisRecord, ...]
    study: StudyRecord | None


def written(
    record: CampaignRecord,
    seen: Seen,
    decided: Decided,
    strategist: str,
    calls: Sequence[LlmCall],
    hypotheses: Sequence[HypothesisRecord],
    folders: Mapping[str, str | None],
) -> Written:
    """Build the records of a decision. `decided` must have a step.

    `hypotheses` are the newest versions before this decision. `folders` has the folder of each instrument, by name; None means
    that the instrument is part of the repository.
    """
    step = decided.step
    assert step is not None
    versions = _changed(hypotheses, seen, step)
    asked, name = step.proposal.hypothesis, None
    if isinstance(asked, NewHypothesis):
        name = f"H{len(hypotheses) + 1}"
        versions.append(_registered(name, asked, seen.on(step.proposal.instrument or "")))
    elif asked is not None:
        name = asked
    role = _role(step)
    decision = DecisionRecord(
        seq=seen.seq,
        saw_digest=seen.digest(),
        saw=seen.model_dump(mode="json"),
        strategist=strategist,
        proposals=[each.row() | {"chosen": each is step} for each in decided.judgements],
        action=step.proposal.action,
        because=step.proposal.words or step.proposal.because,
        hypothesis=name,
        role=role,
        alpha=step.alpha,
        plan=step.plan,
        llm_calls=[call.model_dump(mode="json") for call in calls],
    )
    study = None if step.plan is None else _study(record, step, name, role, strategist, folders)
    return Written(decision, tuple(versions), study)


def _role(step: Judged) -> Role | None:
    if step.plan is None:
        return None
    return "confirm" if step.proposal.action in CONFIRMING else "explore"


def _registered(name: str, asked: NewHypothesis, view: View) -> HypothesisRecord:
    return HypothesisRecord(
        id=name,
        parent=asked.parent,
        claim=asked.claim,
        metric=view.aim.metric,
        margin=view.aim.margin,
        prediction=asked.prediction,
        kill_if=asked.kill_if,
        seq=view.whole.seq,
    )


def _changed(hypotheses: Sequence[HypothesisRecord], seen: Seen, step: Judged) -> list[HypothesisRecord]:
    """Return new versions of the hypotheses whose status changes because of the studies so far or this step."""
    fates: dict[str, Any] = dict(fates_of(hypotheses, seen.studies))
    fates |= {name: ("dropped", why) for name, why in step.proposal.drops.items()}
    return [
        each.model_copy(
            update={
                "version": each.version + 1,
                "seq": seen.seq,
                "status": fates[each.id][0],
                "because": fates[each.id][1],
            }
        )
        for each in hypotheses
        if each.id in fates and fates[each.id][0] != each.status
    ]


def _study(
    record: CampaignRecord,
    step: Judged,
    hypothesis: str | None,
    role: Role | None,
    strategist: str,
    folders: Mapping[str, str | None],
) -> StudyRecord:
    """Build the study's record, without an id, which the store assigns."""
    plan = Plan.model_validate_json(step.plan or "")
    request = StudyRequest(spec=step.spec, author=strategist, because=step.proposal.because)
    changed = {"request": request, "instrument": folders[plan.instrument]}
    options: StudyOptions = record.options.model_copy(update=changed)
    return StudyRecord(
        id="",
        topic=plan.question,
        options=options,
        status=StudyStatus.PLANNING,
        created_at=0.0,
        updated_at=0.0,
        campaign_id=record.id,
        hypothesis_id=hypothesis,
        role=role,
    )
