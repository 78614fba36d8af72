"""`researcher doctor`: check whether this machine has what a study needs."""

from __future__ import annotations

import argparse
import importlib.metadata
import importlib.util
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator, Sequence

from foundation.commandline import UsageError
from foundation.gpus import NEWEST_CUDA_DRIVER, VISIBLE, Card, DriverSilent, answered_cards, why_no_gpu
from foundation.machine import multiplies_bfloat16, total_memory
from foundation.paths import memory_dir, python_path, user_data_dir
from researcher.cli import DONE, FAILED, answer
from researcher.home import open_home
from researcher.refusals import PlanningRefused
from researcher.sandbox.launch import Mode, sandbox
from researcher.store.errors import StoreError
from swarm.models import cached_models
from swarm.models.catalogue import hub_folder
from swarm.models.shapes import SHAPES

_NEED_DISK_GB = 5.0
_NEED_MEMORY_GB = 12.0
_NEED_SHARED_BYTES = 1_000_000_000
_PLAN_LIMIT_S = 60.0
_COMPILERS = ("gcc", "clang")
"""Compilers that Triton tries, in this order, if CC is not set."""
_PACKAGES = ("vllm", "torch", "transformers", "mlflow", "langgraph", "sqlalchemy")


def doctor_command(args: argparse.Namespace) -> int:
    """Check this machine's requirements for a study. Returns 1 if something is missing."""
    rows = [
        *_packages(),
        _disk(),
        _memory(),
        _processor(),
        *_graphics(),
        _shared_memory(),
        _model(),
        _sandbox(),
        _database(),
        *_services(),
    ]
    document = [
        {"check": name, "ok": ok is not False, "warning": ok is None, "detail": detail} for name, ok, detail in rows
    ]
    answer(args.json, document, *(f"{_WORDS[ok]}  {name}: {detail}" for name, ok, detail in rows))
    return FAILED if any(ok is False for _, ok, _ in rows) else DONE


Row = tuple[str, bool | None, str]
"""Name of the check, whether it passed (None: passed with a warning), and details."""
_WORDS = {True: "ok     ", False: "MISSING", None: "WARNING"}


def _packages() -> list[Row]:
    rows: list[Row] = []
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
    there = next(folder for folder in (root, *root.parents) if folder.exists())
    free = shutil.disk_usage(there).free / 1e9
    return "disk", free >= _NEED_DISK_GB, f"{free:.0f} GB free at {root}; a study needs {_NEED_DISK_GB:.0f}"


def _memory() -> Row:
    total = total_memory()
    shown = "size unknown" if total is None else f"{total / 1e9:.0f} GB"
    enough = total is None or total / 1e9 >= _NEED_MEMORY_GB
    return "memory", enough, f"{shown}; SmolLM2-135M and its trainer need {_NEED_MEMORY_GB:.0f}"


def _processor() -> Row:
    computes = (
        "computes in bfloat16" if multiplies_bfloat16() else "computes in float32, several times slower: no AVX-512"
    )
    return "processor", True, f"{os.cpu_count()} cores; a model on the CPU {computes}"


def _graphics() -> list[Row]:
    """Return a row for each GPU, then rows for what GPUs need; a single row on a machine without a GPU."""
    try:
        found = answered_cards()
    except DriverSilent as error:
        return [("gpu", False, str(error))]
    if not found:
        return [("gpu", True, "none found by NVIDIA's driver; models run on the CPU")]
    return [
        *map(_gpu, found),
        _driver(found[0]),
        _compiler(),
        _cuda_build(),
        *_plans(found),
    ]


def _gpu(card: Card) -> Row:
    return (
        f"gpu {card.index}",
        True,
        f"{card.name}, {card.total / 1e9:.0f} GB, of which {card.free / 1e9:.0f} GB are free",
    )


def _driver(card: Card) -> Row:
    detail = f"{card.driver}; CUDA 13 needs {NEWEST_CUDA_DRIVER} or newer"
    return "NVIDIA driver", card.driver_is_new_enough, detail


def _compiler() -> Row:
    wanted = os.environ.get("CC")
    found = next(filter(None, map(shutil.which, [wanted] if wanted else _COMPILERS)), None)
    absent = f"CC={wanted} was not found" if wanted else f"found neither {' nor '.join(_COMPILERS)}"
    return "C compiler", found is not None, f"{found or absent}; Triton compiles kernels with it"


