"""vLLM's own server for the CPU, with an engine core that is forked from it. Run it as a module, with vLLM's arguments.

On the CPU, vLLM spawns its core, which imports everything again; elsewhere it forks. vLLM spawns so that the core loads a thread
library before all others. Here the server itself has loaded it (`machine.yielding_threads`), and Intel's library survives a fork,
unlike GNU's.
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
