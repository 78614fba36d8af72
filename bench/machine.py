"""Devices and model files for the trainer's benches."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

import torch

from swarm.models import resolve


def seconds(work: Callable[[], object], device: torch.device) -> float:
    """Seconds that the work takes; synchronises with a GPU before and after."""
    wait_for(device)
    began = time.perf_counter()
    work()
    wait_for(device)
    return time.perf_counter() - began


def wait_for(device: torch.device) -> None:
    """Wait until the device has finished its queued work."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def name_of(device: torch.device) -> str:
    """The device's name; `cpu` for any processor."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu"


def path_of_model(name: str) -> Path:
    """Folder of the model's weights. name: of a model, or such a folder's path."""
    return Path(name) if Path(name).is_dir() else resolve(name).path
