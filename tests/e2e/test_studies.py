"""Whole studies through the command line, on the echo engine: verdicts, kills at any moment, tampering."""

from __future__ import annotations

import json
import os
import shutil
import signal
import sqlite3
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from foundation.clock import SystemClock
from researcher.executor.processes import Berth
from researcher.ownership import owned_now
from researcher.schedule.timetable import Timetable, Window
from researcher.store.store import Store
from tests.command import LOOKING, looked

ROOT = Path(__file__).parents[2]
REPEAT = ROOT / "tests" / "instruments" / "repeat"
ASKED = ("start", "--instrument", str(REPEAT), "--claim", "increase", "--vary")
FASTER = "learning_rate=1e-5,1e-3"
LIMIT_S = 300


@dataclass
class Machine:
    """A user's data directory, and the commands run in it."""

    home: Path

    def researcher(self, *words: str, moment: str | None = None) -> subprocess.CompletedProcess[str]:
        program = ["-m", "researcher.main"] if moment is None else [str(ROOT / "tests/e2e/killed.py"), moment]
        environ = {**os.environ, "RESEARCHER_HOME": str(self.home), "PYTHONPATH": str(ROOT), "COLUMNS": "200"}
        environ.pop("RESEARCHER_DATABASE_URL", None)
        environ.pop("MLFLOW_TRACKING_URI", None)
        if moment is None and words[0] in LOOKING:
            return looked(words, environ)
        return subprocess.run(
            [sys.executable, *program, *words],
            env=environ,
            capture_output=True,
            text=True,
            timeout=LIMIT_S,
            check=False,
        )

    def start(self, vary: str = FASTER, moment: str | None = None) -> subprocess.CompletedProcess[str]:
        return self.researcher(*ASKED, vary, "--engine", "echo", "--seeds", "3", moment=moment)

    def status(self) -> dict[str, Any]:
        found: dict[str, Any] = json.loads(self.researcher("status", "--json").stdout)
        return found

    def rows(self, query: str) -> list[tuple[Any, ...]]:
        with sqlite3.connect(self.home / "researcher.db") as database:
            return database.execute(query).fetchall()

    def change(self, statement: str) -> None:
        with sqlite3.connect(self.home / "researcher.db") as database:
            assert database.execute(statement).rowcount == 1

    def end_leftovers(self) -> None:
        """End servers and clients that a killed researcher left, by the pids that they wrote down."""
        for file in self.home.glob("studies/**/pid"):
            try:
                os.killpg(int(file.read_text()), signal.SIGKILL)
            except (ProcessLookupError, PermissionError, ValueError):
                continue


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Machine]:
    machine = Machine(tmp_path_factory.mktemp("undisturbed"))
    done = machine.start()
    assert done.returncode == 0, done.stderr
    yield machine
    machine.end_leftovers()


@pytest.fixture
def machine(tmp_path: Path) -> Iterator[Machine]:
    made = Machine(tmp_path / "home")
    yield made
    made.end_leftovers()


def _conclusions(machine: Machine) -> tuple[list[tuple[str, str]], dict[str, float]]:
    status = machine.status()
    verdicts = [(record["hypothesis"], record["verdict"]) for record in status["verdicts"]]
    return verdicts, {trial["key"]: trial["finals"]["auc_reward"] for trial in status["trials"]}


def test_a_study_ends_with_a_verdict_and_a_report_that_recomputes(undisturbed: Machine) -> None:
    status = undisturbed.status()
    assert status["status"] == "done"
    assert [record["verdict"] for record in status["verdicts"]] == ["supported"]
    verified = undisturbed.researcher("verify")
    assert verified.returncode == 0, verified.stdout
    folder = undisturbed.home / "studies" / status["id"]
    assert (folder / "report.md").is_file()
    assert "http" not in "".join(line for line in (folder / "report.html").read_text().splitlines() if "src=" in line)


