"""Who will continue a study or campaign that has no worker: the daemon, or a person with a command."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any

from researcher.describe import when
from researcher.home import Home
from researcher.models import SPOKEN, CampaignRecord, CampaignStatus, StudyRecord, StudyStatus
from researcher.schedule.timetable import Timetable, Unreadable


@dataclass(frozen=True, slots=True, kw_only=True)
class Attendance:
    """A study or campaign that has no worker.

    Args:
        command: command that continues it on this machine.
        asks: whether it waits for a person's answer.
        rests_since: time when it began to wait; None if it does not wait, or a person has answered since.
        schedule: the schedule as stored; None: nobody has scheduled it.
    """

    command: str
    asks: bool
    pause_requested: bool
    rests_since: float | None
    schedule: dict[str, Any] | None

    @property
    def carried(self) -> bool:
        """Whether it was handed to the daemon."""
        return bool(self.schedule and self.schedule.get("carried")) and not self.pause_requested

    @property
    def text(self) -> str:
        """Who will continue it, and when."""
        if self.asks and not self.carried:
            return "nobody works on it until there is an answer"
        if self.asks:
            return f"{carrier(command=self.command)} once there is an answer"
        if self.schedule is None or not self.carried:
            return f"nobody works on it; `{self.command}` continues it"
        now = time.time()
        try:
            opening = Timetable.of_record(self.schedule).next_opening(now)
        except Unreadable as error:  # a daemon on this machine leaves it alone
            return f"nobody works on it here: {error}"
        if opening is None:
            return f"its days are over; {carrier('ends', self.command)}"
        if opening > now:
            return f"{carrier(command=self.command)} at {when(opening)}"
        return (
            f"{carrier('tries', self.command)} again; deal with what it waits for"
            if self._stuck
            else carrier(command=self.command)
        )

    @property
    def goes_on(self) -> bool:
        """Whether a running daemon continues it, so that no person has to do anything."""
        return self.carried and not self.asks and not self._stuck and _daemon_lives()

    @property
    def _stuck(self) -> bool:
        """Whether it cannot continue by itself: it began to wait inside an open window, because of a lost server for example, or this
        machine cannot read its timetable."""
        if self.schedule is None:
            return False
        try:
            timetable = Timetable.of_record(self.schedule)
        except Unreadable:
            return True
        return self.rests_since is not None and timetable.open(self.rests_since)


def of_study(home: Home, study: StudyRecord) -> Attendance:
    """Return the attendance of a study whose plan is frozen."""
    gate = home.store.gates.open(study.id)
    rests = study.status is StudyStatus.WAITING and (gate is None or gate.answer is None)
    return Attendance(
        command="researcher resume",
        asks=gate is not None and gate.answer is None,
        pause_requested=study.pause_requested,
        rests_since=study.updated_at if rests else None,
        schedule=home.store.studies.schedule(study.id),
    )


def of_campaign(home: Home, record: CampaignRecord, *, asks: bool) -> Attendance:
    """Return the attendance of a campaign. `asks` says whether it waits for a person's answer."""
    rests = record.status is CampaignStatus.WAITING and not any(
        event.at >= record.updated_at for event in home.store.campaigns.events(record.id, *SPOKEN)
    )
    return Attendance(
        command=f"researcher campaign resume {record.id}",
        asks=asks,
        pause_requested=record.pause_requested,
        rests_since=record.updated_at if rests else None,
        schedule=record.schedule,
    )


def unattended(home: Home, study: StudyRecord) -> str:
    """Return who will continue a study that has no worker, and when."""
    if study.plan_version is None:
        return "nobody works on it, and it has no plan: `researcher start` asks anew, `researcher stop` ends this one"
    return of_study(home, study).text


def goes_on(home: Home, study: StudyRecord) -> bool:
    """Return whether a study that has no worker will continue without a person."""
    return study.plan_version is not None and of_study(home, study).goes_on


def carrier(does: str = "continues", command: str = "researcher resume") -> str:
    """Return a clause that says who continues a study handed to the daemon: the daemon if it is running, else the commands to type.

    `does` is the clause's verb phrase, such as `continues`; `command` continues the study without the daemon.
    """
    who = "the daemon" if _daemon_lives() else f"no daemon is running: `researcher daemon` or `{command}`"
    return f"{who} {does} it"


def _daemon_lives() -> bool:
    from researcher.schedule.daemon import daemon_lives  # APScheduler takes longer to import than a list takes

    return daemon_lives()
