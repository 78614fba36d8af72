"""Answers of people, however they are given: the first one stays, and who comes second is told."""

from __future__ import annotations

import sqlite3
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy.exc import IntegrityError

from researcher.cli import DONE, FAILED, OUT_OF_BUDGET
from researcher.gates import Amendment, amend, answer_gate, answer_text
from researcher.main import main
from researcher.models import Answer, OpenGate, StudyStatus
from researcher.store.errors import WrongState
from tests.fakes.shown_study import at_gate, opened, planned, running
from tests.fakes.specs import planned as designed
from tests.fakes.study import study_plan

ADA = Answer(verdict="approve", words="worth it", by="ada")


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("RESEARCHER_HOME", str(tmp_path))
    monkeypatch.delenv("RESEARCHER_DATABASE_URL", raising=False)
    return tmp_path


def test_the_first_answer_stays_and_the_second_is_told(home: Path) -> None:
    found, _ = opened(home)
    study = at_gate(found.store)
    assert answer_gate(found.store, study, ADA) == "plan/1"
    with pytest.raises(WrongState, match="answered already: approved by ada: worth it"):
        answer_gate(found.store, study, ADA)
    found.store.close()


def test_who_is_overtaken_is_told_what_counts(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Somebody answers between this one's look at the gate and its answer."""
    found, _ = opened(home)
    study = at_gate(found.store)
    look = found.store.gates.open

    def overtaken(study_id: str) -> OpenGate | None:
        before = look(study_id)
        found.store.gates.give(study_id, "plan/1", ADA)
        return before

    monkeypatch.setattr(found.store.gates, "open", overtaken)
    with pytest.raises(WrongState, match="answered already: approved by ada: worth it"):
        answer_gate(found.store, study, Answer(verdict="reject", words="too dear", by="bob"))
    [given] = found.store.journal.events(study, "answer_given")
    assert given.detail["by"] == "ada"
    found.store.close()


def test_the_same_in_the_terminal(home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    found, _ = opened(home)
    study = at_gate(found.store)
    assert main(["approve", study]) == DONE
    assert "plan/1 approved; `researcher resume` continues it" in capsys.readouterr().out
    assert main(["reject", study, "--because", "too dear"]) == FAILED
    assert "answered already: approved" in capsys.readouterr().err
    assert main(["amend", study, "--seeds", "4", "--because", "more"]) == DONE
    assert main(["amend", study, "--because", "more"]) == 2
    assert main(["reject", study, "--because", "too dear"]) == DONE  # the new version was not answered yet
    assert "plan/2 rejected; the study is stopped" in capsys.readouterr().out
    stopped = found.store.studies.get(study)
    assert stopped.status is StudyStatus.STOPPED
    assert "the plan was rejected by" in (stopped.reason or "")
    found.store.close()


def test_a_plan_whose_trials_have_begun_is_not_amended(home: Path) -> None:
    found, _ = opened(home)
    study, _ = running(found.store)
    with pytest.raises(WrongState, match="have begun"):
        amend(found.store, study, Amendment(seeds=4), because="more", by="ada")
    found.store.close()


def test_a_plan_is_amended_together_with_its_reason_or_not_at_all(home: Path) -> None:
    found, _ = opened(home)
    study = at_gate(found.store)
    with closing(sqlite3.connect(home / "researcher.db")) as records:
        records.execute(
            "CREATE TRIGGER no_reason BEFORE INSERT ON events WHEN NEW.kind = 'amended' "
            "BEGIN SELECT RAISE(ABORT, 'cut off'); END"
        )
        with pytest.raises(IntegrityError, match="cut off"):
            amend(found.store, study, Amendment(seeds=4), because="more", by="ada")
        assert found.store.plans.get(study).version == 1
        records.execute("DROP TRIGGER no_reason")
    amend(found.store, study, Amendment(seeds=4), because="more", by="ada")
    [told] = found.store.journal.events(study, "amended")
    assert told.detail == {"version": 2, "because": "more", "by": "ada", "changed": "4 seeds per arm"}
    found.store.close()


def test_an_amendment_that_changes_nothing_is_refused(home: Path) -> None:
    found, _ = opened(home)
    study = at_gate(found.store)
    amend(found.store, study, Amendment(seeds=4, wall_s=9999.0), because="more", by="ada")
    for same in (Amendment(seeds=4), Amendment(wall_s=9999.0), Amendment(seeds=4, wall_s=9999.0)):
        with pytest.raises(WrongState, match=r"\(version 2\) already says so: .*; nothing was amended"):
            amend(found.store, study, same, because="again", by="ada")
    assert found.store.plans.get(study).version == 2
    found.store.close()


@pytest.mark.parametrize("change", [{}, {"seeds": 0}, {"wall_s": 0.0}, {"wall_s": float("nan")}])
def test_an_amendment_changes_something_to_something(change: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=r"amend|above zero"):
        Amendment(**change)


def test_answers_are_told_as_sentences() -> None:
    assert answer_text(ADA) == "approved by ada: worth it"
    assert answer_text(Answer(verdict="reject")) == "rejected"


RACE = {"compare": {"learning_rate": {"levels": [1e-6, 5e-6, 1e-5, 2e-5, 4e-5, 1e-4]}}, "design": "race"}


@pytest.mark.parametrize(("layout", "first"), [({}, 0), ({"looks": 3}, 0), ({"fine": 5}, 0), (RACE, 0), (RACE, 50)])
@pytest.mark.parametrize("seeds", [2, 25])
def test_a_plan_amended_to_other_seeds_is_laid_out_as_one_that_was_asked_for_with_them(
    home: Path, layout: dict[str, Any], first: int, seeds: int
) -> None:
    """Looks keep their shares, confirmations their fresh seeds, and the budget pays for all trials."""
    found, _ = opened(home)
    layout = {**layout, "budget": {"wall": 1e6}}
    study = planned(found.store, plan=designed(**layout, seeds={"first": first}))
    amended = amend(found.store, study, Amendment(seeds=seeds), because="more", by="ada")
    wanted = designed(**layout, seeds={"min": seeds, "max": seeds, "first": first})
    assert amended.stages == wanted.stages
    assert amended.budget == wanted.budget
    found.store.close()


def test_an_amendment_that_its_budget_does_not_pay_for_is_refused_as_a_start_with_it_is(
    home: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    found, _ = opened(home)
    study = at_gate(found.store)
    for change in (["--seeds", "200"], ["--budget", "1m"]):
        assert main(["amend", study, *change, "--because", "more"]) == OUT_OF_BUDGET
        said = capsys.readouterr().err
        assert "budget.wall: " in said
        assert "give a budget of" in said
    assert main(["amend", study, "--seeds", "200", "--budget", "24h", "--because", "more"]) == DONE
    assert found.store.plans.get(study).version == 2
    found.store.close()


def test_one_seed_per_arm_is_refused_in_one_line(home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    found, _ = opened(home)
    study = at_gate(found.store)
    assert main(["amend", study, "--seeds", "1", "--because", "cheap"]) == 2
    assert "at least 2 are needed" in capsys.readouterr().err
    found.store.close()


def test_an_amendment_that_runs_out_of_seeds_is_refused(home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    found, _ = opened(home)
    plan = study_plan()
    late = tuple(stage.model_copy(update={"first_seed": 2**31 - 10}) for stage in plan.stages)
    study = at_gate(found.store, plan=plan.model_copy(update={"stages": late}))
    assert main(["amend", study, "--seeds", "11", "--budget", "8h", "--because", "more"]) == 2
    assert "the largest seed is 2147483647" in capsys.readouterr().err
    assert found.store.plans.get(study).version == 1
    found.store.close()
