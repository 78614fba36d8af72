"""`researcher campaign`: what it refuses, what it says of a campaign, and what people do to one."""

from __future__ import annotations

import asyncio
import json
import os
import re
import socket
import tarfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from foundation.clock import ManualClock, SystemClock
from researcher.campaign import people
from researcher.executor.errors import ClusterUnreachable, InstrumentChanged, NoServersLeft
from researcher.executor.processes import Berth
from researcher.home import DATABASE, open_home
from researcher.main import main
from researcher.models import CampaignStatus, StudyStatus
from researcher.ownership import owned_at_rest, owned_now, this_process
from researcher.schedule.daemon import Carrier, only_daemon
from researcher.study.plan import Plan
from tests.fakes.campaign import MadeUpCampaign
from tests.fakes.notices import webhook
from tests.researcher.campaign.test_honesty import Cheat
from tests.researcher.campaign.test_new_instrument import WANTED, Writer

DEAD = f"{socket.gethostname()}/1/0"
"""A process of this machine that has ended."""
Capture = pytest.CaptureFixture[str]


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    found = tmp_path / "home"
    found.mkdir()
    monkeypatch.setenv("RESEARCHER_HOME", str(found))
    monkeypatch.delenv("RESEARCHER_DATABASE_URL", raising=False)
    return found


def campaign(home: Path, **fields: Any) -> MadeUpCampaign:
    """One in that home, carried out as far as it goes by itself."""
    (home / "studies").mkdir(exist_ok=True)
    made = MadeUpCampaign(home / "studies", url=f"sqlite:///{home / DATABASE}", **fields)
    asyncio.run(made.carry_out())
    return made


@pytest.fixture
def done(home: Path) -> Iterator[MadeUpCampaign]:
    made = campaign(home)
    yield made
    made.store.close()


@pytest.fixture
def waiting(home: Path) -> Iterator[MadeUpCampaign]:
    made = campaign(home, approve="study")
    yield made
    made.store.close()


def said(capsys: Capture, code: int, *words: str) -> Any:
    assert main(["campaign", *words, "--json"]) == code
    return json.loads(capsys.readouterr().out)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("goal: better\ninstruments: [arithmetic]\n", "budget"),
        ("goal: better\ninstruments: [arithmetic]\nbudget: {trials: 20}\nfactor: [kl]\n", "did you mean 'factors'"),
        ("goal: better\ninstruments: [arithmetic]\nbudget: {trials: 20}\nfactors: [learning_rte]\n", "learning_rate"),
        (
            "goal: better\ninstruments: [arithmetic]\nbudget: {trials: 20}\nfactors: [{kl: [0.1]}]\n",
            "factors: a list can only name factors",
        ),
        (
            "goal: better\ninstruments: [arithmetic]\nbudget: {trials: 20}\nfactors: {kl: [0.1, 7]}\n",
            "goal.yaml:4: factors.kl",
        ),
        (
            "goal: better\ninstruments: [arithmetic]\nbudget: {trials: 20}\nobjective: {metric: auc}\n",
            "objective.metric",
        ),
        ("goal: better\ninstruments: [arithmetc]\nbudget: {trials: 20}\n", "goal.yaml:2: instruments"),
        ("goal: better\ninstruments: [arithmetic]\nbudget: {wall: 1h}\nschedule: {windows: [ten]}\n", "goal.yaml:4"),
        (
            "goal: better\ninstruments: [arithmetic]\nbudget: {trials: 20}\nnotify: [NOWHERE]\n",
            "RESEARCHER_NOTIFY_NOWHERE",
        ),
        ("- a list\n", "has no keys"),
    ],
)
def test_a_goal_that_cannot_be_pursued_is_refused_with_what_to_change(
    home: Path, tmp_path: Path, capsys: Capture, text: str, words: str
) -> None:
    file = tmp_path / "goal.yaml"
    file.write_text(text)
    assert main(["campaign", "start", str(file)]) == 2
    assert words in capsys.readouterr().err


