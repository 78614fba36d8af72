"""Runs a real swarm server in a separate process, for benches and for tests that kill it."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Self

import httpx

_TOKENS = ("SWARM_ADMIN_TOKEN", "SWARM_CLIENT_TOKEN")


class DidNotStart(Exception):
    """The server exited before it served. The text is its output."""


class ServerProcess:
    """`swarm serve` on a free port. `url` answers from the moment the object exists.

    Raises: DidNotStart with the server's last words.
    """

    def __init__(
        self,
        state_dir: Path,
        *arguments: str,
        engine: str = "echo",
        model: str = "echo",
        environ: Mapping[str, str] | None = None,
        wrapper: Sequence[str] = (),
    ) -> None:
        self.state_dir = state_dir
        self.log_path = state_dir.with_suffix(".log")
        command = [*wrapper, sys.executable, "-m", "swarm.main", "serve", "--json", "--port", "0"]
        command += ["--engine", engine, "--model", model, "--state-dir", str(state_dir), *arguments]
        inherited = {name: value for name, value in os.environ.items() if name not in _TOKENS}
        with self.log_path.open("a") as log:
            self.process = subprocess.Popen(
                command, stdout=subprocess.PIPE, stderr=log, text=True, env=inherited | dict(environ or {})
            )
        try:
            self.url = self._said_url()
        except BaseException:  # signals too, because nobody else knows of the process yet
            self.process.terminate()
            self.process.wait()
            self._close()
            raise
        self.pid = int(json.loads((state_dir / "server.json").read_text())["pid"])
        """Process id of the server itself, not of a wrapper."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.stop()

    def stop(self, limit_s: float = 60.0) -> int:
        """Stop the server cleanly; returns its exit code. If it does not exit in time, kills it and raises TimeoutExpired."""
        if self.process.poll() is None:
            os.kill(self.pid, signal.SIGTERM)
        try:
            code = self.process.wait(timeout=limit_s)
        except subprocess.TimeoutExpired:
            self.kill()
            raise
        self._close()
        return code

    def kill(self) -> None:
        """Send SIGKILL, like a power cut."""
        os.kill(self.pid, signal.SIGKILL)
        self.process.wait()
        self._close()

    def client(self, **options: Any) -> httpx.Client:
        return httpx.Client(base_url=self.url, timeout=60.0, trust_env=False, **options)

    def _said_url(self) -> str:
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        if not line:
            self.process.wait()
            raise DidNotStart(self.log_path.read_text()[-4000:])
        return str(json.loads(line)["url"])

    def _close(self) -> None:
        assert self.process.stdout is not None
        self.process.stdout.close()
