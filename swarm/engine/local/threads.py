"""With how many threads a child computes on the CPU, and how they wait for each other. Imports no torch."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from functools import cache
from importlib import metadata
from pathlib import Path

_FEW_CORES = 4
_SPINS = "2000"
"""Of GNU's runtime, some 20 µs: as long as the gap between two operations of a small model."""
_SPIN_MS = "1"
"""Of Intel's runtime: the gaps of a decoding step are shorter, what comes between two steps is longer."""
_RUNTIMES = ("libgomp", "libomp", "libiomp")


def cores() -> int:
    """How many this process may use."""
    return len(os.sched_getaffinity(0)) if sys.platform == "linux" else os.cpu_count() or 1


def thread_count(environ: Mapping[str, str]) -> int:
    """OMP_NUM_THREADS, of a list of them the outermost; else one thread for each core."""
    asked = environ.get("OMP_NUM_THREADS", "").partition(",")[0].strip()
    return int(asked) if asked.isdecimal() and int(asked) else cores()


def thread_settings(environ: Mapping[str, str]) -> dict[str, str]:
    """The environment with threads that soon sleep while they wait: spinning ones take the cores from the other child.

    On a small machine vLLM's own binding would leave all but one core idle, so the system places the threads there.
    """
    settings = {"OMP_WAIT_POLICY": "PASSIVE", "GOMP_SPINCOUNT": _SPINS} | dict(environ)
    if cores() <= _FEW_CORES:
        settings.setdefault("VLLM_CPU_OMP_THREADS_BIND", "nobind")
        settings.setdefault("OMP_NUM_THREADS", str(cores()))
    return settings


def yielding_threads(environ: Mapping[str, str]) -> dict[str, str]:
    """What has a child wait with Intel's OpenMP runtime, where vLLM brings it along (x86); else nothing.

    Its threads give up their core to whoever wants it while they spin, so that they can spin for longer than those of GNU's
    runtime, which torch brings: these would take it from the other child for as long. The results are the same, bit for bit.
    """
    runtime, preloaded = _intel_runtime(), environ.get("LD_PRELOAD", "")
    if runtime is None or any(name in preloaded for name in _RUNTIMES):
        return {}
    return {
        "LD_PRELOAD": ":".join(filter(None, [preloaded, str(runtime)])),
        "KMP_BLOCKTIME": environ.get("KMP_BLOCKTIME", _SPIN_MS),
    }


@cache
def _intel_runtime() -> Path | None:
    """Where it lies; None also where the dynamic linker could not be told, which knows no quotes."""
    try:
        files = metadata.files("intel-openmp") or []
    except metadata.PackageNotFoundError:
        return None
    found = next((Path(str(file.locate())).resolve() for file in files if file.name == "libiomp5.so"), None)
    return found if found and found.is_file() and not set(" :;") & set(str(found)) else None
