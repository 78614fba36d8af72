"""The report of a study that lies in SQL: what is written from the records is verified from the records."""

from __future__ import annotations

import json
import sqlite3
from pathlib import Path
from typing import Any

import pytest

from foundation.clock import ManualClock
from researcher.analysis.knowledge import findings_of
from researcher.analysis.metrics import finals
from researcher.analysis.verdicts import conclude
from researcher.campaign.goal import CampaignGoal, aim_of
from researcher.campaign.records import observe
from researcher.campaign.report import write_campaign_report
from researcher.cli import DONE, FAILED
from researcher.conduct import report
from researcher.design.transfer import scored_on
from researcher.instruments.catalogue import open_instrument
from researcher.main import main
from researcher.models import DecisionRecord, LlmCall, StudyData, StudyOptions, StudyRecord, StudyStatus, TrialRecord
from researcher.report.conducted import Difference
from researcher.report.expressions import Evaluator
from researcher.report.records import Records
from researcher.report.verify import verify
from researcher.store.errors import Unreadable
from researcher.store.store import Store
from researcher.study.plan import Verdict
from tests.fakes.concluded_study import BASE, TREATMENT, concluded, supported
from tests.fakes.study import METRIC, done_trial, sent_spec, study_plan, trials_with


@pytest.fixture
def database(tmp_path: Path) -> Path:
    return tmp_path / "researcher.db"


@pytest.fixture
def store(database: Path) -> Store:
    return Store.open(f"sqlite:///{database}")


def recorded(store: Store, data: StudyData, study_id: str | None = None) -> str:
    """The same study, as a conduct leaves it in SQL. study_id: of one that has not begun; None: a new one."""
    study_id = study_id or store.studies.create(data.topic, {})
    store.plans.save(study_id, data.plan)
    store.budgets.set(study_id, "trials", data.plan.budget.trials)
    store.budgets.set(study_id, "wall_s", data.plan.budget.wall_s)
    for stage in data.plan.stages:
        store.plans.set_stage_status(study_id, stage.id, "running")
        for trial in (each for each in data.trials if each.stage == stage.id):
            (made,) = store.trials.ensure(study_id, trial.stage, [(trial.arm, trial.seed)])
            store.trials.record_intent(study_id, made.key, 1, "server", made.key, sent_spec(study_id, data.plan, made))
            store.trials.record_submitted(study_id, made.key, "run-1", handed_over(data, made))
            store.trials.finish(study_id, made.key, trial.finals, trial.series)
        store.plans.set_stage_status(study_id, stage.id, "done")
    for event in data.events:
        store.journal.record(study_id, event.kind, event.detail)
    trials = store.trials.all(study_id)
    verdicts = conclude(data.plan, trials).verdicts
    for record in verdicts:
        store.verdicts.record(study_id, "compare", record)
    store.findings.save(study_id, findings_of(study_id, data.plan, verdicts, 1.0, trials))
    return study_id


def handed_over(data: StudyData, trial: TrialRecord) -> dict[str, Any]:
    """The part of the blueprint that plan and arm settle."""
    plan = data.plan
    asked = {"tasks": plan.heldout_tasks, "episodes": plan.heldout_episodes, "temperature": plan.heldout_temperature}
    facts = {"trial_key": trial.key, "run_id": "run-1", "seed": trial.seed, "group_size": 8}
    return {**facts, "parameters": dict(plan.task), "code_version": plan.instrument_code, "heldout": asked}