def test_what_a_study_found_is_known_to_the_next_and_its_copies_are_whole(undisturbed: Machine) -> None:
    [found] = json.loads(undisturbed.researcher("findings", "--json").stdout)["findings"]
    assert (found["verdict"], found["recomputable"], found["effect"]["n_treatment"]) == ("supported", True, 3)
    shown = undisturbed.researcher(*ASKED, FASTER, "--engine", "echo", "--dry-run", "--json")
    [known] = json.loads(shown.stdout)["plan"]["known"]
    assert (known["id"], known["same_as"]) == (found["id"], {"H1": 1})
    real = undisturbed.researcher(*ASKED, FASTER, "--dry-run", "--json")
    assert json.loads(real.stdout)["plan"]["known"] == []
    copied = undisturbed.researcher("copy", "--sink", "mlflow", "--sink", "tensorboard", "--json")
    assert copied.returncode == 0, copied.stderr
    mlflow, tensorboard = json.loads(copied.stdout)["sinks"]
    assert (mlflow["sent"], mlflow["waiting"], tensorboard["waiting"]) == (0, 0, 0)
    assert len(list((undisturbed.home / "tensorboard").glob("*/*/*/seed-*/events.*"))) == 6
    with sqlite3.connect(undisturbed.home / "mlflow.db") as database:
        assert database.execute("SELECT count(*) FROM trace_info").fetchall() == [(6 * 8,)]


@pytest.mark.parametrize("moment", ["mid-trial", pytest.param("while-reporting", marks=pytest.mark.campaign)])
def test_a_study_killed_at_any_moment_resumes_to_the_same_verdict(
    moment: str, machine: Machine, undisturbed: Machine
) -> None:
    killed = machine.start(moment=moment)
    assert killed.returncode == -signal.SIGKILL, killed.stderr
    resumed = machine.researcher("resume")
    assert resumed.returncode == 0, resumed.stderr
    assert _conclusions(machine) == _conclusions(undisturbed)
    done = machine.rows("select trial_key, count(*) from attempts where outcome = 'done' group by trial_key")
    assert len(done) == 6
    assert {count for _, count in done} == {1}
    assert machine.researcher("verify").returncode == 0


def _alive(machine: Machine) -> list[Berth]:
    """Servers and clients of the study."""
    locks = machine.home.glob("studies/*/**/lock")
    return [berth for lock in locks if (berth := Berth(lock.parent, SystemClock())).alive()]


def test_a_reproduction_runs_on_the_archives_engine_and_ends_its_server_when_it_is_terminated(
    machine: Machine, undisturbed: Machine, tmp_path: Path
) -> None:
    archive = tmp_path / "study.tar.gz"
    assert undisturbed.researcher("export", "--to", str(archive)).returncode == 0
    environ = {**os.environ, "RESEARCHER_HOME": str(machine.home), "PYTHONPATH": str(ROOT)}
    with subprocess.Popen([sys.executable, "-m", "researcher.main", "reproduce", str(archive)], env=environ) as running:
        for _ in range(600):
            if _alive(machine) or running.poll() is not None:
                break
            time.sleep(0.05)
        assert _alive(machine)
        running.send_signal(signal.SIGTERM)
        assert running.wait(60) == 130
    assert not _alive(machine)
    assert [json.loads(options)["engine"] for (options,) in machine.rows("SELECT options FROM studies")] == ["echo"]


@pytest.mark.campaign
@pytest.mark.parametrize("rest", ["pause", "window"])
def test_a_study_whose_researcher_was_killed_holds_no_server_while_it_rests(
    machine: Machine, undisturbed: Machine, rest: str
) -> None:
    assert machine.start(moment="mid-trial").returncode == -signal.SIGKILL
    assert _alive(machine)
    study = machine.status()["id"]
    if rest == "pause":
        assert machine.researcher("pause").returncode == 0
    else:
        store = Store.open(f"sqlite:///{machine.home / 'researcher.db'}")
        later = (datetime.now(UTC).weekday() + 3) % 7
        closed = Timetable(windows=(Window(opens=0, closes=1, weekdays=(later,)),), zone="UTC")
        with owned_now(store, study) as own:
            own.studies.save_schedule(study, {"timetable": closed.model_dump(mode="json"), "carried": True})
        assert machine.researcher("resume", study, "--scheduled").returncode == 3
        store.studies.save_schedule(
            study, {"timetable": Timetable(zone="UTC").model_dump(mode="json"), "carried": False}
        )
        store.close()
    assert not _alive(machine)
    assert machine.rows("SELECT count(*) FROM attempts WHERE outcome = 'open'") == [(1,)]
    resumed = machine.researcher("resume")
    assert resumed.returncode == 0, resumed.stderr
    assert _conclusions(machine) == _conclusions(undisturbed)
    assert machine.rows("SELECT count(*) FROM attempts WHERE outcome != 'done'") == [(0,)]


