"""How long trials took, without the time in which they rested.

A trial rests while it is paused, after a withdrawn or failed attempt until the next one begins, and while nothing works on it
because its researcher was interrupted or killed. The journal has the begin and the end of each rest.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence

from researcher.models import Event, TrialRecord, TrialStatus

Rests = Mapping[str, Sequence[tuple[float, float]]]
"""Begin and end of every completed rest, in Unix seconds, by the trial's key."""

_RESTS = ("trial_paused", "attempt_withdrawn", "attempt_failed")
_GOES_ON = ("trial_continued", "trial_begun", "trial_done", "attempt_failed", "trial_failed")
EVENTS = tuple(dict.fromkeys((*_RESTS, *_GOES_ON)))
"""Kinds of the journal's lines that `rests` reads."""


def rests(events: Iterable[Event]) -> Rests:
    """events: of a study's journal, in order."""
    since, found = dict[str, float](), defaultdict[str, list[tuple[float, float]]](list)
    for event in events:
        key = str(event.detail.get("trial"))
        if event.kind in _GOES_ON and key in since:
            found[key].append((since.pop(key), event.at))
        if event.kind in _RESTS:
            since.setdefault(key, event.at - event.detail.get("rested_s", 0.0))
    return found


def took_s(trial: TrialRecord, rested: Rests) -> float | None:
    """Seconds from the trial's first attempt to its end, without its rests; None if it did not begin or has not ended."""
    if trial.started_at is None or trial.ended_at is None:
        return None
    return trial.ended_at - trial.started_at - sum(end - begin for begin, end in rested.get(trial.key, ()))


def at_first_attempt_s(trials: Iterable[TrialRecord], events: Iterable[Event]) -> list[tuple[TrialRecord, float]]:
    """The trials that succeeded at their first attempt, each with the seconds that it took: the pace of one whole trial.

    One that took no time by the records, as the clock was put back meanwhile, shows none.
    """
    rested = rests(events)
    tried_once = [trial for trial in trials if trial.status is TrialStatus.DONE and trial.attempt <= 1]
    return [(trial, seconds) for trial in tried_once if (seconds := took_s(trial, rested) or 0.0) > 0]
