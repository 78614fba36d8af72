"""Confine this process before it runs untrusted code. There is no way back.

`confine` sets resource limits, drops capabilities, forbids new processes and all sockets but TCP (seccomp), and blocks
files and ports that are not listed (Landlock). It skips limits that the system does not support; if the system supports a
limit but refuses it, that is an error. This module imports only the standard library. Run as a script
(`python confinement.py SPEC_FD FAULT_FD COMMAND...`), it confines itself and then replaces itself with the command.
"""

from __future__ import annotations

import ctypes
import json
import os
import platform
import resource
import signal
import struct
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

_PR_SET_PDEATHSIG, _PR_SET_DUMPABLE, _PR_SET_SECCOMP, _PR_SET_CHILD_SUBREAPER, _PR_SET_NO_NEW_PRIVS = 1, 4, 22, 36, 38
_SECCOMP_FILTER = 2
_CREATE_RULESET, _ADD_RULE, _RESTRICT_SELF = 444, 445, 446
_GIB = 1 << 30
FILES, PORTS, SIGNALS = 1, 4, 6
"""First Landlock versions that can block files, TCP ports, and signals to outside processes."""
SYSTEM = (
    "/usr",
    "/bin",
    "/sbin",
    "/lib",
    "/lib32",
    "/lib64",
    "/etc/alternatives",
    "/etc/ld.so.cache",
    "/etc/ld.so.conf",
    "/etc/ld.so.conf.d",
    "/etc/ssl",
    "/etc/ca-certificates",
    "/etc/pki",
    "/etc/localtime",
    "/etc/nsswitch.conf",
    "/etc/mime.types",
)
"""Paths that any program needs to read in order to run. They hold no secrets."""


class Unconfined(Exception):
    """The system refused a limit that it should support. Callers must not run the program without it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Bounds:
    """Resource limits of a confined process.

    Args:
        address_bytes: address space.
        cpu_s: CPU time.
        file_bytes: size of any one file.
        files: open files.
        tasks: threads, in addition to those the user already runs.
    """

    address_bytes: int = 8 * _GIB
    cpu_s: int = 24 * 3600
    file_bytes: int = _GIB // 4
    files: int = 1024
    tasks: int = 256


@dataclass(frozen=True, slots=True, kw_only=True)
class Confined:
    """The limits in force. With `calls`, system calls are filtered. With `files` or `ports`, only listed files or ports are usable."""

    calls: bool
    files: bool
    ports: bool


def confine(
    bounds: Bounds | None,
    *,
    reads: Sequence[Path] = (),
    lists: Sequence[Path] = (),
    writes: Sequence[Path] = (),
    ports: Sequence[int] | None = None,
    datagrams: bool = False,
    processes: bool = False,
) -> Confined:
    """Confine this thread, the threads that it starts, and the program that it executes.

    Args:
        bounds: resource limits; None sets none.
        reads: files and folders (with their contents) that it may read. If `reads` and `writes` are both empty, file access
            is not restricted.
        lists: folders that it may list, with their subfolders.
        writes: files and folders (with their contents) that it may read and write.
        ports: TCP ports that it may connect to; None allows any.
        datagrams: allow datagram sockets, which DNS lookups need.
        processes: allow new processes.

    Raises: Unconfined if the system supports one of these limits (`filters_calls`, `landlock_version`) but refuses it.
    """
    if bounds is not None:
        _limit(bounds)
    if sys.platform != "linux":
        return Confined(calls=False, files=False, ports=False)
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) != 0:
        raise _refused("no_new_privs")
    _drop_capabilities(libc)
    version = landlock_version()
    files = bool(reads or writes) and version >= FILES
    shut = ports is not None and version >= PORTS
    if files or shut:
        _landlock(libc, version, reads if files else (), lists, writes if files else (), ports if shut else None)
    calls = filters_calls()
    if calls:
        _seccomp(libc, datagrams=datagrams, processes=processes)
    return Confined(calls=calls, files=files, ports=shut)


def filters_calls() -> bool:
    """True if this machine can filter system calls."""
    return sys.platform == "linux" and platform.machine() in _NUMBERS


def hide_memory() -> None:
    """Keep the user's other processes from reading this one's memory, environment and open files; disable core dumps. Linux only."""
    if sys.platform == "linux" and ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_DUMPABLE, 0, 0, 0, 0) != 0:
        raise _refused("PR_SET_DUMPABLE")


def adopt_orphans() -> None:
    """Become the parent of descendants whose own parent exits. Linux only."""
    if sys.platform == "linux" and ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0) != 0:
        raise _refused("PR_SET_CHILD_SUBREAPER")


def _refused(what: str) -> Unconfined:
    words = os.strerror(ctypes.get_errno())
    return Unconfined(
        f"this system refused {what} ({words}), so code cannot be confined as promised: allow it (in a container, "
        "with a seccomp profile), or run on another system"
    )


def landlock_version() -> int:
    """Return the kernel's Landlock version; 0 if it has no Landlock."""
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
        except (ValueError, OSError) as error:
            if sys.platform != "darwin":  # macOS does not support a limit on the address space
                raise Unconfined(f"this system refused a resource limit ({error})") from error


