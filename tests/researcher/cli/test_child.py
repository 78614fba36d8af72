"""A command's own process ends with the command, whatever ends it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
GRANDCHILD = "import os, sys, time; os.write(int(sys.argv[1]), f'{os.getpid()}\\n'.encode()); time.sleep(600)"
CHILD = """
import os, subprocess, sys
line = int(sys.argv[1])
os.write(line, f"{os.getpid()}\\n".encode())
subprocess.Popen([sys.executable, "-c", sys.argv[2], sys.argv[1]], pass_fds=(line,)).wait()
"""
COMMAND = """
import functools, subprocess, sys
from researcher.web.tracking import child
line = int(sys.argv[1])
subprocess.Popen = functools.partial(subprocess.Popen, pass_fds=(line,))
with child([sys.executable, "-c", sys.argv[2], sys.argv[1], sys.argv[3]]) as process:
    sys.exit(process.wait())
"""


@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 143), (signal.SIGINT, -signal.SIGINT)])
def test_it_leaves_nothing_behind(number: signal.Signals, code: int) -> None:
    read, write = os.pipe()
    command = subprocess.Popen(
        [sys.executable, "-c", COMMAND, str(write), CHILD, GRANDCHILD],
        pass_fds=(write,),
        stderr=subprocess.DEVNULL,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),
    )
    os.close(write)
    with os.fdopen(read) as line:
        pids = [int(line.readline()) for _ in range(2)]
        command.send_signal(number)
        assert command.wait(timeout=60) == code
        assert line.read() == "", "nobody holds the other end any more"
    assert len(set(pids)) == 2
