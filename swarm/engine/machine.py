"""What this machine computes on, in which type, with how many threads, and how much memory the children of an engine take.

Decided from files, headers and installed packages before anything is started, without importing torch or vllm. Estimates of memory are
rough on purpose: they refuse what cannot fit, and say what to expect.
"""

from __future__ import annotations

import json
import math
import os
import struct
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from importlib import metadata
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path
from typing import Any, Literal

from foundation.machine import available_memory, multiplies_bfloat16, total_memory
from swarm.engine.seam import EngineDown, EngineError
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
    reason = why_no_gpu(environ)
    if reason is None:
        return "cuda"
    if wanted == "cuda":
        raise EngineError(f"--device cuda: {reason}")
    return "cpu"


def compute_type(device: Device) -> ComputeType:
    """What is multiplied in where nobody says otherwise: bfloat16, but float32 on CPUs that cannot multiply it."""
    return "bfloat16" if device == "cuda" or multiplies_bfloat16() else "float32"


def slow_type(device: Device, dtype: ComputeType) -> str | None:
    """A warning for a type that this machine multiplies slowly; None: it does not."""
    if device == "cpu" and dtype == "bfloat16" and not multiplies_bfloat16():
        return "this CPU multiplies bfloat16 number by number, some ten times slower than float32: leave out --dtype"
    return None


def why_no_gpu(environ: Mapping[str, str]) -> str | None:
    """None: there is one that may be used."""
    if not _DRIVER.exists():
        return f"this machine has no NVIDIA driver ({_DRIVER} is missing)"
    if environ.get("CUDA_VISIBLE_DEVICES", "0").strip() in ("", "-1"):
        return "CUDA_VISIBLE_DEVICES hides every GPU"
    try:
        distribution(_CUDA_VLLM)
    except PackageNotFoundError:
        return "vLLM is not built for CUDA here; install requirements/gpu.txt (pip install --no-deps -r requirements/gpu.txt)"
    return None


# -- threads -------------------------------------------------------------------------------------------------------------

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


