"""Transfer of weights from a rank to its part of a replica: the private socket, and a digest to verify arrival."""

from __future__ import annotations

import hashlib
import shutil
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor

_STRIDE = 1_000_003
"""Makes the checksum depend on positions, so that it detects swapped values."""
_SLICE = 1 << 22
"""Numbers of a tensor that are looked at at a time: as 64-bit integers they take eight bytes each, on the device that trains."""


class WeightsDigest:
    """Names, shapes, types and two sums over the bits of each tensor; in any order of tensors."""

    def __init__(self) -> None:
        self._lines: list[str] = []

    def add(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        for name, tensor in weights:
            self._lines.append(f"{name} {tensor.dtype} {tuple(tensor.shape)} {_sums(tensor)}")

    def over(self, weights: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
        """The same weights, added as they pass."""
        for name, tensor in weights:
            self.add([(name, tensor)])
            yield name, tensor

    def hexdigest(self) -> str:
        return hashlib.sha256("\n".join(sorted(self._lines)).encode()).hexdigest()


def _sums(tensor: Tensor) -> tuple[int, int]:
    """Sums of the bits as integers, plain and weighted by position; they wrap alike on every device."""
    width = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[tensor.element_size()]
    bits = tensor.detach().contiguous().reshape(-1).view(width)
    sums = torch.zeros(2, device=bits.device, dtype=torch.int64)
    for first in range(0, len(bits), _SLICE):
        some = bits[first : first + _SLICE].to(torch.int64)
        places = torch.arange(first, first + len(some), device=bits.device, dtype=torch.int64)
        sums[0] += some.sum()
        sums[1] += places.remainder_(_STRIDE).add_(1).mul_(some).sum()
    plain, weighted = sums.tolist()
    return plain, weighted


_SCHEME = "ipc://"


class Sender(Protocol):
    """A rank's side, as verl has it; the handle is read when weights are sent."""

    zmq_handle: str


def of_this_change(handle: str, word: str) -> str:
    """verl's handle (`ipc:///tmp/NAME.sock`), moved into the directory that it has for this change of weights."""
    named = Path(handle.removeprefix(_SCHEME))
    return f"{_SCHEME}{named.with_name(f'swarm-{word}-{named.stem}') / 's'}"


@contextmanager
def meeting(sender: Sender, word: str) -> Iterator[None]:
    """Inside, the rank sends over a socket in a directory that it alone may enter, and that is gone afterwards.

    Raises: FileExistsError when someone made the directory before.
    """
    usual = sender.zmq_handle
    sender.zmq_handle = of_this_change(usual, word)
    folder = Path(sender.zmq_handle.removeprefix(_SCHEME)).parent
    try:
        folder.mkdir(mode=0o700)
        try:
            yield
        finally:
            shutil.rmtree(folder, ignore_errors=True)
    finally:
        sender.zmq_handle = usual
