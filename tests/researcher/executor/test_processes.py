"""A process in its berth is found by whoever looks, whatever became of the one that started it."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from foundation.clock import SystemClock
from researcher.executor.processes import Berth, child_environ, started_at

pytestmark = pytest.mark.anyio

FOR_EVER = ["/bin/sh", "-c", "echo ready; exec sleep 1000"]
DEAF = [
    sys.executable,
    "-c",
    "import signal, time; signal.signal(15, signal.SIG_IGN); print('deaf', flush=True); time.sleep(1000)",
]


@pytest.fixture
async def berth(tmp_path: Path) -> AsyncIterator[Berth]:
    berth = Berth(tmp_path / "berth", SystemClock())
    yield berth
    await Berth(berth.folder, SystemClock()).end(grace_s=5)


async def test_nobody_lives_in_a_berth_that_was_never_used(berth: Berth) -> None:
    assert not berth.alive()
    assert berth.pid() is None
    await berth.ended()
    await berth.end(grace_s=1)
    assert berth.tail() == ""


async def test_a_process_is_known_by_its_pid_and_its_last_words(berth: Berth) -> None:
    pid = berth.start(["/bin/sh", "-c", "echo out; echo last words >&2; exit 3"], os.environ)
    await berth.ended()
    assert (berth.alive(), berth.pid(), berth.exit_code()) == (False, None, 3)
    assert (berth.tail(), berth.tail("out.log")) == ("last words", "out")
    assert started_at(pid) is None


async def test_a_second_one_is_refused_while_the_first_lives(berth: Berth) -> None:
    pid = berth.start(FOR_EVER, os.environ)
    with pytest.raises(BlockingIOError):
        Berth(berth.folder, SystemClock()).start(FOR_EVER, os.environ)
    assert berth.alive()
    await berth.end(grace_s=5)
    assert started_at(pid) is None
    assert berth.start(FOR_EVER, os.environ) != pid


async def test_it_is_adopted_after_the_starter_was_killed(berth: Berth) -> None:
    code = (
        "import os, signal, sys; from pathlib import Path\n"
        "from foundation.clock import SystemClock; from researcher.executor.processes import Berth\n"
        f"Berth(Path({str(berth.folder)!r}), SystemClock()).start({FOR_EVER!r}, os.environ)\n"
        "os.kill(os.getpid(), signal.SIGKILL)"
    )
    starter = await asyncio.create_subprocess_exec(sys.executable, "-c", code, env=child_environ())
    assert await starter.wait() == -signal.SIGKILL
    assert berth.alive()
    while berth.pid() is None:  # it was killed before its child could say who it is
        await SystemClock().sleep(0.01)
    pid = berth.pid()
    assert pid is not None
    assert started_at(pid) is not None
    await berth.end(grace_s=5)
    assert (berth.alive(), berth.exit_code()) == (False, None)


async def test_one_that_will_not_end_is_made_to(berth: Berth) -> None:
    berth.start(DEAF, os.environ)
    while berth.tail("out.log") != "deaf":
        await SystemClock().sleep(0.01)
    await berth.end(grace_s=0.2)
    assert not berth.alive()


async def test_without_any_grace_it_is_not_asked(berth: Berth) -> None:
    berth.start(FOR_EVER, os.environ)
    await berth.end(grace_s=0)
    assert (berth.alive(), berth.exit_code()) == (False, -signal.SIGKILL)


async def test_a_process_is_named_by_its_pid_and_start() -> None:
    assert started_at(os.getpid()) == started_at(os.getpid())
    assert started_at(os.getpid()) != started_at(1)
    assert started_at(2**22 + 1) is None
