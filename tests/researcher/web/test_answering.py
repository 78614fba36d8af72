"""Approving, rejecting and amending on the page, by several people, and by strangers who must not."""

from __future__ import annotations

import asyncio

import httpx
import pytest

from researcher.gates import answer_gate, waits_for_an_answer
from researcher.models import Answer, StudyStatus
from researcher.schedule.daemon import only_daemon
from tests.fakes.shown_study import at_gate, meet_gate, planned, running
from tests.fakes.web_page import BASE, PORT, WebPage, answer, form_token

pytestmark = pytest.mark.anyio


async def test_an_approval_stands_on_the_page_and_the_study_goes_on(page: WebPage, browser: httpx.AsyncClient) -> None:
    study = at_gate(page.home.store)
    assert "Waits for your decision" in (await browser.get(f"/studies/{study}")).text
    sent = await answer(browser, study, "approve", words="go ahead")
    assert sent.status_code == 303
    text = (await browser.get(sent.headers["location"])).text
    assert "approved by ada: go ahead" in text
    assert f"<code>researcher resume {study}</code> continues it" in text
    assert "Waits for your decision" not in text
    assert meet_gate(page.home.store, study) is StudyStatus.RUNNING


async def test_an_approved_study_in_the_care_of_no_daemon_says_so(
    page: WebPage, browser: httpx.AsyncClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RESEARCHER_HOME", str(page.home.root))
    study = at_gate(page.home.store)
    page.home.store.studies.save_schedule(study, {"timetable": {"zone": "UTC"}, "carried": True})
    await answer(browser, study, "approve")
    missing = "no daemon is running: <code>researcher daemon</code> or <code>researcher resume</code> continues it"
    assert (await browser.get(f"/studies/{study}")).text.count(missing) == 2
    page.clock.advance(60)  # what was shown a moment ago is shown again
    with only_daemon():
        text = (await browser.get(f"/studies/{study}")).text
    assert (text.count("the daemon continues it"), missing in text) == (2, False)


async def test_a_rejection_needs_words_and_stops_the_study(page: WebPage, browser: httpx.AsyncClient) -> None:
    study = at_gate(page.home.store)
    empty = await answer(browser, study, "reject", words="  ")
    assert empty.status_code == 400
    assert "say why" in empty.text
    assert (await answer(browser, study, "reject", words="too dear")).status_code == 303
    assert page.home.store.studies.get(study).status is StudyStatus.STOPPED
    assert "the study is stopped" in (await browser.get(f"/studies/{study}")).text
    assert meet_gate(page.home.store, study) is StudyStatus.STOPPED
    assert "too dear" in (page.home.store.studies.get(study).reason or "")


async def test_the_second_of_two_people_is_told_what_the_first_said(page: WebPage) -> None:
    study = at_gate(page.home.store)
    async with page.browser() as hers, page.browser() as his:
        forms = [form_token((await each.get(f"/studies/{study}")).text) for each in (hers, his)]
        assert forms[0] != forms[1]
        sent = {"gate": "plan/1", "verdict": "approve"}
        first = await hers.post(f"/studies/{study}/answer", data={**sent, "token": forms[0], "by": "ada"})
        second = await his.post(f"/studies/{study}/answer", data={**sent, "token": forms[1], "by": "bob"})
    assert first.status_code == 303
    assert second.status_code == 409
    assert "was answered already: approved by ada" in second.text


async def test_of_many_answers_at_the_same_moment_one_counts(page: WebPage) -> None:
    study = at_gate(page.home.store)

    async def person(number: int) -> int:
        async with page.browser() as browser:
            token = form_token((await browser.get(f"/studies/{study}")).text)
            verdict = "approve" if number % 2 else "reject"
            fields = {"token": token, "gate": "plan/1", "verdict": verdict, "words": "w", "by": f"person {number}"}
            return (await browser.post(f"/studies/{study}/answer", data=fields)).status_code

    codes = await asyncio.gather(*(person(number) for number in range(8)))
    assert sorted(codes) == [303] + [409] * 7
    gate = page.home.store.gates.open(study)
    assert gate is not None
    assert gate.answer is not None
    assert gate.answer.by == f"person {codes.index(303)}"


async def test_an_answer_from_the_terminal_is_seen_on_the_page(page: WebPage, browser: httpx.AsyncClient) -> None:
    study = at_gate(page.home.store)
    await browser.get(f"/studies/{study}")
    answer_gate(page.home.store, study, Answer(verdict="approve", by="bob"))
    page.clock.advance(2)
    assert "approved by bob" in (await browser.get(f"/studies/{study}")).text


async def test_an_answer_to_another_gate_than_the_open_one_is_refused(
    page: WebPage, browser: httpx.AsyncClient
) -> None:
    study = at_gate(page.home.store)
    late = await answer(browser, study, "approve", gate="plan/7")
    assert late.status_code == 409
    assert "no longer waits at plan/7" in late.text
    assert waits_for_an_answer(page.home.store, study)


async def test_an_amended_plan_is_asked_about_anew(page: WebPage, browser: httpx.AsyncClient) -> None:
    study = at_gate(page.home.store)
    token = form_token((await browser.get(f"/studies/{study}")).text)
    fields = {"token": token, "version": "1", "seeds": "4", "minutes": "90", "because": "cheaper", "by": "ada"}
    sent = await browser.post(f"/studies/{study}/amend", data=fields)
    assert sent.status_code == 303, sent.text
    plan = page.home.store.plans.get(study)
    assert (plan.version, plan.stages[0].seeds, plan.budget.wall_s) == (2, 4, 5400)
    text = (await browser.get(f"/studies/{study}")).text
    assert 'value="plan/2"' in text
    assert "cheaper" in text
    again = await browser.post(f"/studies/{study}/amend", data=fields)
    assert again.status_code == 409
    assert "now has plan version 2" in again.text
    assert (await answer(browser, study, "approve")).status_code == 409  # to plan/1
    assert (await answer(browser, study, "approve", gate="plan/2")).status_code == 303


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"seeds": "many"}, "seeds must be a whole number"),
        ({"seeds": "0"}, "above zero"),
        ({"seeds": ""}, "say what to amend"),
        ({"because": ""}, "say why"),
        ({"by": " "}, "say who you are"),
    ],
)
async def test_what_cannot_be_amended_is_a_clear_message(
    changes: dict[str, str], says: str, page: WebPage, browser: httpx.AsyncClient
) -> None:
    study = at_gate(page.home.store)
    token = form_token((await browser.get(f"/studies/{study}")).text)
    fields = {"token": token, "version": "1", "seeds": "4", "because": "cheaper", "by": "ada", **changes}
    sent = await browser.post(f"/studies/{study}/amend", data=fields)
    assert sent.status_code == 400
    assert says in sent.text
    assert page.home.store.plans.get(study).version == 1


