"""A platform for verl that computes on the processor, through verl's own plugin hook. For tests alone.

The environment that brings verl here is in `platform_environment`; verl imports this module in each
of its processes. Devices are places that are counted, no more: two ranks share the processor.
"""

from __future__ import annotations

import contextlib
import importlib.metadata
import os
import types
from collections.abc import Iterator
from typing import Any

import torch
from verl.plugin.platform import PlatformBase, PlatformRegistry

from tests.swarm.engine.verl.platform_environment import version_with_vllm

DEVICES = 2


def _nothing(*_: Any, **__: Any) -> None:
    return None


def _zero(*_: Any, **__: Any) -> int:
    return 0


def _device_module() -> types.ModuleType:
    """What verl asks of `torch.cuda`, on the processor."""
    module = types.ModuleType("cpu_device")
    answers: dict[str, Any] = dict.fromkeys(
        ("max_memory_allocated", "max_memory_reserved", "memory_allocated", "memory_reserved"), _zero
    )
    answers |= dict.fromkeys(
        ("empty_cache", "ipc_collect", "reset_peak_memory_stats", "manual_seed", "manual_seed_all", "set_device"),
        _nothing,
    )
    answers |= {
        "synchronize": _nothing,
        "Stream": torch.cpu.Stream,
        "stream": torch.cpu.stream,
        "current_stream": torch.cpu.current_stream,
        "is_available": lambda: True,
        "is_initialized": lambda: True,
        "device_count": lambda: DEVICES,
        "current_device": lambda: torch.device("cpu"),
        "mem_get_info": lambda *_: (0, 0),
        "get_device_name": lambda *_: "CPU",
        "get_rng_state": lambda *_: torch.get_rng_state(),
        "set_rng_state": lambda state, *_: torch.set_rng_state(state),
    }
    for name, answer in answers.items():
        setattr(module, name, answer)
    return module


@PlatformRegistry.register(platform="cpu")
class CpuPlatform(PlatformBase):
    device_name = "cpu"
    vendor_name = "cpu"
    device_module = _device_module()

    def is_available(self) -> bool:
        return True

    def current_device(self) -> torch.device:
        return torch.device("cpu")  # a number would mean a GPU

    def device_count(self) -> int:
        return DEVICES

    def set_device(self, device_index: int) -> None:
        pass

    def synchronize(self, device_index: int | None = None) -> None:
        pass

    def manual_seed(self, seed: int) -> None:
        torch.manual_seed(seed)

    def manual_seed_all(self, seed: int) -> None:
        torch.manual_seed(seed)

    def set_allocator_settings(self, settings: str) -> None:
        pass

    def empty_cache(self) -> None:
        pass

    def get_device_capability(self, device_index: int = 0) -> tuple[None, None]:
        return None, None

    def communication_backend_name(self) -> str:
        return "gloo"

    def visible_devices_envvar(self) -> str:
        return "CUDA_VISIBLE_DEVICES"

    @contextlib.contextmanager
    def nvtx_range(self, msg: str) -> Iterator[None]:
        yield

    def profiler_start(self) -> None:
        pass

    def profiler_stop(self) -> None:
        pass

    def ray_resource_name(self) -> str:
        return "GPU"

    def ray_noset_envvars(self) -> list[str]:
        return []

    def ray_resource_options(self, num_gpus: float) -> dict[str, Any]:
        return {"num_gpus": num_gpus}

    def is_ipc_supported(self) -> bool:
        return False

    def cudart(self) -> None:
        return None


def _one_backend() -> None:
    """verl joins `cpu:gloo` and its device's backend, which torch refuses when both are of the processor."""
    from verl.utils import distributed

    made = distributed.initialize_global_process_group_ray

    def initialize(timeout_second: int | None = None, backend: str | None = None) -> Any:
        return made(timeout_second, backend or "gloo")

    distributed.initialize_global_process_group_ray = initialize


if os.environ.get("VERL_PLATFORM") == "cpu":
    importlib.metadata.version = version_with_vllm
    _one_backend()
