"""What whoever sits down to a study heeds first, before a server is started."""

from __future__ import annotations

import sqlite3
from contextlib import closing
from pathlib import Path

import pytest

from foundation.clock import ManualClock, SystemClock
from researcher.cli import FAILED
from researcher.cli.worker import Worker, work_on
from researcher.conduct import Conduct, Outcome
from researcher.executor.errors import NoServersLeft
from researcher.executor.processes import Berth
from researcher.home import Home
from researcher.main import main
from researcher.models import StudyStatus
from researcher.orphans import end_left, halt
from researcher.ownership import this_process
from researcher.schedule.timetable import Timetable
from tests.fakes.quiet import Quiet
from tests.fakes.shown_study import at_gate, opened, planned, running

pytestmark = pytest.mark.anyio
NOON = 1_700_049_600.0
"""2023-11-15 12:00 UTC."""


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[Home, str]:
    monkeypatch.setenv("RESEARCHER_HOME", str(tmp_path))
    monkeypatch.delenv("RESEARCHER_DATABASE_URL", raising=False)
    return opened(tmp_path)


async def _worked(home: Home, study: str) -> Outcome:
    return await work_on(home, study, Quiet(), wait=False, clock=ManualClock(NOON), copy=lambda store: Quiet())


async def test_a_study_whose_days_pass_at_its_plans_gate_is_ended(home: tuple[Home, str]) -> None:
    found, _ = home
    study = at_gate(found.store)
    timetable = Timetable.of([], 1, NOON - 86_401, zone="UTC")
    found.store.studies.save_schedule(study, {"timetable": timetable.model_dump(mode="json"), "carried": True})
    outcome = await _worked(found, study)
    assert (outcome.status, found.store.studies.get(study).status) == (StudyStatus.STOPPED, StudyStatus.STOPPED)
    assert "days are over" in outcome.reason
    found.store.close()


async def test_a_stop_is_heeded_at_the_plans_gate(home: tuple[Home, str]) -> None:
    found, _ = home
    study = at_gate(found.store)
    found.store.studies.request_stop(study)
    outcome = await _worked(found, study)
    assert (outcome.status, found.store.studies.get(study).status) == (StudyStatus.STOPPED, StudyStatus.STOPPED)
    found.store.close()


def _of_campaign(folder: Path, study: str) -> None:
    with closing(sqlite3.connect(folder / "researcher.db")) as database, database:
        database.execute("UPDATE studies SET campaign_id = 'ca-1' WHERE id = ?", (study,))


def _server(home: Home, study: str) -> Path:
    """The state that a study's own server left."""
    folder = home.studies / study / "server"
    (folder / "process").mkdir(parents=True)
    (folder / "process" / "lock").touch()
    (folder / "state" / "runs").mkdir(parents=True)
    return folder / "state"


@pytest.mark.parametrize("in_campaign", [True, False])
async def test_only_a_study_that_nothing_continues_frees_its_disk_when_it_stops(
    home: tuple[Home, str], tmp_path: Path, in_campaign: bool
) -> None:
    found, _ = home
    study, _ = running(found.store)
    if in_campaign:
        _of_campaign(tmp_path, study)
    state = _server(found, study)
    found.store.studies.request_pause(study)
    await _worked(found, study)
    assert state.exists()
    found.store.studies.clear_requests(study)
    found.store.studies.request_stop(study)
    assert (await _worked(found, study)).status is StudyStatus.STOPPED
    assert state.exists() is not in_campaign
    found.store.close()