def test_an_address_among_a_goals_services_is_not_repeated(home: Path, tmp_path: Path, capsys: Capture) -> None:
    file = tmp_path / "goal.yaml"
    file.write_text(
        "goal: better\ninstruments: [arithmetic]\nbudget: {trials: 20}\nnotify: ['slack://T0KENA/T0KENB/T0KENC']\n"
    )
    assert main(["campaign", "start", str(file)]) == 2
    refused = capsys.readouterr().err
    assert "goal.yaml:4: notify: give names in capitals, such as SLACK" in refused
    assert "T0KEN" not in refused


def test_a_dry_run_shows_the_levels_that_may_be_tried(home: Path, tmp_path: Path, capsys: Capture) -> None:
    file = tmp_path / "goal.yaml"
    file.write_text("goal: better\ninstruments: [arithmetic]\nbudget: {trials: 100}\nfactors: {kl: [0.1]}\n")
    found = said(capsys, 0, "start", str(file), "--dry-run")
    [factor] = found["aim"]["factors"]
    assert (factor["name"], factor["levels"], factor["default"]) == ("kl", [0.0, 0.1], 0.0)
    assert found["first"]["proposal"]["action"] == "explore"
    assert 0 < found["first"]["trials"][0] <= 25
    assert not list(home.glob("*.db"))


@pytest.mark.parametrize("strategist", ["builtin", "llm"])
def test_a_dry_run_says_first_that_the_echo_engine_trains_nothing(
    home: Path, tmp_path: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch, strategist: str
) -> None:
    monkeypatch.setenv("RESEARCHER_LLM_MODEL", "some-llm")
    file = tmp_path / "goal.yaml"
    file.write_text(
        f"goal: better\ninstruments: [arithmetic]\nbudget: {{trials: 100}}\nfactors: {{kl: [0.1]}}\nstrategist: {strategist}\n"
    )
    dry = ["campaign", "start", str(file), "--dry-run"]
    assert main([*dry, "--engine", "echo"]) == 0
    first, second, *_ = capsys.readouterr().out.splitlines()
    assert first.startswith("engine      echo: no model is trained, so nothing it finds is a result")
    assert ("the price below is for real trials" in first) is (strategist == "builtin")
    assert second == "goal: better"
    assert main(dry) == 0
    assert capsys.readouterr().out.startswith("goal: better\n")
    assert said(capsys, 0, *dry[1:], "--engine", "echo")["engine"] == "echo"


def test_a_budget_that_pays_for_no_study_is_refused_before_anything_is_recorded(
    home: Path, tmp_path: Path, capsys: Capture
) -> None:
    file = tmp_path / "goal.yaml"
    file.write_text("goal: better\ninstruments: [arithmetic]\nbudget: {trials: 10}\nfactors: {kl: [0.1]}\n")
    assert main(["campaign", "start", str(file)]) == 4
    refused = capsys.readouterr().err
    assert "goal.yaml:3: budget: too small for a first study" in refused
    enough = re.search(r": trials ([0-9]+) would be enough", refused)
    assert enough is not None
    file.write_text(file.read_text().replace("trials: 10", f"trials: {enough[1]}"))
    assert said(capsys, 0, "start", str(file), "--dry-run")["first"]["proposal"]["action"] == "explore"
    assert said(capsys, 0, "list") == []


def test_it_says_what_was_found_and_verifies_it(done: MadeUpCampaign, tmp_path: Path, capsys: Capture) -> None:
    assert [each["id"] for each in said(capsys, 0, "list")] == [done.id]
    status = said(capsys, 0, "status")
    assert status["incumbent"] == {"learning_rate": 1.6e-4}
    assert main(["campaign", "status"]) == 0
    rest = f"left: {status['left']['trials']} trials (60 for confirmations only), enough for about {status['trials_left']} more"
    assert rest in capsys.readouterr().out
    assert Path(said(capsys, 0, "report")["markdown"]).is_file()
    target = tmp_path / "campaign.tar.gz"
    said(capsys, 0, "export", "--to", str(target))
    with tarfile.open(target) as archive:
        assert f"{done.id}/campaign.json" in archive.getnames()
    assert main(["campaign", "tell", "more of it"]) == 1
    assert "can no longer be told anything" in capsys.readouterr().err


