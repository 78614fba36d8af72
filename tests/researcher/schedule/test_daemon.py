"""Days of a daemon in moments: what it begins, when, and what it leaves alone."""

from __future__ import annotations

import asyncio
import subprocess
from collections.abc import Iterator
from contextlib import ExitStack
from datetime import datetime
from pathlib import Path
from zoneinfo import ZoneInfo

import pytest
from apscheduler.schedulers.asyncio import AsyncIOScheduler

from foundation.clock import ManualClock
from researcher.models import Answer, StudyStatus
from researcher.ownership import this_process
from researcher.schedule import daemon
from researcher.schedule.daemon import Carrier, carry, daemon_lives, ensure_daemon, only_daemon
from researcher.schedule.timetable import Timetable
from researcher.store.store import Store
from tests.fakes.campaign import MadeUpCampaign
from tests.fakes.postgres import postgres
from tests.fakes.shown_study import planned
from tests.fakes.study import study_plan

_ZONE = "Europe/Berlin"


def _at(text: str) -> float:
    return datetime.fromisoformat(text).replace(tzinfo=ZoneInfo(_ZONE)).timestamp()


class _WallClock(ManualClock):
    """One whose wall time can be put back, as people do who find it wrong."""

    def put_back(self, seconds: float) -> None:
        self._now -= seconds


class _House:
    """A store, a clock at Monday noon, and a daemon whose launches are noted."""

    def __init__(self, folder: Path) -> None:
        self.clock = _WallClock(_at("2026-03-02 12:00"))
        self.store = Store.open(f"sqlite:///{folder / 'records.sqlite'}", clock=self.clock)
        self.launched: list[str] = []
        self.carrier = Carrier(self.store, self.launched.append, self.clock)

    def study(self, *windows: str, days: float | None = None, carried: bool = True) -> str:
        study_id = self.store.studies.create("a question", {})
        self.store.plans.save(study_id, study_plan())
        table = Timetable.of(windows, days, self.clock.now(), zone=_ZONE)
        self.store.studies.save_schedule(study_id, {"timetable": table.model_dump(mode="json"), "carried": carried})
        return study_id

    def until(self, text: str) -> None:
        self.clock.advance(_at(text) - self.clock.now())


@pytest.fixture
def house(tmp_path: Path) -> Iterator[_House]:
    found = _House(tmp_path)
    yield found
    found.store.close()


def test_a_study_is_begun_when_its_window_opens(house: _House) -> None:
    study = house.study("22:00-07:00")
    assert house.carrier.look() == [study]
    assert house.launched == []
    assert house.carrier.next_change() == _at("2026-03-02 22:00")
    house.until("2026-03-02 22:00")
    house.carrier.look()
    assert house.launched == [study]


def test_one_that_is_worked_on_is_left_alone(house: _House) -> None:
    study = house.study()
    house.store.leases.acquire(study, this_process(), 60.0)
    house.carrier.look()
    assert house.launched == []


def test_one_whose_worker_died_is_begun_again_once_the_lease_is_over(house: _House) -> None:
    study = house.study()
    house.store.leases.acquire(study, "elsewhere/1/1", 60.0)
    house.carrier.look()
    assert house.launched == []
    house.clock.advance(61)
    house.carrier.look()
    assert house.launched == []  # it may be the clock that was put forward
    house.clock.advance(20)
    house.carrier.look()
    assert house.launched == [study]


def test_a_clock_that_is_put_forward_by_hours_does_not_cost_a_worker_its_study(house: _House) -> None:
    study = house.study()
    token = house.store.leases.acquire(study, this_process(), 60.0)
    for _ in range(3):
        house.carrier.look()
        house.clock.advance(5 * 3600)
        house.carrier.look()
        house.store.leases.renew(study, token, 60.0)  # as the worker does, every few seconds of its own
        house.clock.advance(20)
        house.carrier.look()
    assert house.launched == []


def test_a_clock_that_is_put_back_by_hours_delays_nothing(house: _House) -> None:
    study = house.study()
    house.carrier.look()
    assert house.launched == [study]
    house.clock.put_back(6 * 3600)
    house.clock.advance(20)
    house.carrier.look()
    house.clock.advance(20)
    house.carrier.look()
    assert house.launched == [study, study]


def test_one_that_keeps_dying_is_begun_ever_more_seldom(house: _House) -> None:
    house.study()
    for _ in range(360):
        house.carrier.look()
        house.clock.advance(20)
    assert 7 <= len(house.launched) <= 12  # within two hours, instead of 360 times