def test_a_report_from_sql_verifies_and_one_altered_number_in_sql_is_named(
    store: Store, database: Path, tmp_path: Path
) -> None:
    study_id = recorded(store, supported())
    report(store, study_id, tmp_path / "reports")

    def differences() -> list[str]:
        data, claims = store.study_data(study_id), store.reports.claims(study_id)
        return [difference.claim for difference in verify(data, claims, store.reports.files(study_id))]

    assert differences() == []
    with sqlite3.connect(database) as connection:
        kept = connection.execute("SELECT rowid, value FROM trial_metrics LIMIT 1").fetchone()
        connection.execute("UPDATE trial_metrics SET value = 'abc' WHERE rowid = ?", kept[:1])
    with pytest.raises(Unreadable, match=r"trials and their metrics .*abc"):
        differences()
    with sqlite3.connect(database) as connection:
        connection.execute("UPDATE trial_metrics SET value = ? WHERE rowid = ?", kept[::-1])
        where = "name = 'auc' AND step IS NULL AND trial_key LIKE '%lr=base/2'"
        connection.execute(f"UPDATE trial_metrics SET value = value + 0.0001 WHERE {where}")
    found = differences()
    assert found[0] == "trial.lr=base.2.auc"
    assert "H1.diff" in found
    with sqlite3.connect(database) as connection:
        connection.execute(f"UPDATE trial_metrics SET value = value - 0.0001 WHERE {where}")
        connection.execute("UPDATE trial_metrics SET value = 0 WHERE name = 'entropy' AND step = 3")
    assert "trial.lr=base.0.fingerprint" in differences()
    with sqlite3.connect(database) as connection:
        connection.execute("UPDATE hypotheses SET margin = margin / 2")
        connection.execute("UPDATE stages SET max_seeds = 99 WHERE id = 'compare'")
    assert {"hypothesis H1", "stage compare"} <= set(differences())
    store.close()


@pytest.fixture
def written(store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> str:
    """A study with its report, as `researcher verify` finds it."""
    monkeypatch.setenv("RESEARCHER_HOME", str(tmp_path))
    monkeypatch.delenv("RESEARCHER_DATABASE_URL", raising=False)
    plan = study_plan(task={"largest": 9})
    study_id = recorded(store, concluded(plan, trials_with(plan, {"lr=base": BASE, TREATMENT: (0.55, 0.56, 0.54)})))
    report(store, study_id, tmp_path / "studies")
    store.close()
    assert main(["verify", study_id]) == DONE
    capsys.readouterr()
    return study_id


def _changed(database: Path, statement: str) -> None:
    with sqlite3.connect(database) as connection:
        connection.execute("PRAGMA foreign_keys=OFF")
        assert connection.execute(statement).rowcount > 0


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ("UPDATE stages SET arms = '[\"lr=base\"]' WHERE id = 'compare'", "stage compare = arms"),
        ("DELETE FROM stages WHERE id = 'compare'", "stage compare = arms"),
        ("DELETE FROM hypotheses", "hypothesis H1"),
        (
            "INSERT INTO stages SELECT study_id, plan_version, 'extra', position, kind, arms, seeds, max_seeds, first_seed, status,"
            " started_at, ended_at FROM stages LIMIT 1",
            "stage extra",
        ),
        ("UPDATE findings SET verdict = 'refuted'", "finding"),
        ("UPDATE verdicts SET stage = 'floor'", "verdict H1"),
        ("UPDATE verdicts SET sentinels = '[\"collapse\"]'", "verdict H1 = sentinels"),
        (
            "INSERT INTO verdicts (study_id, plan_version, stage, hypothesis, position, verdict, reason, effect, at)"
            " SELECT study_id, plan_version, 'floor', hypothesis, -1, 'refuted', reason, effect, at FROM verdicts",
            "reported 'floor, compare', recomputed 'compare'",
        ),
        ("DELETE FROM attempts WHERE trial_key LIKE '%lr=base/2'", "lr=base/2: reported 1, recomputed 0"),
        ("UPDATE attempts SET number = 2 WHERE trial_key LIKE '%lr=base/2'", "lr=base/2: reported 1, recomputed 1"),
        (
            "UPDATE attempts SET outcome = 'failed' WHERE trial_key LIKE '%lr=base/2'",
            "(failed) do not fit a trial that is done",
        ),
        (
            "UPDATE attempts SET spec = json_set(spec, '$.optimizer.learning_rate', 1.0) WHERE trial_key LIKE '%lr=base/2'",
            "lr=base/2 = spec optimizer.learning_rate: reported 1.0, recomputed 1e-05",
        ),
        (
            "UPDATE attempts SET spec = json_set(spec, '$.seed', 7) WHERE trial_key LIKE '%lr=base/2'",
            "lr=base/2 = spec seed: reported 7, recomputed 2",
        ),
        (
            "UPDATE attempts SET spec = json_set(spec, '$.limits.steps', 99) WHERE trial_key LIKE '%lr=base/2'",
            "lr=base/2 = spec limits.steps: reported 99, recomputed 4",
        ),
        (
            "UPDATE attempts SET blueprint = json_set(blueprint, '$.parameters.largest', 3) WHERE trial_key LIKE '%lr=base/2'",
            "lr=base/2 = blueprint parameters.largest: reported 3, recomputed 9",
        ),
        (
            "UPDATE attempts SET blueprint = json_set(blueprint, '$.heldout.tasks', 3) WHERE trial_key LIKE '%lr=base/2'",
            "lr=base/2 = blueprint heldout.tasks: reported 3, recomputed 4",
        ),
        (
            "UPDATE attempts SET blueprint = json_set(blueprint, '$.code_version', 'abc') WHERE trial_key LIKE '%lr=base/2'",
            "lr=base/2 = blueprint code_version: reported 'abc', recomputed '0000",
        ),
        (
            "UPDATE attempts SET blueprint = json_set(blueprint, '$.group_size', 4) WHERE trial_key LIKE '%lr=base/2'",
            "lr=base/2 = blueprint group_size: reported 4, recomputed 8",
        ),
        ("UPDATE budgets SET \"limit\" = 99 WHERE kind = 'trials'", "budget trials: reported 99.0, recomputed 20"),
        ("UPDATE budgets SET \"limit\" = 99 WHERE kind = 'wall_s'", "budget wall_s: reported 99.0, recomputed 3600.0"),
        ("UPDATE stages SET started_at = started_at + 600 WHERE id = 'floor'", "stage floor = started_at"),
        ("UPDATE stages SET started_at = started_at - 600 WHERE id = 'compare'", "stage compare = started_at"),
        ("UPDATE stages SET ended_at = ended_at - 600 WHERE id = 'compare'", "stage compare = ended_at"),
        ("UPDATE stages SET ended_at = NULL WHERE id = 'floor'", "stage floor = ended_at"),
        ("DELETE FROM findings", "finding"),
        ("UPDATE trials SET arm = 'abc' WHERE arm = 'lr=base' AND seed = 0", "the plan has no arm 'abc'"),
    ],
)
def test_what_no_longer_is_the_plans_is_named(
    written: str, database: Path, change: str, named: str, capsys: pytest.CaptureFixture[str]
) -> None:
    _changed(database, change)
    assert main(["verify", written]) == FAILED
    assert named in capsys.readouterr().out


