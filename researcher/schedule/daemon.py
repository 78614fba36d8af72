"""The daemon continues studies and campaigns, each in its own process, whenever their timetables allow.

APScheduler stores its jobs in the researcher's database and triggers each look. A look decides from the records alone: an extra
look does nothing, and after a missed look the next one makes up for it.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
import os
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from apscheduler.jobstores.sqlalchemy import SQLAlchemyJobStore
from apscheduler.schedulers.asyncio import AsyncIOScheduler

from foundation.clock import Clock, SystemClock
from foundation.locks import locked
from foundation.paths import user_data_dir
from researcher.campaign.people import waits_for_a_person
from researcher.executor.processes import child_environ
from researcher.gates import waits_for_an_answer
from researcher.models import CampaignRecord, StudyRecord
from researcher.notify.sink import Post
from researcher.notify.study import subject_of
from researcher.notify.words import Subject, failure_notice
from researcher.ownership import is_dead, living_owner
from researcher.schedule.timetable import Timetable, Unreadable
from researcher.store.database import connect, default_url, place_of
from researcher.store.store import Store
from researcher.store.transactions import owned_resource

_log = logging.getLogger(__name__)
_LOOK_EVERY_S = 20
_WAKE_EVERY_S = 60.0
_FIRST_BACKOFF_S, _LONGEST_BACKOFF_S = 10.0, 3600.0
_TOLD_STARTS = 4
"""Number of consecutive failed starts after which people are notified."""
_QUIET_S = 900.0
"""A worker that ran for this long does not count as a failed start."""
_AHEAD_S = 8 * 86_400.0
"""Maximum time ahead for which a look is scheduled."""
_KNOCK_S = 0.1
STARTING_S = 15.0
"""Time limit for starting a daemon, in seconds."""
_PLANNED_S = 600.0
"""A study that still has no frozen plan after this time was abandoned during planning."""
_children: list[subprocess.Popen[bytes]] = []
"""Child processes that have to be reaped."""

Launch = Callable[[str], None]
"""Starts a process that continues this study or campaign."""


@dataclass(frozen=True, slots=True)
class Cared:
    """A study or campaign as the daemon sees it.

    Args:
        planned: whether it can be continued; a study needs a frozen plan for that.
        schedule: the schedule as stored; None: nobody has scheduled it.
        waits: returns whether it waits for a person's answer.
    """

    id: str
    ended: bool
    created_at: float
    stop_requested: bool
    pause_requested: bool
    planned: bool
    schedule: dict[str, Any] | None
    waits: Callable[[], bool]


@dataclass(slots=True)
class _Starts:
    """Consecutive failed starts of a study.

    `began` is the time of the last start. `last` is that time, or the time when its worker was last seen alive.
    """

    count: int = 0
    began: float = 0.0
    last: float = 0.0

    @property
    def backoff_s(self) -> float:
        return 0.0 if not self.count else min(_FIRST_BACKOFF_S * 2 ** (self.count - 1), _LONGEST_BACKOFF_S)


class Carrier:
    """Starts a worker for each study or campaign in its care that has none, whenever its timetable allows."""

    def __init__(self, store: Store, launch: Launch, clock: Clock) -> None:
        self._store = store
        self._launch = launch
        self._clock = clock
        self._starts: dict[str, _Starts] = {}
        self._lapsed: dict[str, int] = {}
        """Tokens of leases that had expired at the last look."""
        self._unreadable: set[str] = set()
        """Ids of studies whose timetable this machine cannot read and whose warning has been logged."""

    def look(self) -> list[str]:
        """Start workers where they are missing. Return the ids of studies and campaigns still in the daemon's care."""
        return [each.id for each in self._all() if self._cared_for(each)]

    def next_change(self) -> float | None:
        """Return when the next timetable opens or closes; None if none does within `_AHEAD_S`, because later looks ask again."""
        now = self._clock.now()
        tables = [self._timetable(each) for each in self._all() if not each.ended]
        changes = [table.next_change(now) for table in tables if table is not None]
        return min((change for change in changes if change is not None and change < now + _AHEAD_S), default=None)

    def _all(self) -> list[Cared]:
        studies = [self._study(each) for each in self._store.studies.all()]
        return [*studies, *(self._campaign(each) for each in self._store.campaigns.all())]

    def _study(self, study: StudyRecord) -> Cared:
        return Cared(
            id=study.id,
            ended=study.status.ended,
            created_at=study.created_at,
            stop_requested=study.stop_requested,
            pause_requested=study.pause_requested,
            planned=study.plan_version is not None,
            schedule=self._store.studies.schedule(study.id),
            waits=lambda: waits_for_an_answer(self._store, study.id),
        )

    def _campaign(self, record: CampaignRecord) -> Cared:
        return Cared(
            id=record.id,
            ended=record.status.ended,
            created_at=record.created_at,
            stop_requested=record.stop_requested,
            pause_requested=record.pause_requested,
            planned=True,
            schedule=record.schedule,
            waits=lambda: waits_for_a_person(self._store, record),
        )

    def _cared_for(self, each: Cared) -> bool:
        if each.ended and not self._held(each.id):
            return False
        table = self._timetable(each)
        if table is None:
            return False
        now = self._clock.now()
        if self._is_owned(each.id, now):
            starts = self._starts.setdefault(each.id, _Starts())
            starts.last = now
            if now - starts.began > _QUIET_S:
                starts.count = 0
            return True
        if not each.planned:
            return now - each.created_at < _PLANNED_S
        if self._held(each.id):  # its worker died: free its servers, even if the study may not run now
            self._begin(each.id, now)
        elif each.pause_requested:
            return True
        elif each.stop_requested or table.over(now):
            self._begin(each.id, now)
        elif table.open(now):
            if each.waits():
                self._starts.pop(each.id, None)  # so that it continues at once after an answer
            else:
                self._begin(each.id, now)
        return True

    def _held(self, study_id: str) -> bool:
        """Return whether a worker, perhaps a dead one, still holds the lease. Its trials may still be running."""
        return self._store.leases.holder(study_id) is not None

    def _is_owned(self, study_id: str, now: float) -> bool:
        """Return whether the study has a worker.

        A lease that expired since the last look still counts: if the clock was set forward or the machine slept, its owner is alive
        and will renew it in a moment.
        """
        before = self._lapsed.pop(study_id, None)
        if living_owner(self._store, study_id, now) is not None:
            return True
        lease = self._store.leases.holder(study_id)
        if lease is None or is_dead(lease.owner):
            return False
        self._lapsed[study_id] = lease.token
        return before != lease.token

    def _begin(self, study_id: str, now: float) -> None:
        starts = self._starts.setdefault(study_id, _Starts())
        starts.last = min(starts.last, now)  # in case the clock was set back
        if starts.count and now - starts.last > _QUIET_S + starts.backoff_s:
            starts.count = 0
        if now < starts.last + starts.backoff_s:
            return
        starts.count += 1
        starts.began = starts.last = now
        if starts.count == _TOLD_STARTS:
            self._tell(study_id, now)
        self._launch(study_id)

    def _tell(self, owned_id: str, now: float) -> None:
        """Notify people about a study or campaign."""
        if owned_resource(owned_id).startswith("campaign:"):
            record = self._store.campaigns.get(owned_id)
            subject, services = Subject.of_campaign(owned_id, record.goal["goal"]), record.goal.get("notify", ())
        else:
            study = self._store.studies.get(owned_id)
            subject, services = subject_of(study), study.options.notify
        said = "Its worker keeps ending right after each start."
        then = f"`daemon.log` in its folder says why; {owned_id} is retried at growing intervals."
        self._store.notices.record(failure_notice(subject, said, now, then), services)

    def _timetable(self, each: Cared) -> Timetable | None:
        """Return the timetable; None if no daemon should run the study, or this machine cannot read the timetable."""
        detail = each.schedule
        if detail is None or not detail.get("carried"):
            return None
        try:
            return Timetable.of_record(detail)
        except Unreadable as error:
            if each.id not in self._unreadable:
                self._unreadable.add(each.id)
                _log.warning("this daemon cannot run %s: %s", each.id, error)
            return None


