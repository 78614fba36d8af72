"""The report of a study that ended without its answer says so, why, and what can be done; and it verifies."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest

from foundation.paths import user_data_dir
from researcher.cli import DONE, FAILED
from researcher.main import main
from researcher.models import OVER_BUDGET, Event, StudyData, StudyStatus
from researcher.report.writer import write_report
from researcher.store.store import Store
from tests.fakes.concluded_study import concluded, supported, unfinished
from tests.fakes.shown_study import at_gate, opened, running
from tests.fakes.study import SENTINELS, study_plan

SPENT = Event(seq=90, study_id="st-1", at=0.0, kind=OVER_BUDGET, detail={"because": "it is spent"})
REJECTED = Event(seq=90, study_id="st-1", at=0.0, kind="answer_given", detail={"verdict": "reject"})
REPEATS = Event(seq=90, study_id="st-1", at=0.0, kind="reproduces")


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("RESEARCHER_HOME", str(tmp_path))
    monkeypatch.delenv("RESEARCHER_DATABASE_URL", raising=False)
    return tmp_path


def ended(status: StudyStatus, *events: Event, data: StudyData | None = None) -> StudyData:
    data = data or unfinished()
    return dataclasses.replace(data, status=status, reason="it is spent", events=(*data.events, *events))


def markdown(data: StudyData, folder: Path) -> str:
    return Path(write_report(data, folder).files["markdown"]).read_text()


@pytest.mark.parametrize(
    ("data", "advice"),
    [
        (ended(StudyStatus.STOPPED, SPENT), "start a new study with a larger budget"),
        (ended(StudyStatus.STOPPED, REJECTED), "start a new study with the plan you want"),
        (ended(StudyStatus.STOPPED, REPEATS), "it only repeated one trial"),
        (ended(StudyStatus.STOPPED), "continue with `researcher resume st-1`, unless its days are over"),
        (ended(StudyStatus.FAILED), "fix what failed, then continue with `researcher resume st-1`"),
    ],
)
def test_a_study_that_ended_without_its_answer_says_why_and_what_can_be_done(
    data: StudyData, advice: str, tmp_path: Path
) -> None:
    text = markdown(data, tmp_path)
    assert "The study ended without an answer: it is spent. Until then 4 trials of at most" in text
    assert advice in text.split("## What to ask next")[1]
    assert "not over" not in text
    assert "wait for the study to end" not in text


@pytest.mark.parametrize("status", [StudyStatus.RUNNING, StudyStatus.WAITING, None])
def test_a_study_that_goes_on_says_so(status: StudyStatus | None, tmp_path: Path) -> None:
    text = markdown(dataclasses.replace(unfinished(), status=status, reason="waits"), tmp_path)
    assert "The study is not over" in text
    assert "So far 4 trials are finished and 0 have failed, of at most 20 that the plan allows" in text


def test_how_a_study_stands_changes_nothing_in_an_answer(tmp_path: Path) -> None:
    said = markdown(supported(), tmp_path / "one")
    assert markdown(ended(StudyStatus.STOPPED, data=supported()), tmp_path / "other") == said


def test_without_a_finished_trial_the_sentinels_take_one_line(tmp_path: Path) -> None:
    bare = concluded(study_plan(sentinels=SENTINELS), [])
    limits = markdown(ended(StudyStatus.STOPPED, data=bare), tmp_path).split("## Limits")[1].split("## What")[0]
    assert limits.count("could be checked") == 1
    assert "could not be checked" not in limits


def test_the_report_of_a_study_that_is_stopped_verifies_until_it_goes_on(
    home: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    store = Store.open()
    study, _ = running(store)
    assert main(["report", study]) == DONE
    assert "The study is not over" in capsys.readouterr().out
    assert main(["stop", study]) == DONE
    assert "ended without an answer: stopped on request" in (home / "studies" / study / "report.md").read_text()
    assert main(["verify", study]) == DONE
    capsys.readouterr()
    store.studies.set_status(study, StudyStatus.RUNNING)
    assert main(["verify", study]) == FAILED
    assert "the study has ended or continued since" in capsys.readouterr().out
    assert main(["report", study]) == DONE
    assert main(["verify", study]) == DONE


def test_the_report_of_a_rejected_plan_says_so_and_verifies(home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    found, _ = opened(user_data_dir())
    study = at_gate(found.store)
    assert main(["reject", study, "--because", "too dear"]) == DONE
    assert main(["report", study]) == DONE
    said = capsys.readouterr().out
    assert "ended without an answer: the plan was rejected" in said
    assert "too dear" in said
    assert "start a new study" in said
    assert main(["verify", study]) == DONE
    found.store.close()
