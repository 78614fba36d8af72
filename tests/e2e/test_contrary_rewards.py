"""Whole studies of an instrument that pays for the wrong thing, and of equal arms, on the echo engine."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from researcher.store.store import Store

ROOT = Path(__file__).parents[2]
INSTRUMENTS = ROOT / "tests" / "instruments"
LIMIT_S = 580

pytestmark = pytest.mark.campaign


def researcher(home: Path, *words: str) -> subprocess.CompletedProcess[str]:
    environ = {**os.environ, "RESEARCHER_HOME": str(home), "PYTHONPATH": str(ROOT), "COLUMNS": "200"}
    for name in ("RESEARCHER_DATABASE_URL", "MLFLOW_TRACKING_URI"):
        environ.pop(name, None)
    command = [sys.executable, "-m", "researcher.main", *words]
    return subprocess.run(command, env=environ, capture_output=True, text=True, timeout=LIMIT_S, check=False)


def started(home: Path, instrument: str, *asked: str) -> tuple[str, Store]:
    """A finished study's report in Markdown, and its records."""
    words = ("--instrument", str(INSTRUMENTS / instrument), "--engine", "echo", "--seeds", "3")
    done = researcher(home, "start", *words, *asked, "--claim", "increase")
    assert done.returncode == 0, done.stderr
    [report] = (home / "studies").glob("*/report.md")
    verified = researcher(home, "verify", "latest")
    assert verified.returncode == 0, verified.stdout
    return report.read_text(), Store.open(f"sqlite:///{home / 'researcher.db'}")


def test_a_study_whose_reward_pays_for_failing_is_invalid_and_shows_what_was_said(tmp_path: Path) -> None:
    report, store = started(tmp_path, "flattery", "--vary", "syllables=2,3")
    study = store.study_data(store.studies.all()[0].id)
    assert [record.verdict.value for record in study.verdicts] == ["invalid"]
    assert "episodes with more honesty get less reward" in study.verdicts[0].reason
    assert all({"honesty", "honesty_in_training"} <= set(trial.finals) for trial in study.trials)
    assert "## Sample answers" in report
    assert report.count("held out, before") == report.count("held out, after") > 0
    store.close()


def test_equal_arms_are_no_copies_of_each_other_and_an_honest_reward_is_left_in_peace(tmp_path: Path) -> None:
    report, store = started(tmp_path, "repeat", "--vary", "learning_rate=1e-3,0.001")
    study = store.study_data(store.studies.all()[0].id)
    seeds = {arm.name: {trial.seed for trial in study.trials if trial.arm == arm.name} for arm in study.plan.arms}
    first, second = seeds.values()
    assert first
    assert second
    assert first.isdisjoint(second)
    curves = [tuple(trial.series["reward_mean"]) for trial in study.trials]
    assert len(set(curves)) == len(curves)
    [record] = study.verdicts
    assert record.verdict.value in ("equivalent", "inconclusive", "refuted", "supported")
    assert record.effect is not None
    assert record.effect.method == "welch"
    assert "repeats another one on different seeds, so the comparison is unpaired" in report
    assert "`reward_against_success`: quiet" in report
    store.close()
