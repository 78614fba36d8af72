"""The devices of one machine that an engine uses: one for the trainer, one for each inference replica.

GPUs are counted as CUDA counts them, within CUDA_VISIBLE_DEVICES, without importing torch.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import cast, get_args

from foundation.gpus import VISIBLE, count_gpus, visible_gpus, why_no_gpu
from swarm.engine.machine import Device, cores
from swarm.engine.seam import EngineError


@dataclass(frozen=True, slots=True, order=True)
class DeviceName:
    """One device: `cuda:1` is the second GPU that CUDA would find, `cpu:1` the second replica on this CPU."""

    kind: Device
    index: int = 0

    def __str__(self) -> str:
        return f"{self.kind}:{self.index}"

    @classmethod
    def parse(cls, text: str) -> DeviceName:
        """Parse a name such as `cuda:1`; without an index, the device is the first of its kind. Raises: ValueError with a message for
        users."""
        kind, _, index = text.strip().partition(":")
        if kind not in get_args(Device) or not re.fullmatch(r"(:\d{1,4})?", text.strip()[len(kind) :]):
            raise ValueError(f"{text.strip()!r} is not a device: write cpu, cpu:1, cuda:0, cuda:1, ...")
        return cls(cast("Device", kind), int(index or 0))

    def environment(self, environ: Mapping[str, str]) -> dict[str, str]:
        """Return environment variables that make this the only GPU a child process sees; none for a CPU. `environ` is our own
        environment."""
        if self.kind == "cpu":
            return {}
        visible = visible_gpus(environ)
        return {VISIBLE: str(self.index) if visible is None else visible[self.index]}


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """The devices of the trainer and the replicas, all of one kind. Raises: ValueError with a message for users."""

    trainer: DeviceName
    inference: tuple[DeviceName, ...]

    def __post_init__(self) -> None:
        if not self.inference:
            raise ValueError("inference needs a device")
        twice = next((device for device in self.inference if self.inference.count(device) > 1), None)
        if twice is not None:
            raise ValueError(f"inference names {twice} twice: each replica needs its own device")
        if len({device.kind for device in self.all}) > 1:
            raise ValueError("the trainer and inference need the same kind of device: name only CPUs, or only GPUs")

    @classmethod
    def one(cls, kind: Device) -> Layout:
        """Return the layout with the trainer and one replica on the first device of this kind."""
        return cls(trainer=DeviceName(kind), inference=(DeviceName(kind),))

    @property
    def all(self) -> tuple[DeviceName, ...]:
        """The trainer's device, then the replicas' devices; a shared device occurs twice."""
        return (self.trainer, *self.inference)

    @property
    def kind(self) -> Device:
        return self.trainer.kind

    @property
    def shared(self) -> bool:
        """True if the trainer and the only replica share one device."""
        return self.inference == (self.trainer,)

    def __str__(self) -> str:
        if self == Layout.one(self.kind):
            return self.kind
        return f"trainer {self.trainer}, inference {' '.join(map(str, self.inference))}"

    def require(self, environ: Mapping[str, str]) -> None:
        """Check that this machine has every device of the layout. Raises: EngineError."""
        if self.kind == "cuda" and (reason := why_no_gpu(environ)) is not None:
            raise EngineError(f"there is no {self.trainer}: {reason}")
        there = cores() if self.kind == "cpu" else count_gpus(environ)  # a CPU counts one per core
        for device in self.all:
            if device.index >= there:
                what = "cores for replicas" if self.kind == "cpu" else "usable GPUs"
                raise EngineError(f"there is no {device}: this machine has {there} {what}, counted from {self.kind}:0")
