"""What the page shows of studies at every moment of their lives."""

from __future__ import annotations

from unittest.mock import Mock

import httpx
import pytest

from researcher.models import Attrition, EpisodeAttempts, TrialEvidence
from researcher.study.plan import Known, Verdict
from swarm.protocol.episodes import Cause
from tests.fakes.sampled import an_episode
from tests.fakes.shown_study import ARM, SERVER, at_gate, done, finish, planned, running
from tests.fakes.study import study_plan
from tests.fakes.web_page import WebPage

pytestmark = pytest.mark.anyio

NASTY = "<script>window.hacked = 1</script><img src=x onerror=hacked()>"
"""A topic as an enemy would write it."""


async def test_without_studies_the_list_says_how_to_begin(browser: httpx.AsyncClient) -> None:
    answer = await browser.get("/")
    assert answer.status_code == 200
    assert "No studies yet" in answer.text
    assert "researcher start --topic" in answer.text


async def test_the_list_shows_status_verdict_and_who_is_waited_for(page: WebPage, browser: httpx.AsyncClient) -> None:
    ended, waiting = done(page.home), at_gate(page.home.store, "Is it worth it?")
    text = (await browser.get("/")).text
    assert f'href="/studies/{ended}"' in text
    assert "H1 supported" in text
    assert "6 of 6 trials done" in text
    assert f'href="/studies/{waiting}"' in text
    assert text.count("waits for your decision") == 1


async def test_the_list_shows_a_study_whose_timetable_this_machine_cannot_read(
    page: WebPage, browser: httpx.AsyncClient
) -> None:
    other, study = at_gate(page.home.store, "Is it worth it?"), planned(page.home.store)
    schedule = {"timetable": {"zone": "Mars/Olympus"}, "carried": True}
    page.home.store.studies.save_schedule(study, schedule)
    answer = await browser.get("/")
    assert answer.status_code == 200
    assert f'href="/studies/{other}"' in answer.text
    assert "its timetable cannot be read on this machine" in answer.text
    assert (await browser.get(f"/studies/{study}")).status_code == 200


async def test_a_long_list_comes_in_pages(page: WebPage, browser: httpx.AsyncClient) -> None:
    for number in range(51):
        page.home.store.studies.create(f"topic {number}", {})
    assert "page 1 of 2" in (await browser.get("/")).text
    assert (await browser.get("/?page=2")).text.count('class="study card') == 1
    assert (await browser.get("/?page=7")).text.count('class="study card') == 1
    assert (await browser.get("/?page=x")).status_code == 422


async def test_a_study_that_is_being_planned_has_a_page(page: WebPage, browser: httpx.AsyncClient) -> None:
    study = page.home.store.studies.create("a topic", {})
    text = (await browser.get(f"/studies/{study}")).text
    assert "The plan is being made." in text
    assert "No trial has begun yet." in text
    assert "no report yet" in text


async def test_a_running_study_shows_its_trials_with_server_step_and_curve(
    page: WebPage, browser: httpx.AsyncClient
) -> None:
    study, trial = running(page.home.store)
    text = (await browser.get(f"/studies/{study}")).text
    assert SERVER in text
    assert "2/4" in text
    assert "0.25" in text
    assert text.count('<svg class="spark') == 2
    assert '<svg class="curves"' in text
    assert page.home.store.plans.get(study).digest() in text
    assert "1 of 2 trials done" in text
    assert f"trial={trial.key}" not in text  # a run is in MLflow once it has ended


async def test_a_curve_grows_when_the_browser_looks_again(page: WebPage, browser: httpx.AsyncClient) -> None:
    study, trial = running(page.home.store)
    first = await browser.get(f"/studies/{study}")
    again = await browser.get(f"/studies/{study}", headers={"if-none-match": first.headers["etag"]})
    assert again.status_code == 304
    assert again.content == b""
    page.home.store.trials.record_progress(study, trial.key, 3, [("reward_mean", 3, 0.5)])
    page.clock.advance(2)
    later = await browser.get(f"/studies/{study}", headers={"if-none-match": first.headers["etag"]})
    assert later.status_code == 200
    assert "3/4" in later.text


