"""Host memory of a local engine's children. Refuses what cannot fit before anything starts."""

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
"""A Python process with torch and transformers in it, before any weights; on a GPU with CUDA's libraries."""
_WEIGHT_SLOTS = 2
"""Copies of weights on their way to inference: those served, and those being written."""
_KEPT_SHARE = 10
_LEAST_KEPT, _MOST_KEPT = GIB, 8 * GIB
"""A CPU trainer keeps activations for the backward pass in a tenth of the machine's memory, within these bounds. Of total, not
of free memory, so that a step repeated after a crash is cut into the same pieces and gives the same bits."""
_MOST_TOKENS = 8192
"""Most tokens computed at once, whatever the model."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HostMemory:
    """Bytes of the trainer's process. standing: independent of the step. peak: at the highest point of a step."""

    standing: int
    peak: int


def trainer_host_memory(memory: TrainerMemory, *, turns: bool = False) -> HostMemory:
    """Memory that the trainer needs. turns: moments are kept here between steps; offloaded moments always are."""
    shape, training = memory.shape, memory.training
    exchange = _WEIGHT_SLOTS * shape.served(training.dtype)
    if not training.on_gpu:
        standing = _TRAINER_PROCESS["cpu"] + memory.standing + exchange
        return HostMemory(standing=standing, peak=standing + memory.peak(tokens_on_cpu(memory)))
    loaded = shape.stored  # passes through on its way to the GPU, or stays, offloaded
    standing = _TRAINER_PROCESS["cuda"] + loaded + exchange + (memory.moments if turns or training.offload else 0)
    return HostMemory(standing=standing, peak=standing)


def tokens_on_cpu(memory: TrainerMemory, total: int | None = None) -> int:
    """How many tokens to compute at once, unless a single context has more (`swarm.engine.tree.cut`).

    total: bytes of the machine's memory; None: of this one.
    """
    total = total_memory() if total is None else total
    share = min(max((total or 0) // _KEPT_SHARE, _LEAST_KEPT), _MOST_KEPT)
    return min(max(share // memory.token // FEWEST_TOKENS * FEWEST_TOKENS, FEWEST_TOKENS), _MOST_TOKENS)


def check_slots(folder: Path, weights: int) -> None:
    """Raises: EngineDown if the in-memory `folder` has no room for weights of this size on their way to inference."""
    needed, free = _WEIGHT_SLOTS * weights, shutil.disk_usage(folder).free
    if needed > free:
        raise EngineDown(
            f"weights on their way to inference take {needed / GIB:.1f} GiB of {folder}, which has {free / GIB:.1f} GiB free: "
            f"make room there; a container gets more by docker run --shm-size {math.ceil(needed / GIB) + 1}g"
        )


def check(name: str, needed: int, *, offloaded: bool = False) -> None:
    """Raises: EngineDown if the machine has too little memory left. offloaded: part of it could be on the GPU instead."""
    available = available_memory()
    if available is not None and needed > available:
        raise EngineDown(
            f"{name} needs about {needed / GIB:.1f} GiB of memory to boot, {available / GIB:.1f} GiB are free: "
            f"end other programs, {'serve with --no-offload, ' if offloaded else ''}or choose a smaller model or max_model_len"
        )
