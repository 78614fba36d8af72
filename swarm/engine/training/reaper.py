"""A small process between a server and one of its children: no child outlives the server or leaves anything behind.

Run as a script: `python -I -S reaper.py ALIVE_FD PASSED_FDS COMMAND...`. It starts the command in its own process group, and
exits with the command's exit status (128 + signal). When the other end of ALIVE_FD closes, because the server closed it or was
killed, it kills the command and all processes descended from it. It passes on SIGTERM. Shared memory of killed processes is
removed. Imports only the standard library.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import re
import select
import signal
import subprocess
import sys
import time
from pathlib import Path

PR_SET_PDEATHSIG = 1
PR_SET_CHILD_SUBREAPER = 36
SEGMENT = re.compile(r"/dev/shm/(?:psm_|sem\.|torch_|verl_weights_|vllm_dist_)[^/ ]*$")
"""Names of shared memory that multiprocessing, torch, verl and vLLM create. Other mapped files are not ours to remove."""
_SHM = Path("/dev/shm")
_RUNTIME_NOTE = "__KMP_REGISTERED_LIB_"
"""Name prefix of files that Intel's OpenMP runtime leaves in shared memory; the ids of the process and of its user follow."""
NAMED_BY_PID = ("sem.loky-{pid}-*", f"{_RUNTIME_NOTE}{{pid}}_*")
"""Shared memory to find by its name, because its mapping does not show it: loky's is mapped under another name, and that of Intel's
OpenMP runtime does not stay mapped."""
LOOK_EVERY_S = 10.0
_KILL_LIMIT_S = 10.0


def main(argv: list[str]) -> int:
    """Run the command until it ends or the server is gone."""
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
    segments: set[str] = set()
    while (status := _reap(child.pid)) is None:
        readable, _, _ = select.select([alive_fd, wake_read], [], [], LOOK_EVERY_S)
        segments |= _segments(_descendants(os.getpid()))  # now, because once the command has ended nothing maps them
        if wake_read in readable:
            os.read(wake_read, 4096)
        if stop_asked:
            stop_asked.clear()
            os.kill(child.pid, signal.SIGTERM)
        if alive_fd in readable and not os.read(alive_fd, 1):
            break
    _end_all(child.pid, segments)
    code = os.waitstatus_to_exitcode(status) if status is not None else -signal.SIGKILL
    return code if code >= 0 else 128 - code


def _prctl(option: int, value: int) -> None:
    """Set a process option that only Linux has; elsewhere, watching the file descriptor has to be enough."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(option, value, 0, 0, 0)


def _reap(child: int) -> int | None:
    """Collect all ended processes; return the child's wait status if it was among them."""
    while True:
        try:
            pid, status = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return None
        if pid == child:
            return status
        if pid == 0:
            return None


def _end_all(child: int, segments: set[str]) -> None:
    """Kill the child's group and the child's descendants outside it, and free the shared memory that they held."""
    segments |= _segments([child])  # also if the child ended before we looked
    with contextlib.suppress(ProcessLookupError):  # the group has already ended
        os.killpg(child, signal.SIGKILL)
    until = time.monotonic() + _KILL_LIMIT_S
    while (pids := _descendants(os.getpid())) and time.monotonic() < until:
        segments |= _segments(pids)
        _kill(pids)
        _reap(child)
        time.sleep(0.005)
    _free(segments)


def end_session(leader: int, started: int) -> None:
    """Kill what is left of a reaper's session after the reaper itself was killed, and free its shared memory.

    `started` is the reaper's start time (`start_time`), so that a later process with the same id is left alone.
    """
    if start_time(leader) not in (None, started):
        return
    segments = _segments([leader]) | _notes_of_the_dead()
    until = time.monotonic() + _KILL_LIMIT_S
    while (pids := _session(leader, started)) and time.monotonic() < until:
        segments |= _segments(pids)
        _kill(pids)
        time.sleep(0.005)
    _free(segments)


def _notes_of_the_dead() -> set[str]:
    """Return the files that Intel's runtime left for dead processes of this user, which include the one that died with its reaper."""
    notes = [(path, path.name.removeprefix(_RUNTIME_NOTE).split("_")) for path in _SHM.glob(f"{_RUNTIME_NOTE}*")]
    return {
        str(path)
        for path, ids in notes
        if len(ids) == 2 and ids[1] == str(os.getuid()) and ids[0].isdecimal() and not _lives(int(ids[0]))
    }


def start_time(pid: int) -> int | None:
    """Return when a process started, in clock ticks since boot; None if there is no such process."""
    fields = _stat(pid)
    return None if fields is None else int(fields[19])


def _lives(pid: int) -> bool:
    fields = _stat(pid)
    return fields is not None and fields[0] != "Z"


def _session(leader: int, started: int) -> list[int]:
    """Return the living processes of a session that started no earlier than its leader."""
    pids = [int(entry.name) for entry in Path("/proc").glob("[0-9]*")]
    found = [(pid, fields) for pid in pids if (fields := _stat(pid)) is not None]
    return [
        pid for pid, fields in found if int(fields[3]) == leader and fields[0] != "Z" and int(fields[19]) >= started
    ]


def _stat(pid: int) -> list[str] | None:
    """Return the fields of /proc/PID/stat from the state onward; None if there is no such process, or no /proc."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()
    except OSError:
        return None


def _descendants(pid: int) -> list[int]:
    """Return all living descendants of `pid`, as far as /proc shows them."""
    children: list[int] = []
    for task in Path(f"/proc/{pid}/task").glob("*/children"):
        try:
            children += [int(text) for text in task.read_text().split()]
        except OSError:
            continue  # ended meanwhile
    alive = [child for child in children if _lives(child)]
    return alive + [below for child in alive for below in _descendants(child)]


def _kill(pids: list[int]) -> None:
    for pid in pids:
        try:
            os.kill(pid, signal.SIGKILL)
        except ProcessLookupError:
            continue  # ended meanwhile


def _segments(pids: list[int]) -> set[str]:
    """Return the shared-memory files that these processes map, or that are named after their ids."""
    found: set[str] = set()
    for pid in pids:
        found |= {str(path) for name in NAMED_BY_PID for path in _SHM.glob(name.format(pid=pid))}
        try:
            maps = Path(f"/proc/{pid}/maps").read_text(errors="replace")
        except OSError:
            continue  # ended meanwhile
        found |= {match[0] for line in maps.splitlines() if (match := SEGMENT.search(line))}
    return found


def _free(segments: set[str]) -> None:
    for path in segments:
        Path(path).unlink(missing_ok=True)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
