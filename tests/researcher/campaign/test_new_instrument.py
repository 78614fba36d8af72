"""Instruments that a campaign has an LLM write: tried, approved by a person, and never the ground of a claim."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import text

from bench.made_up_studies import another
from researcher.campaign.goal import Aim, CampaignGoal, aim_beside
from researcher.campaign.honesty import MOST_UNWRITTEN
from researcher.campaign.new_instrument import NO_LLM, WRITTEN, NewInstrument, NotWritten, check_approved, code_of
from researcher.campaign.people import ASKED, approve, veto, waits_for_a_person
from researcher.campaign.proposals import Proposal
from researcher.campaign.records import JOINED, UNWRITTEN, WRITING, observe
from researcher.campaign.report import campaign_page
from researcher.campaign.seen import Left
from researcher.campaign.strategist import LlmAway, StrategistAway
from researcher.campaign.verify import verify_campaign
from researcher.cli.instrument_llm import writer_of
from researcher.home import Home
from researcher.instruments.catalogue import InstrumentFolder, folder_digest
from researcher.llm.endpoint import LlmOutage, LlmSettings
from researcher.models import CampaignStatus, LlmCall
from researcher.refusals import PlanningRefused
from researcher.store.errors import WrongState
from researcher.store.store import Store
from tests.fakes.campaign import MadeUpCampaign, steep
from tests.fakes.scripted_llm import ScriptedLlm, completion, said
from tests.fakes.strategists import texts
from tests.fakes.written_instrument import written
from tests.researcher.campaign.test_honesty import Cheat, confirm, explore
from tests.researcher.campaign.test_several import on

pytestmark = pytest.mark.anyio

BRIEF = "Repeat a word; the reward is 1 for just that word."
WANTED = Proposal(action="new_instrument", because="nothing here measures repetition", words=BRIEF)


class Writer:
    """Writes the simulation instrument under the name `written`, at one call each. fails: what it raises before, in turn."""

    def __init__(self, made: MadeUpCampaign, *fails: Exception) -> None:
        self._made = made
        self._fails = list(fails)
        self.place = made.folder / "written_by_llm"
        self.files = {"reward.py": "def score(answer, right):\n    return float(answer == right)\n"}
        declared = another("written", author="some-llm")
        self.folder = InstrumentFolder(declared.instrument, self.place, code_of(self.files))
        self.asked: list[str] = []

    async def __call__(
        self, words: str, aims: Sequence[Aim], left: Left, kept: Sequence[LlmCall], keep: Callable[[LlmCall], None]
    ) -> NewInstrument:
        if not kept:
            self.asked.append(words)
            keep(
                LlmCall(
                    purpose="instrument", model="some-llm", request={"n": 1}, answer={"n": 1}, prompt_tokens=7, at=0.0
                )
            )
        if self._fails:
            raise self._fails.pop(0)
        goal = CampaignGoal.model_validate(self._made.store.campaigns.get(self._made.id).goal)
        self._made.planner.folders["written"] = self.folder
        self._made.runner.elsewhere["written"] = steep
        aim = aim_beside(goal, aims, self.folder.instrument)
        self.place.mkdir(exist_ok=True)
        for name, content in self.files.items():
            (self.place / name).write_text(content, encoding="utf-8")
        return NewInstrument(aim=aim, folder=str(self.place), author="some-llm", files=self.files)


def campaign(folder: Path, *proposals: Proposal, fails: Sequence[Exception] = (), **fields: Any) -> MadeUpCampaign:
    made = MadeUpCampaign(folder, strategist=Cheat(WANTED, *proposals), **fields)
    made.write = Writer(made, *fails)
    return made


def lines(made: MadeUpCampaign, *kinds: str) -> list[str]:
    return [event.kind for event in made.store.campaigns.events(made.id, *kinds)]


def differences(made: MadeUpCampaign) -> list[str]:
    return verify_campaign(made.store, made.id, made.folder / made.id)


async def test_it_is_written_waits_for_a_person_and_joins_from_the_next_decision_on(tmp_path: Path) -> None:
    made = campaign(tmp_path, on("written", explore()), budget={"trials": 240, "llm_tokens": 100})
    outcome = await made.carry_out()
    assert outcome.status is CampaignStatus.WAITING
    place = str(tmp_path / "written_by_llm")
    assert f"the instrument written, which some-llm wrote to {place}" in outcome.reason
    assert "researcher campaign approve" in outcome.reason
    assert waits_for_a_person(made.store, made.store.campaigns.get(made.id))
    assert len(made.notices) == 1
    assert observe(made.store, made.id).instruments == ("simulation",)
    assert approve(made.store, made.id, "looks sound", "ada") == 1
    assert (await made.carry_out()).status is CampaignStatus.DONE
    seen = observe(made.store, made.id)
    assert seen.instruments == ("simulation", "written")
    assert made.store.campaigns.decisions(made.id)[1].saw["others"][0]["generated"] is True
    assert seen.left.llm_tokens == 93
    [study] = seen.studies
    assert (study.instrument, study.unfit) == ("written", "an LLM wrote the instrument and its reward")
    assert made.store.studies.get(study.study).options.instrument == place
    page = campaign_page(made.store, made.id)
    assert page.steps[0].made == (
        "some-llm wrote written, whose results support no claim. ada approved it: looks sound"
    )
    assert differences(made) == []


async def test_its_results_are_never_claimed_however_good_they_are(tmp_path: Path) -> None:
    made = campaign(tmp_path, on("written", explore()), on("written", confirm(seeds={"min": 10, "max": 20})))
    await made.carry_out()
    approve(made.store, made.id, "", "ada")
    await made.carry_out()
    seen = observe(made.store, made.id)
    assert seen.studies[1].verdict == "supported"
    assert [view.incumbent for view in seen.views] == [{}, {}]
    assert (
        "On written: Nothing was confirmed to be better than the default." in campaign_page(made.store, made.id).answer
    )
    assert differences(made) == []


async def test_a_vetoed_one_stays_out_and_the_next_decision_knows_why(tmp_path: Path) -> None:
    made = campaign(tmp_path, on("written", explore()), explore())
    await made.carry_out()
    veto(made.store, made.id, "its reward can be guessed", "ada")
    with pytest.raises(WrongState):
        approve(made.store, made.id, "", "bob")
    await made.carry_out()
    second = made.store.campaigns.decisions(made.id)[1]
    [said] = second.saw["said"]
    assert (said["kind"], said["words"], said["instrument"]) == ("vetoed", "its reward can be guessed", "written")
    assert observe(made.store, made.id).instruments == ("simulation",)
    assert lines(made, JOINED) == []
    assert "ada vetoed it: its reward can be guessed" in campaign_page(made.store, made.id).steps[0].made
    assert differences(made) == []


async def test_where_its_rehearsal_fails_the_campaign_goes_on_and_the_next_decision_knows_why(tmp_path: Path) -> None:
    made = campaign(tmp_path, explore(), fails=[NotWritten("a wrong answer is worth more than a right one")])
    assert (await made.carry_out()).status is CampaignStatus.DONE
    second = made.store.campaigns.decisions(made.id)[1]
    assert second.saw["said"][0]["kind"] == "unwritten"
    assert "worth more than a right one" in second.saw["said"][0]["words"]
    page = campaign_page(made.store, made.id)
    assert page.steps[0].made == "No instrument came of it: a wrong answer is worth more than a right one"
    assert page.said == []
    assert differences(made) == []


async def test_after_several_that_came_to_nothing_no_further_one_is_asked_for(tmp_path: Path) -> None:
    fails = [NotWritten("no")] * MOST_UNWRITTEN
    made = campaign(tmp_path, *[WANTED] * MOST_UNWRITTEN, explore(), fails=fails)
    await made.carry_out()
    actions = [each.action for each in made.store.campaigns.decisions(made.id)]
    assert actions == ["new_instrument"] * MOST_UNWRITTEN + ["explore", "conclude"]


async def test_without_an_llm_the_action_is_refused_with_the_reason(tmp_path: Path) -> None:
    made = MadeUpCampaign(tmp_path, strategist=Cheat(WANTED, WANTED, WANTED))
    outcome = await made.carry_out()
    assert outcome.status is CampaignStatus.FAILED
    assert "no LLM is configured here that could write one" in outcome.reason


async def test_one_that_was_asked_for_before_the_llm_was_taken_away_comes_to_nothing(tmp_path: Path) -> None:
    made = campaign(tmp_path, explore(), fails=[StrategistAway("no answer")])
    assert (await made.carry_out()).status is CampaignStatus.WAITING
    made.write = None
    assert (await made.carry_out()).status is CampaignStatus.DONE
    assert NO_LLM in campaign_page(made.store, made.id).steps[0].made


class Killed(Exception):
    """The process dies here."""


@pytest.mark.parametrize("at", range(1, 13))
async def test_killed_at_any_line_it_is_neither_written_twice_nor_lost(tmp_path: Path, at: int) -> None:
    made = campaign(tmp_path, on("written", explore()))
    writer, left, real = made.write, [at], made.store.campaigns.record
    assert isinstance(writer, Writer)

    def dies(*args: Any) -> int:
        left[0] -= 1
        if left[0] == 0:
            raise Killed
        found = real(*args)
        left[0] -= 1
        if left[0] == 0:
            raise Killed
        return found

    made.store.campaigns.record = dies  # type: ignore[assignment]
    for _ in range(4):
        try:
            await made.carry_out()
        except Killed:
            continue
        if waits_for_a_person(made.store, made.store.campaigns.get(made.id)):
            made.store.campaigns.record = real  # type: ignore[method-assign]
            approve(made.store, made.id, "", "ada")
            made.store.campaigns.record = dies  # type: ignore[assignment]
    assert lines(made, WRITTEN, ASKED, "approved", JOINED, UNWRITTEN) == [WRITTEN, ASKED, "approved", JOINED]
    assert lines(made, WRITING) == [WRITING]
    assert len(writer.asked) == (2 if at == 1 else 1), "an answer that was recorded is not paid for again"
    assert [study.instrument for study in observe(made.store, made.id).studies] == ["written"]
    assert differences(made) == []


async def test_it_waits_where_the_llm_that_is_to_write_it_cannot_be_asked(tmp_path: Path) -> None:
    made = campaign(tmp_path)
    made.write = LlmAway("no LLM here").write
    outcome = await made.carry_out()
    assert (outcome.status, outcome.reason) == (CampaignStatus.WAITING, "no LLM here")
    assert lines(made, UNWRITTEN) == []
    made.store.campaigns.record(made.id, UNWRITTEN, {"decision": 1, "words": "too hard", "by": ""})
    made.strategist = LlmAway("no LLM here")
    outcome = await made.carry_out()
    assert (outcome.status, outcome.reason) == (CampaignStatus.WAITING, "no LLM here")
    assert len(made.store.campaigns.decisions(made.id)) == 1


@pytest.mark.parametrize(
    ("tampering", "words"),
    [
        ("UPDATE campaign_events SET kind = 'noted' WHERE kind = 'approved'", "it joined without a person's approval"),
        (
            "UPDATE campaign_events SET detail = replace(detail, '\"generated\": true', '\"generated\": false') WHERE kind = 'joined'",
            "what joined is not what was written",
        ),
        (
            "UPDATE campaign_events SET detail = replace(detail, 'answer == right', 'answer != right') WHERE kind = 'written'",
            "the text that a person approved is not the code that joined",
        ),
        (
            "UPDATE campaign_events SET detail = replace(detail, '\"decision\": 1, ', '') WHERE kind = 'joined'",
            "the goal does not name it there and no decision asked for it",
        ),
        (
            'UPDATE decisions SET plan = replace(plan, \'"instrument_code":"\', \'"instrument_code":"0\') WHERE plan IS NOT NULL',
            "it ran other code of written than a person approved",
        ),
    ],
)
async def test_verify_sees_one_that_nobody_approved(tmp_path: Path, tampering: str, words: str) -> None:
    made = campaign(tmp_path, on("written", explore()))
    await made.carry_out()
    approve(made.store, made.id, "", "ada")
    await made.carry_out()
    with made.store._db.engine.begin() as connection:
        assert connection.execute(text(tampering)).rowcount == 1
    assert words in "; ".join(differences(made))


async def test_what_was_changed_after_it_was_written_does_not_join(tmp_path: Path) -> None:
    made = campaign(tmp_path, explore())
    await made.carry_out()
    (tmp_path / "written_by_llm" / "reward.py").write_text("def score(answer, right):\n    return 1.0\n")
    approve(made.store, made.id, "looks sound", "ada")
    assert (await made.carry_out()).status is CampaignStatus.DONE
    assert lines(made, JOINED, UNWRITTEN) == [UNWRITTEN]
    second = made.store.campaigns.decisions(made.id)[1]
    assert "are not those that a person approved" in second.saw["said"][0]["words"]
    assert observe(made.store, made.id).instruments == ("simulation",)
    told = campaign_page(made.store, made.id).steps[0].made
    assert "ada approved it: looks sound; it did not join: the files in" in told
    assert differences(made) == []


async def test_what_is_changed_after_it_joined_is_planned_with_no_more(tmp_path: Path) -> None:
    made = campaign(tmp_path)
    await made.carry_out()
    approve(made.store, made.id, "", "ada")
    await made.carry_out()
    assert isinstance(made.write, Writer)
    joined, folder = made.store.campaigns.events(made.id, JOINED), made.write.folder
    check_approved(joined, folder)
    (folder.path / "reward.py").write_text("def score(answer, right):\n    return 1.0\n")
    with pytest.raises(PlanningRefused, match="are not those that a person approved"):
        check_approved(joined, InstrumentFolder(folder.instrument, folder.path, folder_digest(folder.path)))


async def test_of_two_people_who_answer_at_once_the_first_one_counts(tmp_path: Path) -> None:
    made = campaign(tmp_path)
    await made.carry_out()
    both, answers = threading.Barrier(4), list[str]()

    def answered(number: int) -> None:
        store = Store.open(f"sqlite:///{tmp_path}/records.sqlite", clock=made.clock)
        both.wait()
        try:
            if number % 2:
                approve(store, made.id, "", f"person {number}")
            else:
                veto(store, made.id, "no", f"person {number}")
            answers.append(f"person {number}")
        except WrongState:
            pass
        finally:
            store.close()

    people = [threading.Thread(target=answered, args=(number,)) for number in range(4)]
    for each in people:
        each.start()
    for each in people:
        each.join()
    [line] = made.store.campaigns.events(made.id, "approved", "vetoed")
    assert [line.detail["by"]] == answers


# -- the LLM that writes --------------------------------------------------------------------------------------------------------------


async def test_an_llm_writes_it_once_though_the_campaign_dies_after_its_answer(tmp_path: Path) -> None:
    """Its rehearsal runs in the sandbox, as for `researcher start --instrument new`."""
    made = MadeUpCampaign(tmp_path, strategist=Cheat(WANTED))
    llm = ScriptedLlm(completion("Let me think."), said(written()))
    goal = CampaignGoal.model_validate(made.store.campaigns.get(made.id).goal)
    settings = LlmSettings(model="some-llm", patience_s=0.0)
    made.write = writer_of(Home(tmp_path, made.store), goal, settings, made.told.append, llm)
    real = made.store.campaigns.record

    def dies(campaign_id: str, kind: str, detail: Any) -> int:
        if kind == WRITTEN:
            raise Killed
        return real(campaign_id, kind, detail)

    made.store.campaigns.record = dies  # type: ignore[method-assign]
    with pytest.raises(Killed):
        await made.carry_out()
    made.store.campaigns.record = real  # type: ignore[method-assign]
    outcome = await made.carry_out()
    assert outcome.status is CampaignStatus.WAITING
    assert "the instrument parrot, which some-llm wrote" in outcome.reason
    assert len(llm.asked) == 2
    assert BRIEF in texts(llm.asked[0])
    assert lines(made, WRITING) == [WRITING, WRITING]
    [folder] = (tmp_path / "instruments").iterdir()
    [line] = made.store.campaigns.events(made.id, WRITTEN)
    assert line.detail["folder"] == str(folder)
    assert set(line.detail["files"]) == {"instrument.toml", "workflow.py", "reward.py"}
    assert line.detail["aim"]["generated"] is True


@pytest.mark.parametrize(
    ("answers", "fields", "words"),
    [
        ((completion("I would rather not."),), {}, "gave 3 answers, but no instrument that passes the checks"),
        ((said(written()),), {"factors": ["learning_rate", "digits"]}, ""),
        ((said(written()),), {"budget": {"trials": 90, "llm_tokens": 50}}, "exceed the limit of 50 tokens"),
    ],
)
async def test_what_does_not_hold_or_cannot_be_paid_for_is_not_written(
    tmp_path: Path, answers: tuple[dict[str, Any], ...], fields: dict[str, Any], words: str
) -> None:
    made = MadeUpCampaign(tmp_path, strategist=Cheat(WANTED), **{k: v for k, v in fields.items() if k != "factors"})
    document = {**made.store.campaigns.get(made.id).goal, **fields}
    goal = CampaignGoal.model_validate(document)
    llm = ScriptedLlm(*answers)
    made.write = writer_of(Home(tmp_path, made.store), goal, LlmSettings(model="some-llm"), made.told.append, llm)
    assert (await made.carry_out()).status is CampaignStatus.DONE
    assert lines(made, WRITTEN, UNWRITTEN) == [UNWRITTEN]
    [line] = made.store.campaigns.events(made.id, UNWRITTEN)
    assert (words or "parrot has no factor 'digits'") in json.dumps(line.detail, ensure_ascii=False)


async def test_while_the_llm_is_away_the_campaign_waits_and_asks_again(tmp_path: Path) -> None:
    made = MadeUpCampaign(tmp_path, strategist=Cheat(WANTED))
    goal = CampaignGoal.model_validate(made.store.campaigns.get(made.id).goal)
    llm = ScriptedLlm(LlmOutage("503"), said(written()))
    settings = LlmSettings(model="some-llm", patience_s=0.0)
    made.write = writer_of(Home(tmp_path, made.store), goal, settings, made.told.append, llm)
    outcome = await made.carry_out()
    assert (outcome.status, "503" in outcome.reason) == (CampaignStatus.WAITING, True)
    assert "which some-llm wrote" in (await made.carry_out()).reason