@pytest.mark.parametrize("status", [StudyStatus.STOPPED, StudyStatus.FAILED])
@pytest.mark.parametrize("in_campaign", [True, False])
def test_resume_frees_the_disk_of_an_ended_study_that_it_does_not_continue(
    home: tuple[Home, str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    status: StudyStatus,
    in_campaign: bool,
) -> None:
    found, _ = home
    study, _ = running(found.store)
    if in_campaign:
        _of_campaign(tmp_path, study)
    state = _server(found, study)
    found.store.studies.set_status(study, status, "enough")
    monkeypatch.setattr("researcher.cli.resume.conduct", lambda *_, **__: 0)
    assert main(["resume", study]) == (FAILED if in_campaign else 0)
    assert state.exists() is not in_campaign
    assert ("is part of ca-1" in capsys.readouterr().err) is in_campaign
    assert (found.store.studies.get(study).status, found.store.studies.get(study).reason) == (status, "enough")
    found.store.close()


@pytest.mark.parametrize("in_campaign", [True, False])
@pytest.mark.parametrize("ended", [True, False])
def test_what_is_ended_for_a_dead_worker_frees_its_disk_unless_resume_continues_it(
    home: tuple[Home, str], tmp_path: Path, in_campaign: bool, ended: bool
) -> None:
    found, _ = home
    study = planned(found.store)
    if in_campaign:
        _of_campaign(tmp_path, study)
    state = _server(found, study)
    if ended:
        found.store.studies.set_status(study, StudyStatus.FAILED, "broken")
    found.store.leases.acquire(study, f"{this_process()}0", 60.0)
    if ended:
        assert end_left(found, study) == []
    else:
        halt(found, study, "pause")
        assert state.exists()
        halt(found, study, "stop")
    assert state.exists() is not in_campaign
    found.store.close()


class _Slow:
    """An executor whose trials take so long to come to rest that the next window is open by then."""

    def __init__(self, clock: ManualClock) -> None:
        self._clock = clock
        self.calls = 0

    async def run_trials(self, *_: object) -> list[object]:
        self.calls += 1
        if self.calls > 1:
            raise NoServersLeft("enough seen")
        self._clock.advance(600)
        return []


@pytest.mark.parametrize("wait", [True, False])
async def test_a_study_that_came_to_rest_when_the_next_window_was_open_goes_on(
    home: tuple[Home, str], monkeypatch: pytest.MonkeyPatch, wait: bool
) -> None:
    found, _ = home
    study, clock = planned(found.store), ManualClock(NOON - 300)
    timetable = Timetable.of(["08:00-12:00", "12:01-20:00"], None, clock.now(), zone="UTC")
    found.store.studies.save_schedule(study, {"timetable": timetable.model_dump(mode="json"), "carried": False})
    slow = _Slow(clock)

    async def work(worker: Worker) -> Outcome:
        conduct = Conduct(worker._store, slow, Quiet(), Quiet(), clock, found.studies)  # type: ignore[arg-type]
        return await conduct.carry_out(study)

    monkeypatch.setattr(Worker, "_work", work)
    with pytest.raises(NoServersLeft, match="enough seen"):
        await work_on(found, study, Quiet(), wait=wait, clock=clock, copy=lambda store: Quiet())
    assert slow.calls == 2
    found.store.close()


async def test_a_study_whose_servers_are_lost_waits_and_says_what_for(
    home: tuple[Home, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    found, _ = home
    study, _ = running(found.store)

    async def work(worker: Worker) -> Outcome:
        raise NoServersLeft("http://a:1 does not answer")

    monkeypatch.setattr(Worker, "_work", work)
    with pytest.raises(NoServersLeft):
        await _worked(found, study)
    left = found.store.studies.get(study)
    assert (left.status, left.reason) == (StudyStatus.WAITING, "http://a:1 does not answer")
    assert (found.studies / study / "report.md").is_file()
    found.store.close()


@pytest.mark.parametrize("why", ["stop", "pause", "window", "days"])
async def test_what_one_who_died_left_is_ended_before_the_study_rests(home: tuple[Home, str], why: str) -> None:
    found, _ = home
    study, trial = running(found.store)
    windows, days = (["13:00-14:00"] if why == "window" else []), (1 if why == "days" else None)
    timetable = Timetable.of(windows, days, NOON - 86_401, zone="UTC")
    found.store.studies.save_schedule(study, {"timetable": timetable.model_dump(mode="json"), "carried": True})
    if why in ("stop", "pause"):
        getattr(found.store.studies, f"request_{why}")(study)
    berth = Berth(found.studies / study / "server" / "process", SystemClock())
    berth.start(["/bin/sleep", "600"], {})
    outcome = await _worked(found, study)
    assert not berth.alive()
    ended = why in ("stop", "days")
    assert outcome.status is (StudyStatus.STOPPED if ended else StudyStatus.WAITING)
    assert (outcome.report is not None) is ended
    assert [each.outcome for each in found.store.trials.attempts(study, trial.key)] == ["open"]
    found.store.close()
