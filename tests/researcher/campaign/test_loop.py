"""A campaign from its goal to its answer, and what people and crashes do to it."""

from __future__ import annotations

import socket
import threading
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from researcher.campaign import people
from researcher.campaign.loop import CampaignLoop, Rest
from researcher.campaign.people import approve, waits_for_a_person
from researcher.campaign.proposals import Proposal
from researcher.campaign.records import observe
from researcher.campaign.report import REPORT, campaign_page
from researcher.campaign.verify import verify_campaign
from researcher.models import CampaignStatus, StudyStatus
from researcher.store.errors import WrongState
from researcher.study.plan import Plan, Verdict
from tests.fakes.campaign import MadeUpCampaign, flat
from tests.researcher.campaign.test_honesty import Cheat, explore

pytestmark = pytest.mark.anyio


async def test_it_finds_the_best_setting_and_confirms_it(tmp_path: Path) -> None:
    made = MadeUpCampaign(tmp_path)
    outcome = await made.carry_out()
    assert outcome.status is CampaignStatus.DONE
    seen = observe(made.store, made.id)
    assert seen.on().incumbent == {"learning_rate": 1.6e-4}
    assert seen.studies[0].action == "explore"
    assert any(study.verdict is Verdict.SUPPORTED for study in seen.studies)
    assert verify_campaign(made.store, made.id, made.folder / made.id) == []
    assert outcome.report is not None
    told = (outcome.report / "report.md").read_text()
    assert "Learning_rate 1.6e-4 is the best that was confirmed." in told


async def test_where_nothing_matters_it_says_so(tmp_path: Path) -> None:
    made = MadeUpCampaign(tmp_path, flat)
    outcome = await made.carry_out()
    assert outcome.status is CampaignStatus.DONE
    assert observe(made.store, made.id).on().incumbent == {}


class Killed(BaseException):
    """As a kill at that instruction."""


@pytest.mark.parametrize("at", [1, 2, 3, 4, 6])
async def test_killed_at_any_write_it_decides_and_runs_nothing_twice(tmp_path: Path, at: int) -> None:
    """The same decisions and the same answer as undisturbed."""
    (tmp_path / "a").mkdir()
    (tmp_path / "b").mkdir()
    undisturbed = MadeUpCampaign(tmp_path / "a")
    folder, while_it_runs = undisturbed.folder / undisturbed.id, list[list[str]]()
    undisturbed.runner.before = lambda study_id: while_it_runs.append(
        verify_campaign(undisturbed.store, undisturbed.id, folder)
    )
    await undisturbed.carry_out()
    assert not any(while_it_runs)
    made, left = MadeUpCampaign(tmp_path / "b"), [at]

    def dies(real: Any) -> Any:
        def called(*args: Any, **kwargs: Any) -> Any:
            left[0] -= 1
            if left[0] == 0:
                raise Killed
            found = real(*args, **kwargs)
            left[0] -= 1
            if left[0] == 0:
                raise Killed
            return found

        return called

    for name in ("decide", "set_status"):
        setattr(made.store.campaigns, name, dies(getattr(made.store.campaigns, name)))
    with pytest.raises(Killed):
        await made.carry_out()
    await made.carry_out()
    plain = [each.action for each in undisturbed.store.campaigns.decisions(undisturbed.id)]
    assert [each.action for each in made.store.campaigns.decisions(made.id)] == plain
    assert len(made.runner.ran) == len(set(made.runner.ran)) == len(undisturbed.runner.ran)
    assert verify_campaign(made.store, made.id, made.folder / made.id) == []


async def test_a_person_is_waited_for_where_the_goal_says_so(tmp_path: Path) -> None:
    made = MadeUpCampaign(tmp_path, approve="confirm")
    outcome = await made.carry_out()
    assert outcome.status is CampaignStatus.WAITING
    assert "waits for a person's word on confirm" in outcome.reason
    assert waits_for_a_person(made.store, made.store.campaigns.get(made.id))
    approve(made.store, made.id, "go ahead", "ada")
    assert not waits_for_a_person(made.store, made.store.campaigns.get(made.id))
    await made.carry_out()
    with pytest.raises(WrongState, match="can no longer be approved"):
        approve(made.store, made.id, "again", "ada")
    assert observe(made.store, made.id).on().incumbent == {"learning_rate": 1.6e-4}


def _ask() -> Proposal:
    return Proposal(action="ask", because="a person has to choose", words="Which factor matters to you?")


