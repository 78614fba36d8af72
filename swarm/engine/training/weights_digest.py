"""A digest of weights, computed on the device that holds them, on either side of a transfer."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator

import torch
from torch import Tensor

_STRIDE = 1_000_003
"""Period of the factors by which positions are weighted, so that the checksum detects swapped values."""
_SLICE = 1 << 22
"""Number of tensor elements to process at a time; as 64-bit integers, each takes eight bytes on the training device."""


class WeightsDigest:
    """Digest of each tensor's name, shape, dtype and two sums over its bits; the order of the tensors does not matter."""

    def __init__(self) -> None:
        self._lines: list[str] = []

    def add(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        for name, tensor in weights:
            self._lines.append(f"{name} {tensor.dtype} {tuple(tensor.shape)} {_sums(tensor)}")

    def over(self, weights: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
        """Yield the same weights, adding each as it passes."""
        for name, tensor in weights:
            self.add([(name, tensor)])
            yield name, tensor

    def hexdigest(self) -> str:
        return hashlib.sha256("\n".join(sorted(self._lines)).encode()).hexdigest()


def _sums(tensor: Tensor) -> tuple[int, int]:
    """Return the sum of the bits as integers, and the sum weighted by position; overflow wraps around in the same way on every
    device."""
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