def _tasks() -> int:
    """Return the number of threads of this user: the limit counts all of them."""
    count = 0
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            if folder.stat().st_uid == os.getuid():
                count += len(os.listdir(folder / "task"))
        except OSError:  # the process has ended
            continue
    return count


# -- Landlock: files and TCP ports --------------------------------------------------------------------------------------

_READ, _READ_DIR, _EXECUTE = 1 << 2, 1 << 3, 1 << 0
_ALL_FS = {1: (1 << 13) - 1, 2: (1 << 14) - 1, 3: (1 << 15) - 1, 4: (1 << 15) - 1, 5: (1 << 16) - 1}
_OF_FILES = _EXECUTE | 1 << 1 | _READ | 1 << 14 | 1 << 15
_BIND, _CONNECT = 1, 2
_SCOPES = 3
"""Landlock scopes that block signals to outside processes and connections to their abstract sockets."""


def _landlock(
    libc: ctypes.CDLL,
    version: int,
    reads: Sequence[Path],
    lists: Sequence[Path],
    writes: Sequence[Path],
    ports: Sequence[int] | None,
) -> None:
    """Restrict files and ports with Landlock. Raises: Unconfined."""
    every = _ALL_FS[min(version, 5)] if reads or writes else 0
    net = _BIND | _CONNECT if ports is not None else 0
    attributes = struct.pack("=QQQ", every, net, _SCOPES if version >= SIGNALS else 0)
    length = 24 if version >= SIGNALS else 16 if version >= PORTS else 8
    ruleset = int(libc.syscall(_CREATE_RULESET, attributes, length, 0))
    if ruleset < 0:
        raise _refused("a Landlock ruleset")
    try:
        for path in reads:
            _allow(libc, ruleset, path, (_READ | _READ_DIR | _EXECUTE) & every)
        for path in lists:
            _allow(libc, ruleset, path, _READ_DIR & every)
        for path in writes:
            _allow(libc, ruleset, path, every)
        for port in ports or ():
            libc.syscall(_ADD_RULE, ruleset, 2, struct.pack("=QQ", _CONNECT, port), 0)
        if int(libc.syscall(_RESTRICT_SELF, ruleset, 0)) != 0:
            raise _refused("Landlock")
    finally:
        os.close(ruleset)


def _allow(libc: ctypes.CDLL, ruleset: int, path: Path, access: int) -> None:
    try:
        opened = os.open(path, os.O_PATH | os.O_CLOEXEC)
    except OSError:  # a missing path needs no rule
        return
    try:
        rule = struct.pack("=Qi", access if path.is_dir() else access & _OF_FILES, opened)
        libc.syscall(_ADD_RULE, ruleset, 1, rule, 0)
    finally:
        os.close(opened)


# -- capabilities -------------------------------------------------------------------------------------------------------

_CAPABILITIES_3 = 0x20080522


def _drop_capabilities(libc: ctypes.CDLL) -> None:
    """Drop all capabilities. With no_new_privs, no program that root starts regains them. Raises: Unconfined."""
    header, none = struct.pack("=Ii", _CAPABILITIES_3, 0), bytes(24)
    if libc.capset(header, none) != 0:
        raise _refused("to drop capabilities")


# -- seccomp: no new processes, no sockets but TCP ----------------------------------------------------------------------

_LOAD, _EQUAL, _AT_LEAST, _SET, _AND, _RETURN = 0x20, 0x15, 0x35, 0x45, 0x54, 0x06
_ALLOW, _ERRNO, _KILL = 0x7FFF0000, 0x00050000, 0x80000000
_EPERM, _ENOSYS = 1, 38
_CLONE_THREAD = 0x00010000
_AF_INET, _AF_INET6, _AF_NETLINK, _STREAM = 2, 10, 16, 1
_ANY, _TCP, _UDP = 0, 6, 17
_FASTOPEN = 0x20000000


@dataclass(frozen=True, slots=True)
class _Numbers:
    """System call numbers of one architecture.

    `never` holds the calls that are always refused: ptrace, process_vm_readv, process_vm_writev, io_uring_setup (it opens
    sockets without `socket`) and pidfd_getfd. `sends` holds the calls that can connect implicitly, each with the index of its
    flags argument.
    """

    arch: int
    forks: tuple[int, ...]
    clone: int
    socket: int
    never: tuple[int, ...]
    sends: tuple[tuple[int, int], ...]


