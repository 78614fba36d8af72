"""When a study may run: daily windows in the machine's own time zone, and a last moment.

Everything is worked out anew from the time of day, so that clocks which are put forward or back, and laptops which sleep
through a window, need no care: a window that has passed is over, one that has begun is open.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from datetime import date, datetime, time, timedelta
from typing import Annotated, Any, Self
from zoneinfo import ZoneInfo, ZoneInfoNotFoundError

from pydantic import Field, field_validator
from tzlocal import get_localzone_name

from foundation.commandline import UsageError
from foundation.strict import StrictModel

_WEEKDAYS = ("mon", "tue", "wed", "thu", "fri", "sat", "sun")
_WINDOW = re.compile(r"(?:(?P<days>[a-z,\-]+) )?(?P<opens>\d{1,2}:\d{2})-(?P<closes>\d{1,2}:\d{2})")
_DAY_S = 86_400.0
_AHEAD = 8
"""Days in which every window opens at least once."""


class Window(StrictModel):
    """Minutes after midnight. A window that closes before it opens lasts into the next day.

    weekdays: on which it opens, 0 is Monday.
    """

    opens: Annotated[int, Field(ge=0, lt=1440)]
    closes: Annotated[int, Field(ge=0, le=1440)]
    weekdays: tuple[int, ...] = tuple(range(7))

    @classmethod
    def parse(cls, text: str) -> Self:
        """`22:00-07:00`, `sat,sun 00:00-24:00`, `mon-fri 19:30-23:00`. Raises: UsageError."""
        found = _WINDOW.fullmatch(text.strip().lower())
        if found is None:
            raise UsageError(f"{text!r} is no window; write 22:00-07:00, or 'sat,sun 00:00-24:00'")
        opens, closes = (_minutes(found[part], text) for part in ("opens", "closes"))
        if opens == closes or opens == 1440:
            raise UsageError(f"the window {text!r} is empty; write when it opens and when it closes")
        return cls(opens=opens, closes=closes, weekdays=_weekdays(found["days"], text))

    def on(self, day: date, zone: ZoneInfo) -> tuple[float, float]:
        """Unix seconds at which it opens and closes when it opens on that day."""
        last = day if self.closes > self.opens else day + timedelta(days=1)
        return _moment(day, self.opens, zone), _moment(last, self.closes, zone)


class Timetable(StrictModel):
    """windows: none means always. until: Unix seconds after which nothing more is begun; None: no end.

    zone: IANA name of the time zone in which the windows are meant.
    """

    windows: tuple[Window, ...] = ()
    until: float | None = None
    zone: str

    @field_validator("zone")
    @classmethod
    def _known(cls, name: str) -> str:
        try:
            ZoneInfo(name)
        except (ZoneInfoNotFoundError, ValueError) as error:
            raise ValueError(f"{name!r} is no time zone that this machine knows") from error
        return name

    @classmethod
    def of(cls, windows: Sequence[str], days: float | None, now: float, zone: str | None = None) -> Self:
        """What `--window` and `--days` ask for, from now on, in the machine's zone unless another is named."""
        return cls(
            windows=tuple(Window.parse(text) for text in windows),
            until=None if days is None else now + days * _DAY_S,
            zone=zone or get_localzone_name() or "UTC",
        )

    @classmethod
    def of_record(cls, detail: Mapping[str, Any]) -> Self:
        """The timetable in a study's schedule as the store keeps it."""
        return cls.model_validate(detail["timetable"])

    def over(self, now: float) -> bool:
        return self.until is not None and now >= self.until

    def open(self, now: float) -> bool:
        """Whether trials may run."""
        if self.over(now):
            return False
        return not self.windows or any(begin <= now < end for begin, end in self._around(now))

    def next_change(self, now: float) -> float | None:
        """The next moment at which `open` may say something else; None: never."""
        edges = [edge for span in self._around(now) for edge in span]
        if self.until is not None:
            edges.append(self.until)
        return min((edge for edge in edges if edge > now), default=None)

    def next_opening(self, now: float) -> float | None:
        """The next moment from which trials may run, `now` itself where they may; None: never again."""
        if self.over(now):
            return None
        if self.open(now):
            return now
        begins = [begin for begin, _ in self._around(now) if begin > now]
        first = min(begins, default=None)
        return None if first is None or self.over(first) else first

    def _around(self, now: float) -> Iterator[tuple[float, float]]:
        """Each window of yesterday, today and the days ahead."""
        zone = ZoneInfo(self.zone)
        today = datetime.fromtimestamp(now, zone).date()
        for offset in range(-1, _AHEAD):
            day = today + timedelta(days=offset)
            for window in self.windows:
                if day.weekday() in window.weekdays:
                    yield window.on(day, zone)


def _moment(day: date, minutes: int, zone: ZoneInfo) -> float:
    if minutes == 1440:
        day, minutes = day + timedelta(days=1), 0
    return datetime.combine(day, time(minutes // 60, minutes % 60), zone).timestamp()


def _minutes(text: str, whole: str) -> int:
    hours, minutes = (int(part) for part in text.split(":"))
    if minutes > 59 or hours * 60 + minutes > 1440:
        raise UsageError(f"{text} in the window {whole!r} is no time of day")
    return hours * 60 + minutes


def _weekdays(text: str | None, whole: str) -> tuple[int, ...]:
    """`mon-fri`, `sat,sun`, `fri-mon`."""
    if text is None:
        return tuple(range(7))
    days: set[int] = set()
    for part in text.split(","):
        ends = part.split("-")
        if len(ends) > 2 or any(end not in _WEEKDAYS for end in ends):
            raise UsageError(f"{part!r} in the window {whole!r} is no day; days are {', '.join(_WEEKDAYS)}")
        first, last = _WEEKDAYS.index(ends[0]), _WEEKDAYS.index(ends[-1])
        days.update((first + step) % 7 for step in range((last - first) % 7 + 1))
    return tuple(sorted(days))