async def test_the_first_study_is_approved_whichever_decision_starts_it(tmp_path: Path) -> None:
    made = MadeUpCampaign(tmp_path, approve="campaign", strategist=Cheat(_ask(), explore(), explore(), explore()))
    assert "asks" in (await made.carry_out()).reason
    people.tell(made.store, made.id, "the learning rate", "ada")
    assert "waits for a person's word on explore" in (await made.carry_out()).reason
    people.veto(made.store, made.id, "not that one", "ada")
    assert "waits for a person's word on explore" in (await made.carry_out()).reason
    assert (len(made.store.campaigns.decisions(made.id)), made.runner.ran) == (3, [])
    approve(made.store, made.id, "go ahead", "ada")
    assert (await made.carry_out()).status is CampaignStatus.DONE
    assert len(made.runner.ran) == 2


async def test_a_campaign_whose_studies_earlier_code_ran_unapproved_goes_on(tmp_path: Path) -> None:
    made = MadeUpCampaign(tmp_path, approve="campaign", strategist=Cheat(_ask(), explore(), explore()))
    await made.carry_out()
    people.tell(made.store, made.id, "the learning rate", "ada")
    await made.carry_out()
    last = made.store.campaigns.decisions(made.id)[-1]
    assert last.study_id is not None
    await made.runner(last.study_id, Plan.model_validate_json(last.plan or ""))
    assert (await made.carry_out()).status is CampaignStatus.DONE
    assert len(made.runner.ran) == 2


async def test_a_vetoed_study_stops_and_the_next_decision_knows_why(tmp_path: Path) -> None:
    made = MadeUpCampaign(tmp_path)

    def veto(study_id: str) -> None:
        if not made.runner.ran:
            made.runner.before = lambda study_id: None
            made.store.campaigns.veto(made.id, "temperature must not be touched", "ada")

    made.runner.before = veto
    await made.carry_out()
    decisions = made.store.campaigns.decisions(made.id)
    first = decisions[0]
    assert first.study_id is not None
    assert made.store.studies.get(first.study_id).status is StudyStatus.STOPPED
    assert decisions[1].saw["said"][0]["words"] == "temperature must not be touched"
    assert observe(made.store, made.id).hypotheses[0].status == "dropped"
    assert verify_campaign(made.store, made.id, made.folder / made.id) == []


def _plans_trials_that_never_begin(made: MadeUpCampaign) -> None:
    """Its first study is vetoed once all its trials are planned."""

    def veto(study_id: str) -> None:
        made.runner.before = lambda study_id: None
        plan = Plan.model_validate_json(made.store.campaigns.decisions(made.id)[0].plan or "")
        made.store.plans.save(study_id, plan)
        made.store.trials.ensure(study_id, plan.stages[0].id, [(arm.name, 0) for arm in plan.arms])
        made.store.campaigns.veto(made.id, "not this", "ada")

    made.runner.before = veto


async def test_trials_that_never_began_are_not_charged(tmp_path: Path) -> None:
    made = MadeUpCampaign(tmp_path, budget={"trials": 80})
    _plans_trials_that_never_begin(made)
    await made.carry_out()
    decisions = made.store.campaigns.decisions(made.id)
    assert made.store.trials.all(decisions[0].study_id or "")
    [stopped] = decisions[1].saw["studies"]
    assert (stopped["trials"], stopped["arms"]) == (0, [])
    assert decisions[1].saw["left"]["trials"] == 80
    assert verify_campaign(made.store, made.id, made.folder / made.id) == []


