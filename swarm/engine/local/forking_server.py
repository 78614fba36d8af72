"""vLLM's own server for the CPU, whose engine core is forked from it. Run as a module, with the arguments of vLLM's.

On the CPU vLLM spawns its core, which imports everything once more; elsewhere it forks. It spawns so that the core loads a library of threads
before all others: here the server itself has loaded it (`threads.yielding_threads`), and Intel's bears a fork, which GNU's does not.
"""

from __future__ import annotations

import multiprocessing
from multiprocessing.context import ForkContext

from foundation.imports import uncollected


def main() -> None:
    """Serve until the process is ended."""
    with uncollected():
        from vllm.entrypoints.launchers.api_server import entry
        from vllm.v1.engine import utils
    utils.get_mp_context = _forking
    entry.main()


def _forking() -> ForkContext:
    return multiprocessing.get_context("fork")


if __name__ == "__main__":
    main()
