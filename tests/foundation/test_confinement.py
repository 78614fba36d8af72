"""Limits that a system has and refuses: nothing runs as if they were in force."""

from __future__ import annotations

import platform
import subprocess
import sys
from pathlib import Path

import pytest

from foundation.confinement import FILES, filters_calls, landlock_version

ROOT = Path(__file__).parents[2]
SYSTEM_CALLS = {"x86_64": (157, 126), "aarch64": (167, 91)}
REFUSE = """
import ctypes, struct
libc = ctypes.CDLL(None, use_errno=True)
call, argument = {call}, {argument}
rules = [(0x20, 0, 0, 0), (0x15, 0, 3, call)]
rules += [(0x20, 0, 0, 16), (0x15, 0, 1, argument), (0x06, 0, 0, 0x50001)] if argument is not None else [(0x06, 0, 0, 0x50001)] * 3
code = b"".join(struct.pack("=HBBI", *each) for each in [*rules, (0x06, 0, 0, 0x7FFF0000)])
held = ctypes.create_string_buffer(code, len(code))
class Program(ctypes.Structure):
    _fields_ = [("length", ctypes.c_ushort), ("filter", ctypes.c_void_p)]
libc.prctl(38, 1, 0, 0, 0)
assert libc.prctl(22, 2, ctypes.byref(Program(len(code) // 8, ctypes.cast(held, ctypes.c_void_p))), 0, 0) == 0
"""
"""Has the kernel refuse a system call, or one whose first argument is `argument`, with EPERM."""


def refused(call: int, argument: int | None, code: str) -> str:
    """What code says that is confined where the system refuses that call."""
    program = REFUSE.format(call=call, argument=argument) + code
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=False)
    assert "ran" not in done.stdout
    assert done.returncode != 0
    return done.stderr


CONFINE = """
from pathlib import Path
from foundation.confinement import confine
confine(None, reads=[Path("/usr")], ports=[1])
print("ran")
"""


@pytest.mark.skipif(not filters_calls(), reason="system calls are not filtered here")
@pytest.mark.parametrize(
    ("call", "argument", "said"),
    [
        (SYSTEM_CALLS.get(platform.machine(), (0, 0))[0], 22, "refused a seccomp filter"),
        (446, None, "refused Landlock"),
        (SYSTEM_CALLS.get(platform.machine(), (0, 0))[1], None, "refused to drop capabilities"),
    ],
)
def test_a_limit_that_is_refused_is_an_error(call: int, argument: int | None, said: str) -> None:
    if call == 446 and landlock_version() < FILES:
        pytest.skip("this kernel has no Landlock")
    assert said in refused(call, argument, CONFINE)


@pytest.mark.skipif(not filters_calls(), reason="system calls are not filtered here")
def test_a_sandbox_whose_filter_is_refused_does_not_begin(tmp_path: Path) -> None:
    code = f"""
from pathlib import Path
from researcher.sandbox.entry import become
from researcher.sandbox.launch import Mode, spec_of
import sys
become(spec_of([sys.executable, "-c", "print('ran')"], Path({str(tmp_path)!r}), reads=[], mode=Mode.LIMITS))
"""
    assert "Unconfined" in refused(SYSTEM_CALLS[platform.machine()][0], 22, code)
