"""What the page shows of campaigns, and what people do to them there."""

from __future__ import annotations

import re
from xml.etree import ElementTree

import httpx
import pytest

from researcher.campaign.people import waits_for_a_person
from researcher.campaign.records import observe
from researcher.models import CampaignStatus, StudyStatus
from researcher.web import campaign_drawings
from researcher.web.campaign_drawings import Bar, EffectRow
from tests.fakes.campaign import flat
from tests.fakes.shown_campaign import ShownCampaign
from tests.fakes.web_page import WebPage, form_token
from tests.researcher.campaign.test_honesty import Cheat
from tests.researcher.campaign.test_new_instrument import WANTED, Writer

pytestmark = pytest.mark.anyio

NASTY = "<script>window.hacked = 1</script>"


@pytest.fixture
def made(page: WebPage) -> ShownCampaign:
    """Not yet begun; it will wait before its confirmation."""
    return ShownCampaign(page.home, page.url, approve="confirm", budget={"wall": "2h"})


async def send(browser: httpx.AsyncClient, campaign: str, action: str, **fields: str) -> httpx.Response:
    """Look at the campaign's page and send one of its forms."""
    token = form_token((await browser.get(f"/campaigns/{campaign}")).text)
    return await browser.post(f"/campaigns/{campaign}/{action}", data={"token": token, "by": "ada", **fields})


async def test_without_campaigns_the_list_says_how_to_begin(browser: httpx.AsyncClient) -> None:
    assert "researcher campaign start" in (await browser.get("/campaigns")).text
    missing = await browser.get("/campaigns/latest")
    assert missing.status_code == 404
    assert "there are no campaigns yet" in missing.text


async def test_a_campaign_that_has_decided_nothing_has_a_page(
    page: WebPage, browser: httpx.AsyncClient, made: ShownCampaign
) -> None:
    text = (await browser.get(f"/campaigns/{made.id}")).text
    assert "Nothing is decided yet." in text
    assert "No hypothesis is registered yet." in text
    assert "reserved for confirmations" in text
    report = await browser.get(f"/campaigns/{made.id}/report")
    assert (report.status_code, "has no report yet" in report.text) == (404, True)


async def test_from_the_first_gate_to_the_answer(
    page: WebPage, browser: httpx.AsyncClient, made: ShownCampaign
) -> None:
    await made.to(CampaignStatus.WAITING)
    assert "waits for your decision" in (await browser.get("/campaigns")).text
    text = (await browser.get(f"/campaigns/{made.id}")).text
    assert "Waits for your decision: 3. confirm of H3" in text
    assert "being tested" in text
    assert "Nothing was confirmed, so no claim is made." in text
    assert text.index("Proposals of decision 3") < text.index("Proposals of decision 2")
    assert text.count('<g class="explore">') >= 4
    assert '<g class="confirm">' not in text
    decisions = made.store.campaigns.decisions(made.id)
    for decision in decisions:
        assert f'href="/studies/{decision.study_id}"' in text
    assert f'href="/campaigns/{made.id}"' in (await browser.get(f"/studies/{decisions[0].study_id}")).text

    for fields in ({"verdict": "approve"}, {"verdict": "veto", "words": "too dear"}):
        late = await send(browser, made.id, "answer", decision="2", **fields)
        assert (late.status_code, "an earlier decision" in late.text) == (409, True)
        bare = await send(browser, made.id, "answer", **fields)
        assert (bare.status_code, "has no decision number" in bare.text) == (400, True)
    assert (await send(browser, made.id, "answer", decision="3", verdict="approve")).status_code == 303
    text = (await browser.get(f"/campaigns/{made.id}")).text
    assert "Now: 3. confirm of H3" in text
    again = await send(browser, made.id, "answer", decision="3", verdict="approve")
    assert (again.status_code, "is not waiting for approval" in again.text) == (409, True)

    await made.carry_out()
    while made.store.campaigns.get(made.id).status is CampaignStatus.WAITING:
        newest = made.store.campaigns.decisions(made.id)[-1].seq
        page.clock.advance(2)
        assert (await send(browser, made.id, "answer", decision=str(newest), verdict="approve")).status_code == 303
        await made.carry_out()
    page.clock.advance(2)
    text = (await browser.get(f"/campaigns/{made.id}")).text
    assert "Learning_rate 1.6e-4 is the best that was confirmed." in text
    assert '<g class="confirm">' in text
    assert 'class="pill supported"' in text
    assert "It is done; nothing can be changed." in text
    report = await browser.get(f"/campaigns/{made.id}/report")
    assert report.text == (page.home.studies / made.id / "report.html").read_text()
    assert "sandbox" in report.headers["content-security-policy"]
    for action, fields in (
        ("tell", {"words": "more"}),
        ("amend", {"trials": "9", "because": "more"}),
        ("carry", {"what": "pause"}),
        ("carry", {"what": "stop"}),
        ("carry", {"what": "resume"}),
    ):
        refused = await send(browser, made.id, action, **fields)
        assert (refused.status_code, f"{made.id} is done" in refused.text) == (409, True), (action, fields)


