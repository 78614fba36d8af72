"""Children: they die with the server, come back after a crash, and say why when they do not."""

from __future__ import annotations

import asyncio
import errno
import logging
import os
import signal
import sys
import textwrap
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import pytest

from foundation.clock import SystemClock
from swarm.engine.machine import yielding_threads
from swarm.engine.seam import EngineDown, EngineError, EngineHealth
from swarm.engine.training.channel import Channel
from swarm.engine.training.limits import Silence
from swarm.engine.training.supervisor import BackOff, ChildCommand, ChildProcess, HungStatus, Supervisor

pytestmark = pytest.mark.anyio

SERVES = "import time; print('up', flush=True); time.sleep(600)"
FAST = BackOff(first_s=0.01, failures=3)


def command(tmp_path: Path, code: str) -> ChildCommand:
    return ChildCommand(
        name="child", argv=[sys.executable, "-c", code], env=dict(os.environ), log_path=tmp_path / "child.log"
    )


async def until(holds: Callable[[], bool], limit_s: float = 20.0) -> None:
    async with asyncio.timeout(limit_s):
        while True:  # another process's state has no event to wait for
            if holds():
                return
            await asyncio.sleep(0.01)


async def says_up(child: ChildProcess) -> None:
    await until(lambda: "up" in child.last_lines())


@asynccontextmanager
async def supervised(tmp_path: Path, code: str = SERVES, **parts: Any) -> AsyncIterator[Supervisor]:
    """parts: what is not as it usually is, by the names of `Supervisor`'s own arguments."""
    usual: dict[str, Any] = {
        "start": lambda: ChildProcess.start(command(tmp_path, code)),
        "ready": says_up,
        "on_health": lambda health: None,
        "clock": SystemClock(),
        "boot_s": 20,
        "back_off": FAST,
    }
    supervisor = Supervisor(**usual | parts)
    try:
        yield supervisor
    finally:
        await supervisor.shutdown()


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):  # it may end between being opened and being read
        return False


def below(reaper: int) -> int:
    """The child of a reaper."""
    return int(Path(f"/proc/{reaper}/task/{reaper}/children").read_text().split()[0])


def segment_is_there(name: str) -> bool:
    return Path("/dev/shm", name).exists()


def runtime_is_noted(pid: str) -> bool:
    return any(Path("/dev/shm").glob(f"__KMP_REGISTERED_LIB_{pid}_*"))


async def test_a_child_that_crashes_after_serving_is_started_again(tmp_path: Path) -> None:
    async with supervised(tmp_path, SERVES) as supervisor:
        await supervisor.boot()
        first = supervisor.child
        assert first is not None
        await supervisor.restart()
        await until(lambda: supervisor.health.ready and supervisor.child is not first)
        assert supervisor.health.failures == 1


async def test_a_crash_and_the_recovery_from_it_are_logged_once_each(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "swarm")
    async with supervised(tmp_path) as supervisor:
        await supervisor.boot()
        assert caplog.messages == []
        first = supervisor.child
        assert first is not None
        os.kill(below(first.reaper_pid), signal.SIGKILL)
        await until(lambda: supervisor.health.ready and supervisor.child is not first)
    crash, recovery = caplog.messages
    assert crash.startswith("restarting in 0.01 s: child was ended by SIGKILL")
    assert "\n" not in crash
    assert recovery == "child serves again"


