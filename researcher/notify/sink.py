"""Sends notices. Each service has its own sink, next to the sinks that copy the records, so that one service's outage does not
affect others.

A notice that is recorded as sent is never sent again, even after a crash. Failed notices are retried with growing pauses.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence

from foundation.clock import Clock
from researcher.notify.services import Notifier, NotSent, notifier_of
from researcher.refusals import SpecRefused
from researcher.store.store import Store

_log = logging.getLogger(__name__)
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 10.0, 600.0
_HOPE_S = 86_400.0
"""How long a daemon without other work keeps running for a notice that cannot be sent."""


class NotifySink:
    """Sends notices to one service. After a failure it pauses for 10 s; each further failure doubles the pause, up to 10 min."""

    def __init__(self, store: Store, service: str, notifier: Notifier, clock: Clock) -> None:
        self.service = service
        self._store = store
        self._notifier = notifier
        self._clock = clock
        self._failures = 0
        self._not_before = clock.monotonic()

    def drain(self, subject_id: str | None = None) -> int:
        """Send waiting notices about a study, a campaign or everything, oldest first. Returns how many were sent.

        Stops at the first failure, because the other notices go to the same service.
        """
        notices = self._store.notices
        if self._clock.monotonic() < self._not_before or not notices.unsent(self.service, subject_id):
            return 0
        sent = 0
        with notices.turn(self.service):
            for waiting in notices.unsent(self.service, subject_id):
                try:
                    self._notifier.send(waiting.notice)
                except NotSent as error:
                    self._pause()
                    notices.mark_unsent(waiting.seq, str(error))
                    _log.warning("could not send a notice to %s, will retry: %s", self.service, error)
                    break
                notices.mark_sent(waiting.seq)
                self._failures, sent = 0, sent + 1
        return sent

    def _pause(self) -> None:
        pause_s = min(_FIRST_PAUSE_S * 2.0**self._failures, _LONGEST_PAUSE_S)
        self._failures, self._not_before = self._failures + 1, self._clock.monotonic() + pause_s


def sinks_of(store: Store, services: Sequence[str], environ: Mapping[str, str], clock: Clock) -> list[NotifySink]:
    """Return a sink for each service. Logs and skips services whose addresses are not known here; their notices wait."""
    found = []
    for service in dict.fromkeys(services):
        try:
            found.append(NotifySink(store, service, notifier_of(service, environ), clock))
        except SpecRefused as refused:
            _log.warning("cannot send notices to %s yet: %s", service, refused)
    return found


class Post:
    """Sends waiting notices about all studies and campaigns. Used by the daemon, which outlives their workers."""

    def __init__(self, store: Store, environ: Mapping[str, str], clock: Clock) -> None:
        self._store = store
        self._environ = environ
        self._clock = clock
        self._sinks: dict[str, NotifySink | None] = {}
        """Sinks by service; None if the service's address is not known here."""

    def deliver(self) -> bool:
        """Try once to send all waiting notices. Returns whether notices of the last day still wait for a service that is known
        here."""
        for service in self._store.notices.services():
            if service not in self._sinks:
                self._sinks[service] = next(iter(sinks_of(self._store, [service], self._environ, self._clock)), None)
        sinks = [sink for sink in self._sinks.values() if sink is not None]
        for sink in sinks:
            sink.drain()
        young = self._clock.now() - _HOPE_S
        return any(each.at > young for sink in sinks for each in self._store.notices.unsent(sink.service))
