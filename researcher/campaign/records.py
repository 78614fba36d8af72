"""Builds a decision's input from the records. The same records give the same `Seen`, at any later time."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from researcher.campaign.goal import Aim, CampaignGoal
from researcher.campaign.honesty import RESERVED
from researcher.campaign.seen import HypothesisSeen, Left, Said, Seen, StudySeen, study_seen
from researcher.models import (
    STUDIES,
    CampaignEvent,
    CampaignRecord,
    DecisionRecord,
    Fate,
    HypothesisRecord,
    LlmCall,
    StudyStatus,
    TrialRecord,
    VerdictRecord,
)
from researcher.store.store import Store
from researcher.study.plan import Plan

WRITING, UNWRITTEN = "writing", "unwritten"
"""Kinds of journal entries: an LLM call to write an instrument, and a failed attempt (see `researcher.campaign.new_instrument`)."""
_WORDS = ("told", "vetoed", "amended", "answered", UNWRITTEN)
ASKING = "asking"
"""Kind of journal entry: an LLM call for a decision, recorded as soon as it is answered. `heard` is that of the decision's input."""
UNDECIDED = "undecided"
"""Kind of journal entry: the strategist was asked but gave no decision."""
JOINED = "joined"
"""Kind of journal entry: a further instrument belongs to the campaign from the next decision on."""


def observe(
    store: Store, campaign_id: str, seq: int | None = None, *, heard: int | None = None, begun: bool = True
) -> Seen:
    """Build the input of the next decision, or of decision `seq`. All earlier studies must have ended.

    `heard` is the number of the last journal entry that the decision read. None means the whole journal. For `begun` see `Seen`.
    """
    record = store.campaigns.get(campaign_id)
    decisions = [each for each in store.campaigns.decisions(campaign_id) if seq is None or each.seq < seq]
    number = seq or len(decisions) + 1
    events = entries_read(store, campaign_id, number, heard=heard)
    aims = aims_on_record(record, events)
    studies = [_study(store, aims, each, begun=begun) for each in decisions if each.action in STUDIES]
    hypotheses = store.campaigns.hypotheses(campaign_id, before=number)
    return seen_of(record, number, studies, hypotheses, events, decisions, begun=begun)


def entries_read(store: Store, campaign_id: str, number: int, *, heard: int | None = None) -> list[CampaignEvent]:
    """Return the journal entries that decision `number` reads. For `heard` see `observe`.

    They leave out the LLM calls made for this decision from its newest input: a conversation is saved under its input, so it could not
    continue after a crash if its own calls changed that. They count once another entry has changed the input, or with the decision.
    """
    lines = store.campaigns.events(campaign_id, *_WORDS, UNDECIDED, WRITING, JOINED, ASKING)
    lines = [event for event in lines if heard is None or event.seq <= heard]
    newest = max((event.seq for event in lines if event.kind != ASKING), default=0)
    return [
        event
        for event in lines
        if event.kind != ASKING or event.detail["decision"] < number or event.detail["heard"] < newest
    ]


def keep_call(store: Store, campaign_id: str, seen: Seen, call: LlmCall) -> None:
    """Record an LLM call for the decision with this input, so that it is counted even if the worker is killed."""
    detail = {"decision": seen.seq, "heard": seen.heard, "llm_calls": [call.model_dump(mode="json")]}
    store.campaigns.record(campaign_id, ASKING, detail)


def kept_calls(store: Store, campaign_id: str, seen: Seen) -> list[LlmCall]:
    """Return the recorded LLM calls for the decision with this input."""
    own = [
        event.detail
        for event in store.campaigns.events(campaign_id, ASKING)
        if (event.detail["decision"], event.detail["heard"]) == (seen.seq, seen.heard)
    ]
    return [LlmCall.model_validate(call) for detail in own for call in detail["llm_calls"]]


