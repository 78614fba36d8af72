"""`researcher calibrate` times a short trial, and studies of the same work on the same servers are priced by it."""

from __future__ import annotations

import asyncio
import json
import shlex
import signal
import subprocess
import sys
import time
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest

from bench.serving import ServerProcess
from foundation.clock import SystemClock
from researcher.cli import FAILED, calibrate
from researcher.executor.processes import Berth, child_environ
from researcher.main import main, parser
from researcher.models import StudyOptions, StudyStatus, TrialRecord, TrialStatus
from researcher.store.store import Store
from tests.fakes.gpus import gpu_machine
from tests.fakes.repeat_study import FOLDER

Capture = pytest.CaptureFixture[str]
VARY = ("--vary", "learning_rate=1e-6,5e-6")
REPEAT = ("--instrument", str(FOLDER))


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("RESEARCHER_HOME", str(tmp_path / "home"))
    monkeypatch.delenv("RESEARCHER_DATABASE_URL", raising=False)
    return tmp_path / "home"


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


@pytest.mark.parametrize(
    ("attempt", "steps", "said"), [(1, 1, "timed only 1 of 3 steps"), (2, 3, "only a first attempt shows")]
)
def test_a_trial_that_shows_no_pace_says_why(
    attempt: int, steps: int, said: str, monkeypatch: pytest.MonkeyPatch, capsys: Capture
) -> None:
    good = TrialRecord(
        key="good", study_id="s", stage="", arm="", seed=0, status=TrialStatus.DONE, attempt=1, series=_steps(3)
    )

    async def done(*_: object, **__: object) -> list[TrialRecord]:
        return [good, good.model_copy(update={"key": "k", "attempt": attempt, "series": _steps(steps)})]

    monkeypatch.setattr(calibrate, "lone_trials", done)
    assert main(["calibrate", *REPEAT, "--engine", "echo"]) == FAILED
    told = capsys.readouterr().out
    assert "no pace (k is done" in told
    assert said in told


def _steps(count: int) -> dict[str, list[tuple[int, float]]]:
    return {"step_s": [(step, 1.0) for step in range(1, count + 1)]}


def _begun(home: Path, *words: str) -> subprocess.Popen[bytes]:
    """A calibration in its first trial."""
    before = set(home.glob("studies/*/trials"))
    running = subprocess.Popen(
        [sys.executable, "-m", "researcher.main", "calibrate", *REPEAT, *words], env=child_environ(own=True)
    )
    until = time.monotonic() + 120
    while running.poll() is None and time.monotonic() < until:
        trials = set(home.glob("studies/*/trials")) - before
        if trials and any(next(iter(trials)).glob("*/*/*/pid")):
            return running
        time.sleep(0.05)
    running.kill()
    running.wait()
    raise AssertionError("it did not begin")


def _alive(home: Path) -> list[Path]:
    folders = [lock.parent for lock in home.glob("studies/*/**/lock")]
    return [folder for folder in folders if Berth(folder, SystemClock()).alive()]


@pytest.mark.parametrize("where", ["here", "given"])
def test_what_a_killed_calibration_left_is_ended_by_the_next(
    where: str, home: Path, tmp_path: Path, capsys: Capture
) -> None:
    with ServerProcess(tmp_path / "server") if where == "given" else nullcontext() as server:
        words = ("--engine", "echo") if server is None else ("--server", server.url)
        killed = _begun(home, *words)
        killed.kill()
        killed.wait()
        assert _alive(home)
        assert main(["calibrate", *REPEAT, *words]) == 0
    assert not _alive(home)
    store = Store.open()
    second, first = store.studies.all()
    assert (first.status, first.reason) == (StudyStatus.STOPPED, "its process was killed")
    assert [store.leases.holder(study.id) for study in (first, second)] == [None, None]
    assert not list(home.glob("studies/*/server/state"))
    store.close()


def test_resume_frees_what_a_killed_calibration_left(home: Path, capsys: Capture) -> None:
    killed = _begun(home, "--engine", "echo")
    killed.kill()
    killed.wait()
    assert _alive(home)
    assert main(["resume"]) == FAILED
    assert "run `researcher calibrate` again" in capsys.readouterr().err
    assert not _alive(home)
    assert not list(home.glob("studies/*/server/state"))


def test_a_calibration_that_lives_is_left_alone(home: Path, capsys: Capture) -> None:
    store = Store.open()
    study = store.studies.create("a pace", StudyOptions(calibrates=True))
    store.leases.acquire(study, "elsewhere/1/1.0", 600.0)
    server = Berth(home / "studies" / study / "server" / "process", SystemClock())
    server.start(["/bin/sleep", "600"], {})
    assert main(["resume", study]) == FAILED
    assert "process 1 on elsewhere" in capsys.readouterr().err
    assert main(["calibrate", *REPEAT, "--engine", "echo"]) == 0
    assert server.alive()
    assert store.studies.get(study).status is StudyStatus.PLANNING
    asyncio.run(server.end(0.0))
    store.close()


def test_a_calibration_that_is_interrupted_keeps_no_state(home: Path) -> None:
    running = _begun(home, "--engine", "echo")
    running.send_signal(signal.SIGTERM)
    assert running.wait(120) == 130
    assert not _alive(home)
    assert not list(home.glob("studies/*/server/state"))


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
