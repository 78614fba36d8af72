"""What a server's watchers get: revisions to wait for, and a stream of statuses and log lines, which also go to the server's log."""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from typing import Any, Literal

from foundation.clock import Clock
from foundation.event_loop import within
from foundation.logs import redact
from swarm.server.state.server_state import LogLevel

_log = logging.getLogger("swarm.server")

QUIET_S = 0.25
"""Seconds by which updates about claims and ends may be delayed: there are hundreds per second, so watchers get them merged."""
BACKLOG = 256
"""Maximum number of events kept for a slow subscriber; beyond that, the oldest are dropped."""
RATE_WINDOW_S = 10


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerEvent:
    """The status after a change, or a log line."""

    kind: Literal["status", "log"]
    data: dict[str, Any]


class Watchers:
    """Counts revisions of the status and sends events to subscribers. `render` returns the current status."""

    def __init__(self, clock: Clock, render: Callable[[], dict[str, Any]]) -> None:
        self._clock = clock
        self._render = render
        # An earlier process's revisions must not look like ours, so begin above them.
        self.revision = int(clock.now() * 1000)
        self._changed = asyncio.Event()
        self._queues: list[asyncio.Queue[ServerEvent]] = []
        self._later: asyncio.Task[None] | None = None
        self._many: dict[tuple[LogLevel, str], tuple[int, str]] = {}
        """For each level and kind: the number of lines since the last `sum_up`, and the newest line."""

    def changed(self, *, at_once: bool) -> None:
        """Publish a changed status: immediately with `at_once`, else within QUIET_S."""
        if at_once:
            if self._later is not None:
                self._later.cancel()
                self._later = None
            self._publish()
        elif self._later is None:
            self._later = asyncio.create_task(self._publish_later(), name="events")

    def log(self, line: str, level: LogLevel = "info", *, one_of: str | None = None) -> None:
        """Send the first line of a text to subscribers, and write it to the server's log. For `one_of`, see `LogLine`.

        Any further lines are the end of a child's log, which the child's supervisor has already written.
        """
        line = redact(line.partition("\n")[0])
        self._send(ServerEvent(kind="log", data={"at": self._clock.now(), "line": line}))
        if one_of is None:
            _write(level, line)
        else:
            self._many[level, one_of] = (self._many.get((level, one_of), (0, ""))[0] + 1, line)

    def sum_up(self) -> None:
        """Log one line for each kind, about all its lines since the previous summary. Call this every few seconds."""
        many, self._many = self._many, {}
        for (level, kind), (count, newest) in many.items():
            _write(level, f"{kind}: {count} (last: {newest})")

    async def wait(self, since: int, wait_s: float) -> None:
        """Return once the revision differs from `since`, or after `wait_s` seconds."""
        if self.revision == since:
            await within(self._clock, wait_s, self._changed.wait())

    async def subscribe(self) -> AsyncIterator[ServerEvent]:
        queue: asyncio.Queue[ServerEvent] = asyncio.Queue(BACKLOG)
        self._queues.append(queue)
        try:
            while True:
                yield await queue.get()
        finally:
            self._queues.remove(queue)

    async def close(self) -> None:
        self.sum_up()
        if self._later is not None:
            self._later.cancel()
            await asyncio.gather(self._later, return_exceptions=True)

    async def _publish_later(self) -> None:
        await self._clock.sleep(QUIET_S)
        self._later = None
        self._publish()

    def _publish(self) -> None:
        self.revision += 1
        self._changed.set()
        self._changed = asyncio.Event()
        if self._queues:
            self._send(ServerEvent(kind="status", data=self._render()))

    def _send(self, event: ServerEvent) -> None:
        for queue in self._queues:
            if queue.full():
                queue.get_nowait()
            queue.put_nowait(event)


def _write(level: LogLevel, line: str) -> None:
    _log.log(logging.getLevelNamesMapping()[level.upper()], "%s", line)


class Throughput:
    """Measures tokens per second over the last RATE_WINDOW_S seconds."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._by_second: deque[tuple[int, int]] = deque(maxlen=RATE_WINDOW_S)

    def add(self, tokens: int) -> None:
        second = int(self._clock.monotonic())
        if self._by_second and self._by_second[-1][0] == second:
            tokens += self._by_second.pop()[1]
        self._by_second.append((second, tokens))

    def per_s(self) -> float:
        oldest = int(self._clock.monotonic()) - RATE_WINDOW_S
        return sum(tokens for second, tokens in self._by_second if second > oldest) / RATE_WINDOW_S
