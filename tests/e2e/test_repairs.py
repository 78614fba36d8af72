"""Through the command line: a client's bug mended by an LLM or by hand, and an instrument that an LLM wrote."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from researcher.repair.rehearse import FixedEndpoint
from researcher.sandbox.launch import sandbox
from tests.command import LOOKING, looked
from tests.fakes.mended_study import NINTH_TASK, WORKFLOW
from tests.fakes.repeat_study import FOLDER
from tests.fakes.written_instrument import written

ROOT = Path(__file__).parents[2]
TOPIC = "Does a learning rate of 1e-3 repeat words faster than 1e-5 with 3 steps?"
ASKED = ("--vary", "learning_rate=1e-5,1e-3", "--claim", "increase", "--steps", "3")
LIMIT_S = 580


class Desk:
    """A person's machine, with the LLM that it has configured."""

    def __init__(self, home: Path) -> None:
        self.home = home
        self.llm: FixedEndpoint | None = None

    def configure(self, answer: dict[str, Any]) -> None:
        self.llm = FixedEndpoint()
        self.llm.answer = json.dumps(answer)
        self.llm.serve()

    def researcher(self, *words: str) -> subprocess.CompletedProcess[str]:
        environ = {**os.environ, "RESEARCHER_HOME": str(self.home), "PYTHONPATH": str(ROOT), "COLUMNS": "400"}
        for name in ("RESEARCHER_DATABASE_URL", "MLFLOW_TRACKING_URI"):
            environ.pop(name, None)
        if self.llm is not None:
            environ |= {"RESEARCHER_LLM_BASE_URL": self.llm.base_url, "RESEARCHER_LLM_MODEL": "some-llm"}
            environ |= {"RESEARCHER_LLM_API_KEY": "sk-none-of-anyones"}
        if words[0] in LOOKING:
            return looked(words, environ)
        program = [sys.executable, "-m", "researcher.main", *words]
        return subprocess.run(program, env=environ, capture_output=True, text=True, timeout=LIMIT_S, check=False)

    def start(self, instrument: str, *words: str) -> subprocess.CompletedProcess[str]:
        fixed = ("--engine", "echo", "--seeds", "2", "--instrument", instrument)
        return self.researcher("start", *(words or ASKED), *fixed)

    def report(self) -> str:
        [file] = self.home.glob("studies/*/report.md")
        return file.read_text()

    def close(self) -> None:
        if self.llm is not None:
            self.llm.close()
        for file in self.home.glob("studies/**/pid"):
            try:
                os.killpg(int(file.read_text()), signal.SIGKILL)
            except (ProcessLookupError, PermissionError, ValueError):
                continue


@pytest.fixture
def desk(tmp_path: Path) -> Iterator[Desk]:
    made = Desk(tmp_path / "home")
    yield made
    made.close()


@pytest.fixture
def broken(tmp_path: Path) -> Path:
    folder = tmp_path / "words"
    shutil.copytree(FOLDER, folder, ignore=shutil.ignore_patterns("__pycache__"))
    (folder / "workflow.py").write_text(NINTH_TASK)
    declaration = (folder / "instrument.toml").read_text()
    # A group that the client of before began is not filled by the next: do not wait a minute for it.
    impatient = declaration.replace("[defaults.run.batch]\n", "[defaults.run.batch]\ngroup_patience_s = 2.0\n")
    assert impatient != declaration
    (folder / "instrument.toml").write_text(impatient)
    return folder


def test_a_study_goes_on_with_what_the_llm_mended_and_says_so_everywhere(
    desk: Desk, broken: Path, tmp_path: Path
) -> None:
    desk.configure({"reason": "The key was misspelt.", "files": [{"name": "workflow.py", "content": WORKFLOW}]})
    done = desk.start(str(broken))
    assert done.returncode == 0, done.stdout + done.stderr
    assert "the code was repaired by LLM some-llm" in done.stderr
    assert f"repeat runs {sandbox().words}" in done.stderr
    shown = desk.researcher("show").stdout
    assert "-            word = {'word': word}['wrod']" in shown
    assert "The key was misspelt." in desk.report()
    assert "mixed_code" in desk.report()
    status = json.loads(desk.researcher("status", "--json").stdout)
    assert {trial["status"] for trial in status["trials"]} == {"done"}
    trial = json.loads(desk.researcher("show", status["trials"][0]["key"]).stdout)
    assert trial["failures"][0]["error"] == "KeyError: 'wrod'"
    assert trial["repairs"][0]["by"] == "LLM some-llm"
    assert desk.researcher("verify").returncode == 0
    assert (broken / "workflow.py").read_text() == NINTH_TASK

    file = tmp_path / "study.tar.gz"
    assert desk.researcher("export", "--to", str(file)).returncode == 0
    again = desk.researcher("reproduce", str(file), status["trials"][0]["key"], "--engine", "echo")
    assert again.returncode == 0, again.stdout + again.stderr


@pytest.mark.campaign
def test_without_an_llm_the_study_says_where_to_mend_and_resume_takes_it(desk: Desk, broken: Path) -> None:
    failed = desk.start(str(broken))
    assert failed.returncode == 1
    assert f"{broken / 'workflow.py'}:" in failed.stdout
    assert "KeyError: 'wrod'" in failed.stdout
    assert "researcher resume" in failed.stdout
    (broken / "workflow.py").write_text(WORKFLOW)
    done = desk.researcher("resume")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "repaired by person" in done.stderr
    assert "a person repaired" in desk.report()
    assert desk.researcher("verify").returncode == 0


@pytest.mark.campaign
def test_an_instrument_that_an_llm_wrote_waits_for_a_person_and_runs_in_a_sandbox(desk: Desk) -> None:
    desk.configure(written())
    waiting = desk.start("new", "--topic", TOPIC, "--planner", "builtin")
    assert waiting.returncode == 3, waiting.stdout + waiting.stderr
    assert "read it before you approve" in waiting.stdout
    assert desk.researcher("approve").returncode == 0
    done = desk.researcher("resume")
    assert done.returncode == 0, done.stdout + done.stderr
    report = desk.report()
    assert "was written by the LLM some-llm, not by a person" in report
    assert "Code written by an LLM ran in a sandbox: parrot runs" in report
    assert desk.researcher("verify").returncode == 0


def test_a_new_instrument_needs_an_llm(desk: Desk) -> None:
    refused = desk.start("new", "--topic", TOPIC, "--planner", "builtin")
    assert refused.returncode == 2
    assert "RESEARCHER_LLM_MODEL" in refused.stderr
