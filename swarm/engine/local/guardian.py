"""A small process between a server and one of its children: no child outlives the server or leaves anything behind.

Run as a script: `python -I -S guardian.py ALIVE_FD PASSED_FDS COMMAND...`. It starts the command in a process group of
its own and ends with its exit status (128 + signal). When the other end of ALIVE_FD closes, because the server closed
it or was killed, it kills the command and every process that came from it. SIGTERM is passed on. Shared memory of
killed processes is removed. Imports the standard library alone.
"""

from __future__ import annotations

import ctypes
import os
import select
import signal
import subprocess
import sys
from pathlib import Path

PR_SET_PDEATHSIG = 1
PR_SET_CHILD_SUBREAPER = 36
SHARED_MEMORY = "/dev/shm/"


def main(argv: list[str]) -> int:
    """Run the command until it ends, or until the server is gone."""
    alive_fd = int(argv[0])
    passed_fds = tuple(int(fd) for fd in argv[1].split(",") if fd)
    _prctl(PR_SET_CHILD_SUBREAPER, 1)
    wake_read, wake_write = os.pipe()
    os.set_blocking(wake_write, False)
    signal.set_wakeup_fd(wake_write, warn_on_full_buffer=False)
    stop_asked: list[int] = []
    signal.signal(signal.SIGTERM, lambda number, _: stop_asked.append(number))
    signal.signal(signal.SIGCHLD, lambda *_: None)
    child = subprocess.Popen(
        argv[2:], process_group=0, pass_fds=passed_fds, preexec_fn=lambda: _prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    )
    for fd in passed_fds:
        os.close(fd)
    while (status := _reap(child.pid)) is None:
        readable, _, _ = select.select([alive_fd, wake_read], [], [])
        if wake_read in readable:
            os.read(wake_read, 4096)
        if stop_asked:
            stop_asked.clear()
            os.kill(child.pid, signal.SIGTERM)
        if alive_fd in readable and not os.read(alive_fd, 1):
            break
    _end_all(child.pid)
    code = os.waitstatus_to_exitcode(status) if status is not None else -signal.SIGKILL
    return code if code >= 0 else 128 - code


def _prctl(option: int, value: int) -> None:
    """Linux alone has it; elsewhere the watched file descriptor has to be enough."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(option, value, 0, 0, 0)


def _reap(child: int) -> int | None:
    """Collect whatever ended; the child's wait status when it was among them."""
    while True:
        try:
            pid, status = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return None
        if pid == child:
            return status
        if pid == 0:
            return None


def _end_all(child: int) -> None:
    """Kill the child's group, and what left the group but came from it; then free the shared memory they held."""
    segments: set[str] = set()
    try:
        for pid in _descendants(os.getpid()):
            segments |= _segments_of(pid)
        os.killpg(child, signal.SIGKILL)
    except ProcessLookupError:
        pass  # the group ended by itself
    while pids := _descendants(os.getpid()):
        for pid in pids:
            segments |= _segments_of(pid)
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                continue  # ended meanwhile
        try:
            os.waitpid(-1, 0)
        except ChildProcessError:
            break
    for path in segments:
        Path(path).unlink(missing_ok=True)


def _descendants(pid: int) -> list[int]:
    """Every living process below `pid`, as far as the system tells."""
    try:
        children = [int(text) for text in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
    except OSError:
        return []  # ended meanwhile, or a system without /proc
    return children + [below for child in children for below in _descendants(child)]


def _segments_of(pid: int) -> set[str]:
    """Shared-memory files that a process maps and that are still named."""
    try:
        maps = Path(f"/proc/{pid}/maps").read_text()
    except OSError:
        return set()  # ended meanwhile
    paths = (line[line.index(SHARED_MEMORY) :] for line in maps.splitlines() if SHARED_MEMORY in line)
    return {path for path in paths if not path.endswith(" (deleted)")}


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
