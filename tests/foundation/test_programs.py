"""Programs that are run apart: ended with whoever started them, whatever they print."""

from __future__ import annotations

import asyncio
import sys
import time
from pathlib import Path

import pytest

from foundation.programs import run_apart

pytestmark = pytest.mark.anyio


def until_there(file: Path) -> None:
    while not file.exists():
        time.sleep(0.05)


async def test_a_program_that_printed_much_is_ended_when_its_caller_is_cancelled(tmp_path: Path) -> None:
    loud = "import sys, time; sys.stdout.write('x' * 3_000_000); sys.stdout.flush(); open('said', 'w').close(); time.sleep(600)"
    running = asyncio.create_task(
        run_apart([sys.executable, "-c", loud], {}, given=b"", limit_s=600, confined=None, folder=tmp_path)
    )
    async with asyncio.timeout(60):
        await asyncio.to_thread(until_there, tmp_path / "said")
        running.cancel()
        with pytest.raises(asyncio.CancelledError):
            await running
