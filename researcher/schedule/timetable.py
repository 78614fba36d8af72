"""Timetables: the daily windows in which a study may run, in the machine's time zone, and an end.

Everything is computed from the current time, so clock changes and suspended laptops need no special care.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping, Sequence
from datetime import date, datetime, time, timedelta
from pathlib import Path
from typing import Annotated, Any, Self
from zoneinfo import ZoneInfo, ZoneInfoNotFoundError

from pydantic import Field, ValidationError, field_validator
from tzlocal import get_localzone_name

from foundation.commandline import UsageError
from foundation.strict import StrictModel, explain

_WEEKDAYS = ("mon", "tue", "wed", "thu", "fri", "sat", "sun")
_WINDOW = re.compile(r"(?:(?P<days>[a-z,\-]+) )?(?P<opens>\d{1,2}:\d{2})-(?P<closes>\d{1,2}:\d{2})")
LONGEST_DAYS = 3650
"""Maximum duration of a study that has an end, in days."""
_DAY_S = 86_400.0
_LOCALTIME = Path("/etc/localtime")
"""Symbolic link to the zone file. Its target names the time zone; without the link, the machine uses UTC."""
_NAMELESS = "{} time zone, but --window needs one; set TZ to a name such as Europe/Berlin"
_AHEAD = 8
"""Number of days within which every window opens at least once."""


class Window(StrictModel):
    """A daily window, in minutes after midnight. If it closes before it opens, it lasts into the next day.

    `weekdays` are the days on which it opens; 0 is Monday.
    """

    opens: Annotated[int, Field(ge=0, lt=1440)]
    closes: Annotated[int, Field(ge=0, le=1440)]
    weekdays: tuple[int, ...] = tuple(range(7))

    @classmethod
    def parse(cls, text: str) -> Self:
        """Parse `22:00-07:00`, `sat,sun 00:00-24:00` or `mon-fri 19:30-23:00`. Raises: UsageError."""
        found = _WINDOW.fullmatch(text.strip().lower())
        if found is None:
            raise UsageError(f"{text!r} is not a window; write 22:00-07:00, or 'sat,sun 00:00-24:00'")
        opens, closes = (_minutes(found[part], text) for part in ("opens", "closes"))
        if opens == closes or opens == 1440:
            raise UsageError(
                f"the window {text!r} is empty; it must open before 24:00, and close at another time than it opens"
            )
        return cls(opens=opens, closes=closes, weekdays=_weekdays(found["days"], text))

    def on(self, day: date, zone: ZoneInfo) -> tuple[float, float]:
        """Return the opening and closing times, in Unix seconds, of the window that opens on that day."""
        last = day if self.closes > self.opens else day + timedelta(days=1)
        return _moment(day, self.opens, zone), _moment(last, self.closes, zone)


class Unreadable(UsageError):
    """The timetable comes from another machine or a later version."""


class Timetable(StrictModel):
    """When a study may run.

    Without windows it may always run. `until` is the time in Unix seconds after which no trial begins; None: no end. `zone` is the
    IANA name of the windows' time zone.
    """

    windows: tuple[Window, ...] = ()
    until: float | None = None
    zone: str

    @field_validator("zone")
    @classmethod
    def _known(cls, name: str) -> str:
        if not _is_zone(name):
            raise ValueError(f"{name!r} is not a time zone that this machine knows")
        return name

    @classmethod
    def of(cls, windows: Sequence[str], days: float | None, now: float, zone: str | None = None) -> Self:
        """Return the timetable for `--window` and `--days`, starting now. The default zone is the machine's.

        Raises: UsageError, also for windows when the machine's zone has no name.
        """
        if days is not None and days > LONGEST_DAYS:
            raise UsageError(f"a study may take at most {LONGEST_DAYS} days, not {days:g}")
        return cls(
            windows=tuple(Window.parse(text) for text in windows),
            until=None if days is None else now + days * _DAY_S,
            zone=zone or (_zone_here() if windows else "UTC"),
        )

    @classmethod
    def of_record(cls, detail: Mapping[str, Any]) -> Self:
        """Return the timetable in a stored schedule. Raises: Unreadable."""
        try:
            return cls.model_validate(detail["timetable"])
        except ValidationError as error:
            problems = "; ".join(str(problem) for problem in explain(error, cls))
            raise Unreadable(f"its timetable cannot be read on this machine: {problems}") from error

    def over(self, now: float) -> bool:
        return self.until is not None and now >= self.until

    def open(self, now: float) -> bool:
        """Return whether trials may run at `now`."""
        if self.over(now):
            return False
        return not self.windows or any(begin <= now < end for begin, end in self._around(now))

    def next_change(self, now: float) -> float | None:
        """Return the next time at which `open` may change; None: never."""
        edges = [edge for span in self._around(now) for edge in span]
        if self.until is not None:
            edges.append(self.until)
        return min((edge for edge in edges if edge > now), default=None)

    def next_opening(self, now: float) -> float | None:
        """Return the next time at which trials may run: `now` if they may run now; None: never again."""
        if self.over(now):
            return None
        if self.open(now):
            return now
        begins = [begin for begin, _ in self._around(now) if begin > now]
        first = min(begins, default=None)
        return None if first is None or self.over(first) else first

    def _around(self, now: float) -> Iterator[tuple[float, float]]:
        """Yield the opening and closing times of each window from yesterday to `_AHEAD` days ahead."""
        zone = ZoneInfo(self.zone)
        today = datetime.fromtimestamp(now, zone).date()
        for offset in range(-1, _AHEAD):
            day = today + timedelta(days=offset)
            for window in self.windows:
                begin, end = window.on(day, zone)
                if (
                    day.weekday() in window.weekdays and begin < end
                ):  # skip a window that the change of clocks removes entirely
                    yield begin, end


def _moment(day: date, minutes: int, zone: ZoneInfo) -> float:
    if minutes == 1440:
        day, minutes = day + timedelta(days=1), 0
    named = datetime.combine(day, time(minutes // 60, minutes % 60), zone)
    late, early = named.timestamp(), named.replace(fold=1).timestamp()
    return late if late <= early else _change_between(early, late, zone)


def _change_between(before: float, after: float, zone: ZoneInfo) -> float:
    """Find the clock change between two Unix times, and return the Unix time at which the new UTC offset starts."""
    offset = datetime.fromtimestamp(after, zone).utcoffset()
    while after - before > 1:
        middle = (before + after) // 2
        if datetime.fromtimestamp(middle, zone).utcoffset() == offset:
            after = middle
        else:
            before = middle
    return after


def _zone_here() -> str:
    """Return the IANA name of the machine's time zone. Raises: UsageError if it has none, because windows would be undefined."""
    given = os.environ.get("TZ", "").removeprefix(":")
    if given:
        name = str(Path(given).resolve()).rpartition("/zoneinfo/")[2] if given.startswith("/") else given
        if not _is_zone(name):
            raise UsageError(_NAMELESS.format(f"TZ={given!r} names no"))
        return name
    try:
        found = get_localzone_name()
    except ZoneInfoNotFoundError as error:
        raise UsageError(_NAMELESS.format("this machine's settings name more than one")) from error
    if not found and _LOCALTIME.exists():
        raise UsageError(_NAMELESS.format("this machine's settings do not name a"))
    return found or "UTC"


def _is_zone(name: str) -> bool:
    try:
        ZoneInfo(name)
    except (ZoneInfoNotFoundError, ValueError, OSError):  # OSError: the name is a folder of zones
        return False
    return True


def _minutes(text: str, whole: str) -> int:
    hours, minutes = (int(part) for part in text.split(":"))
    if minutes > 59 or hours * 60 + minutes > 1440:
        raise UsageError(f"{text} in the window {whole!r} is not a time of day")
    return hours * 60 + minutes


def _weekdays(text: str | None, whole: str) -> tuple[int, ...]:
    """Parse `mon-fri`, `sat,sun` or `fri-mon`."""
    if text is None:
        return tuple(range(7))
    days: set[int] = set()
    for part in text.split(","):
        ends = part.split("-")
        if len(ends) > 2 or any(end not in _WEEKDAYS for end in ends):
            raise UsageError(f"{part!r} in the window {whole!r} is not a day; days are {', '.join(_WEEKDAYS)}")
        first, last = _WEEKDAYS.index(ends[0]), _WEEKDAYS.index(ends[-1])
        days.update((first + step) % 7 for step in range((last - first) % 7 + 1))
    return tuple(sorted(days))