async def test_a_child_that_is_given_up_is_logged_as_such(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    async with supervised(tmp_path, "print('no room left'); raise SystemExit(3)") as supervisor:
        with pytest.raises(EngineDown):
            await supervisor.boot()
    (line,) = caplog.messages
    ended = "not restarting: child ended with status 3 while it was starting"
    assert line == f"{ended} (log: {tmp_path / 'child.log'})\nno room left"


async def test_a_child_may_be_started_anew_however_often_nothing_has_failed(tmp_path: Path) -> None:
    async with supervised(tmp_path, SERVES) as supervisor:
        await supervisor.boot()
        for _ in range(FAST.failures + 1):
            await supervisor.restart(failed=False)
            await supervisor.settled()
        assert supervisor.health.failures == 0


async def test_a_child_that_refuses_to_be_brought_back_is_started_again(tmp_path: Path) -> None:
    tries = 0

    async def ready(child: ChildProcess) -> None:
        nonlocal tries
        tries += 1
        await says_up(child)
        if tries == 2:
            raise EngineError("/collective_rpc answered 500")

    async with supervised(tmp_path, ready=ready) as supervisor:
        await supervisor.boot()
        await supervisor.restart()
        async with asyncio.timeout(20):
            await supervisor.settled()
        assert tries == 3


async def test_a_child_that_never_serves_fails_for_good_with_the_end_of_its_log(tmp_path: Path) -> None:
    async with supervised(tmp_path, "raise SystemExit('no such model: x')") as supervisor:
        with pytest.raises(EngineDown, match=r"(?s)ended with status 1.*no such model: x"):
            await supervisor.boot()
        assert supervisor.health.failed_for_good


@pytest.mark.parametrize(("served", "starts"), [(False, 1), (True, 2)])
async def test_a_child_that_would_end_in_the_same_way_is_not_started_again_and_again(
    served: bool, starts: int, tmp_path: Path
) -> None:
    begun = 0
    full = "raise SystemExit('CUDA out of memory')"

    async def start() -> ChildProcess:
        nonlocal begun
        begun += 1
        return await ChildProcess.start(command(tmp_path, SERVES if served and begun == 1 else full))

    def hopeless(child: ChildProcess) -> str | None:
        return "serve less" if child.said("CUDA out of memory") else None

    patient = BackOff(first_s=0.01, failures=5, first_boot_failures=5)
    async with supervised(tmp_path, start=start, hopeless=hopeless, back_off=patient) as supervisor:
        if served:
            await supervisor.boot()
            await supervisor.restart()
        else:
            with pytest.raises(EngineDown, match=r"(?s)^serve less\n.*CUDA out of memory"):
                await supervisor.boot()
        await until(lambda: supervisor.health.failed_for_good)
        assert begun == starts


async def test_a_start_that_fails_in_a_way_nobody_foresaw_fails_for_good_and_says_how(tmp_path: Path) -> None:
    async def start() -> ChildProcess:
        raise KeyError("hidden_size")

    seen: list[EngineHealth] = []
    async with supervised(tmp_path, start=start, on_health=seen.append) as supervisor, asyncio.timeout(5):
        with pytest.raises(EngineDown, match="KeyError: 'hidden_size'"):
            await supervisor.boot()
        assert (seen[-1].failed_for_good, seen[-1].failures) == (True, 1)


async def test_a_child_that_cannot_be_asked_in_a_way_nobody_foresaw_is_ended(tmp_path: Path) -> None:
    reapers: list[int] = []

    async def ready(child: ChildProcess) -> None:
        reapers.append(child.reaper_pid)
        raise TypeError("no such thing")

    async with supervised(tmp_path, ready=ready) as supervisor, asyncio.timeout(20):
        with pytest.raises(EngineDown, match="TypeError: no such thing"):
            await supervisor.boot()
        assert supervisor.child is None
        assert not alive(reapers[0])


async def test_a_child_that_the_system_killed_is_said_to_have_run_out_of_memory(tmp_path: Path) -> None:
    killed = "import os, signal; os.kill(os.getpid(), signal.SIGKILL)"
    async with supervised(tmp_path, killed) as supervisor:
        with pytest.raises(EngineDown, match="was ended by SIGKILL, as the system does when memory runs out"):
            await supervisor.boot()


async def test_a_child_that_keeps_crashing_is_given_up_after_the_allowed_failures(tmp_path: Path) -> None:
    seen: list[EngineHealth] = []
    starts = 0

    async def start() -> ChildProcess:
        nonlocal starts
        starts += 1
        return await ChildProcess.start(command(tmp_path, SERVES if starts == 1 else "raise SystemExit(3)"))

    async with supervised(tmp_path, start=start, on_health=seen.append) as supervisor:
        await supervisor.boot()
        await supervisor.restart()
        await until(lambda: supervisor.health.failed_for_good)
        assert starts == 3
        assert [health.ready for health in seen].count(True) == 1
        with pytest.raises(EngineDown):
            await supervisor.settled()


async def test_crashes_before_and_after_what_a_child_is_there_for_are_not_of_one_row(tmp_path: Path) -> None:
    async with supervised(tmp_path, SERVES) as supervisor:
        await supervisor.boot()
        for _ in range(2):
            for _ in range(FAST.failures - 1):
                await supervisor.restart()
                await supervisor.settled()
            assert supervisor.health.failures == FAST.failures - 1
            supervisor.forget()
            assert (supervisor.health.ready, supervisor.health.failures) == (True, 0)
        for _ in range(FAST.failures):
            await supervisor.settled()
            await supervisor.restart()
        await until(lambda: supervisor.health.failed_for_good)


async def test_a_child_that_cannot_be_ended_is_given_up_and_said_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def refuses(child: ChildProcess) -> None:
        raise EngineError("no")

    async def stays(child: ChildProcess, grace_s: float = 5.0) -> None:
        raise PermissionError(errno.EPERM, "may not be killed")

    patient = replace(FAST, first_boot_failures=3)
    async with supervised(tmp_path, ready=refuses, back_off=patient) as supervisor:
        with monkeypatch.context() as stuck:
            stuck.setattr(ChildProcess, "stop", stays)
            async with asyncio.timeout(5):
                with pytest.raises(EngineDown, match="may not be killed"):
                    await supervisor.boot()
        assert supervisor.health.failed_for_good


async def test_whoever_cannot_hear_of_a_child_leaves_nobody_waiting(tmp_path: Path) -> None:
    heard = 0

    def deaf(health: EngineHealth) -> None:
        nonlocal heard
        heard += 1
        if heard == 2:
            raise LookupError("no such run")

    patient = replace(FAST, first_boot_failures=3)
    async with supervised(tmp_path, "raise SystemExit(3)", on_health=deaf, back_off=patient) as supervisor:
        async with asyncio.timeout(5):
            with pytest.raises(EngineDown, match="no such run"):
                await supervisor.boot()


@pytest.mark.parametrize("late", range(8))
async def test_whoever_is_cancelled_while_a_child_ends_does_not_go_on(tmp_path: Path, late: int) -> None:
    """A supervisor that went on would start the child once more, and its shutdown would wait for ever."""
    child = await ChildProcess.start(command(tmp_path, SERVES))
    ended = asyncio.Event()

    class Ends:
        """The child's process, whose end is seen at a turn of the loop that we choose."""

        pid, returncode = child.reaper_pid, None

        async def wait(self) -> int:
            await ended.wait()
            return 0

    watched = ChildProcess(child.command, cast(asyncio.subprocess.Process, Ends()), os.open(os.devnull, os.O_RDONLY), 0)

    async def stop_and_go_on() -> None:
        await watched.stop(grace_s=0)
        await asyncio.sleep(60)

    going = asyncio.create_task(stop_and_go_on())
    await asyncio.sleep(0.01)
    ended.set()
    for _ in range(late):
        await asyncio.sleep(0)
    going.cancel()
    await asyncio.wait({going}, timeout=1)
    cancelled = going.cancelled()
    going.cancel()
    await child.stop(grace_s=0)
    assert cancelled


async def test_a_shutdown_while_a_child_is_being_ended_still_ends_it(tmp_path: Path) -> None:
    deaf = "import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN); " + SERVES
    refused = asyncio.Event()

    async def refuses(child: ChildProcess) -> None:
        await says_up(child)
        refused.set()
        raise EngineError("no")

    async with supervised(tmp_path, deaf, ready=refuses, back_off=BackOff(), stop_grace_s=0.5) as supervisor:
        booting = asyncio.create_task(supervisor.boot())
        await refused.wait()
        assert supervisor.child is not None
        reaper = supervisor.child.reaper_pid
        await asyncio.sleep(0.05)
        await supervisor.shutdown()
        with pytest.raises(EngineDown):
            await booting
        assert not alive(reaper)


async def test_a_failed_child_may_be_booted_again_by_hand(tmp_path: Path) -> None:
    flag = tmp_path / "repaired"
    code = f"import os, time\nif not os.path.exists({str(flag)!r}): raise SystemExit(1)\n{SERVES}"
    async with supervised(tmp_path, code) as supervisor:
        with pytest.raises(EngineDown):
            await supervisor.boot()
        flag.touch()
        await supervisor.boot()
        assert supervisor.health.ready


async def test_what_intels_runtime_notes_in_shared_memory_goes_with_a_killed_child(tmp_path: Path) -> None:
    preloaded = yielding_threads({})
    if not preloaded:
        pytest.skip("vLLM brings no OpenMP runtime of Intel's along here")
    code = textwrap.dedent(f"""
        import subprocess, sys, time
        inner = (
            "import ctypes, os, time; ctypes.CDLL(None).omp_get_max_threads();"
            "print(os.getpid(), flush=True); time.sleep(600)"
        )
        children = [
            subprocess.Popen([sys.executable, "-c", inner], stdout=subprocess.PIPE, text=True, env={preloaded!r})
            for _ in range(2)
        ]
        open({str(tmp_path / "pids")!r}, "w").write(" ".join(child.stdout.readline().strip() for child in children))
        print("up", flush=True)
        time.sleep(600)
    """)

    async with supervised(tmp_path, code) as supervisor:
        await supervisor.boot()
        pids = (tmp_path / "pids").read_text().split()
        assert [runtime_is_noted(pid) for pid in pids] == [True, True]
    assert [runtime_is_noted(pid) for pid in pids] == [False, False]


async def test_what_intels_runtime_notes_in_shared_memory_goes_with_a_child_that_ends_early(tmp_path: Path) -> None:
    preloaded = yielding_threads({})
    if not preloaded:
        pytest.skip("vLLM brings no OpenMP runtime of Intel's along here")
    code = (
        "import ctypes, os; ctypes.CDLL(None).omp_get_max_threads(); print('up', os.getpid(), flush=True); os._exit(3)"
    )
    child = await ChildProcess.start(replace(command(tmp_path, code), env=preloaded))
    assert await child.wait() == 3
    await child.stop()
    [said] = [line for line in child.last_lines().splitlines() if line.startswith("up")]
    assert not runtime_is_noted(said.split()[1])


async def test_stopping_a_child_ends_its_own_children_and_frees_their_shared_memory(tmp_path: Path) -> None:
    note = tmp_path / "pid"
    code = textwrap.dedent(f"""
        import subprocess, sys, time
        inner = ("import time; from multiprocessing import shared_memory as m;"
                 "s = m.SharedMemory(create=True, size=4096); print(s.name, flush=True); time.sleep(600)")
        argv = [sys.executable, "-c", inner]
        child = subprocess.Popen(argv, start_new_session=True, stdout=subprocess.PIPE, text=True)
        name = child.stdout.readline().strip()
        open({str(note)!r}, "w").write(f"{{child.pid}} {{name}}")
        print("up", flush=True)
        time.sleep(600)
    """)
    async with supervised(tmp_path, code) as supervisor:
        await supervisor.boot()
        pid, segment = note.read_text().split()
        assert alive(int(pid))
        assert segment_is_there(segment)
    assert not alive(int(pid))
    assert not segment_is_there(segment)


async def test_what_a_killed_reaper_leaves_is_ended_before_the_next_start(tmp_path: Path) -> None:
    note = tmp_path / "pid"
    code = textwrap.dedent(f"""
        import subprocess, sys, time
        child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
        open({str(note)!r}, "w").write(str(child.pid))
        print("up", flush=True)
        time.sleep(600)
    """)
    async with supervised(tmp_path, code) as supervisor:
        await supervisor.boot()
        inner = int(note.read_text())
        assert supervisor.child is not None
        os.kill(supervisor.child.reaper_pid, signal.SIGKILL)
        await until(lambda: not supervisor.health.ready)
        await supervisor.boot()
        assert not alive(inner)
        assert alive(int(note.read_text()))
    assert not alive(int(note.read_text()))


async def test_what_intels_runtime_noted_goes_with_the_next_start_after_a_killed_reaper(tmp_path: Path) -> None:
    preloaded = yielding_threads({})
    if not preloaded:
        pytest.skip("vLLM brings no OpenMP runtime of Intel's along here")
    code = (
        "import ctypes, os, time; ctypes.CDLL(None).omp_get_max_threads(); print('up', os.getpid(), flush=True);"
        "time.sleep(600)"
    )
    asked = replace(command(tmp_path, code), env=preloaded)
    killed = await ChildProcess.start(asked)
    await says_up(killed)
    [said] = [line for line in killed.last_lines().splitlines() if line.startswith("up")]
    pid = said.split()[1]
    assert runtime_is_noted(pid)
    os.kill(killed.reaper_pid, signal.SIGKILL)
    await until(lambda: not alive(int(pid)))
    await (await ChildProcess.start(asked)).stop(0)
    assert not runtime_is_noted(pid)


async def test_a_child_dies_with_a_server_that_is_killed(tmp_path: Path) -> None:
    note = tmp_path / "pid"
    child_code = f"import os, time; open({str(note)!r}, 'w').write(str(os.getpid())); time.sleep(600)"
    server_code = textwrap.dedent(f"""
        import asyncio, os, sys
        from pathlib import Path
        from swarm.engine.training.supervisor import ChildCommand, ChildProcess
        async def main():
            argv, log_path = [sys.executable, "-c", {child_code!r}], Path({str(tmp_path)!r}, "log")
            await ChildProcess.start(ChildCommand(name="c", argv=argv, env=dict(os.environ), log_path=log_path))
            await asyncio.sleep(600)
        asyncio.run(main())
    """)
    server = await asyncio.create_subprocess_exec(sys.executable, "-c", server_code, cwd=Path(__file__).parents[4])
    try:
        await until(lambda: note.exists() and note.read_text() != "")
        child = int(note.read_text())
        assert alive(child)
    finally:
        server.send_signal(signal.SIGKILL)
        await server.wait()
    await until(lambda: not alive(child))


def open_descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


def reapers(tmp_path: Path) -> list[int]:
    """Those that were noted and live."""
    session = tmp_path / "child.log.session"
    noted = [int(session.read_text().split()[0])] if session.exists() else []
    return [pid for pid in noted if alive(pid)]


@pytest.mark.parametrize("turns", range(10))
async def test_a_start_that_is_cancelled_leaves_neither_a_child_nor_a_descriptor(tmp_path: Path, turns: int) -> None:
    before = open_descriptors()

    def made(descriptor: int) -> ChildCommand:
        return replace(command(tmp_path, SERVES), pass_fds=(descriptor,))

    starting = asyncio.ensure_future(Channel.start(made, "child"))
    for _ in range(turns):
        await asyncio.sleep(0)
    starting.cancel()
    try:
        channel = await starting
    except asyncio.CancelledError:
        await until(lambda: not reapers(tmp_path))
    else:
        await channel.child.stop(grace_s=0)
        await channel.close()
    await until(lambda: open_descriptors() == before)


async def test_a_child_that_cannot_be_noted_is_ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    noted: list[int] = []

    def full(path: Path, data: bytes) -> None:
        noted.append(int(data.split()[0]))
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr("swarm.engine.training.supervisor.write_atomically", full)
    before = open_descriptors()
    with pytest.raises(OSError, match="No space left"):
        await ChildProcess.start(command(tmp_path, SERVES))
    await until(lambda: not alive(noted[0]))
    assert open_descriptors() <= before + 1  # asyncio's own, of the child that it has not reaped


async def test_a_child_that_is_found_hung_is_ended_though_it_hears_no_signal_and_said_to_hang_until_it_is_ready(
    tmp_path: Path,
) -> None:
    seen: list[EngineHealth] = []
    looks = 0

    async def watch(child: ChildProcess) -> Silence:
        nonlocal looks
        looks += 1
        if looks > 1:
            await asyncio.Event().wait()
        os.kill(below(child.reaper_pid), signal.SIGSTOP)
        return Silence(reason="the child sleeps", since=5.0)

    async with supervised(tmp_path, watch=watch, on_health=seen.append) as supervisor:
        await supervisor.boot()
        await until(lambda: supervisor.health.ready and supervisor.health.failures == 1)
    hung = [health for health in seen if health.hung_since is not None]
    assert hung
    assert not any(health.ready for health in hung)
    assert {health.hung_since for health in hung} == {5.0}
    assert all("the child sleeps" in (health.reason or "") for health in hung)


async def test_a_child_that_finds_a_part_of_itself_hung_says_so_by_its_status(tmp_path: Path) -> None:
    seen: list[EngineHealth] = []
    silent_s = [30.0]
    status = HungStatus(status=75, silent_s=lambda: silent_s[-1])
    code = "import time; print('up', flush=True); time.sleep(0.2); raise SystemExit(75)"
    async with supervised(tmp_path, code, hung_status=status, on_health=seen.append) as supervisor:
        await supervisor.boot()
        silent_s.append(40.0)  # what it computes on is known only when it serves
        await until(lambda: any(health.hung_since is not None for health in seen))
    hung = next(health for health in seen if health.hung_since is not None)
    assert "a part of the child has not answered for 40 s" in (hung.reason or "")
