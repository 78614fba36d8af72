"""Checks whether nodes have the resources for ranks and replicas, and says what helps when memory runs out.

Without these checks, missing resources would show as a hang of Ray or as a CUDA error deep in a log. Knows neither Ray nor verl.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from swarm.engine.memory.model import GIB, parameters
from swarm.engine.seam import EngineError
from swarm.engine.verl.settings import VerlSettings

BUCKET_BYTES = 512 << 20
"""Size of the memory through which a rank sends weights to its replica, part by part, in bytes."""
_SHARED_BYTES = 64 << 20
"""Bytes of shared memory per rank if weights stay on the device: NCCL's buffers and vLLM's queues."""
_WEIGHT_BYTES = 4
_MIB = 1 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class Room:
    """Resources that one rank finds. `device_total_bytes` is 0 if the device is a CPU."""

    node: str
    shared_bytes: int
    device_bytes: int
    device_total_bytes: int


@dataclass(frozen=True, slots=True, order=True)
class Devices:
    """How many devices a node has (`there`), and how many of them are free."""

    node: str
    free: int
    there: int


def lacking_devices(settings: VerlSettings, found: Sequence[Devices]) -> str | None:
    """Return why these ranks cannot be placed on the nodes, or None if they can."""
    enough = [one for one in found if one.free >= settings.ranks_per_node]
    if len(enough) >= settings.nodes:
        return None
    listed = ", ".join(f"{one.node} {one.free} of {one.there}" for one in sorted(found)) or "none at all"
    return (
        f"{settings.nodes} node(s) with {settings.ranks_per_node} free device(s) are needed, but the Ray cluster has {len(enough)} "
        f"(free: {listed}); end what uses the others (`ray status`), start more nodes, or lower --verl-nodes or --verl-ranks"
    )


def require_room(settings: VerlSettings, found: Sequence[Room], *, over_devices: bool) -> None:
    """Check that every rank has enough memory. `found` is what each rank finds.

    `over_devices` says that weights go from a rank to its replica without passing through host memory.
    Raises: EngineError with advice if there is too little.
    """
    shared = settings.ranks_per_node * (_SHARED_BYTES if over_devices else BUCKET_BYTES)
    weights = (
        0 if "parameters" in settings.offload else _WEIGHT_BYTES * parameters(settings.model_dir) // settings.ranks
    )
    for room in found:
        if room.shared_bytes < shared:
            raise EngineError(
                f"/dev/shm of {room.node} has {room.shared_bytes // _MIB} MiB free, but {settings.ranks_per_node} rank(s) need "
                f"{shared // _MIB} MiB of it: make it larger (docker run --shm-size=8g, or mount -o remount,size=8g /dev/shm)"
            )
        needed = settings.sampling_memory * room.device_total_bytes + weights
        if room.device_total_bytes and room.device_bytes < needed:
            raise EngineError(
                f"a device of {room.node} has {room.device_bytes / GIB:.1f} of {room.device_total_bytes / GIB:.1f} GiB free, but a replica's "
                f"share with a rank's weights needs {needed / GIB:.1f} GiB: end what uses it (`nvidia-smi`), lower "
                "--verl-sampling-memory, or add --verl-offload parameters"
            )


def less_memory(settings: VerlSettings) -> str:
    """Return advice for when a rank runs out of memory during a run."""
    options = [] if settings.sleep else ["serve with --enable-sleep-mode"]
    options += [f"lower {_share(settings)}", *_offload(settings)]
    if settings.tokens_per_rank > settings.max_model_len:
        options.append(f"lower --verl-tokens-per-rank ({settings.tokens_per_rank:,} now)")
    else:
        options.append(f"lower --max-model-len and --verl-tokens-per-rank ({settings.tokens_per_rank:,} now)")
    if settings.fused_kernels is None:
        options.append("add --verl-fused-kernels torch")
    if settings.adapters is None:
        options.append('train adapters (parameters = {"rank": 16})')
    return "; or ".join([*options, _MORE_CARDS])


def less_memory_at_start(settings: VerlSettings, *, no_blocks: bool) -> str:
    """Return advice for when a cluster runs out of memory while starting. `no_blocks`: replicas have no memory for keys and values."""
    if no_blocks:
        options = [f"raise {_share(settings)}", "raise --verl-tensor-parallel", "lower --max-model-len"]
    else:
        options = ["end what else uses the devices (`nvidia-smi`)", f"lower {_share(settings)}", "lower --max-num-seqs"]
    return "; or ".join([*options, *_offload(settings), _MORE_CARDS, "host a smaller model"])


_MORE_CARDS = "use more cards (--verl-ranks, --verl-nodes)"


def _share(settings: VerlSettings) -> str:
    """Return the option that divides a device between its replica and its rank."""
    if settings.kv_cache_bytes is not None:
        return f"--verl-kv-cache-gib ({settings.kv_cache_bytes / GIB:.1f} now)"
    return f"--verl-sampling-memory ({settings.sampling_memory:g} now)"


def _offload(settings: VerlSettings) -> list[str]:
    lacking = {"parameters", "optimizer"} - settings.offload
    return ["add --verl-offload parameters optimizer"] if lacking else []