def seen_of(
    record: CampaignRecord,
    number: int,
    studies: Sequence[StudySeen],
    hypotheses: Sequence[HypothesisRecord],
    events: Sequence[CampaignEvent],
    decisions: Sequence[DecisionRecord],
    *,
    begun: bool = False,
) -> Seen:
    """Build the input of a decision. Pure.

    `events` are the journal entries with people's words, LLM calls without a result, and instruments that joined.
    """
    goal = CampaignGoal.model_validate(record.goal)
    aim, *others = (each.leaving(left_alone(events)) for each in aims_on_record(record, events))
    fates = fates_of(hypotheses, studies)
    return Seen(
        campaign=record.id,
        seq=number,
        goal=goal.goal,
        aim=aim,
        others=tuple(others),
        hypotheses=tuple(
            HypothesisSeen(
                id=each.id,
                parent=each.parent,
                claim=each.claim,
                prediction=each.prediction,
                kill_if=each.kill_if,
                status=fates.get(each.id, (each.status, ""))[0],
            )
            for each in hypotheses
        ),
        studies=tuple(studies),
        left=left_of(limits_of(goal, events), studies, calls_of(decisions, events)),
        said=tuple(_said(event, aim) for event in events if event.kind in _WORDS),
        heard=max((event.seq for event in events), default=0),
        begun=begun,
    )


def before_all(goal: CampaignGoal, aims: Sequence[Aim]) -> Seen:
    """Build the input of the first decision of a campaign with this goal."""
    left, (aim, *others) = left_of(limits_of(goal, ()), (), ()), aims
    return Seen(
        campaign="", seq=1, goal=goal.goal, aim=aim, others=tuple(others), hypotheses=(), studies=(), left=left, said=()
    )


def joining(aim: Aim, folder: str | None) -> dict[str, Any]:
    """Return the detail of the journal entry for a further instrument.

    `folder` has its files. None means that it is part of the repository.
    """
    return {"aim": aim.model_dump(mode="json"), "folder": folder}


def aims_on_record(record: CampaignRecord, events: Sequence[CampaignEvent]) -> list[Aim]:
    """Return the goal in the terms of each of the campaign's instruments, starting with the first one."""
    joined = [event.detail["aim"] for event in events if event.kind == JOINED]
    found: dict[str, Aim] = {}
    for aim in map(Aim.model_validate, (record.aim, *joined)):
        found.setdefault(aim.instrument, aim)
    return list(found.values())


def left_alone(events: Sequence[CampaignEvent]) -> list[str]:
    """Return the factors that people want left alone, as named by the newest message with `leave`. It may name none."""
    named = [event.detail["leave"] for event in events if event.kind == "told" and "leave" in event.detail]
    return named[-1] if named else []


def folders_of(record: CampaignRecord, events: Sequence[CampaignEvent]) -> dict[str, str | None]:
    """Return the folder of each instrument, by name. None means that the instrument is part of the repository."""
    found: dict[str, str | None] = {str(record.aim["instrument"]): record.options.instrument}
    return found | {
        event.detail["aim"]["instrument"]: event.detail["folder"] for event in events if event.kind == JOINED
    }


def limits_of(goal: CampaignGoal, events: Sequence[CampaignEvent]) -> dict[str, float | None]:
    """Return the budget's limits, including people's amendments."""
    found: dict[str, float | None] = goal.budget.model_dump()
    found |= {name: getattr(goal.budget, name) for name in found}  # as numbers: a dump writes durations as text (`2h`)
    for event in events:
        if event.kind == "amended":
            found |= {str(name): float(value) for name, value in event.detail.get("budget", {}).items()}
    return found


def calls_of(decisions: Sequence[DecisionRecord], events: Sequence[CampaignEvent]) -> list[dict[str, Any]]:
    """Return every call of the strategist's LLM once, including calls that wrote instruments.

    Most calls are recorded twice: in the journal, and with the decision that was made in the end.
    """
    found = [call for each in decisions for call in each.llm_calls]
    for event in events:
        if event.kind in (UNDECIDED, WRITING, ASKING):
            found += [call for call in event.detail["llm_calls"] if call not in found]
    return found


