"""Windows, weekdays, the changes of summer time, and a last moment."""

from __future__ import annotations

from datetime import datetime
from pathlib import Path
from zoneinfo import ZoneInfo

import pytest
from hypothesis import given
from hypothesis import strategies as st

from foundation.commandline import UsageError
from researcher.schedule.timetable import LONGEST_DAYS, Timetable, Window

_ZONE = "Europe/Berlin"


def _at(text: str) -> float:
    return datetime.fromisoformat(text).replace(tzinfo=ZoneInfo(_ZONE)).timestamp()


def _table(*windows: str, days: float | None = None, now: str = "2026-03-02 12:00") -> Timetable:
    return Timetable.of(windows, days, _at(now), zone=_ZONE)


def test_without_windows_it_is_always_open() -> None:
    table = _table()
    assert table.open(_at("2026-03-02 03:00"))
    assert table.next_change(_at("2026-03-02 03:00")) is None


@pytest.mark.parametrize(
    ("moment", "is_open"),
    [("2026-03-02 21:59", False), ("2026-03-02 22:00", True), ("2026-03-03 06:59", True), ("2026-03-03 07:00", False)],
)
def test_a_window_over_midnight(moment: str, is_open: bool) -> None:
    assert _table("22:00-07:00").open(_at(moment)) is is_open


def test_weekdays_name_the_day_on_which_it_opens() -> None:
    table = _table("fri 22:00-07:00")
    assert table.open(_at("2026-03-07 06:00"))  # a Saturday morning
    assert not table.open(_at("2026-03-06 06:00"))
    assert table.next_opening(_at("2026-03-07 08:00")) == _at("2026-03-13 22:00")


def test_a_whole_weekend() -> None:
    table = _table("sat,sun 00:00-24:00")
    assert table.open(_at("2026-03-08 23:59"))
    assert not table.open(_at("2026-03-09 00:00"))


def test_days_that_wrap_around_the_week() -> None:
    assert Window.parse("sat-mon 01:00-02:00").weekdays == (0, 5, 6)


def test_the_night_in_which_clocks_go_forward_is_an_hour_shorter() -> None:
    table = _table("01:00-05:00")
    opening = table.next_opening(_at("2026-03-28 23:00"))
    assert opening == _at("2026-03-29 01:00")
    closing = table.next_change(opening)
    assert closing is not None
    assert closing - opening == 3 * 3600


def test_the_night_in_which_clocks_go_back_is_an_hour_longer_and_opens_once() -> None:
    table = _table("01:00-05:00")
    opening = table.next_opening(_at("2026-10-24 23:00"))
    assert opening == _at("2026-10-25 01:00")
    closing = table.next_change(opening)
    assert closing is not None
    assert closing - opening == 5 * 3600
    assert all(table.open(opening + minutes * 60) for minutes in range(5 * 60))


def test_a_window_whose_beginning_the_change_of_clocks_leaves_out_opens_all_the_same() -> None:
    table = _table("02:30-04:00")  # there is no 02:30 on the 29th
    opening = table.next_opening(_at("2026-03-28 23:00"))
    assert opening is not None
    assert _at("2026-03-29 01:30") <= opening <= _at("2026-03-29 03:30")
    assert table.open(_at("2026-03-29 03:45"))
    assert not table.open(_at("2026-03-29 04:00"))


def test_a_time_that_the_change_of_clocks_leaves_out_is_the_moment_of_the_change() -> None:
    changed = _at("2026-03-29 03:00")
    assert _table("02:30-03:10").next_opening(_at("2026-03-28 23:00")) == changed
    assert _table("02:30-03:10").next_change(changed) == _at("2026-03-29 03:10")
    assert _table("22:00-02:30").next_change(_at("2026-03-28 23:00")) == changed


def test_a_window_that_the_change_of_clocks_leaves_out_whole_opens_the_day_after() -> None:
    assert _table("02:15-02:45").next_opening(_at("2026-03-28 23:00")) == _at("2026-03-30 02:15")


@given(st.floats(min_value=1_700_000_000, max_value=1_900_000_000), st.floats(min_value=-86_400, max_value=86_400))
def test_whatever_a_clock_did_before_what_is_open_follows_from_the_time_it_shows(now: float, moved: float) -> None:
    table = _table("22:00-07:00", "sat,sun 00:00-24:00")
    fresh = Timetable.model_validate_json(table.model_dump_json())
    table.open(now)
    assert table.open(now + moved) == fresh.open(now + moved)
    assert table.next_opening(now + moved) == fresh.next_opening(now + moved)


def test_after_its_last_moment_nothing_opens() -> None:
    table = _table("22:00-07:00", days=1)
    assert table.open(_at("2026-03-03 06:00"))
    assert table.over(_at("2026-03-03 12:00"))
    assert table.next_opening(_at("2026-03-03 12:00")) is None
    assert table.next_opening(_at("2026-03-03 08:00")) is None


@pytest.mark.parametrize(
    "text", ["22-7", "25:00-07:00", "22:00-22:00", "someday 22:00-23:00", "mon-tue-wed 1:00-2:00", ""]
)
def test_what_is_no_window_is_refused(text: str) -> None:
    with pytest.raises(UsageError, match="window"):
        Window.parse(text)


@pytest.mark.parametrize(
    ("given", "zone"),
    [
        ("Europe/Berlin", "Europe/Berlin"),
        (":Europe/Berlin", "Europe/Berlin"),
        ("EST5EDT", "EST5EDT"),
        ("UTC", "UTC"),
    ],
)
def test_windows_are_meant_in_the_zone_that_tz_names(given: str, zone: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TZ", given)
    assert Timetable.of(["22:00-07:00"], None, 0.0).zone == zone


@pytest.mark.parametrize("given", ["EST5EDT4", "UTC+3", "CET-1CEST,M3.5.0,M10.5.0/3", "Mars/Olympus", "/nowhere"])
def test_windows_in_a_zone_without_a_name_are_refused(given: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TZ", given)
    with pytest.raises(UsageError, match="set TZ to a name such as Europe/Berlin"):
        Timetable.of(["22:00-07:00"], None, 0.0)
    assert Timetable.of([], 3, 0.0).until == 3 * 86_400


def test_windows_on_a_machine_that_does_not_name_its_zone_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("TZ", raising=False)
    monkeypatch.setattr("researcher.schedule.timetable.get_localzone_name", lambda: None)
    monkeypatch.setattr("researcher.schedule.timetable._LOCALTIME", tmp_path / "localtime")
    assert Timetable.of(["22:00-07:00"], None, 0.0).zone == "UTC"
    (tmp_path / "localtime").touch()
    with pytest.raises(UsageError, match="do not name a time zone"):
        Timetable.of(["22:00-07:00"], None, 0.0)


def test_an_unknown_zone_is_refused() -> None:
    with pytest.raises(ValueError, match="not a time zone"):
        Timetable(zone="Mars/Olympus")


@given(st.floats(min_value=1_700_000_000, max_value=1_900_000_000))
def test_nothing_changes_before_the_next_change(now: float) -> None:
    table = _table("mon-fri 19:30-23:00", "sat 10:00-02:00")
    change = table.next_change(now)
    assert change is not None
    assert change > now
    assert table.open(now) == table.open(now + (change - now) * 0.999)
    assert table.open(change) != table.open(now)


def test_days_beyond_ten_years_are_refused() -> None:
    assert _table(days=LONGEST_DAYS).until is not None
    with pytest.raises(UsageError, match="at most 3650"):
        _table(days=3_000_000)
