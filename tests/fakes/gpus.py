"""A machine with NVIDIA's driver, some GPUs, and vLLM built for them."""

from __future__ import annotations

from pathlib import Path

import pytest

from foundation import gpus


def gpu_machine(monkeypatch: pytest.MonkeyPatch, folder: Path, count: int = 1) -> None:
    """folder: for the device files."""
    for name in ("nvidiactl", "nvidia-uvm", *(f"nvidia{index}" for index in range(count))):
        (folder / name).touch()
    monkeypatch.delenv(gpus.VISIBLE, raising=False)
    monkeypatch.setattr(gpus, "DEVICE", folder / "nvidiactl")
    monkeypatch.setattr(gpus, "_DEVICE_FILES", folder)
    monkeypatch.setattr(gpus, "distribution", lambda name: name)
