"""Child processes of a server: started under a reaper, monitored, restarted with back-off, cleaned up when they end.

Knows nothing of what a child does: callers pass functions that start it and wait until it is ready.
"""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import sys
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, BinaryIO

from foundation.clock import Clock
from foundation.logs import redact
from foundation.paths import write_atomically
from swarm.engine.seam import EngineDown, EngineError, EngineHealth
from swarm.engine.training import reaper
from swarm.engine.training.limits import Expected, Silence, Work

_LOG = logging.getLogger(__name__)
_KILL_LIMIT_S = 10.0
_TAIL_BYTES = 16_384


@dataclass(frozen=True, slots=True, kw_only=True)
class ChildCommand:
    """What to run. The child's output goes to `log_path`; the log of the previous start is kept as `….1`.

    `pass_fds` are file descriptors that the child inherits under the same numbers; the caller closes its own copies.
    """

    name: str
    argv: Sequence[str]
    env: Mapping[str, str]
    log_path: Path
    cwd: Path | None = None
    pass_fds: tuple[int, ...] = ()


class ChildFailed(EngineDown):
    """A child ended, or was not ready in time. The message has the last lines of its log."""


class ChildProcess:
    """One running child. It dies with this process, however this process ends."""

    def __init__(self, command: ChildCommand, process: asyncio.subprocess.Process, alive_fd: int, began: int) -> None:
        self.command = command
        self._process = process
        self._began = began
        self._alive_fd: int | None = alive_fd
        self._stopped = False

    @classmethod
    async def start(cls, command: ChildCommand) -> ChildProcess:
        """Start the command in its own session."""
        session_file = command.log_path.with_name(command.log_path.name + ".session")
        _end_left_over(session_file)
        guard_fd, alive_fd = os.pipe()
        passed = ",".join(str(fd) for fd in command.pass_fds)
        try:
            with _fresh_log(command.log_path) as log:
                process = await asyncio.create_subprocess_exec(
                    *(sys.executable, "-I", "-S", reaper.__file__, str(guard_fd), passed, *command.argv),
                    env=dict(command.env),
                    cwd=command.cwd,
                    stdin=asyncio.subprocess.DEVNULL,
                    stdout=log,
                    stderr=log,
                    pass_fds=(guard_fd, *command.pass_fds),
                    start_new_session=True,
                )
            began = reaper.start_time(process.pid) or 0
            write_atomically(session_file, f"{process.pid} {began}".encode())
        except BaseException:  # also on cancellation: closing this descriptor makes the reaper end whatever was started
            os.close(alive_fd)
            raise
        finally:
            os.close(guard_fd)
        return cls(command, process, alive_fd, began)

    @property
    def running(self) -> bool:
        return self._process.returncode is None

    @property
    def reaper_pid(self) -> int:
        return self._process.pid

    async def wait(self) -> int:
        """Wait for the command to end; return its exit status, or 128 + signal if a signal ended it."""
        code = await self._process.wait()
        self._let_go()
        if code < 0:  # the reaper itself was killed, and could not clean up
            reaper.end_session(self._process.pid, self._began)
        return code

    async def stop(self, grace_s: float = 5.0) -> None:
        """Ask the child to end; after `grace_s`, kill it with everything it started."""
        self._stopped = True
        if self.running and grace_s > 0:
            self._signal(signal.SIGTERM)
            await self._ended_within(grace_s)
        self._let_go()  # the reaper kills whatever is left
        if not await self._ended_within(_KILL_LIMIT_S):
            self._signal(signal.SIGKILL)
            await self.wait()

    def last_lines(self, count: int = 12) -> str:
        """Return the end of the log, with secrets removed."""
        try:
            with open(self.command.log_path, "rb") as log:
                log.seek(max(0, os.fstat(log.fileno()).st_size - _TAIL_BYTES))
                text = log.read().decode(errors="replace")
        except FileNotFoundError:
            return ""
        return redact("\n".join(line for line in text.splitlines()[-count:] if line.strip()))

    def said(self, *words: str) -> bool:
        """Return whether the log contains any of these words."""
        try:
            text = self.command.log_path.read_text(errors="replace")
        except FileNotFoundError:
            return False
        return any(each in text for each in words)

    def ended(self, status: int) -> str:
        """Describe how the child ended. `status` is as `wait` returns it."""
        if self._stopped:
            return "hung and was killed"
        try:
            name = signal.Signals(-status if status < 0 else status - 128).name
        except ValueError:
            return f"ended with status {status}"
        return f"was ended by {name}" + (", as the system does when memory runs out" if name == "SIGKILL" else "")

    def failed(self, what: str) -> ChildFailed:
        """Return an error. Its first line says what happened; the others are the end of the log."""
        return ChildFailed(f"{self.command.name} {what} (log: {self.command.log_path})\n{self.last_lines()}")

    async def _ended_within(self, seconds: float) -> bool:
        try:
            async with asyncio.timeout(seconds):  # wait_for of Python 3.11 may swallow the cancellation of its caller
                await self._process.wait()
        except TimeoutError:
            return False
        return True

    def _signal(self, number: int) -> None:
        try:
            self._process.send_signal(number)
        except ProcessLookupError:
            return  # it has already ended

    def _let_go(self) -> None:
        if self._alive_fd is not None:
            os.close(self._alive_fd)
            self._alive_fd = None


