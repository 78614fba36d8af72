"""Chooses the device, compute dtype and number of threads for this machine.

Decides from files and installed packages, before anything starts and without importing torch or vllm.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from functools import cache
from importlib import metadata
from importlib.metadata import PackageNotFoundError
from pathlib import Path
from typing import Literal

from foundation.gpus import why_no_gpu
from foundation.machine import multiplies_bfloat16
from swarm.engine.seam import EngineError
from swarm.protocol.runspec import ComputeType

Device = Literal["cpu", "cuda"]


def device_for(wanted: Device | None, environ: Mapping[str, str] = os.environ) -> Device:
    """Return the device to use. For None, that is `cuda` if there is a usable GPU and vLLM is built for it, else `cpu`.

    Raises: EngineError with the reason if `cuda` is wanted but not available.
    """
    if wanted == "cpu":
        return "cpu"
    reason = why_no_gpu(environ)
    if reason is None:
        return "cuda"
    if wanted == "cuda":
        raise EngineError(f"--device cuda: {reason}")
    return "cpu"


def compute_type(device: Device) -> ComputeType:
    """Return the default compute dtype: bfloat16, but float32 on CPUs without fast bfloat16 products."""
    return "bfloat16" if device == "cuda" or multiplies_bfloat16() else "float32"


def slow_type(device: Device, dtype: ComputeType) -> str | None:
    """Return a warning if this machine multiplies this dtype slowly, else None."""
    if device == "cpu" and dtype == "bfloat16" and not multiplies_bfloat16():
        return "this CPU has no fast bfloat16 products, so bfloat16 is about ten times slower than float32: leave out --dtype"
    return None


# -- threads -------------------------------------------------------------------------------------------------------------

_FEW_CORES = 4
_SPINS = "2000"
"""Spin count of GNU's runtime, about 20 µs: the gap between two operations of a small model."""
_SPIN_MS = "1"
"""Spin time of Intel's runtime, in ms: longer than gaps within a decoding step, shorter than gaps between steps."""
_RUNTIMES = ("libgomp", "libomp", "libiomp")


def cores() -> int:
    """Return the number of cores that this process may use."""
    return len(os.sched_getaffinity(0)) if sys.platform == "linux" else os.cpu_count() or 1


def thread_count(environ: Mapping[str, str]) -> int:
    """Return OMP_NUM_THREADS (the first number of a list), else one thread per core."""
    asked = environ.get("OMP_NUM_THREADS", "").partition(",")[0].strip()
    return int(asked) if asked.isdecimal() and int(asked) else cores()


def thread_settings(environ: Mapping[str, str], *, sharing: int = 1) -> dict[str, str]:
    """Return an environment in which waiting threads soon sleep: spinning threads would take cores from the other child.

    On a small machine the system places the threads, because vLLM's own binding would leave all but one core idle. `sharing` is the
    number of vLLM servers that share the cores; each would bind its threads to all of them.
    """
    settings = {"OMP_WAIT_POLICY": "PASSIVE", "GOMP_SPINCOUNT": _SPINS} | dict(environ)
    if cores() <= _FEW_CORES or sharing > 1:
        settings.setdefault("VLLM_CPU_OMP_THREADS_BIND", "nobind")
        settings.setdefault("OMP_NUM_THREADS", str(max(1, cores() // sharing)))
    return settings


def yielding_threads(environ: Mapping[str, str]) -> dict[str, str]:
    """Return variables that make a child use Intel's OpenMP runtime, which vLLM ships on x86; otherwise return no variables.

    Its spinning threads yield their core to others, so they may spin for longer than those of GNU's runtime, which torch ships
    and which would meanwhile block the other child. Results are the same, bit for bit.
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
    """Return the path of Intel's runtime. None if it is missing, or if its path needs quotes, which the dynamic linker does not
    support."""
    try:
        files = metadata.files("intel-openmp") or []
    except PackageNotFoundError:
        return None
    found = next((Path(str(file.locate())).resolve() for file in files if file.name == "libiomp5.so"), None)
    return found if found and found.is_file() and not set(" :;") & set(str(found)) else None
