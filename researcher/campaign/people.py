"""People's input to a running campaign: messages, answers, study requests, pause and stop; and whether it waits for a person."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, Literal

from foundation.nearest import nearest
from researcher.campaign.goal import check_limits
from researcher.campaign.new_instrument import Making
from researcher.campaign.records import JOINED, aims_on_record, left_alone
from researcher.campaign.report import write_campaign_report
from researcher.campaign.requests import check_request
from researcher.models import PERSON, RULES, CampaignEvent, CampaignRecord, CampaignStatus, DecisionRecord
from researcher.refusals import SpecRefused
from researcher.store.errors import LeaseHeld, WrongState, owner_text
from researcher.store.store import Store

ASKED, RESUMED = "asked", "resumed"
STOPPED = "stopped on request; `researcher campaign resume` continues it"
PAUSED = "paused on request; `researcher campaign resume` continues it"
Owning = Callable[[Store, str], AbstractContextManager[Store]]
"""Takes a campaign's lease for a short write (see `researcher.ownership`). Raises: LeaseHeld."""
Halting = Callable[[str, Literal["stop", "pause"]], list[str]]
"""Halts the newest study of a campaign that has no worker (see `researcher.orphans.halt_newest`), and returns what it could not end.
Raises: LeaseHeld."""
_ANSWERS = {"approval": ("approved", "vetoed"), "words": ("told", "answered")}
"""Kinds of journal entries that answer a question, by what the question needs."""


def ask(store: Store, campaign_id: str, decision: DecisionRecord, needs: str) -> None:
    """Record, once, that this decision waits for a person. `needs` is `approval` or `words`."""
    detail: dict[str, Any] = {"decision": decision.seq, "needs": needs}
    asked = (event.detail for event in store.campaigns.events(campaign_id, ASKED))
    if all((each["decision"], each["needs"]) != (decision.seq, needs) for each in asked):
        store.campaigns.record(campaign_id, ASKED, detail if needs == "approval" else {**detail, "since": decision.at})


def open_question(events: Sequence[CampaignEvent]) -> CampaignEvent | None:
    """Return the unanswered question in a journal, or None. `events` are in order."""
    asked = next((event for event in reversed(events) if event.kind == ASKED), None)
    return None if asked is None or any(_answers(event, asked) for event in events) else asked


def _answers(event: CampaignEvent, asked: CampaignEvent) -> bool:
    """Return whether a journal entry answers a question.

    The answer may come first: a campaign that is interrupted after a decision records the question when it resumes.
    """
    if event.kind not in _ANSWERS[asked.detail["needs"]]:
        return False
    if asked.detail["needs"] == "approval" and event.detail.get("decision") == asked.detail["decision"]:
        return True
    return event.seq > asked.seq or event.at > asked.detail.get("since", math.inf)


def is_answered(events: Sequence[CampaignEvent], decision: int) -> bool:
    """Return whether a person has approved or vetoed the decision with this number."""
    return any(event.kind in _ANSWERS["approval"] and event.detail.get("decision") == decision for event in events)


def waits_for_a_person(store: Store, record: CampaignRecord) -> bool:
    """Return whether the campaign waits for a person's answer."""
    return open_question(store.campaigns.events(record.id)) is not None


def approve(store: Store, campaign_id: str, words: str, by: str, *, decision: int | None = None) -> int:
    """Approve the study or instrument that waits, and return its decision's number.

    `decision` is the number of the decision that the person saw, by default the newest. Raises: WrongState when the campaign has
    decided again or ended, or is not waiting for approval.
    """
    check_open(store, campaign_id, "approved")

    def yes(events: Sequence[CampaignEvent]) -> dict[str, Any]:
        asked = open_question(events)
        if asked is None or asked.detail["needs"] != "approval":
            raise WrongState(
                f"{campaign_id} is not waiting for approval; `researcher campaign status` shows what is next"
            )
        return {"decision": asked.detail["decision"], "words": words, "by": by}

    return int(store.campaigns.answer(campaign_id, "approved", yes, decision=decision)["decision"])


def tell(store: Store, campaign_id: str, words: str, by: str, *, leave: Sequence[str] | None = None) -> None:
    """Record a person's message for the next decision.

    `leave` names all factors to leave alone from now on. An empty list lets all factors vary again; None changes nothing.
    Raises: WrongState when the campaign has ended; SpecRefused for a factor that none of its instruments has.
    """
    check_open(store, campaign_id, "told anything")
    said: dict[str, Any] = {"words": words, "by": by}
    if leave is not None:
        aims = aims_on_record(store.campaigns.get(campaign_id), store.campaigns.events(campaign_id, JOINED))
        known = list(dict.fromkeys(factor.name for aim in aims for factor in aim.factors))
        for name in leave:
            if name not in known:
                near = nearest(name, known)
                hint = f"did you mean {near}?" if near else f"it varies {', '.join(known)}"
                raise SpecRefused(
                    "leave", f"{name!r} is not a factor of this campaign; {hint}", [near] if near else known
                )
        if set(leave) != set(left_alone(store.campaigns.events(campaign_id, "told"))):
            said["leave"] = list(leave)
    store.campaigns.record(campaign_id, "told", said)


def names_in(text: str) -> list[str]:
    """Split a comma-separated list of names."""
    return [name.strip() for name in text.split(",") if name.strip()]


def telling_text(store: Store, campaign_id: str, leave: Sequence[str] | None, instead: str) -> str:
    """Say what effect a message has on the next decision.

    `leave` names the factors to leave alone, if the message changes that. `instead` is the advice to give if it has no effect.
    """
    if leave:
        return f"from the next decision on {', '.join(leave)} {'stays as it is' if len(leave) == 1 else 'stay as they are'}"
    if leave is not None:
        return "from the next decision on every factor may vary again"
    if acts_on_words(store.campaigns.get(campaign_id), store.campaigns.decisions(campaign_id)):
        return "the next decision reads it"
    return f"it will be quoted but has no other effect, because no LLM leads this campaign: {instead}"