def _end_left_over(session_file: Path) -> None:
    """End what is left of this child from an earlier server, if that server and its reaper were killed together."""
    try:
        leader, began = (int(text) for text in session_file.read_text().split())
    except (FileNotFoundError, ValueError):
        return  # there was none, or it was being written when the power failed
    reaper.end_session(leader, began)


def _fresh_log(path: Path) -> BinaryIO:
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.exists():
        path.replace(path.with_name(path.name + ".1"))
    return open(path, "wb")


@dataclass(frozen=True, slots=True, kw_only=True)
class BackOff:
    """When to restart a crashed child, and when to give up."""

    first_s: float = 0.5
    factor: float = 2.0
    most_s: float = 30.0
    failures: int = 5
    """Number of consecutive failures after which the child is not restarted."""
    first_boot_failures: int = 1
    """Like `failures`, but for a child that has never been ready: by default, one failed start is enough to give up."""
    forget_after_s: float = 120.0
    """Once a child has served for this many seconds, its earlier failures no longer count."""

    def __post_init__(self) -> None:
        if self.first_s <= 0 or self.factor < 1 or self.failures < 1 or self.first_boot_failures < 1:
            raise ValueError(f"back-off needs first_s > 0, factor >= 1 and at least one failure, got {self}")

    def delay_s(self, failures: int) -> float:
        return min(self.most_s, self.first_s * self.factor ** max(0, failures - 1))


@dataclass(frozen=True, slots=True, kw_only=True)
class HungStatus:
    """Exit status of a child that found one of its parts hung.

    `silent_s` returns how long the child waited before it gave up on that part; it is called after the child has ended.
    """

    status: int
    silent_s: Callable[[], float]


