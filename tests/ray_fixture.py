"""A real Ray cluster of two nodes on this machine, started once for all tests that want it."""

from __future__ import annotations

import importlib.util
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest

NEEDED = ("ray", "aiohttp_cors", "opencensus", "opentelemetry.exporter.prometheus")
_UP_S, _DOWN_S = 90.0, 40.0


def lacking() -> list[str]:
    """What a job server needs and this Python does not have."""
    return [name for name in NEEDED if not _found(name)]


@pytest.fixture(scope="session")
def ray_home() -> Iterator[Path]:
    """Where the cluster keeps its logs and what it was sent."""
    place = Path(tempfile.mkdtemp(prefix="ray-", dir="/tmp"))  # short: Unix sockets lie in it
    try:
        yield place
    finally:
        shutil.rmtree(place, ignore_errors=True)


@pytest.fixture(scope="session")
def ray_cluster(ray_home: Path) -> Iterator[str]:
    """The address of its job server. Afterwards nothing of it runs."""
    place = ray_home
    port, jobs = _free_port(), _free_port()
    # Jobs have to run on the second node: the head has no room for them. The cluster's `python` is this one.
    environ = {
        name: value for name, value in os.environ.items() if not name.startswith(("RAY_", "SWARM_", "PYTHONPATH"))
    }
    environ["RAY_AUTH_MODE"] = "disabled"  # whoever ever used Ray here may have a token, and then it asks for it
    environ["PATH"] = os.pathsep.join((str(Path(sys.executable).parent), environ["PATH"]))
    common = ["--block", "--object-store-memory", "80000000", "--disable-usage-stats"]
    head = [
        "--head",
        "--port",
        str(port),
        "--dashboard-host",
        "127.0.0.1",
        "--dashboard-port",
        str(jobs),
        "--temp-dir",
        str(place),
        "--dashboard-agent-listen-port",
        str(_free_port()),
        "--num-cpus",
        "0",
    ]
    started: list[subprocess.Popen[bytes]] = []
    try:
        started.append(_start(place, environ, *head, *common))
        address = f"http://127.0.0.1:{jobs}"
        _until_up(f"{address}/api/version", started[0], place)
        beside = [
            "--address",
            f"127.0.0.1:{port}",
            "--dashboard-agent-listen-port",
            str(_free_port()),
            "--num-cpus",
            "4",
        ]
        started.append(_start(place, environ, *beside, *common))
        yield address
    finally:
        for process in reversed(started):
            process.terminate()
        for process in reversed(started):
            try:
                process.wait(_DOWN_S)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
        left = _processes_of(place)
        for pid in left:
            os.kill(pid, signal.SIGKILL)


def _start(place: Path, environ: dict[str, str], *arguments: str) -> subprocess.Popen[bytes]:
    with (place / "start.log").open("ab") as log:
        return subprocess.Popen(
            [sys.executable, "-m", "ray.scripts.scripts", "start", *arguments],
            env=environ,
            cwd=place,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            start_new_session=True,
        )


def _until_up(url: str, process: subprocess.Popen[bytes], place: Path) -> None:
    deadline = time.monotonic() + _UP_S
    while time.monotonic() < deadline and process.poll() is None:
        try:
            urllib.request.urlopen(url, timeout=2).close()
            return
        except OSError:
            time.sleep(0.2)
    raise RuntimeError(f"Ray did not start: {(place / 'start.log').read_text()[-2000:]}")


def _processes_of(place: Path) -> list[int]:
    """Whatever was started for the cluster that is kept in `place`, and still runs."""
    found = []
    for file in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            if f"{place}/" in file.read_text(errors="replace"):
                found.append(int(file.parent.name))
        except OSError:
            continue
    return found


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _found(name: str) -> bool:
    try:
        return importlib.util.find_spec(name) is not None
    except ModuleNotFoundError:
        return False
