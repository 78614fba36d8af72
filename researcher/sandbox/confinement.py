"""What a process takes from itself before it runs code that nobody vouches for. It cannot take it back.

`confine` sets resource limits, forbids new processes and other sockets than TCP (seccomp), and shuts files and ports that
are not named (Landlock), each where the system has it; it returns what is in force. Standard library alone.
"""

from __future__ import annotations

import ctypes
import os
import platform
import resource
import struct
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

_PR_SET_NO_NEW_PRIVS, _PR_SET_SECCOMP, _SECCOMP_FILTER = 38, 22, 2
_CREATE_RULESET, _ADD_RULE, _RESTRICT_SELF = 444, 445, 446
_GIB = 1 << 30


@dataclass(frozen=True, slots=True, kw_only=True)
class Bounds:
    """address_bytes: of memory. cpu_s: of processor time. file_bytes: of one file. tasks: threads beside those there are."""

    address_bytes: int = 8 * _GIB
    cpu_s: int = 24 * 3600
    file_bytes: int = _GIB // 4
    files: int = 1024
    tasks: int = 256


@dataclass(frozen=True, slots=True, kw_only=True)
class Confined:
    """What is in force. processes: no new ones can be made. files, ports: only those that were named can be used."""

    processes: bool
    files: bool
    ports: bool


def confine(
    bounds: Bounds,
    *,
    reads: Sequence[Path] = (),
    lists: Sequence[Path] = (),
    writes: Sequence[Path] = (),
    ports: Sequence[int] | None = None,
    datagrams: bool = False,
) -> Confined:
    """For this thread, the threads that it starts, and whatever it becomes.

    reads, writes: files and folders, with all that is in them; none at all: files are left as they are. lists: folders
    whose names, and those of all folders in them, may be seen.
    ports: TCP ports that may be connected to; None: any. datagrams: whether it may ask for the address of a name.
    """
    _limit(bounds)
    if sys.platform != "linux":
        return Confined(processes=False, files=False, ports=False)
    libc = ctypes.CDLL(None, use_errno=True)
    libc.prctl(_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)
    files, shut = (
        _landlock(libc, reads, lists, writes, ports) if reads or writes or ports is not None else (False, False)
    )
    return Confined(processes=_seccomp(libc, datagrams), files=files, ports=shut)


def landlock_version() -> int:
    """0 where the kernel has none."""
    if sys.platform != "linux":
        return 0
    return max(0, int(ctypes.CDLL(None, use_errno=True).syscall(_CREATE_RULESET, None, 0, 1)))


def _limit(bounds: Bounds) -> None:
    wanted = {
        resource.RLIMIT_AS: bounds.address_bytes,
        resource.RLIMIT_CPU: bounds.cpu_s,
        resource.RLIMIT_FSIZE: bounds.file_bytes,
        resource.RLIMIT_NOFILE: bounds.files,
        resource.RLIMIT_CORE: 0,
        resource.RLIMIT_NPROC: _tasks() + bounds.tasks,
    }
    for what, most in wanted.items():
        hard = resource.getrlimit(what)[1]
        least = most if hard == resource.RLIM_INFINITY else min(most, hard)
        try:
            resource.setrlimit(what, (least, least))
        except (ValueError, OSError):  # macOS takes no limit on the address space
            continue


def _tasks() -> int:
    """Threads of this user: the limit counts all of them."""
    count = 0
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            if folder.stat().st_uid == os.getuid():
                count += len(os.listdir(folder / "task"))
        except OSError:  # ended meanwhile
            continue
    return count


# -- Landlock: files and TCP ports --------------------------------------------------------------------------------------

_READ, _READ_DIR, _EXECUTE = 1 << 2, 1 << 3, 1 << 0
_ALL_FS = {1: (1 << 13) - 1, 2: (1 << 14) - 1, 3: (1 << 15) - 1, 4: (1 << 15) - 1, 5: (1 << 16) - 1}
_OF_FILES = _EXECUTE | 1 << 1 | _READ | 1 << 14 | 1 << 15
_BIND, _CONNECT = 1, 2
_SCOPES = 3
"""No signals to processes outside, no abstract sockets of theirs."""


def _landlock(
    libc: ctypes.CDLL,
    reads: Sequence[Path],
    lists: Sequence[Path],
    writes: Sequence[Path],
    ports: Sequence[int] | None,
) -> tuple[bool, bool]:
    """Whether files, and whether ports are shut."""
    version = landlock_version()
    if version < 1:
        return False, False
    every = _ALL_FS[min(version, 5)] if reads or writes else 0
    net = _BIND | _CONNECT if version >= 4 and ports is not None else 0
    attributes = struct.pack("=QQQ", every, net, _SCOPES if version >= 6 else 0)
    length = 24 if version >= 6 else 16 if version >= 4 else 8
    ruleset = int(libc.syscall(_CREATE_RULESET, attributes, length, 0))
    if ruleset < 0:
        return False, False
    try:
        for path in reads:
            _allow(libc, ruleset, path, (_READ | _READ_DIR | _EXECUTE) & every)
        for path in lists:
            _allow(libc, ruleset, path, _READ_DIR & every)
        for path in writes:
            _allow(libc, ruleset, path, every)
        for port in ports or ():
            if net:
                libc.syscall(_ADD_RULE, ruleset, 2, struct.pack("=QQ", _CONNECT, port), 0)
        done = int(libc.syscall(_RESTRICT_SELF, ruleset, 0)) == 0
    finally:
        os.close(ruleset)
    return done and bool(every), done and bool(net)