@pytest.mark.parametrize(
    "change",
    [
        "UPDATE claims SET value = 'abc' WHERE position = 3",
        "UPDATE events SET detail = '{' WHERE kind = 'report'",
        "UPDATE events SET at = 'abc' WHERE kind = 'report'",
        "UPDATE studies SET options = '{'",
        "UPDATE studies SET status = 'abc'",
        "UPDATE studies SET created_at = 'abc'",
    ],
)
def test_a_row_that_cannot_be_read_is_named_in_one_line(
    written: str, database: Path, change: str, capsys: pytest.CaptureFixture[str]
) -> None:
    _changed(database, change)
    assert main(["verify", written]) == FAILED
    said = capsys.readouterr().err
    assert "cannot be read; the data was changed after it was written" in said
    assert said.count("\n") == 1


@pytest.mark.parametrize("set_to", ["value = value + 1", "name = 'other'"])
def test_a_report_that_the_records_do_not_carry_is_refused_in_one_line(
    written: str, database: Path, set_to: str, capsys: pytest.CaptureFixture[str]
) -> None:
    _changed(
        database, f"UPDATE trial_metrics SET {set_to} WHERE name = 'auc' AND step IS NULL AND trial_key LIKE '%base/2'"
    )
    assert main(["report", written]) == FAILED
    assert "base/2" in capsys.readouterr().err


def test_where_another_version_concluded_a_study_verify_says_so(
    written: str, store: Store, capsys: pytest.CaptureFixture[str]
) -> None:
    [now] = store.verdicts.all(written)
    store.verdicts.record(written, "compare", now.model_copy(update={"verdict": Verdict.INCONCLUSIVE}))
    assert main(["verify", written]) == FAILED
    assert "a different version" not in capsys.readouterr().out
    seal = store.reports.seal(written)
    assert seal is not None
    store.reports.record(written, store.reports.files(written), seal.model_copy(update={"wording": "another"}))
    assert main(["verify", written]) == FAILED
    assert "a different version of researcher concluded the study" in capsys.readouterr().out


