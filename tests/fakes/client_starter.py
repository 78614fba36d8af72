"""Starts a client and dies at once: `python -m tests.fakes.client_starter CLIENTS FOLDER NAME INSTRUMENT`."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from pathlib import Path

from tests.contracts.client_job_contract import order_in, place_at, started


async def main(words: str, folder: Path, name: str, instrument: Path) -> None:
    await started((await place_at(words)).job(folder, name), order_in(instrument))
    os.kill(os.getpid(), signal.SIGKILL)


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1], Path(sys.argv[2]), sys.argv[3], Path(sys.argv[4])))
