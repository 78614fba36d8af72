"""Notices on their way: a sink per service beside the copies of the records, each with its own deliveries and outages.

What was recorded as sent is not sent again, whatever dies; what could not be sent is tried again, ever more seldom.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence

from foundation.clock import Clock
from researcher.notify.services import Notifier, NotSent, notifier_of
from researcher.refusals import SpecRefused
from researcher.store.notices import notice_of, sink_name
from researcher.store.outbox import Message
from researcher.store.sink import CopyFailed, CopySink
from researcher.store.store import Store

_log = logging.getLogger(__name__)
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 10.0, 600.0
_HOPE_S = 86_400.0
"""A daemon without other work stays this long for a notice that cannot be sent."""


class NotifySink(CopySink):
    """Takes the notices to one service. After a failure it pauses for 10 s, then twice as long each time, up to 10 min."""

    def __init__(self, store: Store, name: str, notifier: Notifier, clock: Clock) -> None:
        super().__init__(store)
        self.name = sink_name(name)
        self._notifier = notifier
        self._clock = clock
        self._failures = 0
        self._not_before = clock.monotonic()

    def drain(self, study_id: str | None = None) -> int:
        return 0 if self._clock.monotonic() < self._not_before else super().drain(study_id)

    def _send(self, message: Message) -> None:
        try:
            self._notifier.send(notice_of(message))
        except NotSent as error:
            pause_s = min(_FIRST_PAUSE_S * 2.0**self._failures, _LONGEST_PAUSE_S)
            self._failures, self._not_before = self._failures + 1, self._clock.monotonic() + pause_s
            raise CopyFailed(str(error)) from error
        self._failures = 0

    def place(self) -> str:
        return self.name


def sinks_of(store: Store, names: Sequence[str], environ: Mapping[str, str], clock: Clock) -> list[NotifySink]:
    """A sink per service. One whose address is not known here is left out, and its notices wait; that is logged."""
    found = []
    for name in dict.fromkeys(names):
        try:
            found.append(NotifySink(store, name, notifier_of(name, environ), clock))
        except SpecRefused as refused:
            _log.warning("notices to %s wait: %s", name, refused)
    return found


class Post:
    """Sends what waits of all studies and campaigns; for the daemon, which outlives their workers."""

    def __init__(self, store: Store, environ: Mapping[str, str], clock: Clock) -> None:
        self._store = store
        self._environ = environ
        self._clock = clock
        self._sinks: dict[str, NotifySink | None] = {}
        """By service; None for one whose address is not known here."""

    def deliver(self) -> bool:
        """Returns whether notices of the last day still wait for a service that is known here."""
        for name in self._store.notices.names():
            if name not in self._sinks:
                self._sinks[name] = next(iter(sinks_of(self._store, [name], self._environ, self._clock)), None)
        sinks = [sink for sink in self._sinks.values() if sink is not None]
        for sink in sinks:
            sink.drain()
        young = self._clock.now() - _HOPE_S
        return any(each.at > young for sink in sinks for each in self._store.outbox.unsent(sink.name))
