"""A server that dies is started again, for as long as that does good."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from foundation.clock import ManualClock
from researcher.executor.local_server import LocalLimits, LocalProcess, LocalServer

pytestmark = pytest.mark.anyio
QUIET_S = 900.0


class _Berth:
    """Whoever lives here does so for the next of these times, in seconds."""

    def __init__(self, clock: ManualClock, lives_s: list[float]) -> None:
        self._clock = clock
        self._lives_s = lives_s

    async def ended(self) -> None:
        self._clock.advance(self._lives_s.pop(0))

    def tail(self) -> str:
        return "out of memory"


async def _listens() -> str:
    return "http://here"


@pytest.mark.parametrize(
    ("lives_s", "starts"),
    [
        ([1.0, 1.0, 1.0, 1.0], 3),
        ([1.0, 1.0, 1.0, QUIET_S, 1.0, 1.0, 1.0], 6),  # days may lie between two deaths that have nothing in common
    ],
)
async def test_only_deaths_in_a_row_make_a_server_lost(
    lives_s: list[float], starts: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock, started = ManualClock(), list[int]()
    limits = LocalLimits(first_backoff_s=0.0, quiet_s=QUIET_S)
    process = LocalProcess(LocalServer(model="echo", folder=tmp_path), clock, limits, os.environ)
    monkeypatch.setattr(process, "_berth", _Berth(clock, lives_s))
    monkeypatch.setattr(process, "_launch", started.append)
    monkeypatch.setattr(process, "_listening", _listens)
    assert await process.keep_alive("http://here:8642") == "it died 4 times: out of memory"
    assert (len(started), lives_s) == (starts, [])


async def test_a_start_that_the_system_refuses_counts_as_one_more_death(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refused(port: int) -> None:
        raise BlockingIOError("Resource temporarily unavailable")

    clock = ManualClock()
    limits = LocalLimits(first_backoff_s=0.0)
    process = LocalProcess(LocalServer(model="echo", folder=tmp_path), clock, limits, os.environ)
    monkeypatch.setattr(process, "_berth", _Berth(clock, [1.0] * 4))
    monkeypatch.setattr(process, "_launch", refused)
    assert await process.keep_alive("http://here:8642") == "it died 4 times: out of memory"
