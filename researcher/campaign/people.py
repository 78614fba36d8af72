"""People's input to a running campaign: words, answers, requests, pause and stop; and whether it waits for a person."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

from foundation.nearest import nearest
from researcher.campaign.new_instrument import Making
from researcher.campaign.records import JOINED, aims_on_record, left_alone
from researcher.campaign.report import write_campaign_report
from researcher.campaign.requests import check_request
from researcher.models import PERSON, RULES, CampaignEvent, CampaignRecord, CampaignStatus, DecisionRecord
from researcher.refusals import SpecRefused
from researcher.store.errors import LeaseHeld, WrongState, owner_text
from researcher.store.store import Store

ASKED, RESUMED = "asked", "resumed"
Owning = Callable[[Store, str], AbstractContextManager[Store]]
"""Own a campaign for a short write (`researcher.ownership.owned_now`). Raises: LeaseHeld."""
_ANSWERS = {"approval": ("approved", "vetoed"), "words": ("told", "answered")}
"""Journal lines that answer a question, by what it needs."""


def ask(store: Store, campaign_id: str, decision: DecisionRecord, needs: str) -> None:
    """Record once that this decision waits for a person. needs: `approval` or `words`."""
    detail = {"decision": decision.seq, "needs": needs}
    if all(event.detail != detail for event in store.campaigns.events(campaign_id, ASKED)):
        store.campaigns.record(campaign_id, ASKED, detail)


def open_question(events: Sequence[CampaignEvent]) -> CampaignEvent | None:
    """The unanswered question in a journal; None without one. events: in order."""
    asked = next((event for event in reversed(events) if event.kind == ASKED), None)
    if asked is None:
        return None
    kinds = _ANSWERS[asked.detail["needs"]]
    answered = any(event.seq > asked.seq and event.kind in kinds for event in events)
    return None if answered else asked


def waits_for_a_person(store: Store, record: CampaignRecord) -> bool:
    """Whether the campaign waits for a person's answer."""
    return open_question(store.campaigns.events(record.id)) is not None


def approve(store: Store, campaign_id: str, words: str, by: str, *, decision: int | None = None) -> int:
    """Approve the study or instrument that waits; returns its decision's number.

    decision: the one that the person saw; None: the newest. Raises: WrongState when the campaign has decided again or ended,
    or is not waiting for approval.
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
    """Record a person's words for the next decision.

    leave: all factors to leave alone from now on; empty: none; None: as before. Raises: WrongState when the campaign has
    ended; SpecRefused for a factor that none of its instruments has.
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
                raise SpecRefused("leave", f"{name!r} is no factor of this campaign; {hint}", [near] if near else known)
        if set(leave) != set(left_alone(store.campaigns.events(campaign_id, "told"))):
            said["leave"] = list(leave)
    store.campaigns.record(campaign_id, "told", said)


def names_in(text: str) -> list[str]:
    """Split a comma-separated list of names."""
    return [name.strip() for name in text.split(",") if name.strip()]


def telling_text(store: Store, campaign_id: str, leave: Sequence[str] | None, instead: str) -> str:
    """The words' effect on the next decision. leave: factors named with them. instead: advice if words have no effect."""
    if leave:
        return f"from the next decision on {', '.join(leave)} {'stays as it is' if len(leave) == 1 else 'stay as they are'}"
    if leave is not None:
        return "from the next decision on every factor may vary again"
    if acts_on_words(store.campaigns.get(campaign_id), store.campaigns.decisions(campaign_id)):
        return "the next decision reads it"
    return f"it will be quoted, and nothing else comes of it, because no LLM leads this campaign: {instead}"


def acts_on_words(record: CampaignRecord, decisions: Sequence[DecisionRecord]) -> bool:
    """Whether an LLM leads the campaign: the built-in strategist quotes people's words but does not act on them."""
    leads = [each.strategist for each in decisions if each.strategist not in (RULES, PERSON)]
    return bool((leads[-1] if leads else record.goal.get("strategist", "auto")) != "builtin")


def request_study(store: Store, campaign_id: str, spec: Mapping[str, Any], words: str, by: str) -> None:
    """Request a study. The next decision carries it out, as an exploration, or says what is wrong with it.

    spec: fields of a study file (`researcher.campaign.honesty.FIELDS`), and, if the campaign has several, its instrument.
    Raises: SpecRefused; WrongState when the campaign has ended.
    """
    check_open(store, campaign_id, "asked for anything")
    joined = store.campaigns.events(campaign_id, JOINED)
    check_request(aims_on_record(store.campaigns.get(campaign_id), joined), spec)
    store.campaigns.record(campaign_id, "told", {"words": words, "by": by, "spec": dict(spec)})


def veto(store: Store, campaign_id: str, because: str, by: str, *, decision: int | None = None) -> DecisionRecord:
    """Veto the study that waits or runs, which stops, or the instrument that waits; the next decision sees the reason.

    decision: as in `approve`. Raises: WrongState.
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
    """Change limits of the budget, by their names in the goal; the next decision sees them. Returns the recorded text.

    Raises: WrongState when the campaign has ended.
    """
    check_open(store, campaign_id, "amended")
    words = f"{', '.join(f'{name} {value:g}' for name, value in limits.items())}: {because}"
    store.campaigns.record(campaign_id, "amended", {"budget": dict(limits), "words": words, "by": by})
    return words


def pause(store: Store, campaign_id: str) -> None:
    """Request a pause; the campaign's study pauses too. Raises: WrongState when the campaign has ended."""
    check_open(store, campaign_id, "paused")
    store.campaigns.request(campaign_id, pause=True)


def withdraw_requests(store: Store, campaign_id: str, owning: Owning) -> None:
    """Withdraw a pause or a stop, so that whoever works on it continues. Raises: WrongState when it is done; LeaseHeld."""
    record = store.campaigns.get(campaign_id)
    if record.status is CampaignStatus.DONE:
        raise WrongState(f"{campaign_id} is done; there is nothing to go on with")
    store.campaigns.request(campaign_id, stop=False, pause=False)
    if record.status.ended:
        with owning(store, campaign_id) as own:
            own.campaigns.set_status(campaign_id, CampaignStatus.RUNNING, RESUMED)


def stop(store: Store, campaign_id: str, reports: Path, owning: Owning) -> str:
    """Ask its worker to stop, or stop it here if it has none. Returns what was done."""
    store.campaigns.request(campaign_id, stop=True)
    try:
        with owning(store, campaign_id) as own:
            reason = "stopped on request; `researcher campaign resume` goes on"
            write_campaign_report(own, campaign_id, reports, status=CampaignStatus.STOPPED, reason=reason)
            own.campaigns.set_status(campaign_id, CampaignStatus.STOPPED, reason)
            return "stopped"
    except LeaseHeld as held:
        return f"asked {owner_text(held.owner)} to stop"


def check_open(store: Store, campaign_id: str, done: str) -> None:
    """done: the refused action as a participle, such as `amended`. Raises: WrongState if the campaign has ended."""
    status = store.campaigns.get(campaign_id).status
    if status.ended:
        raise WrongState(f"{campaign_id} is {status}; it cannot be {done} any more")