def test_people_steer_one_that_waits(waiting: MadeUpCampaign, tmp_path: Path, capsys: Capture) -> None:
    assert said(capsys, 3, "status")["waits_for"] == {"decision": 1, "needs": "approval"}
    assert said(capsys, 0, "tell", "leave the temperature alone")["told"] == "leave the temperature alone"
    assert main(["campaign", "tell", "latest", "rates diverge"]) == 0
    assert "has no other effect" in capsys.readouterr().out
    assert main(["campaign", "tell", "latest", "leave it", "--leave", "temprature"]) == 2
    assert "'temprature' is not a factor of this campaign; did you mean temperature?" in capsys.readouterr().err
    assert said(capsys, 0, "tell", "latest", "leave it", "--leave", "temperature, learning_rate")["leave"] == [
        "temperature",
        "learning_rate",
    ]
    assert said(capsys, 0, "tell", "latest", "vary all", "--leave", "")["leave"] == []
    assert said(capsys, 0, "amend", "--trials", "300", "--because", "it is cheap")["budget"] == {"trials": 300}
    for wrong in (["--trials", "9" * 400], ["--tokens", "9" * 30], ["--money", "inf"], ["--budget", f"{'9' * 12}h"]):
        assert main(["campaign", "amend", *wrong, "--because", "no end"]) == 2
        assert re.search("is too large|should be a finite number", capsys.readouterr().err)
    study = tmp_path / "study.yaml"
    study.write_text("steps: 20\ncompre: {temperature: {levels: [0.7]}}\n")
    assert main(["campaign", "tell", "--study", str(study), "latest", "it should matter"]) == 2
    assert "study.yaml:2: compre: did you mean compare?" in capsys.readouterr().err
    study.write_text("compare: {temperature: {levels: [0.7]}}\n")
    assert said(capsys, 0, "tell", "--study", str(study), "latest", "it should matter")["study"]
    assert said(capsys, 0, "approve")["decision"] == 1
    assert main(["campaign", "approve"]) == 1
    assert "is not waiting for approval" in capsys.readouterr().err
    assert said(capsys, 0, "veto", "--because", "on second thoughts")["decision"] == 1
    said(capsys, 0, "stop")
    assert said(capsys, 0, "status")["status"] == "stopped"


@pytest.fixture
def orphaned(home: Path) -> Iterator[tuple[MadeUpCampaign, str, Berth]]:
    """One whose worker was killed in its first study, the study, and the study's server, which is still there."""

    class Killed(BaseException):
        pass

    (home / "studies").mkdir()
    made = MadeUpCampaign(home / "studies", url=f"sqlite:///{home / DATABASE}")

    def begin(study_id: str) -> None:
        [decision] = made.store.campaigns.decisions(made.id)
        made.store.plans.save(study_id, Plan.model_validate_json(decision.plan or ""))
        made.store.studies.set_status(study_id, StudyStatus.RUNNING)
        raise Killed

    made.runner.before = begin
    with pytest.raises(Killed):
        asyncio.run(made.carry_out())
    [decision] = made.store.campaigns.decisions(made.id)
    for each in (made.id, decision.study_id):
        made.store.leases.acquire(str(each), DEAD, 1e9)
    berth = Berth(home / "studies" / str(decision.study_id) / "server" / "process", SystemClock())
    berth.start(["/bin/sleep", "600"], {})
    yield made, str(decision.study_id), berth
    asyncio.run(berth.end(1.0))
    made.store.close()