async def carry(*, until_idle: bool) -> None:
    """Run the daemon until cancelled; with `until_idle`, until no study is left in its care."""
    idle = asyncio.Event()
    store, clock = Store.open(), SystemClock()
    _Current.carrier, _Current.post = Carrier(store, _launch, clock), Post(store, os.environ, clock)
    _Current.idle = idle if until_idle else None
    jobs = connect(default_url())
    scheduler = AsyncIOScheduler(
        jobstores={"default": SQLAlchemyJobStore(engine=jobs, tablename=_jobs_table())},
        job_defaults={"coalesce": True, "misfire_grace_time": None, "max_instances": 1},
        timezone=UTC,
    )
    _Current.scheduler = scheduler
    scheduler.start()
    try:
        now = datetime.now(UTC)
        scheduler.add_job(look, "interval", seconds=_LOOK_EVERY_S, id="look", replace_existing=True, next_run_time=now)
        while not idle.is_set():  # the scheduler may have lost its alarm in a database outage
            with suppress(TimeoutError):
                async with asyncio.timeout(_WAKE_EVERY_S):
                    await idle.wait()
            scheduler.wakeup()
    finally:
        scheduler.shutdown(wait=False)
        jobs.dispose()


class _Current:
    """Objects that the jobs use. A job in a database can only name its function, so it cannot hold objects."""

    carrier: Carrier | None = None
    post: Post | None = None
    scheduler: AsyncIOScheduler | None = None
    idle: asyncio.Event | None = None