async def test_a_veto_needs_words_and_the_next_decision_reads_them(
    page: WebPage, browser: httpx.AsyncClient, made: ShownCampaign
) -> None:
    await made.to(CampaignStatus.WAITING)
    study = made.store.campaigns.decisions(made.id)[-1].study_id
    assert study is not None
    empty = await send(browser, made.id, "answer", decision="3", verdict="veto")
    assert (empty.status_code, "say why" in empty.text) == (400, True)
    sent = await send(browser, made.id, "answer", decision="3", verdict="veto", words=NASTY)
    assert sent.status_code == 303
    await made.carry_out()
    assert made.store.studies.get(study).status is StudyStatus.STOPPED
    said = made.store.campaigns.decisions(made.id)[3].saw["said"]
    assert [(each["kind"], each["words"], each["by"]) for each in said] == [("vetoed", NASTY, "ada")]
    page.clock.advance(2)
    text = (await browser.get(f"/campaigns/{made.id}")).text
    assert NASTY not in text
    assert "&lt;script&gt;window.hacked" in text
    assert " style=" not in text


async def test_words_and_limits_reach_the_next_decision(
    page: WebPage, browser: httpx.AsyncClient, made: ShownCampaign
) -> None:
    assert (await send(browser, made.id, "tell", words=" ")).status_code == 400
    assert (await send(browser, made.id, "tell", words="rates diverge", by=" ")).status_code == 400
    assert (await send(browser, made.id, "tell", words="rates diverge")).status_code == 303
    limits = {"minutes": "90.5", "trials": "40", "because": "less time"}
    assert (await send(browser, made.id, "amend", **limits)).status_code == 303
    seen = observe(made.store, made.id)
    assert (seen.left.wall_s, seen.left.trials) == (5430.0, 40)
    assert [each.words for each in seen.said] == ["rates diverge", "wall 5430, trials 40: less time"]
    page.clock.advance(2)
    assert "wall 5430, trials 40: less time" in (await browser.get(f"/campaigns/{made.id}")).text


async def test_a_study_is_asked_for_on_the_page(page: WebPage, browser: httpx.AsyncClient, made: ShownCampaign) -> None:
    text = "compare: {temperature: {levels: [1.25]}}\r\nseeds: {min: 3, max: 3}"
    assert (await send(browser, made.id, "study", text=text)).status_code == 400  # nothing is expected of it
    wrong = await send(browser, made.id, "study", text=text + "\r\nclaim: increase", words="warmer is better")
    assert (wrong.status_code, "the text:3: claim: the campaign sets it" in wrong.text) == (400, True), wrong.text
    assert made.store.campaigns.events(made.id) == []
    assert (await send(browser, made.id, "study", text=text, words="warmer is better")).status_code == 303
    await made.to(CampaignStatus.WAITING)
    first = made.store.campaigns.decisions(made.id)[0]
    assert (first.strategist, first.because) == ("person", "ada asked for it: warmer is better")
    page.clock.advance(2)
    text = (await browser.get(f"/campaigns/{made.id}")).text
    assert "asked for</span> explore: ada asked for it" in text


async def test_what_cannot_be_amended_is_a_clear_message(browser: httpx.AsyncClient, made: ShownCampaign) -> None:
    for changes, says in (
        ({"trials": "many"}, "trials must be a whole number"),
        ({"trials": "0"}, "above zero"),
        ({"trials": ""}, "say what to amend"),
        ({"minutes": "-3"}, "minutes must be a number above zero"),
        ({"money": "nan"}, "money must be a number above zero"),
        ({"minutes": "1e308"}, "wall: should be a finite number"),
        ({"minutes": "1e300"}, "wall: is too large: at most 10,000,000,000 is allowed"),
        ({"because": ""}, "say why"),
        ({"by": " "}, "say who you are"),
    ):
        sent = await send(browser, made.id, "amend", **{"trials": "4", "because": "cheaper", **changes})
        assert (sent.status_code, says in sent.text) == (400, True), sent.text
    assert made.store.campaigns.events(made.id, "amended") == []