def left_of(
    limits: Mapping[str, float | None], studies: Sequence[StudySeen], asked: Sequence[Mapping[str, Any]]
) -> Left:
    """Return the budget left after these studies and `asked`, the calls of the strategist's LLM."""
    spent = {
        "wall": sum(study.wall_s for study in studies),
        "trials": float(sum(study.trials for study in studies)),
        "tokens": sum(study.tokens for study in studies),
        "llm_tokens": float(sum(call["prompt_tokens"] + call["completion_tokens"] for call in asked)),
        "money": sum(call["cost"] or 0.0 for call in asked),
    }
    left = {name: None if limits[name] is None else max(0.0, float(limits[name] or 0) - spent[name]) for name in spent}
    confirmed = [study for study in studies if study.confirms]
    return Left(
        wall_s=_rounded(left["wall"]),
        trials=None if left["trials"] is None else int(left["trials"]),
        tokens=_rounded(left["tokens"]),
        llm_tokens=_rounded(left["llm_tokens"]),
        money=_rounded(left["money"]),
        reserved_wall_s=_reserved(limits["wall"], sum(study.wall_s for study in confirmed)),
        reserved_trials=_reserved(limits["trials"], sum(study.trials for study in confirmed)),
    )


def _reserved(limit: float | None, confirmed: float) -> float:
    return 0.0 if limit is None else round(max(0.0, RESERVED * limit - confirmed), 3)


def _rounded(value: float | None) -> float | None:
    return None if value is None else round(value, 6)


def fates_of(hypotheses: Sequence[HypothesisRecord], studies: Sequence[StudySeen]) -> dict[str, tuple[Fate, str]]:
    """Return the status of each tested hypothesis, with the reason. The last study that tested it counts."""
    dropped = {each.id for each in hypotheses if each.status == "dropped"}
    found: dict[str, tuple[Fate, str]] = {}
    for study in studies:
        if study.hypothesis not in dropped and StudyStatus(study.status).ended:
            found[study.hypothesis] = _fate(study)
    return found


def _fate(study: StudySeen) -> tuple[Fate, str]:
    if study.status == StudyStatus.STOPPED and not any(arm.n for arm in study.arms):
        return "dropped", f"{study.study} was stopped before a trial was finished"
    if study.unfit:
        return "invalid", f"{study.study}: {study.unfit}"
    if not study.confirms:
        return "explored", f"{study.study} explored it, and gives no verdict"
    verdict: Fate = "inconclusive" if study.verdict is None else study.verdict.value
    return verdict, f"{study.study} found it {verdict}"


def _study(store: Store, aims: Sequence[Aim], decision: DecisionRecord, *, begun: bool) -> StudySeen:
    """Build the row of a study that has ended. `aims` starts with the aim on the first instrument. For `begun` see `Seen`."""
    assert decision.study_id is not None
    study = store.studies.get(decision.study_id)
    plan = Plan.model_validate_json(decision.plan or "") if study.plan_version is None else store.plans.get(study.id)
    aim = next((each for each in aims if each.instrument == plan.instrument), aims[0])
    trials: list[TrialRecord] = [each for each in store.trials.all(study.id, series=()) if each.attempt or not begun]
    verdicts: list[VerdictRecord] = store.verdicts.all(study.id)
    spent = {budget.kind: budget.spent for budget in store.budgets.all(study.id)}
    return study_seen(
        decision,
        aim,
        plan,
        trials,
        verdicts,
        status=study.status,
        reason=study.reason or "",
        spent=spent,
        instrument="" if aim is aims[0] else aim.instrument,
    )


def _said(event: CampaignEvent, first: Aim) -> Said:
    """Return a person's message as data. `first` is the aim on the campaign's first instrument."""
    detail: dict[str, Any] = event.detail
    words = detail.get("words", "")
    if (leave := detail.get("leave")) is not None:
        words += (
            f" ({', '.join(leave)} to stay as {'it is' if len(leave) == 1 else 'they are'})"
            if leave
            else " (every factor may vary again)"
        )
    about = detail.get("instrument", first.instrument)
    said = {"kind": event.kind, "words": words, "by": detail.get("by", ""), "seq": event.seq}
    return Said.model_validate(said | {"instrument": "" if about == first.instrument else about})