def _allow(libc: ctypes.CDLL, ruleset: int, path: Path, access: int) -> None:
    try:
        opened = os.open(path, os.O_PATH | os.O_CLOEXEC)
    except OSError:  # what is not there needs no leave
        return
    try:
        rule = struct.pack("=Qi", access if path.is_dir() else access & _OF_FILES, opened)
        libc.syscall(_ADD_RULE, ruleset, 1, rule, 0)
    finally:
        os.close(opened)


# -- seccomp: no new processes, no sockets but TCP ----------------------------------------------------------------------

_LOAD, _EQUAL, _AT_LEAST, _SET, _AND, _RETURN = 0x20, 0x15, 0x35, 0x45, 0x54, 0x06
_ALLOW, _ERRNO, _KILL = 0x7FFF0000, 0x00050000, 0x80000000
_EPERM, _ENOSYS = 1, 38
_CLONE_THREAD = 0x00010000
_AF_INET, _AF_INET6, _STREAM = 2, 10, 1
_NUMBERS = {
    "x86_64": {"arch": 0xC000003E, "forks": (57, 58), "clone": 56, "socket": 41, "never": (101, 310, 311, 425)},
    "aarch64": {"arch": 0xC00000B7, "forks": (), "clone": 220, "socket": 198, "never": (117, 270, 271, 425)},
}
"""never: ptrace, process_vm_readv, process_vm_writev, io_uring_setup (which opens sockets without `socket`)."""
_CLONE3, _FIRST_X32 = 435, 0x40000000


class _Program(ctypes.Structure):
    _fields_ = [("length", ctypes.c_ushort), ("filter", ctypes.c_void_p)]


def _seccomp(libc: ctypes.CDLL, datagrams: bool) -> bool:
    numbers = _NUMBERS.get(platform.machine())
    if numbers is None:
        return False
    code = b"".join(struct.pack("=HBBI", *each) for each in _filter(numbers, datagrams))
    held = ctypes.create_string_buffer(code, len(code))
    program = _Program(len(code) // 8, ctypes.cast(held, ctypes.c_void_p))
    return int(libc.prctl(_PR_SET_SECCOMP, _SECCOMP_FILTER, ctypes.byref(program), 0, 0)) == 0


def _filter(numbers: dict[str, object], datagrams: bool) -> list[tuple[int, int, int, int]]:
    """Instructions (code, jump if true, jump if false, value). Each rule loads what it looks at, and falls through."""
    refused, unknown = (_RETURN, 0, 0, _ERRNO | _EPERM), (_RETURN, 0, 0, _ERRNO | _ENOSYS)
    number, arch, first, second = (_LOAD, 0, 0, 0), (_LOAD, 0, 0, 4), (_LOAD, 0, 0, 16), (_LOAD, 0, 0, 24)
    forks, never = numbers["forks"], numbers["never"]
    assert isinstance(forks, tuple)
    assert isinstance(never, tuple)
    rules = [
        arch,
        (_EQUAL, 1, 0, _int(numbers["arch"])),
        (_RETURN, 0, 0, _KILL),
        number,
        (_AT_LEAST, 0, 1, _FIRST_X32),
        refused,
        (_EQUAL, 0, 1, _CLONE3),
        unknown,  # the C library then asks for `clone`, whose flags can be seen
    ]
    for each in (*forks, *never):
        rules += [(_EQUAL, 0, 1, each), refused]
    rules += [
        (_EQUAL, 0, 3, _int(numbers["clone"])),
        first,
        (_SET, 1, 0, _CLONE_THREAD),
        refused,
        number,
    ]
    socket = _int(numbers["socket"])
    if datagrams:
        rules += [(_EQUAL, 0, 4, socket), first, (_EQUAL, 2, 0, _AF_INET), (_EQUAL, 1, 0, _AF_INET6), refused]
    else:
        rules += [(_EQUAL, 0, 7, socket), first, (_EQUAL, 1, 0, _AF_INET), (_EQUAL, 0, 3, _AF_INET6)]
        rules += [second, (_AND, 0, 0, 0xF), (_EQUAL, 1, 0, _STREAM), refused]
    return [*rules, (_RETURN, 0, 0, _ALLOW)]


def _int(value: object) -> int:
    assert isinstance(value, int)
    return value