def test_people_hear_of_a_campaign_that_keeps_dying(house: _House, tmp_path: Path) -> None:
    made = MadeUpCampaign(tmp_path, clock=house.clock, notify=["HOOK"])
    carrier = Carrier(made.store, house.launched.append, house.clock)
    for _ in range(20):
        carrier.look()
        house.clock.advance(20)
    assert [notice.title for notice in made.store.notices.of(made.id)] == [f"{made.id} needs attention"]
    made.store.close()


def test_one_that_worked_for_hours_before_it_died_is_begun_again_at_once(house: _House) -> None:
    study = house.study()
    for deaths in range(6):
        house.carrier.look()
        assert len(house.launched) == deaths + 1
        token = house.store.leases.acquire(study, this_process(), 3 * 3600.0)
        for _ in range(12):
            house.clock.advance(600)
            house.carrier.look()
        house.store.leases.release(study, token)


def test_a_paused_study_rests_until_somebody_resumes_it(house: _House) -> None:
    study = house.study()
    house.store.studies.request_pause(study)
    assert house.carrier.look() == [study]
    assert house.launched == []


def test_a_study_at_a_gate_rests_until_somebody_answers_and_goes_on_at_once(house: _House) -> None:
    study = house.study()
    house.carrier.look()
    assert house.launched == [study]
    house.store.gates.ask(study, "plan/1", {})
    for _ in range(100):
        house.clock.advance(60.0)
        house.carrier.look()
    assert house.launched == [study]
    house.store.gates.give(study, "plan/1", Answer(verdict="approve"))
    house.carrier.look()
    assert house.launched == [study, study]


def test_a_study_at_a_gate_is_ended_all_the_same_when_it_shall_stop(house: _House) -> None:
    study = house.study()
    house.store.gates.ask(study, "plan/1", {})
    house.store.studies.request_stop(study)
    house.carrier.look()
    assert house.launched == [study]


def test_studies_that_nobody_handed_over_or_that_are_done_are_none_of_its_business(house: _House) -> None:
    house.study(carried=False)
    done = house.study()
    house.store.studies.set_status(done, StudyStatus.DONE)
    assert house.carrier.look() == []
    assert house.launched == []


def test_after_its_days_a_study_is_begun_once_more_to_be_ended(house: _House) -> None:
    study = house.study("22:00-07:00", days=2)
    house.until("2026-03-04 12:00")
    house.carrier.look()
    assert house.launched == [study]


def test_a_laptop_that_slept_through_a_window_misses_it_and_meets_the_next(house: _House) -> None:
    study = house.study("22:00-07:00")
    house.carrier.look()
    house.until("2026-03-03 09:00")  # asleep all night
    house.carrier.look()
    assert house.launched == []
    house.until("2026-03-03 23:10")
    house.carrier.look()
    assert house.launched == [study]


