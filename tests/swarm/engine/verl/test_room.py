"""What is missing on the nodes is said before anything is loaded."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from swarm.engine.seam import EngineError
from swarm.engine.verl.room import Devices, Room, lacking_devices, less_memory, less_memory_at_start, require_room
from swarm.engine.verl.settings import VerlSettings
from swarm.models.folder import ModelFolder
from swarm.protocol.runspec import LoraSpec

GIB = 1 << 30


def wanted(model_dir: Path = Path("/m"), **fields: Any) -> VerlSettings:
    return VerlSettings(model_dir=model_dir, model_name="m", max_model_len=64, **fields)


def room(**fields: Any) -> Room:
    found = {"node": "a", "shared_bytes": 8 * GIB, "device_bytes": 80 * GIB, "device_total_bytes": 80 * GIB}
    return Room(**(found | fields))


def test_a_cluster_with_too_few_free_devices_says_where_they_are() -> None:
    settings = wanted(nodes=2, ranks_per_node=4)
    assert lacking_devices(settings, [Devices("a", 8, 8), Devices("b", 4, 8)]) is None
    said = lacking_devices(settings, [Devices("b", 3, 8), Devices("a", 8, 8)])
    assert said is not None
    assert "2 node(s) with 4 free device(s) are needed, but the Ray cluster has 1 (free: a 8 of 8, b 3 of 8)" in said
    assert "none at all" in str(lacking_devices(settings, []))


def test_too_little_shared_memory_is_named_with_its_node(tiny_llama: ModelFolder) -> None:
    settings = wanted(tiny_llama.path, ranks_per_node=2)
    small = room(node="b", shared_bytes=600 << 20)
    require_room(settings, [room(), small], over_devices=True)
    with pytest.raises(EngineError, match=r"/dev/shm of b has 600 MiB free, but 2 rank\(s\) need 1024 MiB"):
        require_room(settings, [room(), small], over_devices=False)


def test_a_device_that_is_in_use_is_named_with_what_is_needed(tiny_llama: ModelFolder) -> None:
    busy = room(device_bytes=20 * GIB)
    require_room(wanted(tiny_llama.path, sampling_memory=0.2), [busy], over_devices=True)
    with pytest.raises(EngineError, match=r"a device of a has 20.0 of 80.0 GiB free, .* needs 36.0 GiB"):
        require_room(wanted(tiny_llama.path), [busy], over_devices=True)


def test_a_processor_is_asked_for_no_memory_of_a_device(tiny_llama: ModelFolder) -> None:
    require_room(wanted(tiny_llama.path), [room(device_bytes=0, device_total_bytes=0)], over_devices=False)


def test_what_an_operator_has_chosen_already_is_not_advised_again() -> None:
    bare = less_memory(wanted())
    for option in (
        *("--enable-sleep-mode", "--verl-sampling-memory (0.45 now)", "--verl-offload", "--verl-fused-kernels"),
        *("--verl-tokens-per-rank (4,096 now)", "train adapters", "--verl-ranks"),
    ):
        assert option in bare
    assert "--max-model-len" not in bare
    chosen = wanted(
        sleep=True,
        kv_cache_bytes=2 * GIB,
        offload=frozenset({"parameters", "optimizer"}),
        fused_kernels="torch",
        adapters=LoraSpec(rank=4),
        tokens_per_rank=64,
    )
    assert less_memory(chosen) == (
        "lower --verl-kv-cache-gib (2.0 now); or lower --max-model-len and --verl-tokens-per-rank (64 now); "
        "or use more cards (--verl-ranks, --verl-nodes)"
    )


def test_replicas_without_room_for_keys_and_values_are_given_more_and_others_less() -> None:
    assert less_memory_at_start(wanted(), no_blocks=True).startswith("raise --verl-sampling-memory (0.45 now)")
    assert "lower --verl-sampling-memory (0.45 now)" in less_memory_at_start(wanted(), no_blocks=False)
