"""Studies and campaigns from words to their start on the page, with the planner and the instruments that there are."""

from __future__ import annotations

import html
import re

import httpx
import pytest

from researcher.campaign import people
from researcher.cli import resume
from researcher.ownership import owned_now
from researcher.schedule.timetable import Timetable
from tests.fakes.web_page import WebPage, form_token

pytestmark = pytest.mark.anyio

TOPIC = "Does GRPO learn one-digit sums faster with a learning rate of 4e-5 than with 1e-5? Use 3 seeds."


GOAL = "What makes GRPO learn one-digit sums fastest? Two hours."
GOAL_FILE = "goal: better\ninstruments: [arithmetic]\nbudget: {trials: 100}\nfactors: {kl: [0.1]}"


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
    """The file as a browser shows it for editing."""
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
    assert re.search(r"\d+ trials, .*; it spends at most", checked.text)
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


async def test_a_goal_in_words_becomes_a_file_a_first_study_with_its_price_and_a_campaign(
    page: WebPage, browser: httpx.AsyncClient
) -> None:
    assert "/draft/campaign" in (await browser.get("/campaigns")).text
    drafted = await send(browser, "/draft/campaign", topic=GOAL, instrument="arithmetic")
    assert drafted.status_code == 200, drafted.text
    text = text_in(drafted.text)
    assert "instruments: [arithmetic]" in text
    assert "budget: {wall: 2h}" in text
    assert "Not covered" not in text
    edited = re.sub(r"factors:\n(  .*\n)+", "factors: {kl: [0.1]}\n", text).replace("\n", "\r\n")
    checked = await send(browser, "/draft/campaign/check", text=edited, engine="echo")
    assert "kl: 0, 0.1 (default 0)" in checked.text
    assert re.search(
        r"first study: \d+.* trials, about \d+ min of trials; the campaign spends at most: wall 2h", checked.text
    )
    assert (page.home.store.campaigns.all(), page.daemons) == ([], [])
    started = await send(browser, "/draft/campaign/start", text=edited, engine="echo")
    assert started.status_code == 303, started.text
    (campaign,) = page.home.store.campaigns.all()
    assert started.headers["location"] == f"/campaigns/{campaign.id}"
    assert (campaign.goal["goal"], campaign.goal["factors"]) == (GOAL, {"kl": [0.1]})
    assert campaign.options.engine == "echo"
    assert campaign.schedule["carried"]
    Timetable.of_record(campaign.schedule)
    assert page.daemons == [1]
    assert html.escape(GOAL) in (await browser.get(f"/campaigns/{campaign.id}")).text


async def test_a_campaign_that_runs_is_not_started_again(page: WebPage, browser: httpx.AsyncClient) -> None:
    started = await send(browser, "/draft/campaign/start", text=GOAL_FILE)
    assert started.status_code == 303, started.text
    (first,) = page.home.store.campaigns.all()
    again = await send(browser, "/draft/campaign/start", text=f"# once more\n{GOAL_FILE}")
    assert again.status_code == 400
    assert f"line 2: <code>goal</code>: {first.id} already pursues this goal" in again.text
    assert (len(page.home.store.campaigns.all()), page.daemons) == (1, [1])
    page.home.store.campaigns.request(first.id, stop=True)
    people.stop(page.home.store, first.id, page.home.studies, owned_now, lambda *_: [])
    assert (await send(browser, "/draft/campaign/start", text=GOAL_FILE)).status_code == 303


@pytest.mark.parametrize(
    ("old", "new", "says"),
    [
        ("budget", "bugdet", "line 3: <code>bugdet</code>: unknown field (did you mean 'budget'?)"),
        ("trials: 100", "trials: 10", "line 3: <code>budget</code>: too small for a first study"),
        ("kl: [0.1]", "lk: [0.1]", "line 4: <code>factors.lk</code>: arithmetic has no factor 'lk'"),
        ("kl: [0.1]", "kl: [7]", "line 4: <code>factors.kl</code>"),
        ("[arithmetic]", "[/tmp/anything]", "line 2: <code>instruments</code>: only installed instruments"),
        (
            "better",
            "better\nset: {loss: own.py:mine}",
            "line 2: <code>set</code>: 'own.py:mine' is a function in a file",
        ),
        ("better", "better\nnotify: [NOWHERE]", "RESEARCHER_NOTIFY_NOWHERE"),
        ("better", "better\nschedule: {windows: [ten]}", "line 2: <code>schedule.windows</code>"),
        (GOAL_FILE, "- a list", "is not a goal file"),
        (GOAL_FILE, "a: [", "this is not YAML"),
        (GOAL_FILE, "", "there is no goal file yet"),
    ],
)
async def test_a_goal_that_cannot_be_pursued_is_refused_with_its_line_and_the_text_stays(
    page: WebPage, browser: httpx.AsyncClient, old: str, new: str, says: str
) -> None:
    text = GOAL_FILE.replace(old, new)
    answer = await send(browser, "/draft/campaign/start", text=text)
    assert answer.status_code == 400
    assert says in html.unescape(answer.text)
    assert not text or text_in(answer.text) == text
    assert (page.home.store.campaigns.all(), page.daemons) == ([], [])


async def test_a_goal_that_the_planner_does_not_understand_gives_a_file_to_edit_or_a_reason(
    browser: httpx.AsyncClient,
) -> None:
    unclear = await send(browser, "/draft/campaign", topic="What makes GRPO learn one-digit sums fastest on Tuesdays?")
    assert "# To be settled: 'tuesdays' is not understood here." in text_in(unclear.text)
    narrow = await send(browser, "/draft/campaign", topic=TOPIC)
    assert "# Not covered: seeds (each study of a campaign has its own)" in text_in(narrow.text)
    listed = "Ablate DAPO on countdown: (a) vanilla GRPO, (b) with clip-higher 0.28"
    bundles = await send(browser, "/draft/campaign", topic=listed, text=GOAL_FILE)
    assert bundles.status_code == 400
    assert "that is a single study" in bundles.text
    assert text_in(bundles.text) == GOAL_FILE


async def test_a_form_of_another_session_starts_nothing(page: WebPage, browser: httpx.AsyncClient) -> None:
    for form, text in (("/draft", "question: a"), ("/draft/campaign", GOAL_FILE)):
        for address in (form, f"{form}/check", f"{form}/start"):
            refused = await send(browser, address, token="0" * 64, topic=TOPIC, text=text)
            assert (refused.status_code, f'href="{form}"' in refused.text) == (403, True)
    token = form_token((await browser.get("/draft/campaign")).text)
    elsewhere = {"origin": "https://evil.example", "sec-fetch-site": "cross-site"}
    fields = {"token": token, "text": GOAL_FILE}
    assert (await browser.post("/draft/campaign/start", data=fields, headers=elsewhere)).status_code == 403
    assert (page.home.store.studies.all(), page.home.store.campaigns.all(), page.daemons) == ([], [], [])
