"""Copies of tensors in host memory, page-locked if a GPU has to read and write them at full speed."""

from __future__ import annotations

import logging
import mmap
import sys
from collections.abc import Mapping
from contextlib import suppress
from typing import Any

import torch
from torch import Tensor

from swarm.engine.memory.model import GIB

_LOG = logging.getLogger(__name__)
_ALIGNED = 64
"""Alignment of each copy, in bytes."""


def pinned_copies(tensors: Mapping[str, Tensor], device: torch.device) -> dict[str, Tensor]:
    """Copy tensors into one block of memory, which is freed with the last copy. `device` is the device that reads them.

    We allocate it ourselves, because torch rounds page-locked blocks up to a power of two and never frees them.
    """
    places, size = {}, 0
    for name, tensor in tensors.items():
        places[name] = slice(size, size + tensor.nbytes)
        size += -(-tensor.nbytes // _ALIGNED) * _ALIGNED
    if not size:
        return {}
    memory = _Memory(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    bytes_N = torch.frombuffer(memory, dtype=torch.uint8)
    if device.type == "cuda":
        _lock(memory, bytes_N)
    copies = {name: bytes_N[place].view(tensors[name].dtype) for name, place in places.items()}
    return {name: copy.view(tensors[name].shape).copy_(tensors[name]) for name, copy in copies.items()}


class _Memory(mmap.mmap):
    """Unlocks itself before it is unmapped: `__del__` runs before `mmap` frees its pages, `weakref.finalize` only afterwards."""

    _locked: tuple[Any, int] | None = None
    """The driver, and the address under which it locked this memory."""

    def lock(self, driver: Any, address: int) -> bool:
        if int(driver.cudaHostRegister(address, len(self), 0)) != 0:
            return False
        self._locked = driver, address
        return True

    def __del__(self) -> None:
        if self._locked is None or sys.is_finalizing():  # at exit the process's locks end anyway
            return
        driver, address = self._locked
        if (code := int(driver.cudaHostUnregister(address))) != 0:
            _LOG.warning("memory stays page-locked: cudaHostUnregister returned error %d", code)


def _lock(memory: _Memory, bytes_N: Tensor) -> None:
    """Page-lock the memory until it is freed. If the system refuses, copies are slower but still correct."""
    driver = torch.cuda.cudart()  # type: ignore[no-untyped-call]
    if memory.lock(driver, bytes_N.data_ptr()):
        return
    with suppress(RuntimeError):
        torch.ones(1, device="cuda")  # clears the error, which otherwise the next kernel would report
    _LOG.warning("cannot page-lock %.1f GiB of host memory: offloading is slower", bytes_N.nbytes / GIB)
