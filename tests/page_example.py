"""The one Python example of a page, run as it stands."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

from bench.serving import ServerProcess

_ROOT = Path(__file__).resolve().parents[1]


def printed_by_example(page: str, folder: Path) -> str:
    """What it prints, against a server on the echo engine. Its exit code has to be 0."""
    (example,) = re.findall(r"```python\n(.*?)```", page, re.DOTALL)
    with ServerProcess(folder / "state", "--log-level", "warning") as server:
        script = folder / "example.py"
        script.write_text(example.replace("http://127.0.0.1:8642", server.url))
        ran = subprocess.run(
            [sys.executable, str(script)], cwd=_ROOT, capture_output=True, text=True, timeout=600, check=False
        )
    assert ran.returncode == 0, ran.stderr[-2000:]
    return ran.stdout
