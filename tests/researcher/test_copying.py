"""The copies of a study beside the work: none waits for another, and all are waited for at the end."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any, cast

import pytest

from foundation.clock import ManualClock
from researcher.conduct import Conduct

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