def test_a_stop_ends_what_a_dead_worker_left(orphaned: tuple[MadeUpCampaign, str, Berth], capsys: Capture) -> None:
    made, study, berth = orphaned
    assert main(["campaign", "stop"]) == 0
    assert capsys.readouterr().out == f"{made.id}: stopped\n"
    assert not berth.alive()
    assert made.store.campaigns.get(made.id).status is CampaignStatus.STOPPED
    assert made.store.studies.get(study).status is StudyStatus.STOPPED


def test_a_pause_ends_what_a_dead_worker_left(orphaned: tuple[MadeUpCampaign, str, Berth], capsys: Capture) -> None:
    made, study, berth = orphaned
    assert main(["campaign", "pause"]) == 0
    assert "no process works on it; it stays where it is" in capsys.readouterr().out
    assert not berth.alive()
    assert made.store.campaigns.get(made.id).status is CampaignStatus.WAITING
    assert not made.store.studies.get(study).status.ended


def test_a_stop_ends_what_is_left_of_one_that_has_ended(
    orphaned: tuple[MadeUpCampaign, str, Berth], capsys: Capture
) -> None:
    made, study, berth = orphaned
    with owned_now(made.store, made.id) as own:
        own.campaigns.set_status(made.id, CampaignStatus.STOPPED, "by an earlier version, which left its study")
    assert said(capsys, 0, "stop")["status"] == "stopped"
    assert not berth.alive()
    assert made.store.studies.get(study).status is StudyStatus.STOPPED
    assert not made.store.campaigns.get(made.id).stop_requested


def test_one_whose_worker_died_after_its_end_leaves_the_daemons_care(done: MadeUpCampaign, capsys: Capture) -> None:
    done.store.leases.acquire(done.id, DEAD, 1e9)
    carrier = Carrier(done.store, lambda _: None, ManualClock())
    assert carrier.look() == [done.id]
    said(capsys, 0, "resume", "--scheduled")
    assert carrier.look() == []


@pytest.mark.parametrize(
    ("error", "said_of_it"),
    [
        (NoServersLeft("http://a:1 does not answer"), "The campaign waits: no server is left that can run its trials."),
        (
            ClusterUnreachable("no cluster"),
            "The campaign waits: the Ray cluster that runs its clients cannot be reached.",
        ),
        (InstrumentChanged("other code"), "The campaign waits: it cannot continue without help."),
    ],
)
def test_one_that_loses_its_servers_waits_and_says_so_once(
    home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Capture, error: Exception, said_of_it: str
) -> None:
    async def lost(*_: Any, **__: Any) -> Any:
        raise error

    monkeypatch.setattr("researcher.cli.campaign_worker.work_on", lost)
    file = tmp_path / "goal.yaml"
    file.write_text(
        "goal: better\ninstruments: [arithmetic]\nbudget: {trials: 100}\nfactors: {kl: [0.1]}\nnotify: [HOOK]\n"
    )
    with webhook() as hook:
        monkeypatch.setenv("RESEARCHER_NOTIFY_HOOK", hook.url)
        assert main(["campaign", "start", str(file), "--engine", "echo"]) == 1
        assert main(["campaign", "resume"]) == 1
    assert [each["message"].split("\n")[2] for each in hook.posts] == [said_of_it]
    capsys.readouterr()
    found = said(capsys, 3, "status")
    assert (found["status"], found["reason"]) == ("waiting", str(error))
    assert main(["campaign", "watch"]) == 3
    assert "nobody works on it" in capsys.readouterr().out


def test_watching_one_whose_worker_was_killed_ends(
    orphaned: tuple[MadeUpCampaign, str, Berth], monkeypatch: pytest.MonkeyPatch, capsys: Capture
) -> None:
    made, _, _ = orphaned
    assert main(["campaign", "watch"]) == 3
    told = capsys.readouterr().out.splitlines()
    assert (
        told[-1]
        == f"{made.id}: no daemon is running: `researcher daemon` or `researcher campaign resume {made.id}` continues it"
    )


