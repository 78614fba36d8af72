"""A study's journal as one reader has it so far, for those who look again and again.

PostgreSQL numbers a line when it is written, and shows it when its transaction is committed: a line may come to be seen
after lines with higher numbers. So each look reads some way back.
"""

from __future__ import annotations

from researcher.models import Event
from researcher.store.store import Store

_AGAIN = 200
"""Lines of the study that are read again: far more than are written while one transaction is open."""
_ALL = 1_000_000


class Journal:
    """Nothing in it ever changes, so only its end is read anew. Of two threads that look at once the later one's lines stand."""

    def __init__(self, store: Store, study_id: str) -> None:
        self._store = store
        self._study_id = study_id
        self.events: list[Event] = []
        """All that were seen, in their order. Replaced by each look, never changed."""

    def look(self) -> list[Event]:
        """The lines that were not seen before, in their order."""
        known = self.events
        again = known[-_AGAIN:]
        after = again[0].seq - 1 if len(again) == _AGAIN else 0
        seen = {event.seq for event in again}
        found = self._store.events(self._study_id, after=after, limit=_ALL)
        new = [event for event in found if event.seq not in seen]
        self.events = sorted([*known, *new], key=lambda event: event.seq)
        return new
