"""A trial of an archive run again: what is left behind where that comes to nothing."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest

from researcher.archive import write_archive
from researcher.cli import DONE, FAILED
from researcher.executor.errors import NoServersLeft
from researcher.home import Home
from researcher.instruments.catalogue import read_instrument
from researcher.main import main
from researcher.models import StudyStatus, TrialEvidence, TrialRecord, TrialStatus
from researcher.store.errors import PlanFrozen
from researcher.store.plans import Plans
from researcher.study.plan import Plan
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
    [trial] = home.store.trials.ensure(study, "floor", [("lr=base", 0)])
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

    monkeypatch.setattr("researcher.cli.worker.pool_of", none)
    assert main(["reproduce", str(file), "--engine", "echo"]) == FAILED
    assert "no server is left" in capsys.readouterr().err
    again = next(each for each in home.store.studies.all() if each.id != study)
    assert again.status is StudyStatus.STOPPED
    assert "reran one trial" in str(again.reason)


def test_what_export_prints_can_be_typed(
    archived: tuple[Home, str, Path],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    _, study, _ = archived
    monkeypatch.setattr("researcher.cli.archives.write_archive", lambda *_: 1000)
    assert main(["export", study, "--to", str(tmp_path / "a b.tar.gz")]) == 0
    assert f"`researcher reproduce '{tmp_path}/a b.tar.gz'`" in capsys.readouterr().out


@pytest.fixture
def amended(archived: tuple[Home, str, Path]) -> tuple[Home, str, Path]:
    """The archive of a study whose plan was amended before its first trial."""
    home, study, file = archived
    plan = home.store.plans.get(study)
    second = planned(home.store, plan=plan)
    home.store.plans.save(second, plan.model_copy(update={"version": 2}))
    [trial] = home.store.trials.ensure(second, "floor", [("lr=base", 0)])
    finish(home.store, second, trial, 0.3, computed_in("bfloat16"))
    write_archive(home.store, second, read_instrument(FOLDER), home.studies / second, file)
    return home, second, file


def test_a_trial_of_an_amended_plan_is_run_again_under_the_same_plan(
    amended: tuple[Home, str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    home, study, file = amended

    class Runs:
        def __init__(self, *_: object) -> None:
            pass

        async def run_trials(self, _: str, __: Plan, trials: list[TrialRecord]) -> list[TrialRecord]:
            return [trial.model_copy(update={"status": TrialStatus.DONE}) for trial in trials]

    monkeypatch.setattr("researcher.cli.worker.pool_of", lambda *_: nullcontext())
    monkeypatch.setattr("researcher.cli.worker.Executor", Runs)
    assert main(["reproduce", str(file), "--engine", "echo"]) == DONE
    again = home.store.studies.resolve("latest")
    assert (again != study, home.store.studies.get(again).status) == (True, StudyStatus.STOPPED)
    assert home.store.plans.get(again) == home.store.plans.get(study)
    assert [trial.key for trial in home.store.trials.all(again)] == [
        trial.key for trial in home.store.trials.all(study)
    ]


def test_a_reproduction_whose_plan_cannot_be_saved_is_over(
    archived: tuple[Home, str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    home, study, file = archived

    def full(*_: object) -> None:
        raise PlanFrozen("the plan cannot be saved")

    monkeypatch.setattr(Plans, "save", full)
    assert main(["reproduce", str(file), "--engine", "echo"]) == FAILED
    again = next(each for each in home.store.studies.all() if each.id != study)
    assert again.status is StudyStatus.STOPPED


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

    monkeypatch.setattr("researcher.cli.archives._again", again)
    assert main(["reproduce", str(archived[2]), "--engine", "echo"]) == DONE
    assert ("computed in bfloat16 then and in float32 now" in capsys.readouterr().out) == told
    assert main(["reproduce", str(archived[2]), "--engine", "echo", "--json"]) == DONE
    assert json.loads(capsys.readouterr().out)["computed_in"] == {"then": "bfloat16", "now": now}