def test_a_study_whose_terminal_is_closed_holds_no_server(machine: Machine) -> None:
    words = [*ASKED, FASTER, "--engine", "echo", "--seeds", "3"]
    environ = {**os.environ, "RESEARCHER_HOME": str(machine.home), "PYTHONPATH": str(ROOT)}
    environ.pop("RESEARCHER_DATABASE_URL", None)
    environ.pop("MLFLOW_TRACKING_URI", None)
    command = [sys.executable, "-m", "researcher.main", *words]
    heard = partial(signal.signal, signal.SIGHUP, signal.SIG_DFL)  # whoever runs the tests may ignore it
    with subprocess.Popen(
        command, env=environ, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, preexec_fn=heard
    ) as process:
        assert process.stdout is not None
        assert any("running" in line for line in process.stdout)
        assert _alive(machine)
        for _ in range(2):
            process.send_signal(signal.SIGHUP)
        assert "continues it" in process.stdout.read()
    assert process.returncode == 130
    assert not _alive(machine)


def test_a_stored_metric_that_was_changed_is_found_and_its_claim_named(machine: Machine, undisturbed: Machine) -> None:
    shutil.copytree(undisturbed.home, machine.home)
    assert machine.researcher("verify").returncode == 0
    machine.change(
        "update trial_metrics set value = value + 0.25 where rowid = "
        "(select rowid from trial_metrics where name = 'auc_reward' and step is null limit 1)"
    )
    verified = machine.researcher("verify")
    assert verified.returncode == 1
    assert "auc_reward" in verified.stdout


def test_a_copied_home_is_verified_by_its_own_files(machine: Machine, undisturbed: Machine) -> None:
    shutil.copytree(undisturbed.home, machine.home)
    (report,) = machine.home.glob("studies/*/report.md")
    report.write_text(report.read_text().replace("Yes: ", "No: "))
    verified = machine.researcher("verify")
    assert verified.returncode == 1
    assert "report.md" in verified.stdout
    assert undisturbed.researcher("verify").returncode == 0


@pytest.mark.campaign
def test_swapping_the_arms_flips_the_sign_and_equal_arms_are_not_supported(
    tmp_path: Path, undisturbed: Machine
) -> None:
    swapped, equal = Machine(tmp_path / "swapped"), Machine(tmp_path / "equal")
    try:
        with ThreadPoolExecutor() as side_by_side:
            flipped = side_by_side.submit(swapped.start, "learning_rate=1e-3,1e-5")
            assert equal.start("learning_rate=1e-4,1e-4").returncode == 0
            assert flipped.result().returncode == 0
        effects = [each.status()["verdicts"][0]["effect"]["diff"] for each in (undisturbed, swapped)]
        assert effects[0] > 0 > effects[1]
        assert equal.status()["verdicts"][0]["verdict"] != "supported"
    finally:
        swapped.end_leftovers()
        equal.end_leftovers()


@pytest.mark.parametrize(
    ("vary", "says"),
    [("moon=cheese", "there are learning_rate"), ("learning_rat=1e-5,1e-3", "did you mean learning_rate?")],
)
def test_what_cannot_be_asked_is_one_clear_error_with_the_nearest_things(
    vary: str, says: str, machine: Machine
) -> None:
    refused = machine.start(vary)
    assert refused.returncode == 2
    assert says in refused.stderr
    assert "Traceback" not in refused.stderr
    assert machine.researcher("list").stdout.startswith("no studies yet")
