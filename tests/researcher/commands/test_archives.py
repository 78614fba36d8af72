"""A trial of an archive run again: what is left behind where that comes to nothing."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from researcher.archive import write_archive
from researcher.commands import DONE, FAILED
from researcher.commands.home import Home
from researcher.executor.errors import NoServersLeft
from researcher.main import main
from researcher.models import StudyStatus, TrialEvidence, TrialRecord
from researcher.planner.instruments import read_instrument
from tests.fakes.repeat_study import FOLDER
from tests.fakes.shown_study import finish, opened, planned
from tests.fakes.study import study_plan


@pytest.fixture
def archived(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[Home, str, Path]]:
    """A study with one trial, computed in bfloat16, and its archive."""
    monkeypatch.setenv("RESEARCHER_HOME", str(tmp_path))
    monkeypatch.delenv("RESEARCHER_DATABASE_URL", raising=False)
    home, _ = opened(tmp_path)
    instrument = read_instrument(FOLDER)
    study = planned(home.store, plan=study_plan().model_copy(update={"instrument_code": instrument.code}))
    [trial] = home.store.ensure_trials(study, "floor", [("lr=base", 0)])
    finish(home.store, study, trial, 0.3, computed_in("bfloat16"))
    file = tmp_path / "study.tar.gz"
    write_archive(home.store, study, instrument, home.studies / study, file)
    yield home, study, file
    home.store.close()


def computed_in(dtype: str) -> TrialEvidence:
    return TrialEvidence(spec={"dtype": dtype})


def test_a_reproduction_that_gets_no_server_is_over(
    archived: tuple[Home, str, Path], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    home, study, file = archived

    def none(*_: object) -> None:
        raise NoServersLeft("no server is left")

    monkeypatch.setattr("researcher.commands.archives.pool_of", none)
    assert main(["reproduce", str(file), "--engine", "echo"]) == FAILED
    assert "no server is left" in capsys.readouterr().err
    again = next(each for each in home.store.studies() if each.id != study)
    assert again.status is StudyStatus.STOPPED
    assert "run again" in str(again.reason)


@pytest.mark.parametrize(("now", "told"), [("bfloat16", False), ("float32", True)])
def test_a_reproduction_in_another_number_type_says_so(
    archived: tuple[Home, str, Path],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    now: str,
    told: bool,
) -> None:
    async def again(*given: Any) -> TrialRecord:
        then: TrialRecord = given[4]
        return then.model_copy(update={"evidence": computed_in(now)})

    monkeypatch.setattr("researcher.commands.archives._again", again)
    assert main(["reproduce", str(archived[2]), "--engine", "echo"]) == DONE
    assert ("computed in bfloat16 then and in float32 now" in capsys.readouterr().out) == told
    assert main(["reproduce", str(archived[2]), "--engine", "echo", "--json"]) == DONE
    assert json.loads(capsys.readouterr().out)["computed_in"] == {"then": "bfloat16", "now": now}
