"""What the benches of the trainer run on: a device, and a model's files."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

import torch

from swarm.models import resolve


def seconds(work: Callable[[], object], device: torch.device) -> float:
    """That the work takes; a GPU is waited for before and after."""
    wait_for(device)
    began = time.perf_counter()
    work()
    wait_for(device)
    return time.perf_counter() - began


def wait_for(device: torch.device) -> None:
    """Until what was asked of the device is done."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def name_of(device: torch.device) -> str:
    """What the device calls itself; `cpu` for any processor."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu"


def path_of_model(name: str) -> Path:
    """name: of a model, or the path of a folder with its weights."""
    return Path(name) if Path(name).is_dir() else resolve(name).path
