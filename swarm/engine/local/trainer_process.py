"""The trainer's process: reads requests from a socket that it inherited, one at a time, and answers each.

    python -m swarm.engine.local.trainer_process --model DIR --fingerprint SHA256 --socket FD --threads N
        --device cpu|cuda --dtype bfloat16|float32 --context N [--room BYTES] [--turns] [--offload]

An unexpected error ends it; the control process sees the socket close, and the log has the traceback.
"""

from __future__ import annotations

import argparse
import logging
import mmap
import socket
import sys
from pathlib import Path
from typing import TYPE_CHECKING, get_args

from foundation import logs
from foundation.clock import SystemClock
from foundation.imports import uncollected
from foundation.machine import available_memory
from swarm.engine.machine import Device
from swarm.engine.memory.model import GIB
from swarm.engine.seam import EngineError
from swarm.engine.training.channel import READY, Reply, frame, received
from swarm.protocol.runspec import ComputeType

if TYPE_CHECKING:
    from swarm.engine.local.session import LocalSession

_MOST_TOUCHED = 8 * GIB
"""Maximum bytes to touch: half a minute if the system needs 10 µs per page."""


def main(argv: list[str] | None = None) -> int:
    """Answer requests until the socket is closed."""
    parser = argparse.ArgumentParser(prog="swarm.engine.local.trainer_process", allow_abbrev=False)
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--fingerprint", required=True)
    parser.add_argument("--socket", type=int, required=True, help="file descriptor of a connected stream socket")
    parser.add_argument("--threads", type=int, required=True)
    parser.add_argument("--device", choices=get_args(Device), required=True)
    parser.add_argument("--dtype", choices=get_args(ComputeType), required=True, help="inference's compute dtype")
    parser.add_argument("--context", type=int, required=True, help="tokens of the longest call")
    parser.add_argument("--room", type=int, help="maximum bytes of GPU memory (default: all)")
    parser.add_argument("--turns", action="store_true", help="hold only weights on the device between steps")
    parser.add_argument("--offload", action="store_true", help="keep moments and initial weights in host memory")
    args = parser.parse_args(argv)
    logs.configure()
    try:
        session = _session(args)
    except EngineError as error:
        logging.getLogger(__name__).error("%s", error)
        return 1
    with socket.socket(fileno=args.socket) as connection:
        connection.sendall(frame(Reply(number=READY)))
        while (request := received(connection)) is not None:
            connection.sendall(frame(session.answer(request)))
    return 0


def _session(args: argparse.Namespace) -> LocalSession:
    with uncollected():
        import torch
        from transformers.utils import logging as transformers_logging

        from swarm.engine.local.forward import DeviceShare, Policy
        from swarm.engine.local.session import LocalSession
    transformers_logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    torch.set_num_threads(args.threads)
    # Some CUDA kernels have no deterministic form; the log names them.
    torch.use_deterministic_algorithms(True, warn_only=args.device == "cuda")
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]
    share = DeviceShare(room=args.room, context=args.context, offload=args.offload)
    policy = Policy.load(args.model, torch.device(args.device), trained=False, share=share)
    policy.use_dtype(args.dtype)
    if args.device == "cpu":
        touch(policy.memory.step + policy.memory.kept(policy.segment_tokens) // 2)
    return LocalSession(policy, args.fingerprint, SystemClock(), served_in=args.dtype, turns=args.turns)


def touch(size: int) -> None:
    """Allocate this many bytes while inference boots, unless the system is short of memory.

    Otherwise the first steps would wait for it: on a small machine, fresh pages cost several times as much as the computation on them.
    The memory is freed immediately, and `REUSE_MEMORY` keeps it for the steps.
    """
    import torch

    available = available_memory()
    if available is not None and size < available // 2:
        torch.empty(min(size, _MOST_TOUCHED), dtype=torch.uint8)[:: mmap.PAGESIZE] = 0


if __name__ == "__main__":
    sys.exit(main())
