"""Measures how long trials took, not counting the time in which they rested.

A trial rests while it is paused, between a withdrawn or failed attempt and the next attempt, and while nothing works on it because
its researcher was interrupted or killed. The journal records when each rest began and ended.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence

from researcher.models import Event, TrialRecord, TrialStatus

Rests = Mapping[str, Sequence[tuple[float, float]]]
"""Start and end of every completed rest, in Unix seconds, by trial key."""

_RESTS = ("trial_paused", "attempt_withdrawn", "attempt_failed")
_GOES_ON = ("trial_continued", "trial_begun", "trial_done", "attempt_failed", "trial_failed")
EVENTS = tuple(dict.fromkeys((*_RESTS, *_GOES_ON)))
"""Kinds of journal events that `rests` reads."""


def rests(events: Iterable[Event]) -> Rests:
    """Find the completed rests in a study's journal events, which must be in order."""
    since, found = dict[str, float](), defaultdict[str, list[tuple[float, float]]](list)
    for event in events:
        key = str(event.detail.get("trial"))
        if event.kind in _GOES_ON and key in since:
            found[key].append((since.pop(key), event.at))
        if event.kind in _RESTS:
            since.setdefault(key, event.at - event.detail.get("rested_s", 0.0))
    return found


def took_s(trial: TrialRecord, rested: Rests) -> float | None:
    """Return the seconds from the trial's first attempt to its end, without its rests; None if it has not begun or not ended."""
    if trial.started_at is None or trial.ended_at is None:
        return None
    return trial.ended_at - trial.started_at - sum(end - begin for begin, end in rested.get(trial.key, ()))


def at_first_attempt_s(trials: Iterable[TrialRecord], events: Iterable[Event]) -> list[tuple[TrialRecord, float]]:
    """List the trials that succeeded at their first attempt, with the seconds that each took: the pace of a complete trial.

    Skips trials that took no time according to the records, as happens when the clock is set back.
    """
    rested = rests(events)
    tried_once = [trial for trial in trials if trial.status is TrialStatus.DONE and trial.attempt <= 1]
    return [(trial, seconds) for trial in tried_once if (seconds := took_s(trial, rested) or 0.0) > 0]
