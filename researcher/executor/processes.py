"""Processes that outlive the researcher: started in their own session, found again after its death, ended from outside.

A `Berth` is the folder of one such process. Only the process inherits the folder's lock, so a held lock means that the process
is alive, even after its parent died. The process writes its pid there before it does anything else, so that a running process
can always be found.
"""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path

from foundation.clock import Clock
from foundation.locks import locked
from foundation.paths import last_bytes, python_path

_ENTRY = 'echo $$ > "$0" && exec "$@"'
"""Shell prefix of a new process: write the pid, then become the command."""
NOTIFY_PREFIX = "RESEARCHER_NOTIFY_"
"""Prefix of the environment variables that hold addresses for notices."""
_APPEND = os.O_WRONLY | os.O_CREAT | os.O_APPEND
_STARTING_S = 0.01
"""Interval between reads of the pid of a new process."""
_WATCH_S = 0.2
"""Polling interval if the system cannot wait for the end of a process."""


class Berth:
    """The folder of one process: `lock`, `pid`, `out.log`, `err.log`. At most one process is alive in it at a time."""

    def __init__(self, folder: Path, clock: Clock) -> None:
        self.folder = folder
        self._clock = clock
        self._child: int | None = None
        self._exit_code: int | None = None

    def start(self, command: Sequence[str], environ: Mapping[str, str]) -> int:
        """Start `command` and return its pid. Its output is appended to the folder's logs.

        Raises: BlockingIOError when a process is already alive here.
        """
        self.folder.mkdir(parents=True, exist_ok=True)
        lock = os.open(self.folder / "lock", os.O_RDWR | os.O_CREAT, 0o600)
        try:
            if not locked(lock, self.folder / "lock", wait=False):
                raise BlockingIOError(f"a process is already running in {self.folder}")
            self._pid_file.unlink(missing_ok=True)
            os.set_inheritable(lock, True)
            # Not subprocess.Popen: it expects to wait for its child, and this child may outlive us.
            self._child = os.posix_spawn(
                "/bin/sh",
                ["/bin/sh", "-c", _ENTRY, str(self._pid_file), *command],
                environ,
                file_actions=[
                    (os.POSIX_SPAWN_OPEN, 0, os.devnull, os.O_RDONLY, 0),
                    (os.POSIX_SPAWN_OPEN, 1, str(self.folder / "out.log"), _APPEND, 0o600),
                    (os.POSIX_SPAWN_OPEN, 2, str(self.folder / "err.log"), _APPEND, 0o600),
                ],
                setsid=True,
                setsigdef=[signal.SIGPIPE],
            )
        finally:
            os.close(lock)
        self._exit_code = None
        return self._child

    def alive(self) -> bool:
        self._reap()
        try:
            lock = os.open(self.folder / "lock", os.O_RDWR)
        except FileNotFoundError:
            return False
        try:
            return not locked(lock, self.folder / "lock", wait=False)
        finally:
            os.close(lock)

    def pid(self) -> int | None:
        """Return the pid of the live process, or None if there is none or its pid is not known yet."""
        if not self.alive():
            return None
        text = self._pid_file.read_text().strip() if self._pid_file.exists() else ""
        return int(text) if text else None

    def exit_code(self) -> int | None:
        """Return the exit code of a process that has ended, if this Python process started it; else None."""
        self._reap()
        return self._exit_code

    async def ended(self) -> None:
        """Wait until no process is alive here."""
        while self.alive():
            pid = self.pid()
            if pid is None or not await _woken_at_end(pid):
                await self._clock.sleep(_WATCH_S)

    async def end(self, grace_s: float) -> None:
        """Ask the process and everything it started to end, and kill them after `grace_s`. If that is 0, kill them immediately."""
        for number in (signal.SIGTERM, signal.SIGKILL) if grace_s > 0 else (signal.SIGKILL,):
            while (pid := self.pid()) is None and self.alive():
                await self._clock.sleep(_STARTING_S)
            if pid is None:
                return
            with suppress(ProcessLookupError):
                os.killpg(pid, number)
            with suppress(TimeoutError):
                async with asyncio.timeout(grace_s):
                    await self.ended()
                    return
        await self.ended()

    def tail(self, name: str = "err.log", length: int = 2000) -> str:
        """Return the end of a log, up to `length` characters."""
        try:
            with open(self.folder / name, "rb") as file:
                return last_bytes(file, length).decode(errors="replace").strip()
        except FileNotFoundError:
            return ""

    def size(self, name: str = "err.log") -> int:
        """Return the size of a log in bytes."""
        file = self.folder / name
        return file.stat().st_size if file.exists() else 0

    @property
    def _pid_file(self) -> Path:
        return self.folder / "pid"

    def _reap(self) -> None:
        """Collect the exit status of a child that ended: until then it stays a zombie, without its lock."""
        if self._child is None:
            return
        try:
            pid, status = os.waitpid(self._child, os.WNOHANG)
        except ChildProcessError:  # other code in this process collected it first
            self._child = None
            return
        if pid:
            self._child, self._exit_code = None, os.waitstatus_to_exitcode(status)


def started_at(pid: int) -> float | None:
    """Return when a process began (seconds after boot on Linux, Unix time elsewhere), or None if it does not exist.

    The pid and this time together identify a process, even when pids are reused.
    """
    if Path("/proc/self/stat").exists():
        try:
            fields = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()
        except (FileNotFoundError, ProcessLookupError):
            return None
        return None if fields[0] == "Z" else int(fields[19]) / os.sysconf("SC_CLK_TCK")
    shown = subprocess.run(["ps", "-o", "lstart=", "-p", str(pid)], capture_output=True, text=True, check=False)
    words = shown.stdout.split()
    return time.mktime(time.strptime(" ".join(words), "%a %b %d %H:%M:%S %Y")) if words else None


def child_environ(environ: Mapping[str, str] | None = None, *, own: bool = False) -> dict[str, str]:
    """Return an environment in which a child process finds the same code, whatever its working directory.

    `own` says that the child is itself a researcher. Only then does it get the addresses for notices, which are secrets.
    """
    env = dict(os.environ if environ is None else environ)
    if not own:
        env = {name: value for name, value in env.items() if not name.startswith(NOTIFY_PREFIX)}
    return env | {"PYTHONPATH": python_path(env)}


async def _woken_at_end(pid: int) -> bool:
    """Wait for the end of a process, whether or not it is a child. Return False if the system cannot do that (not Linux)."""
    if not hasattr(os, "pidfd_open"):
        return False
    try:
        descriptor = os.pidfd_open(pid)
    except ProcessLookupError:
        return False
    loop = asyncio.get_running_loop()
    gone = asyncio.Event()
    loop.add_reader(descriptor, gone.set)
    try:
        await gone.wait()
    finally:
        loop.remove_reader(descriptor)
        os.close(descriptor)
    return True