async def test_an_amendment_beyond_the_budget_is_a_clear_message(page: WebPage, browser: httpx.AsyncClient) -> None:
    study = at_gate(page.home.store)
    token = form_token((await browser.get(f"/studies/{study}")).text)
    fields = {"token": token, "version": "1", "seeds": "200", "because": "sure", "by": "ada"}
    sent = await browser.post(f"/studies/{study}/amend", data=fields)
    assert sent.status_code == 409
    assert "but the budget is 60 min" in sent.text
    assert page.home.store.plans.get(study).version == 1


async def test_a_study_at_no_gate_has_no_form_and_takes_no_answer(page: WebPage, browser: httpx.AsyncClient) -> None:
    study, _ = running(page.home.store)
    waiting = at_gate(page.home.store)
    token = form_token((await browser.get(f"/studies/{waiting}")).text)
    assert "<form" not in (await browser.get(f"/studies/{study}")).text
    fields = {"token": token, "gate": "plan/1", "verdict": "approve", "by": "ada"}
    assert (await browser.post(f"/studies/{study}/answer", data=fields)).status_code == 409
    assert (await browser.post("/studies/st-none/answer", data=fields)).status_code == 404


async def test_a_form_without_the_pages_own_token_does_nothing(page: WebPage, browser: httpx.AsyncClient) -> None:
    study = at_gate(page.home.store)
    refused = await answer(browser, study, "approve", token="0" * 64)
    assert refused.status_code == 403
    assert "earlier visit" in refused.text
    async with page.browser() as other:
        stolen = form_token((await other.get(f"/studies/{study}")).text)
    assert (await answer(browser, study, "approve", token=stolen)).status_code == 403
    assert waits_for_an_answer(page.home.store, study)


@pytest.mark.parametrize(
    "headers",
    [
        {"origin": "http://evil.example"},
        {"origin": "null"},
        {"origin": f"http://127.0.0.1:{PORT + 1}"},
        {"origin": BASE, "sec-fetch-site": "cross-site"},
        {"origin": BASE, "sec-fetch-site": "same-site"},
    ],
)
async def test_a_form_from_another_site_does_nothing(
    headers: dict[str, str], page: WebPage, browser: httpx.AsyncClient
) -> None:
    study = at_gate(page.home.store)
    token = form_token((await browser.get(f"/studies/{study}")).text)
    fields = {"token": token, "gate": "plan/1", "verdict": "approve", "by": "ada"}
    sent = await browser.post(f"/studies/{study}/answer", data=fields, headers=headers)
    assert sent.status_code == 403
    assert "another site" in sent.text
    assert waits_for_an_answer(page.home.store, study)


async def test_only_the_pages_own_kind_of_form_is_read(page: WebPage, browser: httpx.AsyncClient) -> None:
    study = at_gate(page.home.store)
    await browser.get("/")
    address = f"/studies/{study}/answer"
    assert (await browser.post(address, json={"verdict": "approve"})).status_code == 415
    assert (await browser.post(address, data={"words": "x" * 70_000})).status_code == 413
    broken = {"content-type": "application/x-www-form-urlencoded"}
    assert (await browser.post(address, content=b"by=%ff", headers=broken)).status_code == 400
    assert (await browser.put(address, data={}, headers={"origin": BASE})).status_code == 405


async def test_a_paused_study_shows_that_it_was_asked_to_pause(page: WebPage, browser: httpx.AsyncClient) -> None:
    study = planned(page.home.store)
    page.home.store.studies.request_pause(study)
    assert "asked to pause" in (await browser.get(f"/studies/{study}")).text