def acts_on_words(record: CampaignRecord, decisions: Sequence[DecisionRecord]) -> bool:
    """Return whether an LLM leads the campaign. The built-in strategist quotes people's words but does not act on them."""
    leads = [each.strategist for each in decisions if each.strategist not in (RULES, PERSON)]
    return bool((leads[-1] if leads else record.goal.get("strategist", "auto")) != "builtin")


def request_study(store: Store, campaign_id: str, spec: Mapping[str, Any], words: str, by: str) -> None:
    """Request a study. The next decision starts it, as an exploration, or says what is wrong with it.

    `spec` has fields of a study file (see `researcher.campaign.honesty.FIELDS`). It may also name one of the campaign's
    instruments. Raises: SpecRefused; WrongState when the campaign has ended.
    """
    check_open(store, campaign_id, "asked for anything")
    joined = store.campaigns.events(campaign_id, JOINED)
    check_request(aims_on_record(store.campaigns.get(campaign_id), joined), spec)
    store.campaigns.record(campaign_id, "told", {"words": words, "by": by, "spec": dict(spec)})


def veto(store: Store, campaign_id: str, because: str, by: str, *, decision: int | None = None) -> DecisionRecord:
    """Veto the waiting or running study, which then stops, or the waiting instrument. The next decision sees the reason.

    `decision` is as in `approve`. Raises: WrongState.
    """
    check_open(store, campaign_id, "vetoed")
    decisions = store.campaigns.decisions(campaign_id)
    if not decisions or decisions[-1].action != "new_instrument":
        return store.campaigns.veto(campaign_id, because, by, decision=decision)
    newest = decisions[-1]

    def no(events: Sequence[CampaignEvent]) -> dict[str, Any]:
        asked = open_question(events)
        if asked is None or asked.detail["decision"] != newest.seq:
            raise WrongState(
                f"{campaign_id} has no instrument waiting for approval; `researcher campaign status` shows what is next"
            )
        written = Making.of(events, newest.seq).outcome
        about = {} if written is None else {"instrument": written.detail["aim"]["instrument"]}
        return {"words": because, "by": by, "decision": newest.seq, **about}

    store.campaigns.answer(campaign_id, "vetoed", no, decision=decision)
    return newest


def amend_budget(store: Store, campaign_id: str, limits: Mapping[str, float], because: str, by: str) -> str:
    """Change limits of the budget, by their names in the goal. Return the recorded text. The next decision sees the new limits.

    Raises: WrongState when the campaign has ended; SpecRefused for a limit that no goal may have.
    """
    check_open(store, campaign_id, "amended")
    check_limits(limits)
    words = f"{', '.join(f'{name} {value:g}' for name, value in limits.items())}: {because}"
    store.campaigns.record(campaign_id, "amended", {"budget": dict(limits), "words": words, "by": by})
    return words


def pause(store: Store, campaign_id: str, owning: Owning, halt: Halting) -> str:
    """Ask the campaign's worker to pause, or pause the campaign and its study here if it has none. Return what was done.

    Raises: WrongState when the campaign has ended.
    """
    check_open(store, campaign_id, "paused")
    store.campaigns.request(campaign_id, pause=True)
    try:
        with owning(store, campaign_id) as own:
            left = halt(campaign_id, "pause")
            if own.campaigns.get(campaign_id).status is CampaignStatus.RUNNING:
                own.campaigns.set_status(campaign_id, CampaignStatus.WAITING, PAUSED)
            return "; ".join(["no process works on it; it stays where it is", *left])
    except LeaseHeld as held:
        return f"asked {owner_text(held.owner)} to pause"


def withdraw_requests(store: Store, campaign_id: str, owning: Owning) -> None:
    """Withdraw a requested pause or stop, so that the campaign can continue.

    Raises: WrongState when the campaign is done; LeaseHeld.
    """
    record = store.campaigns.get(campaign_id)
    if record.status is CampaignStatus.DONE:
        raise WrongState(f"{campaign_id} is done; there is nothing to continue")
    store.campaigns.request(campaign_id, stop=False, pause=False)
    if record.status.ended:
        with owning(store, campaign_id) as own:
            own.campaigns.set_status(campaign_id, CampaignStatus.RUNNING, RESUMED)


def stop(store: Store, campaign_id: str, reports: Path, owning: Owning, halt: Halting) -> str:
    """Ask the campaign's worker to stop, or stop the campaign and its study here if it has none. Return what was done.

    If the campaign has ended, only end what a dead worker left of it.
    """
    if not store.campaigns.get(campaign_id).status.ended:
        store.campaigns.request(campaign_id, stop=True)
    try:
        with owning(store, campaign_id) as own:
            status = own.campaigns.get(campaign_id).status
            left = halt(campaign_id, "stop")
            if status.ended:
                return "; ".join([f"{status} already", *left])
            write_campaign_report(own, campaign_id, reports, status=CampaignStatus.STOPPED, reason=STOPPED)
            own.campaigns.set_status(campaign_id, CampaignStatus.STOPPED, STOPPED)
            return "; ".join(["stopped", *left])
    except LeaseHeld as held:
        return f"asked {owner_text(held.owner)} to stop"


def check_open(store: Store, campaign_id: str, done: str) -> None:
    """Raise WrongState if the campaign has ended. `done` is the refused action as a participle, such as `amended`."""
    status = store.campaigns.get(campaign_id).status
    if status.ended:
        raise WrongState(f"{campaign_id} is {status}; it can no longer be {done}")
