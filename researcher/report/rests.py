"""When trials rested, by the journal alone: paused, or waiting for another attempt after one that was withdrawn or failed.

It does not know of a researcher that was killed, or interrupted on servers of the study's own: until it goes on, that time counts.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping

from researcher.models import Event

_RESTS = ("trial_paused", "attempt_withdrawn", "attempt_failed")
_GOES_ON = ("trial_continued", "trial_begun", "trial_done", "attempt_failed", "trial_failed")


def rests(events: Iterable[Event]) -> Mapping[str, list[tuple[float, float]]]:
    """Begin and end of every rest that is over, in Unix seconds, by the trial's key. events: in their order."""
    since, found = dict[str, float](), defaultdict[str, list[tuple[float, float]]](list)
    for event in events:
        key = str(event.detail.get("trial"))
        if event.kind in _GOES_ON and key in since:
            found[key].append((since.pop(key), event.at))
        if event.kind in _RESTS:
            since.setdefault(key, event.at)
    return found
