"""Host memory of a local engine's children. Refuses a model that cannot fit before anything starts."""

from __future__ import annotations

import math
import shutil
from dataclasses import dataclass
from pathlib import Path

from foundation.machine import available_memory, total_memory
from swarm.engine.machine import Device
from swarm.engine.memory.model import GIB
from swarm.engine.memory.training import FEWEST_TOKENS, TrainerMemory
from swarm.engine.seam import EngineDown

_TRAINER_PROCESS: dict[Device, int] = {"cpu": int(0.8 * GIB), "cuda": 2 * GIB}
"""Bytes of a Python process with torch and transformers, before any weights; on a GPU, including CUDA's libraries."""
_WEIGHT_SLOTS = 2
"""Copies of weights in transfer to inference: those being served, and those being written."""
_KEPT_SHARE = 10
_LEAST_KEPT, _MOST_KEPT = GIB, 8 * GIB
"""A CPU trainer keeps activations for the backward pass in a tenth of host memory, within these bounds. The share is of total, not
free, memory, so that a step repeated after a crash is cut into the same pieces and gives the same bits."""
_MOST_TOKENS = 8192
"""Maximum number of tokens computed together, for any model."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HostMemory:
    """Bytes of the trainer's process. `standing` is independent of the step; `peak` is the maximum during a step."""

    standing: int
    peak: int


def trainer_host_memory(memory: TrainerMemory, *, turns: bool = False) -> HostMemory:
    """Return the memory that the trainer needs. With `turns`, moments are in host memory between steps; offloaded moments always
    are."""
    shape, training = memory.shape, memory.training
    exchange = _WEIGHT_SLOTS * shape.served(training.dtype)
    if not training.on_gpu:
        standing = _TRAINER_PROCESS["cpu"] + memory.standing + exchange
        return HostMemory(standing=standing, peak=standing + memory.peak(tokens_on_cpu(memory)))
    loaded = shape.stored  # passes through on its way to the GPU, or stays here if offloaded
    standing = _TRAINER_PROCESS["cuda"] + loaded + exchange + (memory.moments if turns or training.offload else 0)
    return HostMemory(standing=standing, peak=standing)


def tokens_on_cpu(memory: TrainerMemory, total: int | None = None) -> int:
    """Return how many tokens to compute together, unless a single context has more (`swarm.engine.tree.cut`).

    `total` is the machine's memory in bytes; None: that of this machine.
    """
    total = total_memory() if total is None else total
    share = min(max((total or 0) // _KEPT_SHARE, _LEAST_KEPT), _MOST_KEPT)
    return min(max(share // memory.token // FEWEST_TOKENS * FEWEST_TOKENS, FEWEST_TOKENS), _MOST_TOKENS)


def check_slots(folder: Path, weights: int) -> None:
    """Check that the in-memory `folder` has room for weights of this size in transfer to inference. Raises: EngineDown."""
    needed, free = _WEIGHT_SLOTS * weights, shutil.disk_usage(folder).free
    if needed > free:
        raise EngineDown(
            f"weights in transfer to inference need {needed / GIB:.1f} GiB of {folder}, which has {free / GIB:.1f} GiB free: "
            f"make room there; in a container, use docker run --shm-size {math.ceil(needed / GIB) + 1}g"
        )


def check(name: str, needed: int, *, offloaded: bool = False) -> None:
    """Check that the machine has enough memory left. `offloaded`: part of it could be on the GPU instead. Raises: EngineDown."""
    available = available_memory()
    if available is not None and needed > available:
        raise EngineDown(
            f"{name} needs about {needed / GIB:.1f} GiB of memory to boot, {available / GIB:.1f} GiB are free: "
            f"end other programs, {'serve with --no-offload, ' if offloaded else ''}or choose a smaller model or max_model_len"
        )
