"""Queries of the pool off the event loop. Refuses to know what is asked."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TypeVar

from swarm.server.storage.reader import PoolReader

T = TypeVar("T")


class ReadThread:
    """Answers one query after the other, over a connection of its own."""

    def __init__(self, path: Path, name: str) -> None:
        self._reader = PoolReader(path)
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix=name)

    async def ask(self, query: Callable[[PoolReader], T]) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._thread, query, self._reader)

    def close(self) -> None:
        """Returns when the query under way is over."""
        self._thread.shutdown()
        self._reader.close()
