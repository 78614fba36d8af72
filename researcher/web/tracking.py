"""MLflow for the page: the configured server, or one that we start when somebody first follows its link.

Starting it takes ten seconds and half a gigabyte of memory, so it only starts when somebody wants to look.
"""

from __future__ import annotations

import logging
import os
import signal
import socket
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass

from researcher.ownership import living_owner
from researcher.store.errors import StoreError
from researcher.store.mlflow_sink import MlflowSink
from researcher.store.store import Store

_log = logging.getLogger(__name__)
START_LIMIT_S = 180.0
MLFLOW_ENVIRON = {"MLFLOW_SERVER_ENABLE_JOB_EXECUTION": "false"}
"""Turns off MLflow's job runner, which is not used here; that saves seven processes."""
_LOOK_EVERY_S = 0.3


@dataclass(frozen=True, slots=True)
class Link:
    """What a request for MLflow should do: redirect to `url`, wait while `starting`, or give up because of `reason`."""

    url: str | None = None
    starting: bool = False
    reason: str = ""


class Tracking:
    """Gives links to MLflow and never waits for it to start.

    `port` is for a server that we start; 0 means any. `local`: whether browsers are on this machine. Other browsers could not reach
    our server, and it would not ask them for a token.
    """

    def __init__(self, store: Store, *, port: int, local: bool, start_limit_s: float = START_LIMIT_S) -> None:
        self._store = store
        self._sink = MlflowSink(store)
        self._wanted_port = port
        self._local = local
        self._start_limit_s = start_limit_s
        self._lock = threading.Lock()
        self._base: str | None = None
        self._fault = ""
        self.started: threading.Thread | None = None
        """Thread that starts MLflow; it ends when MLflow answers or fails."""
        self._server: subprocess.Popen[bytes] | None = None
        self._closed = threading.Event()
        if self._sink.tracking_uri.startswith(("http://", "https://")):
            self._base = self._sink.tracking_uri.rstrip("/")

    def link(self, study_id: str, trial_key: str | None = None) -> Link:
        """Return a link to a study's experiment or to a trial's run.

        If MLflow has to be started first, start it and return a link that is `starting`. If it cannot be, the link holds the reason.

        Raises: MlflowAway.
        """
        if self._base is None and not self._local:
            how = "run an MLflow server and set MLFLOW_TRACKING_URI for all commands"
            return Link(reason=f"MLflow's own page would only listen on this machine: {how}")
        with self._lock:
            if self._server is not None and self._server.poll() is not None:
                self._base, self._server = None, None
            if self._base is None:
                return self._begin()
            return Link(url=f"{self._base}/{self._sink.page(study_id, trial_key)}")

    def catch_up(self) -> None:
        """Send the pending records of studies that have no worker. Workers send their own."""
        now = time.time()
        for study in self._store.studies.all():
            if living_owner(self._store, study.id, now) is None:
                self._sink.drain(study.id)

    def close(self) -> None:
        """Stop the server that we started."""
        self._closed.set()
        if self.started is not None:
            self.started.join()
        if self._server is not None:
            end(self._server)

    def _begin(self) -> Link:
        if self.started is not None and self.started.is_alive():
            return Link(starting=True)
        fault, self._fault = self._fault, ""
        if fault:
            return Link(reason=fault)
        self.started = threading.Thread(target=self._start, name="mlflow")
        self.started.start()
        return Link(starting=True)

    def _start(self) -> None:
        port = free_port(self._wanted_port)
        if port is None:
            self._fault = (
                f"port {self._wanted_port} is taken: give `researcher ui` a different --mlflow-port, or 0 for any"
            )
            return
        server = begin(mlflow_command(self._sink.tracking_uri, port), MLFLOW_ENVIRON)
        if answers(f"http://127.0.0.1:{port}/health", server, self._closed, self._start_limit_s):
            try:
                self.catch_up()
            except StoreError as error:
                _log.warning("MLflow may lack the newest records: %s", error)
            self._server, self._base = server, f"http://127.0.0.1:{port}"
            return
        end(server)
        self._fault = (
            f"MLflow did not answer on port {port} within {self._start_limit_s:.0f} s; `researcher doctor` may say why"
        )


def mlflow_command(tracking_uri: str, port: int) -> list[str]:
    """Return the command that starts MLflow's own server for the copy of the records. It only listens on this machine."""
    where = ["--backend-store-uri", tracking_uri, "--host", "127.0.0.1", "--port", str(port), "--workers", "1"]
    return [sys.executable, "-m", "mlflow", "ui", *where]


def answers(url: str, server: subprocess.Popen[bytes], closed: threading.Event, limit_s: float = START_LIMIT_S) -> bool:
    """Wait for MLflow's server. Returns whether it answered within the limit. Stops waiting when `closed` is set or the server ends."""
    limit = time.monotonic() + limit_s
    while time.monotonic() < limit and server.poll() is None:
        with suppress(urllib.error.URLError, TimeoutError, ConnectionError), urllib.request.urlopen(url, timeout=2):
            return server.poll() is None
        if closed.wait(_LOOK_EVERY_S):
            return False
    return False


def free_port(wanted: int) -> int | None:
    """Return the wanted port, or a free one if it is 0; None if the port is taken."""
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("127.0.0.1", wanted))
        except OSError:
            return None
        return int(probe.getsockname()[1])


_GRACE_S = 15.0


@contextmanager
def child(command: Sequence[str], environ: Mapping[str, str] | None = None) -> Iterator[subprocess.Popen[bytes]]:
    """Run the command in its own process group, and end the whole group on leaving the block.

    SIGTERM also leaves the block, through SystemExit with a shell's usual exit code. Use this in the main thread.
    """
    told: list[int] = []

    def leave(number: int, _: object) -> None:
        sys.exit(128 + number)

    # Only remember a signal until the process is known; else the process would be left running.
    earlier = signal.signal(signal.SIGTERM, lambda number, _: told.append(number))
    try:
        started = begin(command, environ)
        try:
            signal.signal(signal.SIGTERM, leave)
            if told:
                leave(told[0], None)
            yield started
        finally:
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
            end(started)
    finally:
        signal.signal(signal.SIGTERM, earlier)


def begin(command: Sequence[str], environ: Mapping[str, str] | None = None) -> subprocess.Popen[bytes]:
    """Start a child process in its own group, without output. The caller has to `end` it. `environ` is added to our environment."""
    return subprocess.Popen(
        command,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
        env={**os.environ, **(environ or {})},
    )


def end(started: subprocess.Popen[bytes]) -> None:
    """End the whole group, even if its first process is dead: SIGTERM first, then SIGKILL for what is left."""
    for number in (signal.SIGTERM, signal.SIGKILL):
        with suppress(ProcessLookupError):
            os.killpg(started.pid, number)
        with suppress(subprocess.TimeoutExpired):
            started.wait(_GRACE_S)
