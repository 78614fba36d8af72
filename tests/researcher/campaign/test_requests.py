"""Studies that people ask a campaign for."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from researcher.campaign.people import request_study
from researcher.campaign.verify import verify_campaign
from researcher.models import CampaignStatus
from researcher.refusals import SpecRefused
from tests.fakes.campaign import MadeUpCampaign

pytestmark = pytest.mark.anyio

WARMER: dict[str, Any] = {"compare": {"temperature": {"levels": [1.25]}}, "seeds": {"min": 3, "max": 3}}


async def test_studies_that_people_ask_for_come_first_and_explore(tmp_path: Path) -> None:
    made = MadeUpCampaign(tmp_path)
    cooler = {**WARMER, "compare": {"temperature": {"levels": [0.75]}}}
    request_study(made.store, made.id, WARMER, "warmer is better", "ada")
    request_study(made.store, made.id, cooler, "cooler is better", "bob")
    outcome = await made.carry_out()
    assert outcome.status is CampaignStatus.DONE
    first, second, third = made.store.campaigns.decisions(made.id)[:3]
    assert [(each.action, each.role, each.strategist, each.alpha) for each in (first, second)] == [
        ("explore", "explore", "person", None)
    ] * 2
    assert {first.because, second.because} == {
        "ada asked for it: warmer is better",
        "bob asked for it: cooler is better",
    }
    assert len(first.proposals) == 2
    assert len(second.proposals) == 1
    assert third.strategist == "builtin"
    claims = [each.claim for each in made.store.campaigns.hypotheses(made.id)[:2]]
    assert set(claims) == {"warmer is better", "cooler is better"}
    assert verify_campaign(made.store, made.id, made.folder / made.id) == []


async def test_one_that_cannot_be_planned_is_refused_once_beside_the_next_decision(tmp_path: Path) -> None:
    made = MadeUpCampaign(tmp_path)
    request_study(made.store, made.id, {"compare": {"warmth": {"levels": [2, 3]}}}, "warmth matters", "ada")
    await made.carry_out()
    first, *later = made.store.campaigns.decisions(made.id)
    assert first.strategist == "builtin"
    refused = [each for each in first.proposals if each["asked"]]
    assert len(refused) == 1
    assert "warmth" in refused[0]["problems"][0]
    assert not any(each["asked"] for decision in later for each in decision.proposals)


@pytest.mark.parametrize(
    ("spec", "field"),
    [
        ({**WARMER, "claim": "increase"}, "claim"),
        ({**WARMER, "budget": {"wall": "9h"}}, "budget"),
        ({"comapre": {}}, "comapre"),
        ({**WARMER, "set": 3}, "set"),
        ({**WARMER, "seeds": {"min": "many"}}, "seeds.min"),
        ({"seeds": {"min": 3}}, "compare"),
    ],
)
def test_what_no_study_of_a_campaign_may_say_is_refused_at_once(
    tmp_path: Path, spec: dict[str, Any], field: str
) -> None:
    made = MadeUpCampaign(tmp_path)
    with pytest.raises(SpecRefused) as refused:
        request_study(made.store, made.id, spec, "it matters", "ada")
    assert field in [name for name, _ in refused.value.problems]
    assert made.store.campaigns.events(made.id) == []
