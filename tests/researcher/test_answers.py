"""Answers of people, however they are given: the first one stays, and who comes second is told."""

from __future__ import annotations

from pathlib import Path

import pytest

from researcher.answers import Amendment, amend, answer_gate, answer_text
from researcher.commands import DONE, FAILED
from researcher.main import main
from researcher.planner.gate import Answer
from researcher.store.errors import WrongState
from tests.fakes.shown_study import at_gate, opened, running

ADA = Answer(verdict="approve", words="worth it", by="ada")


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("RESEARCHER_HOME", str(tmp_path))
    monkeypatch.delenv("RESEARCHER_DATABASE_URL", raising=False)
    return tmp_path


def test_the_first_answer_stays_and_the_second_is_told(home: Path) -> None:
    found, url = opened(home)
    study = at_gate(found.store, url)
    assert answer_gate(found.store, url, study, ADA) == "plan/1"
    with pytest.raises(WrongState, match="answered already: approved by ada: worth it"):
        answer_gate(found.store, url, study, ADA)
    found.store.close()


def test_the_same_in_the_terminal(home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    found, url = opened(home)
    study = at_gate(found.store, url)
    assert main(["approve", study]) == DONE
    assert "plan/1 approved; `researcher resume` goes on with it" in capsys.readouterr().out
    assert main(["reject", study, "--because", "too dear"]) == FAILED
    assert "answered already: approved" in capsys.readouterr().err
    assert main(["amend", study, "--seeds", "4", "--because", "more"]) == DONE
    assert main(["amend", study, "--because", "more"]) == 2
    assert main(["reject", study, "--because", "too dear"]) == DONE  # the new version was not answered yet
    found.store.close()


def test_a_plan_whose_trials_have_begun_is_not_amended(home: Path) -> None:
    found, url = opened(home)
    study, _ = running(found.store)
    with pytest.raises(WrongState, match="have begun"):
        amend(found.store, url, study, Amendment(seeds=4), because="more", by="ada")
    found.store.close()


@pytest.mark.parametrize("change", [{}, {"seeds": 0}, {"wall_s": 0.0}, {"wall_s": float("nan")}])
def test_an_amendment_changes_something_to_something(change: dict[str, float]) -> None:
    with pytest.raises(ValueError, match=r"amend|above zero"):
        Amendment(**change)


def test_answers_are_told_as_sentences() -> None:
    assert answer_text(ADA) == "approved by ada: worth it"
    assert answer_text(Answer(verdict="reject")) == "rejected"