async def test_decisions_and_reports_that_charged_planned_trials_still_verify(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = MadeUpCampaign(tmp_path, budget={"trials": 80})
    _plans_trials_that_never_begin(made)
    with monkeypatch.context() as earlier:
        earlier.setattr("researcher.campaign.loop.observe", partial(observe, begun=False))
        earlier.setattr("researcher.campaign.report.campaign_page", partial(campaign_page, begun=False))
        earlier.setattr("researcher.campaign.report.BEGUN", "written later")
        await made.carry_out()
    decisions = made.store.campaigns.decisions(made.id)
    assert "begun" not in decisions[1].saw
    assert decisions[1].saw["left"]["trials"] < 80
    assert "begun" not in made.store.campaigns.events(made.id, REPORT)[-1].detail
    assert verify_campaign(made.store, made.id, made.folder / made.id) == []


async def test_what_a_person_tells_it_is_in_the_next_decision(tmp_path: Path) -> None:
    made = MadeUpCampaign(tmp_path)
    made.store.campaigns.record(made.id, "told", {"words": "higher rates may diverge", "by": "ada"})
    await made.carry_out()
    assert made.store.campaigns.decisions(made.id)[0].saw["said"] == [
        {"kind": "told", "words": "higher rates may diverge", "by": "ada", "seq": 1}
    ]


async def test_factors_that_a_person_wants_left_alone_are_varied_no_more(tmp_path: Path) -> None:
    made = MadeUpCampaign(tmp_path)
    people.tell(made.store, made.id, "it does nothing", "ada", leave=["temperature"])
    await made.carry_out()
    plans = [each.plan for each in made.store.campaigns.decisions(made.id) if each.plan is not None]
    arms = [arm.levels for plan in plans for arm in Plan.model_validate_json(plan).arms]
    assert {levels.get("temperature", 1.0) for levels in arms} == {1.0}
    assert len({levels.get("learning_rate") for levels in arms}) > 1
    assert observe(made.store, made.id).said[0].words == "it does nothing (temperature to stay as it is)"
    assert verify_campaign(made.store, made.id, made.folder / made.id) == []


async def test_with_nothing_left_to_vary_it_concludes(tmp_path: Path) -> None:
    made = MadeUpCampaign(tmp_path)
    people.tell(made.store, made.id, "enough", "ada", leave=["learning_rate", "temperature"])
    await made.carry_out()
    assert [each.action for each in made.store.campaigns.decisions(made.id)] == ["conclude"]


async def test_a_stop_and_a_pause_are_heeded_between_studies(tmp_path: Path) -> None:
    made = MadeUpCampaign(tmp_path)
    made.runner.before = lambda study_id: made.store.campaigns.request(made.id, pause=True)
    outcome = await made.carry_out()
    assert outcome.status is CampaignStatus.WAITING
    assert len(made.store.campaigns.decisions(made.id)) == 1
    made.runner.before = lambda study_id: None
    made.store.campaigns.request(made.id, pause=False, stop=True)
    assert (await made.carry_out()).status is CampaignStatus.STOPPED


def _began(made: MadeUpCampaign, study_id: str) -> None:
    """As a worker that was killed in the middle of the study."""
    plan = Plan.model_validate_json(made.store.campaigns.decisions(made.id)[-1].plan or "")
    made.store.plans.save(study_id, plan)
    made.store.studies.set_status(study_id, StudyStatus.RUNNING)
    raise Killed


@pytest.mark.parametrize("wish", ["stop", "pause"])
async def test_a_stop_or_a_pause_reaches_the_study_whose_worker_died(tmp_path: Path, wish: str) -> None:
    made = MadeUpCampaign(tmp_path)
    made.runner.before = lambda study_id: _began(made, study_id)
    with pytest.raises(Killed):
        await made.carry_out()
    made.runner.before = lambda study_id: None
    made.store.campaigns.request(made.id, stop=wish == "stop", pause=wish == "pause")
    outcome = await made.carry_out()
    [decision] = made.store.campaigns.decisions(made.id)
    study = made.store.studies.get(decision.study_id or "")
    assert outcome.status.value == study.status.value == ("stopped" if wish == "stop" else "waiting")
    assert made.runner.ran == []


@pytest.mark.parametrize("wish", ["go on", "stop"])
async def test_what_is_left_of_an_ended_study_is_finished_before_the_next_one(tmp_path: Path, wish: str) -> None:
    """Its worker was killed after the study was done, but before its server had ended."""
    made = MadeUpCampaign(tmp_path)
    real = made.store.studies.set_status

    def dies(study_id: str, status: StudyStatus, *args: Any) -> None:
        real(study_id, status, *args)
        if status is StudyStatus.DONE:
            raise Killed

    made.store.studies.set_status = dies  # type: ignore[assignment, method-assign]
    with pytest.raises(Killed):
        await made.carry_out()
    made.store.studies.set_status = real  # type: ignore[method-assign]
    [study] = made.runner.ran
    made.store.leases.acquire(study, f"{socket.gethostname()}/1/0", 1e9)
    if wish == "stop":
        made.store.campaigns.request(made.id, stop=True)
    found: list[list[str]] = []
    made.runner.before = lambda study_id: found.append([*made.runner.wound_up])
    await made.carry_out()
    assert made.runner.wound_up == [study]
    assert found[:1] == ([] if wish == "stop" else [[study]])


async def test_two_studies_that_fail_in_a_row_call_for_a_person(tmp_path: Path) -> None:
    made = MadeUpCampaign(tmp_path)

    async def failing(study_id: str, plan: Plan) -> Rest:
        made.store.plans.save(study_id, plan)
        made.store.studies.set_status(study_id, StudyStatus.FAILED, "no server answers")
        return Rest(ended=True, reason="failed")

    loop = CampaignLoop(
        made.store,
        made.strategist,
        made.planner,
        failing,
        made.runner.wind_up,
        made.clock,
        made.folder,
        made.told.append,
    )
    outcome = await loop.carry_out(made.id)
    assert outcome.status is CampaignStatus.FAILED
    assert "no server answers" in outcome.reason


async def test_after_its_days_it_concludes_with_what_it_has(tmp_path: Path) -> None:
    made = MadeUpCampaign(tmp_path, schedule={"days": 1})
    made.runner.before = lambda study_id: made.clock.advance(2 * 86_400)
    outcome = await made.carry_out()
    assert outcome.status is CampaignStatus.DONE
    last = made.store.campaigns.decisions(made.id)[-1]
    assert (last.action, last.strategist) == ("conclude", "rules")


async def test_a_study_that_nobody_approved_in_the_campaigns_days_is_stopped(tmp_path: Path) -> None:
    made = MadeUpCampaign(tmp_path, schedule={"days": 1}, approve="study")
    assert (await made.carry_out()).status is CampaignStatus.WAITING
    made.clock.advance(2 * 86_400)
    assert (await made.carry_out()).status is CampaignStatus.DONE
    first, last = made.store.campaigns.decisions(made.id)
    study = made.store.studies.get(first.study_id or "")
    assert (study.status, study.reason) == (StudyStatus.STOPPED, "its days are over, and nobody had approved it")
    assert (last.action, made.runner.ran) == ("conclude", [])
    assert verify_campaign(made.store, made.id, made.folder / made.id) == []


async def test_a_question_that_nobody_answered_in_the_campaigns_days_ends_it(tmp_path: Path) -> None:
    made = MadeUpCampaign(tmp_path, schedule={"days": 1}, strategist=Cheat(_ask()))
    assert (await made.carry_out()).status is CampaignStatus.WAITING
    made.clock.advance(2 * 86_400)
    assert (await made.carry_out()).status is CampaignStatus.DONE
    assert [each.strategist for each in made.store.campaigns.decisions(made.id)] == ["cheat", "rules"]


def _pauses_after_deciding(made: MadeUpCampaign) -> None:
    """Have a person ask for a pause while the campaign decides."""
    real = made.store.campaigns.decide

    def decide(*args: Any) -> Any:
        found = real(*args)
        made.store.campaigns.request(made.id, pause=True)
        return found

    made.store.campaigns.decide = decide  # type: ignore[assignment, method-assign]


async def test_a_veto_of_a_paused_campaigns_study_needs_no_second_answer(tmp_path: Path) -> None:
    made = MadeUpCampaign(tmp_path, approve="study")
    _pauses_after_deciding(made)
    assert "paused" in (await made.carry_out()).reason
    people.veto(made.store, made.id, "not that one", "ada")
    made.store.campaigns.request(made.id, pause=False)
    await made.carry_out()
    first, second = made.store.campaigns.decisions(made.id)
    assert made.store.studies.get(first.study_id or "").status is StudyStatus.STOPPED
    assert second.saw["said"][0]["words"] == "not that one"


async def test_words_to_a_paused_campaign_answer_its_question(tmp_path: Path) -> None:
    made = MadeUpCampaign(tmp_path, strategist=Cheat(_ask(), _ask()))
    people.tell(made.store, made.id, "not an answer", "ada")
    made.clock.advance(1)
    _pauses_after_deciding(made)
    assert "paused" in (await made.carry_out()).reason
    made.clock.advance(1)
    people.tell(made.store, made.id, "the learning rate", "ada")
    made.store.campaigns.request(made.id, pause=False)
    assert "paused" in (await made.carry_out()).reason
    made.store.campaigns.request(made.id, pause=False)
    assert "asks" in (await made.carry_out()).reason
    assert len(made.store.campaigns.decisions(made.id)) == 2


async def test_the_event_loop_goes_on_while_studies_are_planned(tmp_path: Path) -> None:
    made = MadeUpCampaign(tmp_path)
    spec = {"compare": {"temperature": {"levels": [0.7]}}}
    people.request_study(made.store, made.id, spec, "it should matter", "ada")
    threads, real = list[int](), made.planner.plan

    def plan(*args: Any, **kwargs: Any) -> Any:
        threads.append(threading.get_ident())
        return real(*args, **kwargs)

    made.planner.plan = plan  # type: ignore[method-assign]
    await made.carry_out()
    assert len(threads) > 1
    assert threading.get_ident() not in threads


async def test_more_budget_is_seen_by_the_next_decision(tmp_path: Path) -> None:
    made = MadeUpCampaign(tmp_path, budget={"trials": 20})
    made.store.campaigns.record(
        made.id, "amended", {"budget": {"trials": 200}, "words": "trials 200: more", "by": "ada"}
    )
    assert observe(made.store, made.id).left.trials == 200