class Supervisor:
    """Keeps one child alive.

    start: starts the child.
    ready: returns when the child serves; raises EngineError if it never will. Both run again at each restart, so `ready` has to bring a
        restarted child back to where it was.
    on_health: called on every change of health.
    boot_s: upper estimate for the duration of a start, in seconds; later starts are judged by earlier ones.
    watch: runs while the child serves, and returns when it finds the child hung.
    hopeless: returns why a child that ended would end again, with advice, or None. Such a child is not restarted, or only once if it
        has served.
    hung_status: exit status of a child that found a part of itself hung.
    """

    def __init__(
        self,
        *,
        start: Callable[[], Awaitable[ChildProcess]],
        ready: Callable[[ChildProcess], Awaitable[None]],
        on_health: Callable[[EngineHealth], None],
        clock: Clock,
        boot_s: float,
        watch: Callable[[ChildProcess], Awaitable[Silence]] | None = None,
        hopeless: Callable[[ChildProcess], str | None] | None = None,
        hung_status: HungStatus | None = None,
        stop_grace_s: float = 5.0,
        back_off: BackOff | None = None,
    ) -> None:
        self._start = start
        self._ready = ready
        self._on_health = on_health
        self._clock = clock
        self._boots = Expected()
        self._boot = Work(kind="boot", prior_s=boot_s, least_s=boot_s / 3)
        self._watch = watch
        self._hopeless = hopeless
        self._hung_status = hung_status
        self._silence: Silence | None = None
        self._stop_grace_s = stop_grace_s
        self._back_off = back_off or BackOff()
        self._task: asyncio.Task[None] | None = None
        self._child: ChildProcess | None = None
        self._settled = asyncio.Event()
        self._failures = 0
        self._was_ready = False
        self._wanted = False
        self.health = EngineHealth(ready=False)

    @property
    def child(self) -> ChildProcess | None:
        """The current child, if there is one."""
        return self._child

    async def boot(self) -> None:
        """Start the child, and wait until it serves. Does nothing if it already serves. Raises: EngineDown with the reason."""
        if self._task is None or self._task.done():
            self._failures, self._was_ready, self._silence = 0, False, None
            self.health = EngineHealth(ready=False, booting=True)
            self._task = asyncio.create_task(self._keep_alive())
        await self.settled()

    async def settled(self) -> None:
        """Wait until the child serves. Raises: EngineDown if it failed for good or is being shut down."""
        while not self.health.ready:
            if self.health.failed_for_good or self._task is None:
                raise EngineDown(self.health.reason or "not booted")
            await self._settled.wait()

    async def shutdown(self) -> None:
        """Stop the child and stop watching it."""
        task, self._task = self._task, None
        if task is not None:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
        await self._end_child()
        self._tell(EngineHealth(ready=False))

    async def restart(self, *, failed: bool = True, silence: Silence | None = None) -> None:
        """Kill the child; it is then restarted as after a crash.

        failed: whether the child misbehaved, which counts as a failure.
        silence: set if the child hangs.
        """
        if self._child is not None:
            self._wanted = not failed
            self._found_hung(silence)
            reason = "is being restarted" if silence is None else silence.reason
            self._tell(EngineHealth(ready=False, booting=True, failures=self._failures, reason=reason))
            await self._child.stop(grace_s=0)

    def _found_hung(self, silence: Silence | None) -> None:
        if silence is not None and self._silence is None:
            self._silence = silence
            _LOG.error("%s; killing and restarting it", silence.reason)

    def forget(self) -> None:
        """Reset the count of failures, because the child did its job or gets other work."""
        self._failures = 0
        if self.health.failures:
            self._tell(replace(self.health, failures=0))

    async def _keep_alive(self) -> None:
        try:
            while await self._live_once():
                continue
        except Exception as error:  # noqa: BLE001 - callers that wait for the child must learn that nothing restarts it
            _LOG.exception("a child is no longer supervised")
            reason = f"{type(error).__name__}: {error}"
            self._tell(EngineHealth(ready=False, failed_for_good=True, failures=self._failures, reason=reason))

    async def _live_once(self) -> bool:
        """Start the child, wait until it ends, and pause before the next start. Returns whether to start it again."""
        self._tell(EngineHealth(ready=False, booting=True, failures=self._failures, reason=self.health.reason))
        try:
            served_s, failure = await self._serve_once()
        except (EngineError, OSError) as error:
            served_s, failure = 0.0, str(error)
        except Exception as error:  # noqa: BLE001 - callers that wait for the child must learn of any error
            _LOG.exception("a child could not be started")
            served_s, failure = 0.0, f"{type(error).__name__}: {error}"
        finally:
            child = self._child
            await self._end_child()
        wanted, self._wanted = self._wanted, False
        if wanted:
            return True
        if self._silence is not None:
            failure = f"{self._silence.reason}; {failure}"
        self._failures = 1 if served_s > self._back_off.forget_after_s else self._failures + 1
        bears_more = self._was_ready or self._silence is not None  # a child that hung may well start the next time
        allowed = self._back_off.failures if bears_more else self._back_off.first_boot_failures
        final = self._failures >= allowed
        if child is not None and self._hopeless is not None and (reason := self._hopeless(child)) is not None:
            failure, final = f"{reason}\n{failure}", final or not self._was_ready or self._failures > 1
        pause_s = self._back_off.delay_s(self._failures)
        if final:
            _LOG.error("not restarting: %s", failure)
        else:  # its log is kept as `….1`
            _LOG.error("restarting in %g s: %s", pause_s, failure.partition("\n")[0])
        self._tell(EngineHealth(ready=False, failed_for_good=final, failures=self._failures, reason=failure))
        if not final:
            await self._clock.sleep(pause_s)
        return not final

    async def _serve_once(self) -> tuple[float, str]:
        """Start the child, wait until it serves, then until it ends. Returns how long it served, and how it ended."""
        began, limit_s = self._clock.now(), self._boots.limit_s(self._boot)
        child = self._child = await self._start()
        exited = asyncio.create_task(child.wait())
        ready = asyncio.ensure_future(self._ready(child))
        started = self._clock.monotonic()
        try:
            await asyncio.wait({exited, ready}, timeout=limit_s, return_when=asyncio.FIRST_COMPLETED)
            if exited.done():
                self._ended_by_itself(child, exited.result())
                raise child.failed(f"{child.ended(exited.result())} while it was starting")
            if not ready.done():
                self._boots.hung(self._boot)
                words = f"was not ready within {limit_s:.0f} s"
                await self.restart(silence=Silence(reason=f"{child.command.name} {words}", since=began))
                raise child.failed("was ended")
            ready.result()
            self._boots.took(self._boot, self._clock.monotonic() - started)
            return await self._until_ended(child, exited)
        finally:
            ready.cancel()
            exited.cancel()
            await asyncio.gather(ready, exited, return_exceptions=True)

    async def _until_ended(self, child: ChildProcess, exited: asyncio.Future[int]) -> tuple[float, str]:
        """Wait until a serving child ends, and end it if it is found hung."""
        if self._was_ready:
            _LOG.info("%s serves again", child.command.name)
        self._was_ready, self._silence = True, None
        began = self._clock.monotonic()
        self._tell(EngineHealth(ready=True, failures=self._failures))
        watched = None if self._watch is None else asyncio.ensure_future(self._watch(child))
        try:
            if watched is not None:
                either: set[asyncio.Future[Any]] = {exited, watched}
                await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
                if not exited.done():
                    await self.restart(silence=watched.result())
            code = await exited
        finally:
            if watched is not None:
                watched.cancel()
                await asyncio.gather(watched, return_exceptions=True)
        self._ended_by_itself(child, code)
        return self._clock.monotonic() - began, str(child.failed(child.ended(code)))

    def _ended_by_itself(self, child: ChildProcess, code: int) -> None:
        hung = self._hung_status
        if hung is not None and code == hung.status:
            silent_s = hung.silent_s()
            reason = f"a part of the {child.command.name} has not answered for {silent_s:.0f} s"
            self._found_hung(Silence(reason=reason, since=self._clock.now() - silent_s))

    async def _end_child(self) -> None:
        if self._child is not None:
            await self._child.stop(self._stop_grace_s)
            self._child = None  # only now: if this is interrupted, the child still has to be stopped

    def _tell(self, health: EngineHealth) -> None:
        if self._silence is not None:
            health = replace(health, hung_since=self._silence.since)
        self.health = health
        settled, self._settled = self._settled, asyncio.Event()
        settled.set()
        self._on_health(health)
