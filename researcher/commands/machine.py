"""`researcher doctor` and `researcher ui`."""

from __future__ import annotations

import argparse
import importlib.metadata
import importlib.util
import os
import shutil
import subprocess
import sys
import time
import urllib.error
import urllib.request
import webbrowser

from foundation.paths import memory_dir, user_data_dir
from researcher.commands import DONE, FAILED
from researcher.commands.child import child
from researcher.commands.home import open_home, say, say_json
from researcher.sandbox.launch import sandbox
from researcher.store.mlflow_sink import MlflowSink
from swarm.models import cached_models

_NEED_DISK_GB = 5.0
_NEED_MEMORY_GB = 10.0
_UI_LIMIT_S = 90.0
_PACKAGES = ("vllm", "torch", "transformers", "mlflow", "langgraph", "sqlalchemy")


def doctor_command(args: argparse.Namespace) -> int:
    """Check what a study on this machine needs; 1 when something is missing."""
    home = open_home()
    rows = [
        *_packages(),
        _disk(),
        _memory(),
        _shared_memory(),
        _model(),
        _sandbox(),
        ("database", True, home.store.url),
    ]
    if args.json:
        say_json([{"check": name, "ok": ok, "detail": detail} for name, ok, detail in rows])
    else:
        for name, ok, detail in rows:
            say(f"{'ok     ' if ok else 'MISSING'}  {name}: {detail}")
    return DONE if all(ok for _, ok, _ in rows) else FAILED


Row = tuple[str, bool, str]


def _packages() -> list[Row]:
    rows = []
    for name in _PACKAGES:
        found = importlib.util.find_spec(name) is not None
        rows.append((name, found, _version(name) if found else "not installed; run `make setup`"))
    return rows


def _version(name: str) -> str:
    for distribution in (name, f"{name}-cpu"):
        try:
            return importlib.metadata.version(distribution)
        except importlib.metadata.PackageNotFoundError:
            continue
    return "installed"


def _disk() -> Row:
    root = user_data_dir()
    free = shutil.disk_usage(root).free / 1e9
    return "disk", free >= _NEED_DISK_GB, f"{free:.0f} GB free at {root}; a study wants {_NEED_DISK_GB:.0f}"


def _memory() -> Row:
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 1e9
    return "memory", total >= _NEED_MEMORY_GB, f"{total:.0f} GB; SmolLM2-135M with trainer wants {_NEED_MEMORY_GB:.0f}"


def _shared_memory() -> Row:
    free = shutil.disk_usage(memory_dir()).free / 1e9
    return "memory-backed files", free >= 1, f"{free:.1f} GB free at {memory_dir()}; weights pass through it"


def _sandbox() -> Row:
    return "sandbox", True, f"code that an LLM wrote runs {sandbox().words}"


def _model() -> Row:
    cached = [folder.name for folder in cached_models()]
    return "models", True, ", ".join(cached) or "none yet; `swarm models get smollm2-135m` (a study does it by itself)"


def ui_command(args: argparse.Namespace) -> int:
    """Start MLflow's UI over the records and open it on the study; runs until interrupted."""
    home = open_home()
    study_id = home.store.resolve_study(args.study)
    sink = MlflowSink(home.store)
    sink.drain(study_id)
    path = sink.page(study_id)
    if sink.tracking_uri.startswith(("http://", "https://")):
        _open(f"{sink.tracking_uri.rstrip('/')}/{path}", args.no_browser)
        return DONE
    command = [sys.executable, "-m", "mlflow", "ui", "--backend-store-uri", sink.tracking_uri, "--port", str(args.port)]
    with child(command) as server:
        if not _answers(f"http://127.0.0.1:{args.port}/health", server):
            sys.stderr.write(f"researcher ui: MLflow does not answer on port {args.port}; try another --port\n")
            return FAILED
        _open(f"http://127.0.0.1:{args.port}/{path}", args.no_browser)
        return server.wait()


def _answers(url: str, server: subprocess.Popen[bytes]) -> bool:
    """Whether MLflow's server is up, and is ours, within the limit."""
    end = time.monotonic() + _UI_LIMIT_S
    while time.monotonic() < end and server.poll() is None:
        try:
            with urllib.request.urlopen(url, timeout=2):
                return server.poll() is None
        except (urllib.error.URLError, TimeoutError, ConnectionError):
            time.sleep(0.3)
    return False


def _open(url: str, no_browser: bool) -> None:
    say(url)
    if not no_browser:
        webbrowser.open(url)