def _plans(found: Sequence[Card]) -> Iterator[Row]:
    """Say how `swarm serve` would divide each card, for the models on this machine and for common ones. Downloads nothing."""
    here = {each.path.name: str(each.path) for each in cached_models()}
    models = here | {name: name for name in SHAPES if hub_folder(name) not in here}
    sizes = {card.total: card for card in reversed(found)}
    for card in sorted(sizes.values(), key=lambda card: card.index):
        for name, model in models.items():
            yield _fits(f"fits: {name}{f', gpu {card.index}' if len(sizes) > 1 else ''}", model, card)


def _fits(check: str, model: str, card: Card) -> Row:
    """Return the row for one plan. The check also passes if the model does not fit, since that is not a fault of the machine."""
    command = [sys.executable, "-m", "swarm.main", "serve", "--model", model, "--plan"]
    environ = {**os.environ, "PYTHONPATH": python_path(os.environ), VISIBLE: str(card.index)}
    if why_no_gpu(environ) is not None:  # the server would plan for the processor
        command.append(f"{card.total / (1 << 30):g}")
    try:
        said = subprocess.run(command, env=environ, capture_output=True, text=True, timeout=_PLAN_LIMIT_S, check=False)
    except subprocess.TimeoutExpired:
        return check, False, f"`swarm serve --plan` gave no answer within {_PLAN_LIMIT_S:.0f} s"
    lines = (said.stdout if said.returncode == 0 else said.stderr).splitlines()
    return check, True, "; ".join(line for line in lines if line and not line.startswith(" "))


def _cuda_build() -> Row:
    try:
        return "vllm for CUDA", True, importlib.metadata.version("vllm")
    except importlib.metadata.PackageNotFoundError:
        return "vllm for CUDA", False, "not installed; run `make clean`, then `make setup LOCK=requirements/gpu.txt`"


def _shared_memory() -> Row:
    usage = shutil.disk_usage(memory_dir())
    detail = (
        f"{usage.free / 1e9:.1f} of {usage.total / 1e9:.1f} GB free at {memory_dir()}; weights are passed through it"
    )
    if usage.free < _NEED_SHARED_BYTES:
        detail += "; in a container give it more (`docker run --shm-size 16g`)"
    return "memory-backed files", usage.free >= _NEED_SHARED_BYTES, detail


def _sandbox() -> Row:
    """Say what confines code that an LLM wrote. Studies of other instruments need no sandbox."""
    found = sandbox()
    weak = "" if found.mode is Mode.BUBBLEWRAP else "; only instruments and repairs by an LLM need it"
    return "sandbox", None if weak else True, f"code that an LLM wrote runs {found.words}{weak}"


def _database() -> Row:
    try:
        home = open_home()
    except (StoreError, UsageError) as error:
        return "database", False, str(error)
    except ModuleNotFoundError as error:
        return "database", False, f"cannot be opened without {error.name}"
    home.store.close()
    return "database", True, home.store.url


def _services() -> list[Row]:
    """List the services that can receive notices, by name only: their addresses are secrets."""
    try:
        from researcher.notify.services import named, notifier_of
    except ModuleNotFoundError as error:
        return [("notify", False, f"cannot be used without {error.name}")]
    rows: list[Row] = []
    for name in named(os.environ):
        try:
            notifier_of(name, os.environ)
        except PlanningRefused as refused:
            rows.append((f"notify: {name}", False, str(refused).removeprefix("notify: ")))
        except ModuleNotFoundError as error:
            rows.append((f"notify: {name}", False, f"cannot be used without {error.name}"))
        else:
            rows.append((f"notify: {name}", True, f"its address is set; `researcher notify {name}` sends a test"))
    return rows or [
        ("notify", True, "no service; set RESEARCHER_NOTIFY_SLACK=<apprise URL>, for example, to use SLACK in `notify`")
    ]


def _model() -> Row:
    cached = [folder.name for folder in cached_models()]
    return (
        "models",
        True,
        ", ".join(cached) or "none yet; `swarm models get smollm2-135m` (a study does this automatically)",
    )
