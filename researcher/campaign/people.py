"""What people do to a campaign while it runs: their word at a gate, and whether one is waited for."""

from __future__ import annotations

from collections.abc import Sequence

from researcher.models import CampaignEvent, CampaignRecord, DecisionRecord
from researcher.store.errors import WrongState
from researcher.store.store import Store

ASKED = "asked"
_ANSWERS = {"approval": ("approved", "vetoed"), "words": ("told", "answered")}
"""Kinds of lines that end the waiting, by what is waited for."""


def ask(store: Store, campaign_id: str, decision: DecisionRecord, needs: str) -> None:
    """Note that a person is waited for at this decision, once. needs: `approval` or `words`."""
    detail = {"decision": decision.seq, "needs": needs}
    if all(event.detail != detail for event in store.campaigns.events(campaign_id, ASKED)):
        store.campaigns.record(campaign_id, ASKED, detail)


def open_question(events: Sequence[CampaignEvent]) -> CampaignEvent | None:
    """The question that nobody has answered yet, of a journal's lines in order."""
    asked = next((event for event in reversed(events) if event.kind == ASKED), None)
    if asked is None:
        return None
    kinds = _ANSWERS[asked.detail["needs"]]
    answered = any(event.seq > asked.seq and event.kind in kinds for event in events)
    return None if answered else asked


def waits_for_a_person(store: Store, record: CampaignRecord) -> bool:
    """Whether the campaign rests until somebody says something."""
    return open_question(store.campaigns.events(record.id)) is not None


def approve(store: Store, campaign_id: str, words: str, by: str) -> int:
    """Say yes to the study that waits; returns its decision's number. Raises: WrongState when none waits for that."""
    asked = open_question(store.campaigns.events(campaign_id))
    if asked is None or asked.detail["needs"] != "approval":
        status = store.campaigns.get(campaign_id).status
        raise WrongState(
            f"{campaign_id} is {status} and waits for no approval; `researcher campaign status` shows what is next"
        )
    number = int(asked.detail["decision"])
    store.campaigns.record(campaign_id, "approved", {"decision": number, "words": words, "by": by})
    return number
