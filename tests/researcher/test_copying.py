"""The copies of a study beside the work: none waits for another, and all are waited for at the end."""

from __future__ import annotations

import asyncio
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from foundation.clock import ManualClock
from researcher.conduct import Conduct
from researcher.models import TrialStatus
from researcher.refusals import RecordsDisagree
from researcher.store.errors import DatabaseAway

pytestmark = pytest.mark.anyio
PATIENCE_S = 60.0


class _Slow:
    """Takes nothing until it is let."""

    def __init__(self) -> None:
        self.let = threading.Event()
        self.taken = 0

    def drain(self, study_id: str | None = None) -> int:
        assert self.let.wait(PATIENCE_S)
        self.taken += 1
        return 1


class _Quick:
    def __init__(self, other: _Slow) -> None:
        self._other = other
        self.taken = 0

    def drain(self, study_id: str | None = None) -> int:
        """The slow one, asked first, has taken nothing by now: it is let go from here."""
        assert self._other.taken == 0
        self.taken += 1
        self._other.let.set()
        return 1


async def test_a_sink_that_is_stuck_delays_no_other(tmp_path: Path) -> None:
    nothing = cast(Any, None)
    slow = _Slow()
    quick = _Quick(slow)
    conduct = Conduct(nothing, nothing, slow, nothing, ManualClock(), tmp_path, further=[quick])
    async with conduct._copying("st-1"):
        pass
    assert (slow.taken, quick.taken) == (1, 1)


class _Failing:
    """Its records cannot be read the first times."""

    def __init__(self, failures: int, error: Exception | None = None) -> None:
        self.failures = failures
        self.error = error or DatabaseAway(600.0, "no route")
        self.taken = 0

    def drain(self, study_id: str | None = None) -> int:
        if self.failures:
            self.failures -= 1
            raise self.error
        self.taken += 1
        return 1


@pytest.mark.parametrize("error", [DatabaseAway(600.0, "no route"), KeyError("a bug of ours")], ids=repr)
async def test_a_copy_that_fails_is_tried_again_and_ends_no_study(tmp_path: Path, error: Exception) -> None:
    nothing = cast(Any, None)
    clock, sink, hopeless = ManualClock(), _Failing(1, error), _Failing(1_000, error)
    conduct = Conduct(nothing, nothing, sink, nothing, clock, tmp_path, further=[hopeless])
    async with asyncio.timeout(PATIENCE_S), conduct._copying("st-1"):
        while sink.taken == 0:
            await asyncio.sleep(0)
            clock.advance(1.0)
    assert hopeless.taken == 0


async def test_the_daily_report_waits_for_no_copy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    nothing = cast(Any, None)
    clock, slow = ManualClock(), _Slow()
    conduct = Conduct(nothing, nothing, slow, nothing, clock, tmp_path)
    written = list[float]()

    def write(*_: object) -> Path:
        written.append(clock.now())
        return tmp_path

    monkeypatch.setattr("researcher.conduct.interim_report", write)
    began = clock.now()
    async with asyncio.timeout(PATIENCE_S), conduct._copying("st-1"):
        while len(written) < 2:
            await asyncio.sleep(0)
            clock.advance(600.0)
        slow.let.set()
    assert [round((at - began) / 86_400) for at in written] == [1, 2]


async def test_a_daily_report_that_fails_is_tried_again_within_the_hour_and_ends_no_study(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    nothing = cast(Any, None)
    clock, sink = ManualClock(), _Failing(0)
    done = cast(
        Any, SimpleNamespace(trials=SimpleNamespace(all=lambda *_, **__: [SimpleNamespace(status=TrialStatus.DONE)]))
    )
    conduct = Conduct(done, nothing, sink, nothing, clock, tmp_path)
    tried = list[float]()
    began = clock.now()

    def report(*_: object) -> Path:
        tried.append((clock.now() - began) / 3600)
        if len(tried) < 4:
            raise (OSError(28, "full"), DatabaseAway(600.0, "no route"), RecordsDisagree("altered"))[len(tried) - 1]
        return tmp_path

    monkeypatch.setattr("researcher.conduct.report", report)
    async with asyncio.timeout(PATIENCE_S), conduct._copying("st-1"):
        while len(tried) < 5:
            await asyncio.sleep(0)
            clock.advance(600.0)
    assert [round(at) for at in tried] == [24, 25, 26, 27, 51]
