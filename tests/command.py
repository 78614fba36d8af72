"""`researcher` commands that look at a study and change none: run in the tests' own process, which has imported all of it."""

from __future__ import annotations

import subprocess
from collections.abc import Mapping
from contextlib import redirect_stderr, redirect_stdout
from io import StringIO
from unittest.mock import patch

from researcher.main import main

LOOKING = frozenset({"findings", "list", "show", "status", "verify"})


def looked(words: tuple[str, ...], environ: Mapping[str, str]) -> subprocess.CompletedProcess[str]:
    """What `subprocess.run` would say of the command."""
    out, err = StringIO(), StringIO()
    with patch.dict("os.environ", environ, clear=True), redirect_stdout(out), redirect_stderr(err):
        code = main([*words])
    return subprocess.CompletedProcess(words, code, out.getvalue(), err.getvalue())
