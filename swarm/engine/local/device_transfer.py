"""Transfer of weights from the trainer to inference within one device, through a tensor that both share.

The trainer listens on a Unix socket, sends the shared tensor, and fills it part by part; inference copies each part before the next
one arrives. torch shares GPU memory through CUDA IPC, and CPU memory through a file in memory.
"""

from __future__ import annotations

import socket
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from multiprocessing.connection import Connection
from pathlib import Path
from typing import NamedTuple, Self

import torch
import torch.multiprocessing
from torch import Tensor

from swarm.engine.seam import EngineError
from swarm.engine.training.weights_digest import WeightsDigest

_PART_BYTES = 256 << 20
"""Maximum size of the shared tensor in bytes, unless a single weight is larger."""
_ALIGNED = 16
"""Weights begin at multiples of this many bytes."""
_MEETING_S = 20.0
"""How long either side waits for the other to connect, in seconds."""
_SILENCE_S = 20.0
"""Maximum time for inference to copy a part, in seconds. A trainer that waited longer for a hung process would itself count as hung."""
_LOOK_EVERY_S = 0.01


class _Place(NamedTuple):
    """Layout of one weight in the shared tensor. `start` is its offset in bytes."""

    name: str
    dtype: torch.dtype
    shape: torch.Size
    start: int

    @property
    def end(self) -> int:
        size = self.shape.numel() * self.dtype.itemsize
        return self.start + -(-size // _ALIGNED) * _ALIGNED

    def of(self, shared: Tensor) -> Tensor:
        """Return the weight as a view of the shared tensor."""
        size = self.shape.numel() * self.dtype.itemsize
        return shared[self.start : self.start + size].view(self.dtype).view(self.shape)


def send(path: Path, weights: Mapping[str, Tensor], dtypes: Mapping[str, torch.dtype]) -> str:
    """Send each weight, in its dtype from `dtypes`, to the only reader of the socket at `path`; return the weights' digest.

    Raises: EngineError if no reader connects, or the reader disconnects or hangs.
    """
    digest = WeightsDigest()
    device = next(iter(weights.values())).device
    parts = [*_parts(weights, dtypes, _PART_BYTES)]
    torch.multiprocessing.set_sharing_strategy("file_system")  # type: ignore[no-untyped-call]  # the default needs related processes
    try:
        with _reader(path) as reader:
            shared = torch.empty(max(part[-1].end for part in parts), dtype=torch.uint8, device=device)
            reader.send(shared)
            for part in parts:
                for place in part:
                    place.of(shared).copy_(weights[place.name].detach())
                digest.add((place.name, place.of(shared)) for place in part)
                _finish(device)
                reader.send(part)
                if not reader.poll(_SILENCE_S):
                    raise TimeoutError(f"inference has not answered for {_SILENCE_S:.0f} s")
                reader.recv()
            reader.send(None)
    except (OSError, EOFError, RuntimeError) as error:
        raise EngineError(f"cannot send weights over the device: {error or type(error).__name__}") from error
    return digest.hexdigest()


class Incoming:
    """Receives the weights that `send` sends to this socket. Raises: OSError, EOFError or RuntimeError if memory cannot be shared."""

    def __init__(self, path: Path) -> None:
        self._sender = _connected(path)
        try:
            self._shared: Tensor = self._sender.recv()
        except BaseException:
            self._sender.close()
            raise

    def weights(self) -> Iterator[tuple[str, Tensor]]:
        """Yield copies of all weights, in the sender's order."""
        while (part := self._sender.recv()) is not None:
            copies = [(place.name, place.of(self._shared).clone()) for place in part]
            _finish(self._shared.device)
            self._sender.send(None)
            yield from copies

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        del self._shared
        self._sender.close()


def _parts(weights: Mapping[str, Tensor], dtypes: Mapping[str, torch.dtype], part_bytes: int) -> Iterator[list[_Place]]:
    """Split the weights into parts of at most `part_bytes` and yield each part's layout. A weight larger than that gets a part of its
    own."""
    part: list[_Place] = []
    for name, weight in weights.items():
        place = _Place(name, dtypes[name], weight.shape, part[-1].end if part else 0)
        if part and place.end > part_bytes:
            yield part
            part, place = [], place._replace(start=0)
        part.append(place)
    yield part


@contextmanager
def _reader(path: Path) -> Iterator[Connection]:
    """Listen at this path, and yield the connection to the first process that connects. Raises: OSError, including TimeoutError."""
    path.unlink(missing_ok=True)
    with socket.socket(socket.AF_UNIX) as listening:
        listening.bind(str(path))
        listening.listen(1)
        listening.settimeout(_MEETING_S)
        try:
            accepted, _ = listening.accept()
        finally:
            path.unlink(missing_ok=True)
    with accepted:
        accepted.settimeout(None)
        with Connection(accepted.detach()) as connection:
            yield connection


def _connected(path: Path) -> Connection:
    """Connect as soon as a process listens at this path. Raises: OSError."""
    deadline = time.monotonic() + _MEETING_S
    connecting = socket.socket(socket.AF_UNIX)
    try:
        while True:
            try:
                connecting.connect(str(path))
                break
            except (FileNotFoundError, ConnectionRefusedError):
                if time.monotonic() > deadline:
                    raise
            time.sleep(_LOOK_EVERY_S)
    except BaseException:
        connecting.close()
        raise
    return Connection(connecting.detach())


def _finish(device: torch.device) -> None:
    """Wait until the device has finished its queued work; then the other process may use the shared tensor."""
    if device.type != "cpu":
        torch.accelerator.synchronize(device)