def thread_settings(environ: Mapping[str, str], *, sharing: int = 1) -> dict[str, str]:
    """The environment with threads that soon sleep while they wait: spinning ones take the cores from the other child.

    On a small machine vLLM's own binding would leave all but one core idle, so the system places the threads there. sharing: so many
    vLLM have the cores among them; each would bind its threads to all of them.
    """
    settings = {"OMP_WAIT_POLICY": "PASSIVE", "GOMP_SPINCOUNT": _SPINS} | dict(environ)
    if cores() <= _FEW_CORES or sharing > 1:
        settings.setdefault("VLLM_CPU_OMP_THREADS_BIND", "nobind")
        settings.setdefault("OMP_NUM_THREADS", str(max(1, cores() // sharing)))
    return settings


def yielding_threads(environ: Mapping[str, str]) -> dict[str, str]:
    """Environment that lets a child wait with Intel's OpenMP runtime, where vLLM brings it along (x86); else empty.

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
    """Where it lies; None also for a path that the dynamic linker cannot take, which knows no quotes."""
    try:
        files = metadata.files("intel-openmp") or []
    except PackageNotFoundError:
        return None
    found = next((Path(str(file.locate())).resolve() for file in files if file.name == "libiomp5.so"), None)
    return found if found and found.is_file() and not set(" :;") & set(str(found)) else None


# -- memory --------------------------------------------------------------------------------------------------------------

GIB = 1 << 30
_WEIGHT_BYTES = 4
_STEP_BYTES = {"bfloat16": 4 + 8 + 2, "float32": 4 + 8}
"""Per parameter while it is trained, beside the weight in float32: gradient, AdamW's two moments, the copy in bfloat16."""
_MOMENTS_BYTES = 8
"""Per parameter, of AdamW."""
_START_BYTES = {"bfloat16": 0, "float32": 4}
"""Per parameter while the KL to the start is measured: the start weights as they are multiplied, where that is not a layer at a time."""
_LOGITS_BYTES = 3 * (64 << 20)
"""Logits are made a few at a time; three buffers of them at the peak."""
_ACTIVATIONS_SHARE = 6
_LEAST_ACTIVATIONS, _MOST_ACTIVATIONS, _MOST_ON_GPU = 2 * GIB, 16 * GIB, 32 * GIB
"""What the trainer keeps for its backward pass: so much of the machine's memory, within these bounds. Of all memory, not of
what is free, so that a step that is made again after a crash is cut into the same pieces and gives the same bits."""
_FEWEST_TOKENS, _MOST_TOKENS, _MOST_TOKENS_ON_GPU = 256, 8192, 32768
"""How many tokens that may be, whatever the model. A GPU is busy only with many at once."""
_WEIGHT_SLOTS = 2
"""Weights on their way to inference lie in memory twice: those served, and those being written."""
_HEADER_LIMIT = 100 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainerMemory:
    """Bytes that training a model takes, beside its process. start: the first weights, kept to measure the KL to them.

    step: what the first step makes and the others keep.
    """

    start: int
    weights: int
    step: int
    activations: int
    exchange: int

    @property
    def standing(self) -> int:
        """What is there whatever a step is made of."""
        return self.start + self.weights + self.step + self.exchange

    @property
    def total(self) -> int:
        """At the peak of a step."""
        return self.standing + self.activations

    @property
    def fresh(self) -> int:
        """What a step as most of them are takes beyond what is there once the model is loaded: half of the activations at most."""
        return self.step + self.activations // 2


def trainer_memory(model_dir: Path, config: Mapping[str, Any], dtype: ComputeType) -> TrainerMemory:
    """dtype: what is multiplied in. Raises: EngineError for weights that are no safetensors."""
    stored, count = weight_bytes(model_dir), parameters(model_dir)
    return TrainerMemory(
        start=stored,
        weights=_WEIGHT_BYTES * count,
        step=_STEP_BYTES[dtype] * count,
        activations=activation_bytes(config, segment_tokens(config)) + _LOGITS_BYTES + _START_BYTES[dtype] * count,
        exchange=_WEIGHT_SLOTS * served_bytes(model_dir, dtype),
    )


def memory_beside_gpu(model_dir: Path, dtype: ComputeType, *, offload_optimizer: bool) -> TrainerMemory:
    """The same of the machine's memory where the model is trained on a GPU: what is loaded passes through it, what is exchanged
    lies in it. offload_optimizer: moments wait there between steps. Raises: EngineError.
    """
    return TrainerMemory(
        start=weight_bytes(model_dir),
        weights=0,
        step=_MOMENTS_BYTES * parameters(model_dir) if offload_optimizer else 0,
        activations=0,
        exchange=_WEIGHT_SLOTS * served_bytes(model_dir, dtype),
    )


def segment_tokens(config: Mapping[str, Any], total: int | None = None) -> int:
    """How many tokens of this model the trainer computes at once, unless one context alone has more (`swarm.engine.tree.cut`).

    config: the model's config.json, of its text. total: bytes of a GPU's memory; None: it computes in the machine's.
    """
    high, most = (_MOST_ACTIVATIONS, _MOST_TOKENS) if total is None else (_MOST_ON_GPU, _MOST_TOKENS_ON_GPU)
    total = total_memory() if total is None else total
    share = min(max((total or 0) // _ACTIVATIONS_SHARE, _LEAST_ACTIVATIONS), high)
    rounded = share // _token_bytes(config) // _FEWEST_TOKENS * _FEWEST_TOKENS
    return min(max(rounded, _FEWEST_TOKENS), most)


def activation_bytes(config: Mapping[str, Any], tokens: int) -> int:
    """What is kept of so many tokens, computed at once, for the backward pass."""
    return tokens * _token_bytes(config)


def weight_bytes(model_dir: Path) -> int:
    """Of the weights as they are stored."""
    return sum(file.stat().st_size for file in model_dir.glob("*.safetensors"))


def served_bytes(model_dir: Path, dtype: ComputeType) -> int:
    """Of the weights as inference takes them: as they are stored, but whole where it multiplies in float32. Raises: EngineError."""
    stored = weight_bytes(model_dir)
    return max(stored, _WEIGHT_BYTES * parameters(model_dir)) if dtype == "float32" else stored


def parameters(model_dir: Path) -> int:
    """How many numbers the weights are. Raises: EngineError."""
    return sum(math.prod(shape) for shape in stored_shapes(model_dir).values())


def stored_shapes(model_dir: Path) -> dict[str, list[int]]:
    """The shape of each stored tensor, by name. Raises: EngineError."""
    found = [_shapes_in(file) for file in sorted(model_dir.glob("*.safetensors"))]
    return {name: shape for shapes in found for name, shape in shapes.items()}


def check(name: str, needed: int) -> None:
    """Raises: EngineDown when the machine has less memory left than is needed."""
    available = available_memory()
    if available is not None and needed > available:
        raise EngineDown(
            f"{name} needs about {needed / GIB:.1f} GiB of memory to boot, {available / GIB:.1f} GiB are free: "
            "end other programs, or choose a smaller model or max_model_len"
        )


def _shapes_in(file: Path) -> dict[str, list[int]]:
    with file.open("rb") as stream:
        start = stream.read(8)
        size = struct.unpack("<Q", start)[0] if len(start) == 8 else _HEADER_LIMIT + 1
        if size > _HEADER_LIMIT:
            raise EngineError(f"{file} is no safetensors file")
        header = json.loads(stream.read(size))
    return {name: entry["shape"] for name, entry in header.items() if name != "__metadata__"}


def _token_bytes(config: Mapping[str, Any]) -> int:
    """Activations of one token in all layers, as the trainer counts them."""
    hidden = int(config.get("hidden_size", 4096))
    inner = int(config.get("intermediate_size") or 4 * hidden)
    return int(config.get("num_hidden_layers", 32)) * (60 * hidden + 18 * inner)