async def look() -> None:
    """Run the daemon's job: look now, and schedule another look for when a window next opens or closes."""
    carrier, post, scheduler = _Current.carrier, _Current.post, _Current.scheduler
    if carrier is None or post is None or scheduler is None:
        return
    _children[:] = [child for child in _children if child.poll() is None]
    left = await asyncio.to_thread(carrier.look)
    change = await asyncio.to_thread(carrier.next_change)
    if change is not None:
        scheduler.add_job(look, "date", run_date=datetime.fromtimestamp(change, UTC), id="edge", replace_existing=True)
    unsent = await asyncio.to_thread(post.deliver)
    if left or unsent or _Current.idle is None:
        return
    if not await asyncio.to_thread(carrier.look):  # a study may have been handed over while notices were delivered
        _Current.idle.set()


@contextmanager
def only_daemon(patience_s: float = 0.0) -> Iterator[bool]:
    """Hold the lock of the daemon for this data directory and database while the body runs. Yields whether we got it.

    `patience_s` is how long to wait for another daemon, which may be about to exit because no study is left.
    """
    file = _lock_file()
    until = time.monotonic() + patience_s
    with file.open("a+") as opened:
        while not locked(opened, file, wait=False):
            if time.monotonic() >= until:
                yield False
                return
            time.sleep(_KNOCK_S)
        opened.seek(0)
        opened.truncate()
        opened.write(str(os.getpid()))
        opened.flush()
        yield True


def daemon_lives() -> bool:
    """Return whether a daemon is running for this data directory and database."""
    file = _lock_file()
    if not file.exists():
        return False
    with file.open() as opened:
        return not locked(opened, file, shared=True, wait=False)


def _lock_file() -> Path:
    """Return the lock file of this data directory and database, however the database URL is written."""
    return user_data_dir() / f"daemon-{_short_digest(place_of(default_url()))}.lock"


def ensure_daemon() -> None:
    """Start a daemon in the background unless one is running, and wait until it is up, so that the caller can rely on it.

    The daemon exits when no study is left in its care.
    """
    child = _spawn(["daemon", "--until-idle"], user_data_dir() / "daemon.log")
    until = time.monotonic() + STARTING_S
    while child.poll() is None and not daemon_lives() and time.monotonic() < until:
        time.sleep(_KNOCK_S)


def _launch(study_id: str) -> None:
    folder = user_data_dir() / "studies" / study_id
    folder.mkdir(parents=True, exist_ok=True)
    command = ["campaign"] if owned_resource(study_id).startswith("campaign:") else []
    _spawn([*command, "resume", study_id, "--scheduled", "--json"], folder / "daemon.log")


def _spawn(arguments: list[str], log: Path) -> subprocess.Popen[bytes]:
    with log.open("ab") as opened:
        child = subprocess.Popen(
            [sys.executable, "-m", "researcher.main", *arguments],
            stdin=subprocess.DEVNULL,
            stdout=opened,
            stderr=subprocess.STDOUT,
            env=child_environ(own=True),
            start_new_session=True,
        )
    _children.append(child)
    return child


def _jobs_table() -> str:
    """Return the name of this daemon's job table. Daemons that share a database must not get each other's jobs."""
    place = f"{socket.gethostname()}:{user_data_dir()}"
    return f"daemon_jobs_{_short_digest(place)}"


def _short_digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:12]