async def test_it_pauses_stops_and_goes_on_with_the_daemon(
    page: WebPage, browser: httpx.AsyncClient, made: ShownCampaign
) -> None:
    assert (await send(browser, made.id, "carry", what="dance")).status_code == 400
    assert (await send(browser, made.id, "carry", what="pause")).status_code == 303
    assert "asked to pause" in (await browser.get(f"/campaigns/{made.id}")).text
    await made.to(CampaignStatus.WAITING)
    assert page.daemons == []
    assert (await send(browser, made.id, "carry", what="resume")).status_code == 303
    assert len(page.daemons) == 1
    assert (await send(browser, made.id, "carry", what="stop")).status_code == 303
    assert made.store.campaigns.get(made.id).status is CampaignStatus.STOPPED
    assert (await send(browser, made.id, "carry", what="stop")).status_code == 409
    assert (await send(browser, made.id, "carry", what="resume")).status_code == 303
    record = made.store.campaigns.get(made.id)
    assert (record.status, record.stop_requested, record.schedule["carried"]) == (CampaignStatus.RUNNING, False, True)


async def test_a_form_of_another_session_does_nothing(
    page: WebPage, browser: httpx.AsyncClient, made: ShownCampaign
) -> None:
    for action in ("tell", "answer", "amend", "carry"):
        refused = await send(browser, made.id, action, token="0" * 64, words="w", what="stop")
        assert (refused.status_code, f'href="/campaigns/{made.id}"' in refused.text) == (403, True)
    assert made.store.campaigns.events(made.id) == []
    assert not waits_for_a_person(made.store, made.store.campaigns.get(made.id))


def test_drawings_are_whole_and_what_others_wrote_is_text_in_them() -> None:
    rows = [
        EffectRow(seq=1, text=NASTY * 4, diff=0.0, low=0.0, high=0.0, confirms=False, verdict=""),
        EffectRow(seq=2, text="a against b", diff=1e9, low=-1e9, high=2e9, confirms=True, verdict="supported"),
    ]
    bars = [Bar(seq=1, action="explore", confirms=False, spent=0.0, status="running")]
    drawn = [
        campaign_drawings.effects(rows, 0.1, NASTY),
        campaign_drawings.effects(rows[:1], 0.1, "m"),
        campaign_drawings.timeline(bars, left=3.0, reserved=3.0, in_seconds=True),
        campaign_drawings.timeline(bars * 30, left=40.0, reserved=12.0, in_seconds=False),
    ]
    for svg in drawn:
        ElementTree.fromstring(svg)
        assert re.search(r"\b(nan|inf)\b", svg) is None
    assert campaign_drawings.effects([], 0.1, "m") == ""
    assert campaign_drawings.timeline(bars, left=0.0, reserved=0.0, in_seconds=True) == ""


async def test_effects_and_the_best_are_shown_for_each_instrument(page: WebPage, browser: httpx.AsyncClient) -> None:
    made = ShownCampaign(page.home, page.url, further={"elsewhere": flat})
    await made.to(CampaignStatus.DONE)
    text = (await browser.get(f"/campaigns/{made.id}")).text
    assert text.count("Effects on final_reward with their intervals") == 2
    for words in (
        "On simulation:",
        "On elsewhere:",
        "Looked for: final_reward of elsewhere",
        "was not confirmed on elsewhere",
    ):
        assert words in text, words


async def test_an_instrument_that_an_llm_wrote_is_read_and_approved_on_the_page(
    page: WebPage, browser: httpx.AsyncClient
) -> None:
    made = ShownCampaign(page.home, page.url, strategist=Cheat(WANTED))
    made.write = Writer(made)
    await made.to(CampaignStatus.WAITING)
    text = (await browser.get(f"/campaigns/{made.id}")).text
    for words in (
        "Waits for your decision: 1. new instrument",
        "It waits for a person",
        "<summary>reward.py</summary>",
        "def score(answer, right)",
    ):
        assert words in text, words
    assert (await send(browser, made.id, "answer", decision="1", verdict="veto", words="guessable")).status_code == 303
    late = await send(browser, made.id, "answer", decision="1", verdict="approve")
    assert (late.status_code, "is not waiting for approval" in late.text) == (409, True)
    await made.to(CampaignStatus.DONE)
    text = (await browser.get(f"/campaigns/{made.id}")).text
    assert "ada vetoed it: guessable" in text
    assert "<summary>reward.py</summary>" not in text