_NUMBERS = {
    "x86_64": _Numbers(0xC000003E, (57, 58), 56, 41, (101, 310, 311, 425, 438), ((44, 3), (46, 2), (307, 3))),
    "aarch64": _Numbers(0xC00000B7, (), 220, 198, (117, 270, 271, 425, 438), ((206, 3), (211, 2), (269, 3))),
}
_CLONE3, _FIRST_X32 = 435, 0x40000000
_Instruction = tuple[int, int, int, int]
"""A BPF instruction: code, jump if true, jump if false, value."""


class _Program(ctypes.Structure):
    _fields_ = [("length", ctypes.c_ushort), ("filter", ctypes.c_void_p)]


def _seccomp(libc: ctypes.CDLL, *, datagrams: bool, processes: bool) -> None:
    """Filter system calls with seccomp. Raises: Unconfined."""
    code = b"".join(struct.pack("=HBBI", *each) for each in _filter(_NUMBERS[platform.machine()], datagrams, processes))
    held = ctypes.create_string_buffer(code, len(code))
    program = _Program(len(code) // 8, ctypes.cast(held, ctypes.c_void_p))
    if int(libc.prctl(_PR_SET_SECCOMP, _SECCOMP_FILTER, ctypes.byref(program), 0, 0)) != 0:
        raise _refused("a seccomp filter")


def _argument(index: int) -> _Instruction:
    return (_LOAD, 0, 0, 16 + 8 * index)


_NUMBER, _ARCH = (_LOAD, 0, 0, 0), (_LOAD, 0, 0, 4)
_REFUSED, _UNKNOWN = (_RETURN, 0, 0, _ERRNO | _EPERM), (_RETURN, 0, 0, _ERRNO | _ENOSYS)


def _filter(numbers: _Numbers, datagrams: bool, processes: bool) -> list[_Instruction]:
    """Build the filter. Each rule loads the values that it checks, and falls through with the call number loaded."""
    rules = [
        _ARCH,
        (_EQUAL, 1, 0, numbers.arch),
        (_RETURN, 0, 0, _KILL),
        _NUMBER,
        (_AT_LEAST, 0, 1, _FIRST_X32),
        _REFUSED,
    ]
    for each in (*numbers.never, *(() if processes else numbers.forks)):
        rules += [(_EQUAL, 0, 1, each), _REFUSED]
    if not processes:
        # With this errno the C library falls back to `clone`, whose flags the filter can check.
        rules += [(_EQUAL, 0, 1, _CLONE3), _UNKNOWN]
        rules += _when(numbers.clone, [_argument(0), (_SET, 1, 0, _CLONE_THREAD), _REFUSED])
    for call, flags in numbers.sends:
        rules += _when(call, [_argument(flags), (_SET, 0, 1, _FASTOPEN), _REFUSED])
    # Netlink lists this machine's interfaces. Other families reach this user's services or bypass the limits on ports.
    families = (_AF_INET, _AF_INET6, _AF_NETLINK) if processes else (_AF_INET, _AF_INET6)
    sockets = [_argument(0), *_one_of(families)]
    if not datagrams:
        sockets += [_argument(1), (_AND, 0, 0, 0xF), *_one_of((_STREAM,))]
    sockets += [_argument(2), *_one_of((_ANY, _TCP, _UDP))]
    rules += _when(numbers.socket, sockets)
    return [*rules, (_RETURN, 0, 0, _ALLOW)]


def _when(call: int, rules: list[_Instruction]) -> list[_Instruction]:
    """Apply `rules` to one system call; other calls skip them."""
    return [(_EQUAL, 0, len(rules) + 1, call), *rules, _NUMBER]


def _one_of(values: Sequence[int]) -> list[_Instruction]:
    """Refuse the call unless the loaded value is one of `values`."""
    last = len(values)
    return [*((_EQUAL, last - index, 0, value) for index, value in enumerate(values)), _REFUSED]


# -- as a script --------------------------------------------------------------------------------------------------------


def become(spec: dict[str, list[str]], ports: Sequence[int] | None, command: Sequence[str]) -> None:
    """Confine this process and replace it with the command, which may start processes and dies with its parent.

    Raises: Unconfined; OSError if the program is missing or not executable.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0) != 0:
        raise _refused("PR_SET_PDEATHSIG")
    paths = {name: [Path(text) for text in spec[name]] for name in ("reads", "lists", "writes")}
    confine(None, **paths, ports=ports, datagrams=True, processes=True)
    os.execvp(command[0], list(command))


def main(arguments: Sequence[str]) -> int:
    spec_fd, fault_fd = int(arguments[0]), int(arguments[1])
    os.set_inheritable(fault_fd, False)
    with os.fdopen(spec_fd, "rb") as file:
        spec = json.load(file)
    try:
        become(spec, spec["ports"], arguments[2:])
    except (Unconfined, OSError) as error:
        os.write(fault_fd, str(error).encode())
    return 127


if __name__ == "__main__":
    os._exit(main(sys.argv[1:]))