@pytest.mark.anyio
@pytest.mark.parametrize("kind", ["sqlite", "postgresql"])
async def test_a_daemon_without_work_looks_and_ends_whatever_holds_the_records(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RESEARCHER_HOME", str(tmp_path))
    with ExitStack() as stack:
        url = stack.enter_context(postgres()) if kind == "postgresql" else f"sqlite:///{tmp_path}/records.db"
        monkeypatch.setenv("RESEARCHER_DATABASE_URL", url)
        async with asyncio.timeout(120):
            await carry(until_idle=True)
        store = Store.open(url)
        assert store.studies.all() == []
        store.close()


@pytest.mark.anyio
@pytest.mark.parametrize("handed_over", [True, False])
async def test_a_study_that_is_handed_over_during_a_slow_delivery_keeps_the_daemon(
    house: _House, monkeypatch: pytest.MonkeyPatch, handed_over: bool
) -> None:
    class Slow:
        def deliver(self) -> int:
            if handed_over:
                house.study()
            return 0

    idle = asyncio.Event()
    current = {"carrier": house.carrier, "post": Slow(), "scheduler": AsyncIOScheduler(), "idle": idle}
    for name, value in current.items():
        monkeypatch.setattr(daemon._Current, name, value)
    await daemon.look()
    assert idle.is_set() is not handed_over
    assert len(house.launched) == handed_over


def test_there_is_one_daemon_for_a_data_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RESEARCHER_HOME", str(tmp_path))
    with only_daemon() as first:
        assert first
        with only_daemon() as second:
            assert not second
    with only_daemon() as again:
        assert again


def test_another_database_has_a_daemon_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RESEARCHER_HOME", str(tmp_path))
    monkeypatch.setenv("RESEARCHER_DATABASE_URL", "postgresql://one@db/studies")
    with only_daemon():
        assert daemon_lives()
        monkeypatch.setenv("RESEARCHER_DATABASE_URL", "postgresql://other:word@db/studies?connect_timeout=5")
        assert daemon_lives()
        monkeypatch.setenv("RESEARCHER_DATABASE_URL", "postgresql://one@db/others")
        assert not daemon_lives()
        with only_daemon() as alone:
            assert alone
            assert daemon_lives()


def test_whoever_looks_after_a_study_was_handed_over_finds_a_daemon(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RESEARCHER_HOME", str(tmp_path))
    monkeypatch.delenv("RESEARCHER_DATABASE_URL", raising=False)
    store = Store.open()
    study = planned(store)
    store.studies.request_pause(study)
    table = Timetable.of([], None, 0.0, zone=_ZONE)
    store.studies.save_schedule(study, {"timetable": table.model_dump(mode="json"), "carried": True})
    begun: list[subprocess.Popen[bytes]] = []
    monkeypatch.setattr("researcher.schedule.daemon._children", begun)
    monkeypatch.setattr("researcher.schedule.daemon.STARTING_S", 120.0)  # it returns as soon as the daemon lives
    try:
        ensure_daemon()
        assert daemon_lives()
    finally:
        for child in begun:
            child.kill()
            child.wait(60)
        store.close()


@pytest.mark.parametrize("rests", ["window", "pause", "gate", "ended"])
def test_one_whose_worker_died_is_begun_once_though_it_rests_so_that_its_servers_are_freed(
    house: _House, rests: str
) -> None:
    study = house.study("22:00-23:00" if rests == "window" else "08:00-20:00")
    if rests == "pause":
        house.store.studies.request_pause(study)
    elif rests == "gate":
        house.store.gates.ask(study, "plan/1", {})
    elif rests == "ended":
        house.store.studies.set_status(study, StudyStatus.DONE)
    house.store.leases.acquire(study, f"{this_process()}0", 60.0)  # a process of this machine that is no more
    house.carrier.look()
    assert house.launched == [study]
    token = house.store.leases.acquire(study, this_process(), 60.0, dead_owner=f"{this_process()}0")
    house.store.leases.release(study, token)  # as the one that was begun does when it has ended what was left
    for _ in range(10):
        house.clock.advance(20)
        house.carrier.look()
    assert house.launched == [study]


def test_a_study_whose_planner_died_before_the_plan_was_frozen_keeps_no_daemon(house: _House) -> None:
    study = house.store.studies.create("a question", {})
    table = Timetable.of([], None, house.clock.now(), zone=_ZONE)
    house.store.studies.save_schedule(study, {"timetable": table.model_dump(mode="json"), "carried": True})
    assert house.carrier.look() == [study]
    house.clock.advance(3600)
    assert house.carrier.look() == []
    assert house.launched == []


def test_a_timetable_that_cannot_be_read_is_told_of_once_and_stops_no_other_study(
    house: _House, caplog: pytest.LogCaptureFixture
) -> None:
    def elsewhere() -> str:
        study = house.study()
        table = {"timetable": {"zone": "Mars/Olympus"}, "carried": True}
        house.store.studies.save_schedule(study, table)
        return study

    ended, lost, other = elsewhere(), elsewhere(), house.study("22:00-07:00")
    house.store.studies.set_status(ended, StudyStatus.STOPPED, "enough")
    for _ in range(3):
        assert house.carrier.look() == [other]
        assert house.carrier.next_change() == _at("2026-03-02 22:00")
    told = [record.getMessage() for record in caplog.records]
    assert len(told) == 1
    assert lost in told[0]
    assert "Mars/Olympus" in told[0]


def test_a_change_that_lies_far_ahead_is_asked_for_anew_by_a_later_look(house: _House) -> None:
    """Also one that an earlier version stored and no calendar has."""
    study = house.study(days=9)
    assert house.carrier.look() == [study]
    assert house.carrier.next_change() is None
    house.until("2026-03-11 00:00")
    assert house.carrier.next_change() == _at("2026-03-11 12:00")
    house.store.studies.save_schedule(study, {"timetable": {"zone": "UTC", "until": 2.6e11}, "carried": True})
    assert house.carrier.look() == [study]
    assert house.carrier.next_change() is None
