"""A trial of an archive run again: what is left behind where that comes to nothing."""

from __future__ import annotations

from pathlib import Path

import pytest

from researcher.archive import write_archive
from researcher.commands import FAILED
from researcher.executor.errors import NoServersLeft
from researcher.main import main
from researcher.models import StudyStatus
from researcher.planner.instruments import read_instrument
from tests.fakes.repeat_study import FOLDER
from tests.fakes.shown_study import finish, opened, planned
from tests.fakes.study import study_plan


def test_a_reproduction_that_gets_no_server_is_over(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("RESEARCHER_HOME", str(tmp_path))
    monkeypatch.delenv("RESEARCHER_DATABASE_URL", raising=False)
    home, _ = opened(tmp_path)
    instrument = read_instrument(FOLDER)
    study = planned(home.store, plan=study_plan().model_copy(update={"instrument_code": instrument.code}))
    [trial] = home.store.ensure_trials(study, "floor", [("lr=base", 0)])
    finish(home.store, study, trial, 0.3)
    file = tmp_path / "study.tar.gz"
    write_archive(home.store, study, instrument, home.studies / study, file)

    def none(*_: object) -> None:
        raise NoServersLeft("no server is left")

    monkeypatch.setattr("researcher.commands.archives.pool_of", none)
    assert main(["reproduce", str(file), "--engine", "echo"]) == FAILED
    assert "no server is left" in capsys.readouterr().err
    again = next(each for each in home.store.studies() if each.id != study)
    assert again.status is StudyStatus.STOPPED
    assert "run again" in str(again.reason)
    home.store.close()
