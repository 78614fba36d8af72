"""A grader that breaks on the wrong answers of one arm: the study says so, and claims nothing."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from tests.e2e.test_studies import ROOT, Machine

BRITTLE = ROOT / "tests" / "instruments" / "brittle"
ASKED = ("--vary", "digits=3,4", "--claim", "increase", "--engine", "echo", "--seeds", "4")


@pytest.mark.campaign
def test_attempts_that_one_arm_loses_take_the_verdict_and_stand_in_sql_report_and_status(tmp_path: Path) -> None:
    machine = Machine(tmp_path / "home")
    ended = machine.researcher("start", "--instrument", str(BRITTLE), *ASKED)
    assert ended.returncode == 0, ended.stderr
    assert machine.researcher("verify", "latest").returncode == 0
    (verdict,) = machine.status()["verdicts"]
    assert verdict["verdict"] == "invalid"
    assert verdict["reason"].startswith("attrition")
    lost = dict(machine.rows("SELECT arm, SUM(attempts) FROM trial_attrition WHERE cause = 'grader' GROUP BY arm"))
    assert set(lost) == {"digits=4"}
    said = machine.status()["attrition"]
    assert sum(said["digits=4"][kind]["lost"].get("grader", 0) for kind in ("train", "eval")) == lost["digits=4"]
    (report,) = machine.home.glob("studies/*/report.md")
    assert "ArithmeticError" in report.read_text()
    assert f"{lost['digits=4']:,}" in report.read_text()


@pytest.mark.campaign
def test_the_same_study_with_a_grader_that_holds_keeps_its_verdict(tmp_path: Path) -> None:
    sound = tmp_path / "sound"
    shutil.copytree(BRITTLE, sound)
    settings = sound / "instrument.toml"
    settings.write_text(settings.read_text().replace("brittle = true", "brittle = false"))
    machine = Machine(tmp_path / "home")
    ended = machine.researcher("start", "--instrument", str(sound), *ASKED)
    assert ended.returncode == 0, ended.stderr
    assert "invalid" not in {verdict["verdict"] for verdict in machine.status()["verdicts"]}
    (report,) = machine.home.glob("studies/*/report.md")
    assert "No trial failed, and none of" in report.read_text()
