"""What an engine of one machine computes on, and in. Decided from files and installed packages, without importing torch or vllm."""

from __future__ import annotations

import os
from collections.abc import Mapping
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path
from typing import Literal

from foundation.machine import multiplies_bfloat16
from swarm.engine.seam import EngineError
from swarm.protocol.runspec import ComputeType

Device = Literal["cpu", "cuda"]
_DRIVER = Path("/dev/nvidiactl")
_CUDA_VLLM = "vllm"
"""The distribution that is built for CUDA; the one for CPUs has another name."""


def device_for(wanted: Device | None, environ: Mapping[str, str] = os.environ) -> Device:
    """wanted None: `cuda` where there is a GPU that may be used and vLLM is built for it, else `cpu`.

    Raises: EngineError when `cuda` is wanted and cannot be had, with the reason.
    """
    if wanted == "cpu":
        return "cpu"
    reason = _why_no_gpu(environ)
    if reason is None:
        return "cuda"
    if wanted == "cuda":
        raise EngineError(f"--device cuda: {reason}")
    return "cpu"


def compute_type(device: Device) -> ComputeType:
    """What is multiplied in where nobody says otherwise: bfloat16, but float32 on CPUs that cannot multiply it."""
    return "bfloat16" if device == "cuda" or multiplies_bfloat16() else "float32"


def slow_type(device: Device, dtype: ComputeType) -> str | None:
    """What a person is told who asks for what this machine does slowly; None where it does not."""
    if device == "cpu" and dtype == "bfloat16" and not multiplies_bfloat16():
        return "this CPU multiplies bfloat16 number by number, some ten times slower than float32: leave out --dtype"
    return None


def _why_no_gpu(environ: Mapping[str, str]) -> str | None:
    if not _DRIVER.exists():
        return f"this machine has no NVIDIA driver ({_DRIVER} is missing)"
    if environ.get("CUDA_VISIBLE_DEVICES", "0").strip() in ("", "-1"):
        return "CUDA_VISIBLE_DEVICES hides every GPU"
    try:
        distribution(_CUDA_VLLM)
    except PackageNotFoundError:
        return "vLLM is not built for CUDA here; install requirements/gpu.txt (pip install --no-deps -r requirements/gpu.txt)"
    return None