def test_a_worker_that_lives_is_asked_even_if_its_lease_expired(waiting: MadeUpCampaign, capsys: Capture) -> None:
    waiting.store.leases.acquire(waiting.id, this_process(), -1.0)
    for wish in ("pause", "stop"):
        assert main(["campaign", wish]) == 0
        assert f"asked process {os.getpid()}" in capsys.readouterr().out
    assert waiting.store.campaigns.get(waiting.id).status is CampaignStatus.WAITING


def test_one_that_is_done_by_then_is_not_stopped(done: MadeUpCampaign) -> None:
    home = open_home()
    said = people.stop(done.store, done.id, home.studies, owned_at_rest, lambda *_: [])
    assert (said, done.store.campaigns.get(done.id).status) == ("done already", CampaignStatus.DONE)
    home.store.close()


def test_the_daemon_goes_on_once_a_person_has_answered(waiting: MadeUpCampaign, capsys: Capture) -> None:
    launched: list[str] = []
    carrier = Carrier(waiting.store, launched.append, ManualClock())
    assert waiting.id in carrier.look()
    assert launched == []
    said(capsys, 0, "approve")
    carrier.look()
    assert launched == [waiting.id]


def test_an_answered_one_waits_for_nobody_while_a_daemon_lives(waiting: MadeUpCampaign, capsys: Capture) -> None:
    command = f"researcher campaign resume {waiting.id}"
    with only_daemon():
        assert said(capsys, 3, "status")["unattended"] == "the daemon continues it once there is an answer"
        said(capsys, 0, "approve")
        assert said(capsys, 0, "status")["unattended"] == "the daemon continues it"
    assert (
        said(capsys, 3, "status")["unattended"]
        == f"no daemon is running: `researcher daemon` or `{command}` continues it"
    )


def test_a_goal_that_a_campaign_pursues_already_is_started_once(
    home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Capture
) -> None:
    monkeypatch.setattr("researcher.schedule.daemon.ensure_daemon", lambda: None)
    file = tmp_path / "goal.yaml"
    file.write_text("goal: What learns fastest?\ninstruments: [arithmetic]\nbudget: {wall: 2h}\n")
    asked = ["start", str(file), "--engine", "echo", "--detach"]
    first = said(capsys, 0, *asked)["campaign"]
    assert main(["campaign", *asked]) == 2
    assert f"goal.yaml:1: goal: {first} already pursues this goal; --again starts another" in capsys.readouterr().err
    assert said(capsys, 0, *asked, "--again")["campaign"] != first


def test_a_campaign_that_began_with_an_llm_waits_where_there_is_none(
    home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Capture
) -> None:
    monkeypatch.setattr("researcher.schedule.daemon.ensure_daemon", lambda: None)
    file = tmp_path / "goal.yaml"
    file.write_text("goal: What learns fastest?\ninstruments: [arithmetic]\nbudget: {wall: 2h}\n")
    monkeypatch.setenv("RESEARCHER_LLM_MODEL", "some-llm")
    begun = said(capsys, 0, "start", str(file), "--detach")["campaign"]
    monkeypatch.delenv("RESEARCHER_LLM_MODEL")
    assert main(["campaign", "start", str(file), "--detach"]) == 2
    assert f"{begun} already pursues this goal" in capsys.readouterr().err
    assert main(["campaign", "resume", begun]) == 3
    assert "cannot be asked here: strategist: llm needs an LLM" in capsys.readouterr().out
    monkeypatch.setenv("RESEARCHER_LLM_PRICE_IN", "1")
    found = said(capsys, 3, "status", begun)
    assert (found["goal"]["strategist"], found["decisions"]) == ("llm", [])
    other = said(capsys, 0, "start", str(file), "--detach", "--again")["campaign"]
    monkeypatch.setenv("RESEARCHER_LLM_MODEL", "some-llm")
    assert said(capsys, 3, "status", other)["goal"]["strategist"] == "builtin"


