"""`researcher calibrate` times a short trial, and studies of the same work on the same servers are priced by it."""

from __future__ import annotations

import json
import shlex
from pathlib import Path
from typing import Any

import pytest

from researcher.cli import FAILED, calibrate
from researcher.main import main, parser
from researcher.models import TrialRecord, TrialStatus
from tests.fakes.gpus import gpu_machine
from tests.fakes.repeat_study import FOLDER

Capture = pytest.CaptureFixture[str]
VARY = ("--vary", "learning_rate=1e-6,5e-6")
REPEAT = ("--instrument", str(FOLDER))


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RESEARCHER_HOME", str(tmp_path / "home"))
    monkeypatch.delenv("RESEARCHER_DATABASE_URL", raising=False)


def shown(capsys: Capture, *words: str) -> dict[str, Any]:
    capsys.readouterr()
    assert main(["start", *words, "--dry-run", "--json"]) == 0
    return json.loads(capsys.readouterr().out)  # type: ignore[no-any-return]


def test_a_calibration_prices_what_does_the_same_work_here_and_is_over(capsys: Capture) -> None:
    echo = ("--engine", "echo")
    assert main(["calibrate", *REPEAT, *echo, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    plan = shown(capsys, *REPEAT, *VARY, *echo)["plan"]
    assert plan["trial_s_measured"] == f"3 steps of {found['study']}"
    assert plan["trial_s"] == pytest.approx(found["trial_s"])
    assert "trial_s_measured" not in shown(capsys, *REPEAT, *VARY)["plan"]  # not on this engine
    assert "trial_s_measured" not in shown(capsys, *REPEAT, *VARY, *echo, "--set", "max_tokens=7")["plan"]
    assert main(["resume", found["study"]]) == FAILED
    assert "run `researcher calibrate` again" in capsys.readouterr().err
    assert main(["list", "--json"]) == 0
    [listed] = json.loads(capsys.readouterr().out)
    assert listed["status"] == "stopped"


def test_a_trial_that_fails_is_no_success_where_an_older_pace_is_known(
    monkeypatch: pytest.MonkeyPatch, capsys: Capture
) -> None:
    words = ("calibrate", *REPEAT, "--engine", "echo")
    assert main([*words]) == 0

    async def fails(*_: object, **__: object) -> list[TrialRecord]:
        return [
            TrialRecord(key="k", study_id="s", stage="", arm="", seed=0, status=TrialStatus.FAILED, reason="no memory")
        ]

    monkeypatch.setattr(calibrate, "lone_trials", fails)
    assert main([*words]) == FAILED
    assert "no pace (no memory)" in capsys.readouterr().out


def test_a_calibration_of_a_file_takes_its_longest_arm_whatever_its_budget(tmp_path: Path, capsys: Capture) -> None:
    (tmp_path / "study.yaml").write_text(
        f"question: Longer?\ninstrument: {FOLDER}\ncompare: {{steps: {{baseline: 6, levels: [12]}}}}\nbudget: {{wall: 1s}}\n"
    )
    assert main(["calibrate", str(tmp_path / "study.yaml"), "--engine", "echo", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["steps"] == 12


def test_a_dry_run_on_a_gpu_says_how_to_measure_a_trial_and_the_command_can_be_typed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Capture
) -> None:
    assert shown(capsys, *REPEAT, *VARY)["calibration"] == ""
    gpu_machine(monkeypatch, tmp_path)
    said = shown(capsys, *REPEAT, *VARY, "--set", "max_tokens=7")["calibration"]
    assert f"`researcher calibrate --instrument {FOLDER} --vary learning_rate=1e-6,5e-6 --set max_tokens=7`" in said
    assert "this machine's GPU" in said
    assert shown(capsys, *REPEAT, *VARY, "--engine", "echo")["calibration"] == ""
    topic = "Does GRPO learn one-digit sums faster with a learning rate of 4e-5 than with 1e-5?"
    for words in (("--topic", topic, "--planner", "builtin"), (*REPEAT, *VARY)):
        said = shown(capsys, *words, "--server", "http://gpu:8642")["calibration"]
        assert "measures a trial on these servers" in said
        args = parser().parse_args(shlex.split(said.split("`")[1])[1:])
        assert args.command == "calibrate"
        assert args.server == ["http://gpu:8642"]
    assert args.vary == [VARY[1]]