async def test_held_out_rewards_and_sample_answers_are_shown_while_a_trial_trains(
    page: WebPage, browser: httpx.AsyncClient
) -> None:
    study, trial = running(page.home.store)
    assert "Sample answers" not in (await browser.get(f"/studies/{study}")).text
    held = [an_episode(f"ep-{step}", prompt="<b>2 + 2", kind="eval", step=step) for step in (0, 2)]
    points = [("heldout_reward", 0, 0.125), ("heldout_reward", 2, 0.375)]
    page.home.store.trials.record_progress(study, trial.key, 2, points, [*held, an_episode("t", step=2)])
    page.clock.advance(2)
    text = (await browser.get(f"/studies/{study}")).text
    assert "held out 0.375" in text
    assert "Sample answers" in text
    assert "&lt;b&gt;2 + 2" in text
    assert [when in text for when in ("held out, before", "held out, step 2", "in training, step 2")] == [True] * 3
    assert "held out, after" not in text


async def test_many_browsers_that_ask_at_once_are_answered_from_one_reading(
    page: WebPage, browser: httpx.AsyncClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    study, _ = running(page.home.store)
    trials = page.home.store.trials
    reading = Mock(wraps=trials.attempts_of_study)
    monkeypatch.setattr(trials, "attempts_of_study", reading)
    texts = [(await browser.get(f"/studies/{study}")).text for _ in range(5)]
    assert len(set(texts)) == 1
    reading.assert_called_once()


async def test_a_done_study_shows_its_answer_and_its_report(page: WebPage, browser: httpx.AsyncClient) -> None:
    study = done(page.home)
    text = (await browser.get(f"/studies/{study}")).text
    assert "H1 supported" in text
    assert "+0.24" in text
    assert "after compare: stop (all questions were asked)" in text
    report = await browser.get(f"/studies/{study}/report")
    assert report.text == (page.home.studies / study / "report.html").read_text()
    assert "script-src" not in report.headers["content-security-policy"]
    assert "sandbox" in report.headers["content-security-policy"]


async def test_a_missing_report_is_a_clear_message(page: WebPage, browser: httpx.AsyncClient) -> None:
    answer = await browser.get(f"/studies/{planned(page.home.store)}/report")
    assert answer.status_code == 404
    assert "has no report yet" in answer.text


async def test_budget_and_sentinels_are_shown(page: WebPage, browser: httpx.AsyncClient) -> None:
    study, _ = running(page.home.store)
    text = (await browser.get(f"/studies/{study}")).text
    assert "0 of 20" in text
    assert "heldout leak" in text
    page.home.store.trials.ensure(study, "compare", [(ARM, 0)])
    page.clock.advance(2)
    assert (await browser.get(f"/studies/{study}")).status_code == 200


async def test_what_others_wrote_is_shown_as_text(page: WebPage, browser: httpx.AsyncClient) -> None:
    plan = study_plan().model_copy(update={"question": NASTY, "assumptions": (NASTY,)})
    study = at_gate(page.home.store, NASTY, plan=plan)
    page.home.store.journal.record(study, "note", {"text": NASTY})
    (trial,) = page.home.store.trials.ensure(study, "floor", [("lr=base", 0)])
    page.home.store.trials.record_intent(study, trial.key, 1, f"http://{NASTY}", "k", {})
    page.home.store.trials.fail_attempt(study, trial.key, NASTY)
    page.home.store.studies.set_status(study, page.home.store.studies.get(study).status, f"`{NASTY}` {NASTY}")
    for address in ("/", f"/studies/{study}", "/studies/<script>window.hacked = 1"):
        text = (await browser.get(address)).text
        assert "<script>window" not in text
        assert "<img src=x" not in text
        assert "&lt;script&gt;window.hacked" in text


async def test_secrets_are_taken_out(page: WebPage, browser: httpx.AsyncClient) -> None:
    study, trial = running(page.home.store)
    page.home.store.trials.fail_attempt(study, trial.key, "refused: Bearer abcdefgh12345678")
    page.home.store.journal.record(study, "note", {"key": "swk_abc.def.ghi"})
    text = (await browser.get(f"/studies/{study}")).text
    assert "[redacted]" in text
    assert "abcdefgh12345678" not in text
    assert "swk_abc" not in text


async def test_a_plan_that_was_changed_after_it_was_frozen_is_called_out(
    page: WebPage, browser: httpx.AsyncClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    study = planned(page.home.store)
    plan, digest = page.home.store.plans.frozen(study)
    changed = plan.model_copy(update={"steps": 99})
    monkeypatch.setattr(page.home.store.plans, "frozen", lambda study_id: (changed, digest))
    assert "changed after it was frozen" in (await browser.get(f"/studies/{study}")).text


async def test_what_was_known_before_is_told_in_words_and_without_secrets(
    page: WebPage, browser: httpx.AsyncClient
) -> None:
    known = Known(
        id="st-1/H1", statement="4e-5 beats 1e-5, said sk-ant-abcdefgh12345678", verdict=Verdict.SUPPORTED,
        direction="increase", plan_hash="0" * 64,
    )  # fmt: skip
    study = planned(page.home.store, plan=study_plan(known=(known, "an older plan's own sentence")))
    text = (await browser.get(f"/studies/{study}")).text
    assert "known before: an older plan&#39;s own sentence" in text
    assert "4e-5 beats 1e-5" in text
    assert "plan_hash=" not in text
    assert "sk-ant" not in text


async def test_a_study_may_be_named_by_the_beginning_of_its_id_and_an_unknown_one_is_not_found(
    page: WebPage, browser: httpx.AsyncClient
) -> None:
    study = planned(page.home.store)
    latest = await browser.get("/studies/latest")
    assert latest.headers["location"] == f"/studies/{study}"
    missing = await browser.get("/studies/st-nothing")
    assert missing.status_code == 404
    assert "no study has an id that begins with" in missing.text
    assert "<title>no study has an id that begins with" in missing.text
    assert (await browser.get("/nowhere")).status_code == 404


async def test_the_journal_shows_its_newest_lines_first(page: WebPage, browser: httpx.AsyncClient) -> None:
    study = planned(page.home.store)
    for number in range(60):
        page.home.store.journal.record(study, "note", {"number": number})
    text = (await browser.get(f"/studies/{study}")).text
    assert f"the newest 40 of {len(page.home.store.journal.events(study))}" in text
    assert text.index("number 59") < text.index("number 20")
    assert "number 19<" not in text


async def test_a_trial_that_failed_says_why(page: WebPage, browser: httpx.AsyncClient) -> None:
    study, trial = running(page.home.store)
    page.home.store.trials.fail_attempt(study, trial.key, "the client kept crashing")
    page.home.store.trials.fail(study, trial.key, "the client kept crashing")
    text = (await browser.get(f"/studies/{study}")).text
    assert "the client kept crashing" in text
    assert "mlflow?trial=" in text


async def test_seeds_of_the_other_arm_appear_as_they_end(page: WebPage, browser: httpx.AsyncClient) -> None:
    study, _ = running(page.home.store)
    (other,) = page.home.store.trials.ensure(study, "compare", [(ARM, 0)])
    finish(page.home.store, study, other, 0.6)
    text = (await browser.get(f"/studies/{study}")).text
    assert "2 of 3 trials done" in text
    assert "auc 0.6" in text


async def test_lost_attempts_stand_by_arm_and_cause_with_the_first_words(
    page: WebPage, browser: httpx.AsyncClient
) -> None:
    study, _ = running(page.home.store)
    trial = page.home.store.trials.ensure(study, "floor", [("lr=base", 2)])[0]
    counts = EpisodeAttempts(attempts=52, lost={Cause.GRADER: 17, Cause.SERVER: 3}, set_aside=2)
    lost = Attrition(train=counts, first={Cause.GRADER: "KeyError: <b>swk_0123456789abcdef</b>"})
    finish(page.home.store, study, trial, 0.3, TrialEvidence(attrition=lost))
    text = (await browser.get(f"/studies/{study}")).text
    assert "grader 17, server 3" in text or "server 3, grader 17" in text
    assert "KeyError: &lt;b&gt;" in text
    assert "swk_0123" not in text