def test_a_topic_makes_a_goal(home: Path, capsys: Capture) -> None:
    topic = "What makes GRPO learn one-digit sums fastest? Two hours."
    found = said(capsys, 0, "start", "--planner", "builtin", "--topic", topic, "--dry-run")
    assert found["goal"]["goal"] == topic
    assert found["goal"]["budget"] == {"wall": "2h"}
    factors = {factor["name"] for factor in found["aim"]["factors"]}
    assert {"learning_rate", "epochs"} <= factors
    assert "temperature" not in factors  # it changes how what is to rise is measured


def test_an_answer_to_an_earlier_decision_is_refused(waiting: MadeUpCampaign, capsys: Capture) -> None:
    said(capsys, 0, "veto", "--decision", "1", "--because", "too dear")
    asyncio.run(waiting.carry_out())
    for answer in (["approve"], ["veto", "--because", "too dear"]):
        assert main(["campaign", *answer, "--decision", "1"]) == 1
        assert "the campaign has decided again: look at the new decision" in capsys.readouterr().err
    assert said(capsys, 0, "approve", "--decision", "2")["decision"] == 2


def test_a_vetoed_study_stays_stopped_when_the_campaign_goes_on(waiting: MadeUpCampaign, capsys: Capture) -> None:
    said(capsys, 0, "veto", "--because", "too dear")
    waiting.store.campaigns.request(waiting.id, stop=False, pause=False)
    asyncio.run(waiting.carry_out())
    assert waiting.runner.ran == []
    assert len(waiting.store.campaigns.decisions(waiting.id)) == 2


def test_a_goal_on_several_instruments_shows_what_may_be_tried_on_each(
    home: Path, tmp_path: Path, capsys: Capture
) -> None:
    file = tmp_path / "goal.yaml"
    file.write_text(
        "goal: better\ninstruments: [arithmetic, guess_number]\nbudget: {trials: 200}\nfactors: [learning_rate, kl]\n"
    )
    found = said(capsys, 0, "start", str(file), "--dry-run")
    assert [aim["instrument"] for aim in (found["aim"], *found["others"])] == ["arithmetic", "guess_number"]
    assert found["first"]["proposal"]["instrument"] is None
    file.write_text("goal: better\ninstruments: [arithmetic, guess_number]\nbudget: {trials: 90}\nfactors: [digits]\n")
    assert main(["campaign", "start", str(file)]) == 2
    assert "factors.digits: guess_number has no factor" in capsys.readouterr().err
    assert main(["campaign", "start", str(file), "--instrument", "countdown"]) == 2
    assert "drop --instrument" in capsys.readouterr().err


def test_a_topic_is_studied_on_each_instrument_that_is_named(home: Path, capsys: Capture) -> None:
    named = ["--instrument", "arithmetic", "--instrument", "guess_number"]
    topic = "Which learning rate is best, and does the temperature matter? Two hours."
    found = said(capsys, 0, "start", "--planner", "builtin", "--topic", topic, *named, "--dry-run")
    assert found["goal"]["instruments"] == ["arithmetic", "guess_number"]
    assert [aim["instrument"] for aim in found["others"]] == ["guess_number"]


def test_a_person_answers_at_an_instrument_that_an_llm_wrote(home: Path, capsys: Capture) -> None:
    (home / "studies").mkdir()
    made = MadeUpCampaign(home / "studies", url=f"sqlite:///{home / DATABASE}", strategist=Cheat(WANTED, WANTED))
    made.write = Writer(made)
    asyncio.run(made.carry_out())
    waiting = said(capsys, 3, "status")
    assert waiting["waits_for"] == {"decision": 1, "needs": "approval"}
    assert "studies/written_by_llm: read it" in waiting["reason"]
    assert main(["campaign", "veto", "--because", "guessable"]) == 0
    assert "decision 1 (new_instrument) is vetoed; the instrument is not used" in capsys.readouterr().out
    asyncio.run(made.carry_out())
    assert said(capsys, 0, "approve", "--because", "better")["decision"] == 2
    asyncio.run(made.carry_out())
    assert [each["instrument"] for each in said(capsys, 0, "status")["instruments"]] == ["simulation", "written"]
    made.store.close()