def test_the_time_at_rest_is_no_cost_of_a_trial(database: Path) -> None:
    """A night outside its window, a withdrawn attempt, and a trial that was whole when it was taken up again."""
    clock = ManualClock()
    store = Store.open(f"sqlite:///{database}", clock=clock)
    data = supported()
    study_id = store.studies.create(data.topic, {})
    store.plans.save(study_id, data.plan)
    made = store.trials.ensure(study_id, data.trials[0].stage, [(each.arm, each.seed) for each in data.trials[:3]])

    def begin(trial: TrialRecord, attempt: int) -> None:
        store.trials.record_intent(study_id, trial.key, attempt, "server", f"{trial.key}#{attempt}", {})
        store.trials.record_submitted(study_id, trial.key, "run-1", {})
        clock.advance(100)

    def rest(trial: TrialRecord) -> None:
        store.trials.pause_attempt(study_id, trial.key, "its window closed")
        clock.advance(10)
        store.trials.record_rest(study_id, trial.key, "its window closed")
        clock.advance(54_000)

    night, moved, whole = made
    begin(night, 1)
    rest(night)
    store.trials.continue_attempt(study_id, night.key, 2)
    clock.advance(100)
    store.trials.finish(study_id, night.key, data.trials[0].finals, data.trials[0].series)

    begin(moved, 1)
    rest(moved)
    store.trials.withdraw_attempt(study_id, moved.key, "its server lost its state")
    clock.advance(1000)
    begin(moved, 2)
    store.trials.finish(study_id, moved.key, data.trials[1].finals, data.trials[1].series)

    begin(whole, 1)
    rest(whole)
    store.trials.finish(study_id, whole.key, data.trials[2].finals, data.trials[2].series)

    found = Evaluator(Records(store.study_data(study_id))).value("trial_s()")
    assert found == pytest.approx(210 + 210 + 110)
    store.close()


def test_a_report_tells_what_the_planner_llm_took_and_verify_names_what_was_altered(
    store: Store, database: Path, tmp_path: Path
) -> None:
    study_id = recorded(store, supported())
    call = LlmCall(purpose="plan", model="m", request={}, at=1.0)
    paid = {"answer": {"a": 1}, "prompt_tokens": 1_200, "completion_tokens": 34, "cost": 0.5}
    for each in (call.model_copy(update={"error": "connection refused"}), call.model_copy(update=paid)):
        store.journal.record_llm_call(study_id, each)
    told = (report(store, study_id, tmp_path / "reports") / "report.md").read_text()
    [line] = [line for line in told.splitlines() if line.startswith("- Planner LLM")]
    assert line == "- Planner LLM: 2 calls, 1,234 tokens of prompts and answers, 0.5 in the currency of its prices"
    with sqlite3.connect(database) as tampered:
        tampered.execute("UPDATE llm_calls SET completion_tokens = 33 WHERE answer IS NOT NULL")
    found = verify(store.study_data(study_id), store.reports.claims(study_id), store.reports.files(study_id))
    assert found[0].claim == "cost.llm_tokens"


def test_without_a_price_the_report_says_so_and_without_an_llm_it_is_silent(store: Store, tmp_path: Path) -> None:
    study_id = recorded(store, supported())
    assert "Planner LLM" not in (report(store, study_id, tmp_path / "first") / "report.md").read_text()
    store.journal.record_llm_call(
        study_id, LlmCall(purpose="plan", model="m", request={}, answer={}, prompt_tokens=7, at=1.0)
    )
    told = (report(store, study_id, tmp_path / "second") / "report.md").read_text()
    assert "- Planner LLM: 1 call, 7 tokens of prompts and answers; the endpoint stated no cost" in told


