"""A study from a question to its start on the page, with the planner and the instruments that there are."""

from __future__ import annotations

import html
import re

import httpx
import pytest

from researcher.cli import resume
from researcher.schedule.timetable import Timetable
from tests.fakes.web_page import WebPage, form_token

pytestmark = pytest.mark.anyio

TOPIC = "Does GRPO learn one-digit sums faster with a learning rate of 4e-5 than with 1e-5? Use 3 seeds."


@pytest.fixture(autouse=True)
def alone(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """No LLM is configured, and the daemon is only asked for."""
    for name in ("RESEARCHER_LLM_MODEL", "RESEARCHER_LLM_BASE_URL", "RESEARCHER_LLM_API_KEY"):
        monkeypatch.delenv(name, raising=False)
    asked: list[int] = []
    monkeypatch.setattr(resume, "ensure_daemon", lambda: asked.append(1))
    return asked


async def send(browser: httpx.AsyncClient, address: str = "/draft", **fields: str) -> httpx.Response:
    token = form_token((await browser.get("/draft")).text)
    return await browser.post(address, data={"token": token, **fields})


def text_in(page: str) -> str:
    """The study file as a browser shows it for editing."""
    found = re.search(r'<textarea class="file"[^>]*>\n(.*?)</textarea>', page, re.DOTALL)
    assert found is not None
    return html.unescape(found[1])


async def test_a_question_becomes_a_file_a_price_and_a_study(
    page: WebPage, browser: httpx.AsyncClient, alone: list[int]
) -> None:
    drafted = await send(browser, topic=TOPIC)
    assert drafted.status_code == 200, drafted.text
    text = text_in(drafted.text)
    assert "instrument: arithmetic" in text
    edited = re.sub(r"baseline: 1e-0?5", "baseline: 2e-5", text).replace("\n", "\r\n")
    assert "baseline: 2e-5" in edited
    checked = await send(browser, "/draft/check", text=edited, engine="echo")
    assert "This would run" in checked.text
    assert re.search(r"\d+ trials, .*; at most", checked.text)
    assert page.home.store.studies.all() == []
    started = await send(browser, "/draft/start", text=edited, engine="echo")
    assert started.status_code == 303, started.text
    (study,) = page.home.store.studies.all()
    assert started.headers["location"] == f"/studies/{study.id}"
    assert alone == [1]
    schedule = page.home.store.studies.schedule(study.id)
    assert schedule is not None
    assert schedule["carried"]
    Timetable.of_record(schedule)
    assert study.options.engine == "echo"
    assert study.options.request is not None
    assert study.options.request.author == "builtin"
    assert study.options.request.sources["compare.learning_rate"] == "file"  # a person changed it
    assert study.options.request.sources["instrument"] in ("topic", "planner")
    assert "2e-05" in (await browser.get(f"/studies/{study.id}")).text


async def test_what_is_wrong_stands_beside_its_field_and_the_text_stays(
    page: WebPage, browser: httpx.AsyncClient, alone: list[int]
) -> None:
    text = "question: Is it faster?\ninstrument: arithmetic\ncompare: {lerning_rate: {levels: [1e-5, 4e-5]}}\nseeds: {min: 0}"
    for address, status in (("/draft/check", 200), ("/draft/start", 400)):
        answer = await send(browser, address, text=text)
        assert answer.status_code == status
        assert "line 3: <code>compare.lerning_rate</code>" in answer.text
        assert "learning_rate" in answer.text
        assert "line 4: <code>seeds.min</code>" in answer.text
        assert text_in(answer.text) == text
    foreign = await send(browser, "/draft/start", text=text.replace("arithmetic", "/tmp/anything"))
    assert "only installed instruments" in foreign.text
    broken = await send(browser, "/draft/check", text="a: [")
    assert "this is not YAML" in broken.text
    wrong = await send(browser, "/draft/start", text=text, servers="10.0.0.7:8642")
    assert (wrong.status_code, "is not an address" in wrong.text) == (400, True)
    assert (page.home.store.studies.all(), alone) == ([], [])


async def test_a_topic_that_the_planner_does_not_understand_gives_a_draft_to_edit_or_a_reason(
    browser: httpx.AsyncClient,
) -> None:
    unclear = await send(
        browser, topic="Does GRPO learn one-digit sums faster with a learning rate of 4e-5 on Tuesdays?"
    )
    assert 'role="alert"' in unclear.text
    assert "Tuesdays" in html.unescape(unclear.text).split('id="file"')[1]
    for topic, says in ((" ", "the topic is empty"), ("@/etc/passwd", "")):
        answer = await send(browser, topic=topic)
        assert "root:" not in answer.text
        assert says in answer.text


async def test_a_form_of_another_session_starts_nothing(page: WebPage, browser: httpx.AsyncClient) -> None:
    for address in ("/draft", "/draft/check", "/draft/start"):
        refused = await send(browser, address, token="0" * 64, topic=TOPIC, text="question: a")
        assert (refused.status_code, 'href="/draft"' in refused.text) == (403, True)
    assert page.home.store.studies.all() == []
