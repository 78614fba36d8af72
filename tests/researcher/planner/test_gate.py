"""A gate waits for its first answer, over processes and databases."""

from __future__ import annotations

from pathlib import Path

import pytest

from researcher.planner.gate import Answer, Gate


@pytest.fixture
def url(tmp_path: Path) -> str:
    return f"sqlite:///{tmp_path / 'records.sqlite'}"


def test_a_question_waits_until_somebody_answers(url: str) -> None:
    assert not Gate(url, "st-1", "plan/1").waits()
    assert Gate(url, "st-1", "plan/1").ask({"hash": "abc"}) is None
    assert Gate(url, "st-1", "plan/1").waits()
    assert Gate(url, "st-1", "plan/1").ask({"hash": "abc"}) is None
    given = Gate(url, "st-1", "plan/1").give(Answer(verdict="reject", words="too dear", by="ada"))
    assert given.verdict == "reject"
    assert not Gate(url, "st-1", "plan/1").waits()
    assert Gate(url, "st-1", "plan/1").ask({"hash": "abc"}) == Answer(verdict="reject", words="too dear", by="ada")


def test_the_first_answer_stays(url: str) -> None:
    gate = Gate(url, "st-1", "stage/compare")
    gate.ask({})
    gate.give(Answer(verdict="approve"))
    assert gate.give(Answer(verdict="reject")).verdict == "approve"


def test_gates_of_other_studies_are_other_gates(url: str) -> None:
    Gate(url, "st-1", "plan/1").ask({})
    Gate(url, "st-1", "plan/1").give(Answer(verdict="approve"))
    assert Gate(url, "st-2", "plan/1").ask({}) is None


def test_an_answer_to_nothing_is_refused(url: str) -> None:
    with pytest.raises(LookupError):
        Gate(url, "st-1", "plan/1").give(Answer(verdict="approve"))