def test_a_report_tells_of_servers_that_were_replaced(store: Store, tmp_path: Path) -> None:
    study_id = recorded(store, supported())
    store.studies.move(study_id, ["http://b:1"])
    told = (report(store, study_id, tmp_path) / "report.md").read_text()
    assert "it continued with `http://b:1` in place of those it had started itself." in told


GUESS = "guess_number"


def in_a_campaign(store: Store, reports: Path, data: StudyData) -> tuple[str, str]:
    """A campaign whose only study so far is this one, with its report; their ids."""
    goal = CampaignGoal.model_validate({"goal": "better", "instruments": ["arithmetic"], "budget": {"trials": 100}})
    aim = aim_of(goal, open_instrument("arithmetic").instrument)
    schedule = {"timetable": {}, "carried": False}
    campaign = store.campaigns.create(goal.document(), aim.model_dump(mode="json"), StudyOptions(), schedule)
    seen = observe(store, campaign)
    decision = DecisionRecord(
        seq=1,
        saw_digest=seen.digest(),
        saw=seen.model_dump(mode="json"),
        strategist="builtin",
        proposals=[],
        action="explore",
        because="a look",
        role="explore",
        plan=data.plan.canonical(),
    )
    study = StudyRecord(
        id="", topic="t", options=StudyOptions(), status=StudyStatus.PLANNING, created_at=0, updated_at=0,
        campaign_id=campaign, role="explore",
    )  # fmt: skip
    study_id = store.campaigns.decide(campaign, decision, (), study).study_id or ""
    recorded(store, data, study_id)
    store.studies.set_status(study_id, StudyStatus.DONE)
    report(store, study_id, reports)
    write_campaign_report(store, campaign, reports)
    return campaign, study_id


@pytest.mark.parametrize(
    "change",
    [
        f"UPDATE trial_metrics SET value = 0.75 WHERE name = 'on:{GUESS}/eval_reward_after' AND trial_key LIKE '%lr=base/2'",
        f"UPDATE trial_metrics SET value = 0.75 WHERE name LIKE '{GUESS}_%' AND trial_key LIKE '%lr=base/2'",
    ],
    ids=["an episode", "a final"],
)
def test_what_a_campaigns_study_scored_on_another_instrument_is_verified_with_the_campaign(
    change: str,
    store: Store,
    database: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setenv("RESEARCHER_HOME", str(tmp_path))
    monkeypatch.delenv("RESEARCHER_DATABASE_URL", raising=False)
    metric = METRIC.model_copy(update={"name": "auc_reward"})
    plan = scored_on(study_plan(metrics=[metric]), [open_instrument(GUESS)])
    there = {f"on:{GUESS}/eval_{what}_after": [0.0, 1.0, 0.0, 1.0] for what in ("reward", "success")}
    values = {"lr=base": BASE, TREATMENT: (0.55, 0.56, 0.54)}
    played = [
        done_trial(plan, arm, seed, value, series=there)
        for arm, each in values.items()
        for seed, value in enumerate(each)
    ]
    trials = [trial.model_copy(update={"finals": finals(plan.metrics, trial.series)}) for trial in played]
    assert {metric.name for metric in plan.metrics if metric.on == GUESS} <= trials[0].finals.keys()
    campaign, study = in_a_campaign(store, tmp_path / "studies", concluded(plan, trials))
    store.close()

    def verified(*words: str) -> tuple[int, str]:
        return main([*words, "--json"]), capsys.readouterr().out

    assert verified("verify", study)[0] == DONE
    code, out = verified("campaign", "verify", campaign)
    assert (code, json.loads(out)["differences"]) == (DONE, [])
    _changed(database, change)
    code, out = verified("verify", study)
    alone = [Difference.model_validate(each) for each in json.loads(out)["differences"]]
    assert code == FAILED
    code, out = verified("campaign", "verify", campaign)
    assert code == FAILED
    assert [line for line in json.loads(out)["differences"] if line.startswith(study)] == [
        f"{study}: {each}" for each in alone
    ]
    assert any(GUESS in str(each) for each in alone)
    _changed(database, "DELETE FROM claims")
    _changed(database, "DELETE FROM events WHERE kind = 'report'")
    code, out = verified("campaign", "verify", campaign)
    assert code == FAILED
    assert f"{study}: the study is done but has no report" in out
