"""Copies of tensors in the machine's own memory, page-locked where a GPU is to read and write them at full speed."""

from __future__ import annotations

import logging
import mmap
import weakref
from collections.abc import Mapping
from contextlib import suppress

import torch
from torch import Tensor

from swarm.engine.memory.model import GIB

_LOG = logging.getLogger(__name__)
_ALIGNED = 64
"""Bytes that each copy begins at a multiple of."""


def pinned_copies(tensors: Mapping[str, Tensor], device: torch.device) -> dict[str, Tensor]:
    """Copies of these in one stretch of memory, which goes back to the system with the last of them. device: what reads them.

    Memory of our own: torch's page-locked blocks are rounded up to a power of two, and are kept.
    """
    places, size = {}, 0
    for name, tensor in tensors.items():
        places[name] = slice(size, size + tensor.nbytes)
        size += -(-tensor.nbytes // _ALIGNED) * _ALIGNED
    if not size:
        return {}
    memory = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    bytes_N = torch.frombuffer(memory, dtype=torch.uint8)
    if device.type == "cuda":
        _lock(memory, bytes_N)
    copies = {name: bytes_N[place].view(tensors[name].dtype) for name, place in places.items()}
    return {name: copy.view(tensors[name].shape).copy_(tensors[name]) for name, copy in copies.items()}


def _lock(memory: mmap.mmap, bytes_N: Tensor) -> None:
    """Until the memory is freed. Where the system refuses that, copies are slower and no less right."""
    driver, address = torch.cuda.cudart(), bytes_N.data_ptr()  # type: ignore[no-untyped-call]
    if int(driver.cudaHostRegister(address, bytes_N.nbytes, 0)) == 0:
        weakref.finalize(memory, driver.cudaHostUnregister, address).atexit = False
        return
    with suppress(RuntimeError):
        torch.ones(1, device="cuda")  # takes the error, which else the next kernel would be blamed for
    _LOG.warning("%.1f GiB of the machine's memory cannot be page-locked: offloading is slower", bytes_N.nbytes / GIB)
